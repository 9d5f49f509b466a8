"""The plan: it compiles what training runs, fits what it says, and foretells what a run takes."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import subprocess
import sys

import pytest
import tiny_runs

from benchmarks import plans

from searchr1_jax.planning import programs, targets
from searchr1_jax.types import UserError

ROOT = tiny_runs.ROOT
# A module as text, without where in the source its lines come from.
PLACES = re.compile(r'\s?loc\((?:[^()"]|"[^"]*"|\((?:[^()"]|"[^"]*")*\))*\)')
# The jitted functions of a step that a plan must know; others are single operations on scalars.
JITTED = ("start", "lay_out", "prefill", "share", "decode", "score_tokens", "score_value",
          "score_reference", "estimate", "spread_advantages", "_add_gradient", "_apply")


def fingerprint(module: str) -> str:
  lines = PLACES.sub("", module).splitlines()
  return hashlib.sha256("\n".join(
      line for line in lines if not line.startswith("#loc")).strip().encode()).hexdigest()


@pytest.mark.parametrize("algorithm, devices", [("grpo", 1), ("ppo", 2)])
def test_training_runs_the_very_programs_that_the_plan_compiles(algorithm, devices, tmp_path,
                                                                run_python):
  """Every module that two training steps compile is, to the letter, one of the plan's; and what
  stays resident is what the plan says."""
  world = tiny_runs.world(tmp_path)
  changes = dict(mesh__fsdp=devices, batch__lengths=(96, 192), episode__max_turns=2)
  config = f"tiny_runs.config({str(world)!r}, {algorithm!r}, **{changes!r})"
  trained = run_python(f"""
import sys; sys.path.insert(0, "tests")
import pathlib, tiny_runs
from searchr1_jax import train
trainer = train.Trainer({config}, pathlib.Path({str(tmp_path)!r}))
state = trainer.initial_state()
for step in range(2):
  state, _, _ = trainer.step(state, step)
import jax
del trainer.base
on_one = lambda x: x.addressable_shards[0].data.nbytes
print("resident", sum(map(on_one, jax.live_arrays())))
""", devices, 300, {"JAX_DUMP_IR_TO": str(tmp_path / "modules")})
  done = run_python(f"""
import sys; sys.path.insert(0, "tests")
import json, tiny_runs
from searchr1_jax import plan
from searchr1_jax.planning import costs, programs, targets, workload
from test_plan import fingerprint
step = plan.open_step({config}, targets.find("cpu"), workload.Load())
resident = sum(costs.resident(tree) for name, tree in step.residents.items()
               if name in programs.PHASES["begin"])
print(json.dumps([resident] + [fingerprint(costs.lower(p)[0].as_text())
                               for p in step.programs(True)]))
""", devices, 300)
  resident, *planned = json.loads(done.stdout.splitlines()[-1])
  measured = int(re.search(r"resident (\d+)", trained.stdout)[1])
  assert measured == pytest.approx(resident, rel=0.05)
  met = {}
  for path in (tmp_path / "modules").glob("*_compile.mlir"):
    name = re.search(r"jit_(.*)_compile", path.name)[1]
    if name in JITTED:
      met[path.name] = (name, fingerprint(path.read_text()))
  names = {name for name, _ in met.values()}
  only = {"grpo": {"share", "spread_advantages"}, "ppo": {"score_value", "estimate"}}[algorithm]
  assert names == only | {"start", "lay_out", "prefill", "decode", "score_tokens",
                          "_add_gradient", "_apply"}
  assert [file for file, (_, found) in met.items() if found not in planned] == []


def test_a_program_takes_the_memory_that_its_plan_says(run_python):
  """33 M parameters on the CPU: what the process holds at most while each program runs."""
  run_python("""
import sys; sys.path.insert(0, "tests")
import pathlib
import jax, jax.numpy as jnp, numpy as np
import tiny_models, tiny_runs
import dataclasses
from searchr1_jax.planning import costs, programs, workload
from searchr1_jax.run import setup
from searchr1_jax.model.shapes import count_parameters

def resident(key):
  status = pathlib.Path("/proc/self/status").read_text()
  return 1024 * int(next(line for line in status.splitlines() if line.startswith(key)).split()[1])

def real(x):
  if not isinstance(x, jax.ShapeDtypeStruct):
    return x
  return jax.device_put(np.zeros(x.shape, x.dtype), x.sharding or jax.devices()[0])

c = tiny_runs.config("nowhere", "grpo", batch__lengths=(192,), batch__tokens=4 * 192)
shape = dataclasses.replace(tiny_models.random_shape("qwen2", 0), vocab_size=32768, width=512,
                            mlp_width=1536, layers=6, tied_embeddings=True)
