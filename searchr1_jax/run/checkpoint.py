"""A run's state on disk: whole or not at all, and never silently wrong. Orbax lives in this file.

Orbax makes a step appear atomically, but restores flipped bits without a word and does not fall
back. So every step also holds a record: digest, shape and dtype of each leaf, the host part of the
state, and a seal over all of that. A restore that does not match its record is damage. Digests are
computed where the leaves live and do not depend on their layout, so a step can be restored on other
devices. Several processes call everything here together, on a file system that they share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import errno
import gc
import hashlib
import json
import logging
import math
import pathlib
import re
import shutil
import signal
import sys
import time
import warnings
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from searchr1_jax.run import digest, distributed
from searchr1_jax.run.disk import StorageError
from searchr1_jax.types import UserError

_STEP = re.compile(r"step_(\d{8,})")
_LEFTOVERS = ("*.orbax-checkpoint-tmp*", "deleting_*")

# Orbax has no error of its own for a damaged file: whatever it trips over rises.
_READ_ERRORS = (ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError,
                OSError, RuntimeError, TypeError, ValueError)
_WRITE_ERRORS = (OSError, RuntimeError, ValueError)
# What a whole step too trips over, when the machine lacks something at the moment. TensorStore has
# no error for it but words.
_NO_MEMORY = re.compile("RESOURCE_EXHAUSTED|out of memory", re.IGNORECASE)
_NOT_NOW = (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.EIO)
_OS_ERROR = re.compile(r"OS error (\d+)")


class DamagedCheckpointWarning(UserWarning):
  """A step on disk is not what was saved; names the step, the leaf and what is used instead."""


class _Damaged(Exception):
  """A step does not match its record: `leaf` is where, the message is how."""

  def __init__(self, leaf: str, why: str):
    super().__init__(f"{leaf}: {why}")


class StopFlag:
  """True once SIGTERM or SIGINT has come; a second signal ends the process at once."""

  def __init__(self):
    self._came = False

  def install(self) -> "StopFlag":
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, self._on_signal)
    return self

  def _on_signal(self, number, frame):
    del frame
    self._came = True
    signal.signal(number, signal.SIG_DFL)

  def __bool__(self) -> bool:
    return self._came


class CheckpointReader:
  """Restores `{"arrays": pytree, "host": JSON}`, one folder a step; changes nothing on disk.

  So it may look into the folder of a run that is training.
  """

  def __init__(self, folder: str | pathlib.Path):
    self._folder = pathlib.Path(folder).absolute()
    self._metrics: dict[int, float | None] = {}

  def steps(self) -> list[int]:
    """The steps on disk, oldest first, whether whole or not; as process 0 sees them."""
    return distributed.from_leader(self._listed)

  def _listed(self) -> list[int]:
    if not self._folder.is_dir():
      return []
    found = (_STEP.fullmatch(p.name) for p in self._folder.iterdir())
    return sorted(int(m[1]) for m in found if m)

  def best_step(self) -> int | None:
    """The step with the highest metric, the newer of equals; None where no step has one."""
    scored = [(m, s) for s in self.steps() if (m := self._metric_of(s)) is not None]
    return max(scored)[1] if scored else None

  def restore(self, step: int, abstract: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one step, on the shardings of `abstract["arrays"]`."""
    if step not in self.steps():
      raise UserError(f"{self._folder} has no checkpoint of step {step}; it has {self.steps()}")
    try:
      return self._load(step, abstract)
    except _Damaged as damage:
      raise UserError(f"the checkpoint of step {step} in {self._folder} is damaged: {damage}; "
                      f"choose another of {self.steps()}") from damage

  def restore_newest_whole(self, abstract: Mapping[str, Any]) -> tuple[int, dict[str, Any]] | None:
    """The newest step that is what was saved; None where the folder has no step.

    Each damaged step on the way is warned of.
    """
    damaged: dict[int, _Damaged] = {}
    # The folder is listed anew each time: a run that trains may replace a step while it is read.
    while left := [s for s in self.steps() if s not in damaged]:
      try:
        state = self._load(left[-1], abstract)
      except _Damaged as damage:
        damaged[left[-1]] = damage
        continue
      for bad in set(damaged) & set(self.steps()):
        warnings.warn(f"the checkpoint of step {bad} is damaged ({damaged[bad]}); going on from "
                      f"step {left[-1]}", DamagedCheckpointWarning, stacklevel=2)
      return left[-1], state
    if not damaged:
      return None
    each = "\n".join(f"  step {step}: {damage}" for step, damage in damaged.items())
    raise UserError(f"every checkpoint in {self._folder} is damaged:\n{each}\n"
                    "restore the folder from a copy, or start again in an empty one")

  def _path(self, step: int) -> pathlib.Path:
    return self._folder / f"step_{step:08d}"

  def _load(self, step: int, abstract: Mapping[str, Any]) -> dict[str, Any]:
    """Reads and verifies one step."""
    record = self._record(step)
    wanted = _named(abstract["arrays"])
    _refuse_other_structure(step, record["leaves"], wanted)
    targets = {name: _target(leaf) for name, leaf in wanted.items()}
    arrays = self._read(step, {"arrays": targets})["arrays"]
    for name, found in _describe({n: arrays[n] for n in wanted}).items():
      if found != record["leaves"][name]:
        raise _Damaged(name, "its numbers are not those that were saved")
    ordered = [arrays[name] for name in wanted]
    tree = jax.tree.unflatten(jax.tree.structure(abstract["arrays"]), ordered)
    return {"arrays": tree, "host": record["host"]}

  def _read(self, step: int, abstract: Mapping[str, Any]) -> dict[str, Any]:
    """What Orbax reads, on all processes; where one of them fails, none goes on with the rest."""
    found, failure = None, None
    with _quiet():
      try:
        with _orbax():
          found = ocp.load_checkpointables(self._path(step), abstract)
      except _READ_ERRORS as error:
        failure = self._failure(step, abstract, error)
      if failure:
        time.sleep(0.1)  # what the failed read left unfinished ends here, unheard
        gc.collect()
    kinds = (type(None), _Damaged, StorageError, UserError)  # the last of any process is all's
    kind = kinds[max(distributed.gather(bytes([kinds.index(type(failure))])))[0]]
    if kind is type(failure):
      if failure:
        raise failure
      return found
    elsewhere = "another process could not read it"
    raise (_Damaged(f"({', '.join(abstract)})", elsewhere) if kind is _Damaged
           else kind(f"the checkpoint of step {step} in {self._folder}: {elsewhere}"))

  def _failure(self, step: int, abstract: Mapping[str, Any], error: BaseException) -> Exception:
    """Damage; or what keeps a step, whole or not, from being read at the moment."""
    chain = list(_chain(error))
    told = f"{type(chain[-1]).__name__}: {' '.join(str(chain[-1]).split())[:200]}"
    now = f"the checkpoint of step {step} in {self._folder} could not be read now ({told}); this is"
    if any(isinstance(e, MemoryError) or _NO_MEMORY.search(str(e)) for e in chain):
      return UserError(f"{now} no damage: free some memory, or use more devices")
    if any(_errno_of(e) in _NOT_NOW for e in chain):
      return StorageError(f"{now} no damage: mend the rights, limits or disk, and repeat")
    names = abstract.get("arrays") or ()
    named = next((n for n in names if f'"{n}/' in str(chain[-1])), f"({', '.join(abstract)})")
    return _Damaged(named, told)

  def _record(self, step: int) -> dict[str, Any]:
    record = self._read(step, {"record": None})["record"]
    if not isinstance(record, dict) or set(record) != {"body", "sha256"}:
      raise _Damaged("(record)", "it is not a record of digests")
    if record != _sealed(record["body"]):
      raise _Damaged("(record)", "it does not match its seal")
    if record["body"]["step"] != step:
      raise _Damaged("(record)", f"it belongs to step {record['body']['step']}")
    return record["body"]

  def _metric_of(self, step: int) -> float | None:
    if step not in self._metrics:
      try:
        self._metrics[step] = self._record(step)["metric"]
      except _Damaged:
        self._metrics[step] = None
    return self._metrics[step]


