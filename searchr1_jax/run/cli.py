"""How a program starts and ends: flags, a config with overrides, and errors a user can read.

Exit codes are an interface: 0 done, 2 a mistake the user can mend, 3 numbers that are not finite,
5 no retriever, 6 storage, 75 stopped by a signal after saving. Launchers restart on 5, 6, 75 and a
death by a signal, such as the SIGABRT by which JAX ends a process that has lost another one.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import os
import pathlib
import re
import runpy
import sys
import time
from typing import Any, Callable, Iterable, Sequence

from absl import flags
import jax
import ml_collections
from ml_collections import config_flags

from retriever import console
from retriever.protocol import RetrievalError
from searchr1_jax.run import disk, host
from searchr1_jax.types import UserError

DONE, USER, NUMERIC, RETRIEVER, STORAGE, STOPPED = 0, 2, 3, 5, 6, 75
CONFIG_FILE = "config.json"
LAST_WORDS = 3  # seconds that process 0 outlives its own error, so that the others tell theirs
BASE = pathlib.Path(__file__).resolve().parents[2] / "configs" / "base.py"


class NumericError(Exception):
  """The numbers went wrong: restarting would not mend them."""


class RetrieverLost(Exception):
  """The search engine stayed away; the run has saved what it had."""


class Stopped(Exception):
  """A signal asked for the end; the run has saved what it had."""


_CODES = {UserError: USER, flags.Error: USER, NumericError: NUMERIC,
          RetrieverLost: RETRIEVER, RetrievalError: RETRIEVER, disk.StorageError: STORAGE,
          Stopped: STOPPED}

_WANTED = {bool: "True or False", int: "a whole number", float: "a number", str: "a text",
           tuple: "a tuple, such as (64,) or ('a', 'b')"}
# A config file is Python, and whatever is wrong in it is its writer's to mend.
_CONFIG_ERRORS = (ArithmeticError, AttributeError, ImportError, LookupError, NameError, OSError,
                  SyntaxError, TypeError, ValueError)


def run_program(main: Callable[[Sequence[str]], None]) -> None:
  """Runs a program on the command line's words; known errors end it with one message and a code.

  --help prints the docstring of the program's module, whatever else is there or missing.
  """
  os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that PyTorch is not installed
  # Of a GPU's memory JAX would leave a quarter unused; plans leave a tenth.
  os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
  if {"-h", "--help"} & set(sys.argv[1:]):
    print(inspect.getdoc(sys.modules[main.__module__]))
    sys.exit(DONE)
  host.keep_freed_memory()
  console.tell_retries()
  try:
    main(sys.argv[1:])
  except tuple(_CODES) as error:
    code = next(c for kind, c in _CODES.items() if isinstance(error, kind))
    print(f"error: {error}" if code != STOPPED else str(error), file=sys.stderr)
    _leave(code)


def _leave(code: int):
  """Ends the process; one of several goes at once, as JAX would wait for the others and abort.

  Process 0 goes last: JAX aborts those that lose it.
  """
  if jax.distributed.is_initialized() and jax.process_count() > 1:
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(LAST_WORDS if jax.process_index() == 0 else 0)
    os._exit(code)
  sys.exit(code)


def parse(words: Sequence[str], define: Callable[[flags.FlagValues], None],
          positional: int = 0) -> tuple[flags.FlagValues, list[str]]:
  """Flag values, and up to `positional` other words; whatever is left over is an error."""
  values = flags.FlagValues()
  define(values)
  _refuse_duplicates(words)
  try:
    rest = values(["program", *words])[1:]
  except flags.UnrecognizedFlagError as e:
    raise UserError(_unknown(e.flagname, values)) from e
  except flags.IllegalFlagValueError as e:
    raise UserError(_illegal(e, values)) from e
  for name in values:
    if isinstance(values[name].value, float) and not math.isfinite(values[name].value):
      raise UserError(f"--{name} is {values[name].value}; wanted a finite number")
  if len(rest) > positional:
    extra = rest[positional]
    hint = (f"; did you mean --config.{extra.lstrip('-')}?"
            if "=" in extra and "config" in values else "")
    raise UserError(f"nothing takes the argument {extra!r}{hint}")
  return values, list(rest)


def base_config() -> ml_collections.ConfigDict:
  """Every key of a training run with its default, as `configs/base.py` declares it."""
  if BASE.is_file():
    return runpy.run_path(str(BASE))["get_config"]()
  try:  # the package is installed away from its configs: those that Python finds serve as well
    from configs import base
  except ImportError as e:
    raise UserError(f"{BASE}, which declares every key, is not there; install the checkout as it "
                    "stands (pip install -e .), or run in its folder") from e
  return base.get_config()


def define_config(values: flags.FlagValues, words: Sequence[str],
                  base: ml_collections.ConfigDict | None = None) -> None:
  """--config=FILE for a program that starts from a config file, one like `base` where given."""
  named = [w for w in words if re.match(r"--?config(=|$)", w)]
  if not named:
    raise UserError("no config; give one as --config=configs/grpo_tiny.py (see configs/)")
  path = _value_of(named[0], words)
  file = path.partition(":")[0]
  if not pathlib.Path(file).is_file():
    near = difflib.get_close_matches(file, map(str, pathlib.Path("configs").glob("*.py")), 1)
    raise UserError(f"config file {file!r} does not exist"
                    + (f"; did you mean {near[0]}?" if near else ""))
  root = str(pathlib.Path(file).resolve().parent.parent)
  if root not in sys.path:  # so that a config can start from configs.base, wherever it is run from
    sys.path.insert(0, root)
  config_flags.DEFINE_config_file("config", None, "a config file", flag_values=values,
                                  sys_argv=["program", *words])
  try:
    config = values["config"].parser.parse(path)
    keys = _keys(config)
  except _CONFIG_ERRORS as e:
    reason = str(e).strip().rpartition("\n")[2]
    raise UserError(f"config file {file} cannot be read: {reason}") from e
  if base is not None:
    conform(config.to_dict(), base, file)
    if missing := sorted(set(_keys(base)) - set(keys)):
      raise UserError(f"{file} has no {', '.join(missing[:5])}; start it from configs/base.py")
  _refuse_unknown_keys(words, keys)


def define_saved_config(values: flags.FlagValues, words: Sequence[str]) -> None:
  """--workdir=W, and --config.KEY=VALUE on top of the config that W was trained with."""
  flags.DEFINE_string("workdir", None, "the folder of a run", flag_values=values)
  named = [w for w in words if re.match(r"--?workdir(=|$)", w)]
  workdir = _value_of(named[0], words) if named else ""
  if not workdir:
    raise UserError("no run; give its folder as --workdir=runs/NAME")
  config = load_config(workdir)
  _refuse_unknown_keys(words, _keys(config))
  config_flags.DEFINE_config_dict("config", config, flag_values=values,
                                  sys_argv=["program", *words])


def save_config(workdir: pathlib.Path, config: ml_collections.ConfigDict) -> None:
  """Keeps the config beside what it made."""
  part = workdir / (CONFIG_FILE + ".part")
  with disk.writing(part):
    part.write_text(config.to_json(indent=2) + "\n")
    os.replace(part, workdir / CONFIG_FILE)  # a kill leaves the old file or the new one


def load_config(workdir: str | pathlib.Path) -> ml_collections.ConfigDict:
  """The config that a run was started with; keys that came later have their defaults."""
  path = pathlib.Path(workdir) / CONFIG_FILE
  if not path.is_file():
    raise UserError(f"{workdir} is not the folder of a run (no {CONFIG_FILE}); train one with "
                    "`python -m searchr1_jax.train --config=… --workdir=…`")
  try:
    plain = json.loads(path.read_text())
  except ValueError as e:
    raise UserError(f"{path} is no whole JSON file ({e}); copy it from a like run, or train "
                    "again in an empty workdir") from e
  return conform(plain, base_config(), str(path))


def conform(plain: Any, base: ml_collections.ConfigDict, where: str) -> ml_collections.ConfigDict:
  """Puts the values of `plain` into the base: it has all its groups, and no key that it has not."""
  groups = [k for k, v in base.items() if isinstance(v, ml_collections.ConfigDict)]
  there = plain if isinstance(plain, dict) else {}
  if missing := [g for g in groups if not isinstance(there.get(g), dict)]:
    raise UserError(f"{where} is not the config of a training run: it has no group "
                    f"{', '.join(missing[:5])}; name a run's folder, or a file that starts from "
                    "configs/base.py")
  _overlay(base, there, where)
  return base


def _overlay(config: ml_collections.ConfigDict, plain: dict[str, Any], where: str,
             prefix: str = "config") -> None:
  """Sets every value of `plain`, of the type that its key has."""
  for key, value in plain.items():
    name = f"{prefix}.{key}"
    if key not in config:
      raise UserError(f"{where} has a key {name} that is not known"
                      + _did_you_mean(name, _keys(config, prefix)))
    if isinstance(config[key], ml_collections.ConfigDict):
      _overlay(config[key], value, where, name)
      continue
    try:
      if value is None and config[key] is not None:
        raise TypeError("only what is None by itself can be")
      config[key] = tuple(value) if isinstance(value, list) else value
    except TypeError as e:
      wanted = _WANTED[config.get_type(key)]
      raise UserError(f"{where}: {name} is {value!r}; wanted {wanted}") from e


def differences(then: ml_collections.ConfigDict, now: ml_collections.ConfigDict) -> dict[str, str]:
  """Each key whose values differ, with both of them in words."""
  old, new = _leaves(then), _leaves(now)
  return {k: f"was {old[k]!r}, is {new[k]!r}" for k in new if old[k] != new[k]}


def refuse_not_finite(config: ml_collections.ConfigDict) -> None:
  """A NaN or an infinity in a config is never meant."""
  for key, value in _leaves(config).items():
    if isinstance(value, float) and not math.isfinite(value):
      raise UserError(f"{key} is {value}; wanted a finite number")


def _refuse_duplicates(words: Iterable[str]) -> None:
  names = [w.lstrip("-").partition("=")[0] for w in words if w.startswith("-")]
  for name in names:
    if names.count(name) > 1:
      raise UserError(f"--{name} is given more than once; give it once")


def _leaves(config: Any, prefix: str = "config") -> dict[str, Any]:
  """Every dotted key with its value."""
  out = {}
  for key, value in config.items():
    nested = isinstance(value, ml_collections.ConfigDict)
    out |= _leaves(value, f"{prefix}.{key}") if nested else {f"{prefix}.{key}": value}
  return out


def _keys(config: Any, prefix: str = "config") -> list[str]:
  return list(_leaves(config, prefix))


def _value_of(word: str, words: Sequence[str]) -> str:
  """What --flag=VALUE or --flag VALUE says; "" where nothing follows."""
  name, equals, value = word.partition("=")
  return value if equals else "".join(words[words.index(name) + 1 :][:1])


def _refuse_unknown_keys(words: Iterable[str], keys: Sequence[str]) -> None:
  """An override names a key that there is, and one value, not a group of them."""
  named = (re.match(r"--?(?:no)?(config\.[^=]*)", w) for w in words)
  for key in (m[1] for m in named if m):
    if key in keys:
      continue
    inside = [k for k in keys if k.startswith(key + ".")]
    if inside:
      raise UserError(f"{key} is a group of keys; give one of them, such as --{inside[0]}=…")
    raise UserError(f"there is no key {key}{_did_you_mean(key, keys)}")


def _did_you_mean(name: str, known: Sequence[str], before: str = "") -> str:
  """The nearest name, by all of it or else by its last part."""
  bare = {k.rpartition(".")[2]: k for k in known}
  near = (difflib.get_close_matches(name, known, 1)
          or [bare[k] for k in difflib.get_close_matches(name.rpartition(".")[2], bare, 1)])
  return f"; did you mean {before}{near[0]}?" if near else ""


def _unknown(name: str, values: flags.FlagValues) -> str:
  known = [n for n in values if not n.startswith("config.")]
  if "config" in values and values["config"].value is not None:
    known += _keys(values["config"].value)
  return f"there is no flag --{name}{_did_you_mean(name, known, '--')}"


def _illegal(error: flags.IllegalFlagValueError, values: flags.FlagValues) -> str:
  """Key, got and wanted, from absl's `flag --config.KEY=VALUE: reason`."""
  found = re.match(r"flag --(config\.[\w.]+)=(.*?): ", str(error), re.DOTALL)
  if not found:
    return " ".join(str(error).split())
  place = values["config"].value
  *groups, key = found[1].split(".")[1:]
  for group in groups:
    place = place[group]
  return f"{found[1]} is {found[2]!r}; wanted {_WANTED[place.get_type(key)]}"
