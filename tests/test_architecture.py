"""The shape of the house, held by reading its source: floors, purity, axes, configs, safety."""

from __future__ import annotations

import ast
import functools
import importlib
import pathlib
import re
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("searchr1_jax", "retriever")

# A file imports strictly lower numbers only. A step within a floor is a decimal: siblings that one
# room stacks on each other. A name stands for itself and for all below it that have no own line.
FLOORS = {
    "retriever.protocol": 0, "retriever.quality": 0.1, "searchr1_jax.types": 0.1, "searchr1_jax.text.actions": 0.2,
    "searchr1_jax.text.prompts": 0.3, "searchr1_jax.text.observation": 0.4,

    "searchr1_jax.text.rewards": 1, "searchr1_jax.algo.advantages": 1,
    "searchr1_jax.algo.schedules": 1, "searchr1_jax.algo.losses": 1,
    "searchr1_jax.algo.collate": 1.1,
    "searchr1_jax.model.sharding": 1, "searchr1_jax.model.shapes": 1,
    "searchr1_jax.rollout.episode": 1, "searchr1_jax.rollout.stops": 1,
    "searchr1_jax.rollout.slots": 1, "searchr1_jax.rollout.draw": 1,

    "searchr1_jax.model.folders": 2,
    "searchr1_jax.model.kernels": 1, "searchr1_jax.model.attention": 2, "searchr1_jax.model.decoder": 2.1,
    "searchr1_jax.model.logprobs": 2.2, "searchr1_jax.model.value": 2.2,
    "searchr1_jax.text.tokenizer": 2, "searchr1_jax.run.data": 2, "searchr1_jax.run.disk": 2,
    "searchr1_jax.run.digest": 2, "searchr1_jax.run.host": 2,
    "searchr1_jax.worlds": 2.5,
    "retriever.wire": 1, "retriever.product": 1, "retriever.model_files": 1,
    "retriever.page_text": 1, "retriever.search_apis": 1,
    "retriever.manifest": 2, "retriever.corpus": 2, "retriever.store": 2, "retriever.bert": 2.05,
    "retriever.vectors": 2, "retriever.batches": 2.06,
    "retriever.hashing": 2.07, "retriever.sentences": 2.07,
    "retriever.encoders": 2.1, "retriever.inverted": 2.05, "retriever.bm25": 2.1,
    "retriever.faiss_index": 2.2, "retriever.mesh_index": 2.2, "retriever.rerank": 2.2,
    "retriever.egress": 2.2, "retriever.exchange": 2.2, "retriever.replicas": 2.2,
    "retriever.client": 2.3, "retriever.online": 2.3,
    "retriever.fusion": 2.3, "retriever.tape": 2.3, "retriever.sharing": 2.3, "retriever.qdrant": 2.3,
    "retriever.engine": 2.4, "retriever.controls": 2.5, "retriever.opening": 2.6,

    "searchr1_jax.model.weights": 3, "searchr1_jax.rollout.sampler": 3,
    "searchr1_jax.algo.update": 3,

    "searchr1_jax.rollout.engine": 4, "searchr1_jax.rollout.searches": 4, "searchr1_jax.testing": 4,

    "searchr1_jax.rollout.drive": 5, "searchr1_jax.run.writers": 5,
    "searchr1_jax.run.distributed": 5.1, "searchr1_jax.run.checkpoint": 5.2,
    "searchr1_jax.run.cli": 5.2, "searchr1_jax.run.evaluation": 5.2,
    "searchr1_jax.run.metrics": 5.2, "searchr1_jax.run.setup": 5.3, "searchr1_jax.run.load": 5.4,
    "searchr1_jax.run.learning": 5.4,

    "searchr1_jax.planning.hlo": 1, "searchr1_jax.planning.flops": 1,
    "searchr1_jax.planning.workload": 1.2,
    "searchr1_jax.planning.targets": 2, "searchr1_jax.planning.programs": 5.5,
    "searchr1_jax.planning.costs": 5.6, "searchr1_jax.planning.whole": 5.7,

    "searchr1_jax.train": 6, "searchr1_jax.evaluate": 6, "searchr1_jax.ask": 6,
    "searchr1_jax.sft": 6, "searchr1_jax.make_world": 6, "searchr1_jax.export": 6,
    "searchr1_jax.plan": 6,
    "searchr1_jax.report": 6, "retriever.gate": 5.8, "retriever.app": 5.9,
    "retriever.serve": 6, "retriever.evaluate": 6,
    # A program that others call too: generated worlds and set-ups build their own index.
    "retriever.console": 4, "retriever.stages": 4.4, "retriever.build": 4.5,
    "searchr1_jax.worlds.files": 4.8,
}
ALSO_PURE = ("searchr1_jax.worlds",)  # text generation: floor 2, but the same from everywhere
IMPURE = {"os", "time", "random", "logging", "requests", "threading"}
# A thread catches everything there; whoever waits for it raises it again (tests/test_searches.py).
RAISED_BY_ANOTHER = {"searchr1_jax.rollout.searches", "retriever.sharing"}
CODE_IN_DATA = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve",
                "marshal"}