class Checkpointer(CheckpointReader):
  """Saves too. Only one at a time may work on a folder, since it sweeps what a kill left there.

  Keeps the newest `keep` steps and, where `keep_best`, the one with the highest metric. With
  `background` a save returns early and its error rises, naming its step, at the next `save` or
  `wait`.
  """

  def __init__(self, folder: str | pathlib.Path, keep: int = 3, keep_best: bool = True,
               background: bool = False):
    if keep < 1:
      raise UserError(f"checkpoints to keep: got {keep}, wanted 1 or more")
    super().__init__(folder)
    self._keep, self._keep_best, self._background = keep, keep_best, background
    self._pending: tuple[int, float | None, Any] | None = None
    self._space_checked = False
    self._folder.mkdir(parents=True, exist_ok=True)
    self._sweep()

  def save(self, step: int, state: Mapping[str, Any], metric: float | None = None) -> None:
    """Writes the step, atomically; an older one of that number goes once the new one is there."""
    self.wait()
    leaves = _named(state["arrays"])
    self._check_space(leaves)
    metric = None if metric is None or not math.isfinite(metric) else float(metric)
    record = _sealed({"step": step, "metric": metric, "host": _checked_json(state["host"]),
                      "leaves": _describe(leaves)})
    self._metrics.pop(step, None)
    self._move_away(step, "replaced")
    try:
      with _orbax():
        response = ocp.save_checkpointables_async(
            self._path(step), {"arrays": leaves, "record": record})
    except _WRITE_ERRORS as error:
      self._fail(step, error)
    self._pending = (step, metric, response)
    if not self._background:
      self.wait()

  def wait(self) -> None:
    """Returns when the last save is on disk; raises its error."""
    if self._pending is None:
      return
    (step, metric, response), self._pending = self._pending, None
    try:
      response.result()
    except _WRITE_ERRORS as error:
      self._fail(step, error)
    self._metrics[step] = metric
    self._sweep()
    kept = set(self.steps()[-self._keep:]) | ({self.best_step()} if self._keep_best else set())
    for old in set(self.steps()) - kept:
      self._remove(old)

  def restore(self, step: int, abstract: Mapping[str, Any]) -> dict[str, Any]:
    self.wait()
    return super().restore(step, abstract)

  def restore_newest_whole(self, abstract: Mapping[str, Any]) -> tuple[int, dict[str, Any]] | None:
    """As of a reader; damaged steps are renamed `damaged_…`, so that their numbers are free."""
    self.wait()
    found = super().restore_newest_whole(abstract)
    for step in self.steps() if found else ():
      if step > found[0]:
        self._set_aside(step)
    return found

  def _check_space(self, leaves: Mapping[str, Any]) -> None:
    """Warns once, before the first save, when the disk will not hold two states."""
    size, free = sum(x.nbytes for x in leaves.values()), shutil.disk_usage(self._folder).free
    if not self._space_checked and free < 2.2 * size:
      warnings.warn(f"{self._folder}: {free / 1e9:.1f} GB free, one checkpoint takes up to "
                    f"{size / 1e9:.1f} GB and two must fit; free some space or keep fewer",
                    stacklevel=3)
    self._space_checked = True

  def _fail(self, step: int, error: BaseException):
    self._sweep()
    raise StorageError(
        f"the checkpoint of step {step} could not be written to {self._folder}: "
        f"{' '.join(str(error).split())[:300]}; older steps are untouched: {self._listed()}"
    ) from error

  def _remove(self, step: int) -> None:
    self._metrics.pop(step, None)
    self._move_away(step, "deleting")
    self._sweep()

  def _set_aside(self, step: int) -> None:
    self._metrics.pop(step, None)
    self._move_away(step, "damaged")

  def _move_away(self, step: int, prefix: str) -> None:
    """Renames a step, so that no kill leaves half of it under its own name."""
    target = self._folder / f"{prefix}_{self._path(step).name}"
    if distributed.is_leader() and self._path(step).exists():
      shutil.rmtree(target, ignore_errors=True)
      self._path(step).rename(target)
    distributed.barrier()

  def _sweep(self) -> None:
    """Removes what a kill or a full disk left behind; a step comes back that nothing replaced."""
    if distributed.is_leader():
      for path in self._folder.glob("replaced_*"):
        step = path.with_name(path.name.removeprefix("replaced_"))
        if step.exists():
          shutil.rmtree(path, ignore_errors=True)
        else:
          path.rename(step)
      for pattern in _LEFTOVERS:
        for path in self._folder.glob(pattern):
          shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _quiet():
  """A read that fails abandons its other reads; their screens of complaints add nothing to ours."""
  logger, hook = logging.getLogger("asyncio"), sys.unraisablehook
  level = logger.level
  logger.setLevel(logging.CRITICAL + 1)
  sys.unraisablehook = lambda unraisable: None
  try:
    with warnings.catch_warnings():
      warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
      yield
  finally:
    logger.setLevel(level)
    sys.unraisablehook = hook