step = programs.Step(c, shape, 32000, setup.mesh(c), workload.Load())
checked = 0
for p in step.programs(False):
  if not p.name.startswith(("log-probs", "policy gradient", "policy step")):
    continue
  compiled = costs.lower(p)[0].compile()
  sizes = compiled.memory_analysis()
  wanted = (sizes.argument_size_in_bytes + sizes.temp_size_in_bytes
            + sizes.output_size_in_bytes - sizes.alias_size_in_bytes)
  before = resident("VmRSS")
  args = jax.block_until_ready(jax.tree.map(real, p.args))
  pathlib.Path("/proc/self/clear_refs").write_text("5")
  out = jax.block_until_ready(compiled(*args))
  measured = resident("VmHWM") - before
  print(p.name, measured / wanted, wanted / 2**20)
  assert 0.75 < measured / wanted < 1.25, (p.name, measured, wanted)
  del args, out
  checked += 1
assert checked >= 3
""", 1, 300, {"MALLOC_MMAP_THRESHOLD_": str(2**20)})  # freed memory goes back at once


def run(*words: str, env=None) -> subprocess.CompletedProcess:
  return subprocess.run([sys.executable, "-m", "searchr1_jax.plan", *words], cwd=ROOT,
                        capture_output=True, text=True, timeout=300, env=env)


def test_the_program_ends_with_one_object_and_keeps_what_it_compiled(tmp_path, monkeypatch):
  monkeypatch.setenv("SEARCHR1_CACHE", str(tmp_path))
  world = tiny_runs.world(tmp_path)
  file = tiny_runs.config_file(tmp_path / "c.py", world, "ppo", machine="cpu")
  done = run(f"--config={file}", "--json")
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout.splitlines()[-1])
  assert found["fits"] and found["target"] == "cpu" and found["peak_gib"] > 0
  assert found["step_seconds_roofline"] == pytest.approx(sum(found["phase_seconds"].values()))
  assert {p["phase"] for p in found["programs"]} == set(programs.PHASES)
  for words in ("decode 6 in 192", "does not fit" if not found["fits"] else "fits:", "policy step"):
    assert words in done.stdout
  kept = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "plan").rglob("*.json.gz")}
  assert 0 < len(kept) <= len(found["programs"])  # equal ones share what they came to
  again = json.loads(run(f"--config={file}", "--json").stdout.splitlines()[-1])
  assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "plan").rglob("*.json.gz")} == kept
  next((tmp_path / "plan").rglob("*.json.gz")).write_bytes(b"cut")  # is made anew, without a word
  assert run(f"--config={file}").returncode == 0
  assert again["programs"][0]["compile_seconds"] == found["programs"][0]["compile_seconds"]


@pytest.mark.parametrize("words, message", [
    (["--target=b200"], "there is no target 'b200'; choose one of h100x1"),
    (["--target=cpu", "--config.model.path=me/mine-9B"], "neither a folder nor of a known size"),
    (["--config.machine="], "no target; name one of"),
    (["--config.mesh.fsdp=4"], "fsdp=4, tensor=1 has 4 devices, h100x8 has 8"),
    (["--target=cpu", "--config.mesh.fsdp=0"], "config.mesh.fsdp is 0; wanted 1 or more"),
    (["--target=cpu", "--config.mesh.fsdp=1000000"], "has 1000000 devices, cpu has 512"),
    (["--target=cpu", "--config.mesh.fsdp=1", "--config.episode.max_episode_tokens=131072"],
     "has positions for 32768"),
    (["--target=cpu", "--efficiency=0"], "efficiency"),
    (["--target=cpu", "--turn=0"], "turn")])
def test_mistakes_are_named(words, message, tmp_path):
  done = run("--config=configs/grpo_qwen3b.py", *words)
  assert done.returncode == 2 and message in done.stderr, done.stderr
  assert "Traceback" not in done.stderr


def test_a_missing_compiler_says_what_installs_it(monkeypatch):
  def absent(**_):
    raise RuntimeError("Unknown backend\nand more")

  monkeypatch.setattr(targets.topologies, "get_topology_desc", absent)
  for name, extra in (("h100x8", "plan-gpu"), ("v5p-8", "plan-tpu")):
    with pytest.raises(UserError, match=rf"{name} is not in this environment .*\[{extra}\]"):
      targets.devices(targets.TARGETS[name])


PLANNED = plans.planned()


@pytest.mark.parametrize("name", PLANNED)
def test_every_config_for_accelerators_says_where_it_belongs(name):
  c = importlib.import_module(f"configs.{name}").get_config()
  target = targets.TARGETS[c.machine]
  assert c.mesh.data * c.mesh.fsdp * c.mesh.tensor == target.chips
  offloaded = {c.model.reference_memory, c.optimizer.moments_memory} != {"device"}
  assert not offloaded or "14b" in name