def name_of(path: pathlib.Path) -> str:
  return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@functools.cache
def tree_of(path: pathlib.Path) -> ast.Module:
  return ast.parse(path.read_text(), str(path))


def files_of(*folders: str) -> list[pathlib.Path]:
  return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


MODULES = [p for p in files_of(*PACKAGES) if p.name != "__init__.py"]
CONFIGS = [p for p in files_of("configs") if p.stem not in ("__init__", "base")]


def floor_of(module: str) -> float | None:
  """The floor of a module, or of the nearest room around it that has one."""
  while module:
    if module in FLOORS:
      return FLOORS[module]
    module = module.rpartition(".")[0]
  return None


def imports_of(tree: ast.AST) -> list[tuple[int, str]]:
  """(line, dotted name) of every import, wherever it stands; `from a import b` is a.b."""
  found = []
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      found += [(node.lineno, alias.name) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"line {node.lineno}: relative import"
      found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
  return found


def wrong_floors(module: str, tree: ast.AST) -> list[str]:
  own, wrong = floor_of(module), []
  for line, name in imports_of(tree):
    if name.split(".")[0] not in PACKAGES:
      continue
    if module.split(".")[0] == "retriever" and name.startswith("searchr1_jax"):
      wrong.append(f"{module}:{line} the retriever imports the trainer: {name}")
    theirs = floor_of(name)
    if theirs is not None and own is not None and theirs >= own and not same_room(module, name):
      wrong.append(f"{module}:{line} (floor {own}) imports {name} (floor {theirs})")
  return wrong


def none_of(wrong: list[str]) -> None:
  assert not wrong, "\n" + "\n".join(wrong)


def same_room(module: str, name: str) -> bool:
  """Both stand under one entry of FLOORS that names a whole room (such as the worlds)."""
  rooms = [r for r in FLOORS if (ROOT / pathlib.Path(*r.split("."))).is_dir()]
  return any(module.startswith(r + ".") and name.startswith(r + ".") for r in rooms)


def impure_imports(module: str, tree: ast.AST) -> list[str]:
  return [f"{module}:{line} imports {name}" for line, name in imports_of(tree)
          if name.split(".")[0] in IMPURE]


def is_pure(module: str) -> bool:
  floor = floor_of(module)
  return floor is not None and (floor < 2 or module.startswith(ALSO_PURE))


def axes_in(annotation: ast.AST | None) -> list[str]:
  """The axis strings of the arrays in an annotation: `Float[Array, "B L"]` gives "B L"."""
  if annotation is None:
    return []
  return [node.slice.elts[1].value for node in ast.walk(annotation)
          if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple)
          and len(node.slice.elts) == 2 and isinstance(node.slice.elts[1], ast.Constant)
          and isinstance(node.slice.elts[1].value, str)]


def annotated_names(tree: ast.AST) -> list[tuple[int, str, ast.AST | None]]:
  found = []
  for node in ast.walk(tree):
    if isinstance(node, ast.arg):
      found.append((node.lineno, node.arg, node.annotation))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, (ast.Name, ast.Attribute)):
      name = node.target.id if isinstance(node.target, ast.Name) else node.target.attr
      found.append((node.lineno, name, node.annotation))
  return found


def wrong_axes(module: str, tree: ast.AST) -> list[str]:
  """Names of annotated arrays whose ending is not their axes.

  An axis of fixed size is its number or M in the name; axes such as `...` and `L+1` are free.
  """
  wrong = []
  for line, name, annotation in annotated_names(tree):
    axes = axes_in(annotation)
    simple = lambda axis: re.fullmatch(r"[A-Z][a-z0-9]*|\d+", axis)
    plain = [a.split() for a in axes if all(simple(x) for x in a.split())]
    if not axes or len(plain) < len(axes):
      continue
    endings = ["".join(f"({x}|M)" if x.isdigit() else x for x in a) for a in plain]
    ending = name.rpartition("_")[2] if re.search(r"_[A-Z][A-Za-z0-9]*$", name) else ""
    if not any(re.fullmatch(e, ending) for e in endings):
      wrong.append(f"{module}:{line} {name} ends in {ending or 'no axes'}, "
                   f"annotated {' or '.join(axes)!r}")
  return wrong