def _orbax() -> ocp.Context:
  """Orbax's defaults, with the record as a JSON file and not as a tree of arrays."""
  registry = ocp.handlers.local_registry()
  registry.add(ocp.handlers.JsonHandler, checkpointable_name="record")
  context = ocp.Context()
  context.checkpointables.registry = registry
  return context


def _chain(error: BaseException | None) -> Iterator[BaseException]:
  """An error, what it came from, and so on: Orbax wraps what TensorStore said into pages."""
  while error:
    yield error
    error = error.__cause__ or error.__context__


def _errno_of(error: BaseException) -> int | None:
  """The number of the operating system's error; TensorStore has it in its text."""
  told = _OS_ERROR.search(str(error))
  return int(told[1]) if told else getattr(error, "errno", None)


def _named(tree: Any) -> dict[str, Any]:
  """The leaves by their dotted paths: a flat dict, whatever nodes the tree is made of."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
  if len(named) != len(leaves):
    raise ValueError("two leaves of the state have the same dotted path")
  for name, leaf in named.items():
    if not isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
      raise ValueError(f"{name} is a {type(leaf).__name__}, not an array: it belongs to `host`")
  return named


def _target(leaf: Any) -> Any:
  """What Orbax wants to be told of a leaf: a numpy array stays one, the rest get a sharding."""
  if isinstance(leaf, np.ndarray):
    return np.empty(leaf.shape, leaf.dtype)
  sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _describe(leaves: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Shape, dtype and digest of each leaf, however it is laid out."""
  found = digest.of_leaves(leaves)
  return {name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "digest": found[name]}
          for name, leaf in leaves.items()}


def fingerprint(arrays: Any, about: str = "") -> str:
  """One SHA-256 of all leaves of a pytree (names, shapes, dtypes, digests) and of a text."""
  return _sealed({"about": about, "leaves": _describe(_named(arrays))})["sha256"]


def _sealed(body: Any) -> dict[str, Any]:
  """The body with the SHA-256 of its canonical JSON."""
  text = json.dumps(body, sort_keys=True, separators=(",", ":"))
  return {"body": body, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _checked_json(host: Any) -> Any:
  """The host part as it will come back; refuses what JSON would change (tuples, NaN, int keys)."""
  if json.loads(json.dumps(host, allow_nan=False)) != host:
    raise ValueError("the host part of the state does not survive JSON: use lists and string keys")
  return host


def _refuse_other_structure(step: int, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
  """A whole checkpoint of another model is the user's to mend, not damage to fall back from."""
  if any("digest" not in entry for entry in saved.values()):
    raise UserError(f"the checkpoint of step {step} was made by an earlier version of this program "
                    "and cannot be verified; go on with that version, or use an empty folder")
  form = lambda entry: f"{entry['dtype']}{entry['shape']}" if entry else "nothing"
  have = {name: form(entry) for name, entry in saved.items()}
  want = {name: form({"dtype": str(x.dtype), "shape": list(x.shape)}) for name, x in wanted.items()}
  wrong = [n for n in sorted(have | want) if have.get(n) != want.get(n)]
  if wrong:
    lines = [f"  {n}: saved {have.get(n, 'nothing')}, wanted {want.get(n, 'nothing')}"
             for n in wrong[:5]]
    raise UserError(f"the checkpoint of step {step} is of another model or optimizer; "
                    f"{len(wrong)} leaves differ:\n" + "\n".join(lines) +
                    "\nresume with the settings it was made with, or use an empty folder")