def unsafe(module: str, tree: ast.AST) -> list[str]:
  """Ways in which data could become code, and ways in which an error could vanish."""
  found = [(line, f"imports {name}") for line, name in imports_of(tree)
           if name.split(".")[0] in CODE_IN_DATA | {"torch"}]
  for node in ast.walk(tree):
    if isinstance(node, ast.Call):
      called = ast.unparse(node.func)
      if called in ("eval", "exec", "yaml.load", "os.system", "torch.load"):
        found.append((node.lineno, f"calls {called}"))
      found += [(node.lineno, f"{k.arg}=True") for k in node.keywords
                if k.arg in ("shell", "allow_pickle", "trust_remote_code")
                and not (isinstance(k.value, ast.Constant) and k.value.value is False)]
    elif isinstance(node, ast.ExceptHandler):
      caught = ast.unparse(node.type) if node.type else "everything"
      if (set(re.findall(r"\w+", caught)) & {"everything", "Exception", "BaseException"}
          and module not in RAISED_BY_ANOTHER):
        found.append((node.lineno, f"catches {caught}"))
  return [f"{module}:{line} {what}" for line, what in found]


def test_every_module_stands_on_a_floor():
  none_of([name_of(p) for p in MODULES if floor_of(name_of(p)) is None])


def test_imports_go_strictly_down():
  none_of([w for p in MODULES for w in wrong_floors(name_of(p), tree_of(p))])


def test_pure_files_touch_nothing_outside():
  pure = [p for p in MODULES if is_pure(name_of(p))]
  none_of([w for p in pure for w in impure_imports(name_of(p), tree_of(p))])


def test_names_of_arrays_end_in_their_axes():
  none_of([w for p in MODULES for w in wrong_axes(name_of(p), tree_of(p))])


def test_no_data_becomes_code_and_no_error_vanishes():
  files = MODULES + files_of("configs", "benchmarks", "launch")
  none_of([w for p in files for w in unsafe(name_of(p), tree_of(p))])


def test_every_library_is_declared():
  """What the packages import is in the standard library, in requirements.txt, or an extra's."""
  listed = re.findall(r"^[\w-]+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
  own = {"faiss-cpu": "faiss", "orbax-checkpoint": "orbax", "absl-py": "absl"}
  known = {own.get(n, n.replace("-", "_")) for n in listed} | set(PACKAGES) | {"configs"}
  known |= {"backports", "compression"}  # zstd: of a newer Python's library, or its backport
  extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
  known |= {re.match(r"[\w-]+", n)[0].replace("-", "_") for n in extras["qdrant"]}
  missing = {f"{name_of(p)}: {name}" for p in MODULES for _, name in imports_of(tree_of(p))
             if name.split(".")[0] not in known | sys.stdlib_module_names}
  none_of(sorted(missing))


def test_the_rules_find_what_they_forbid():
  """Each rule above, on a line that breaks it: a rule that finds nothing anywhere holds nothing."""
  parse = ast.parse
  up = parse("from searchr1_jax.rollout import drive")
  assert wrong_floors("searchr1_jax.types", up) and not wrong_floors("searchr1_jax.train", up)
  assert wrong_floors("searchr1_jax.model.value", parse("import searchr1_jax.model.value"))
  assert wrong_floors("retriever.serve", parse("from searchr1_jax import types"))
  assert impure_imports("searchr1_jax.types", parse("def f():\n  import time"))
  assert wrong_axes("m", parse('def f(a_BL: Float[Array, "B V"]): pass'))
  assert wrong_axes("m", parse('class A:\n  a: Float[Array, "B L"] | None = None'))
  assert not wrong_axes("m", parse('def f(a_BL: Float[Array, "B L"], b: Int[Array, ""]): pass'))
  for line in ("import pickle", "from torch import nn", "eval('1')", "yaml.load(f)",
               "run(x, shell=True)", "np.load(f, allow_pickle=True)",
               "try: pass\nexcept Exception: pass", "try: pass\nexcept: pass",
               "try: pass\nexcept (OSError, BaseException): pass",
               "from_pretrained(n, trust_remote_code=True)"):
    assert unsafe("m", parse(line)), line


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_config_is_a_document(path):
  module = importlib.import_module(name_of(path))
  labels = re.findall(r"^(Reproduces|Machine|Expected|Command):\s*\S", module.__doc__ or "",
                      re.MULTILINE)
  assert labels == ["Reproduces", "Machine", "Expected", "Command"]
  assert f"configs/{path.name}" in module.__doc__
  assert callable(module.get_config) and module.get_config() is not None


def test_the_project_speaks_of_itself_alone():
  """No file points at a folder outside the checkout."""
  forbidden = ("../" + "shared", "/work" + "/")
  kinds = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".sh", ".ipynb", ".cfg", ""}
  folders = (*PACKAGES, "configs", "tests", "launch", "notebooks", "benchmarks", "models", ".ci")
  files = [p for folder in folders for p in (ROOT / folder).rglob("*")] + list(ROOT.glob("*"))
  texts = {p: p.read_text(errors="replace") for p in files if p.is_file() and p.suffix in kinds}
  none_of([f"{p.relative_to(ROOT)}: {f}" for p, t in texts.items() for f in forbidden if f in t])
