"""run/checkpoint.py: atomic steps, no silent damage, the right steps kept."""

from __future__ import annotations

import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
import typing
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchr1_jax.run import checkpoint
from searchr1_jax.types import UserError


class Moments(typing.NamedTuple):
  mu: dict
  nothing: tuple


def state_of(step: int) -> dict:
  """A state with every kind of leaf, all of whose numbers tell the step."""
  key = jax.random.fold_in(jax.random.key(7), step)
  return {
      "arrays": {
          "params": {"layer.0": {"kernel": jax.random.normal(key, (64, 33)),
                                 "bias": jnp.full((33,), step, jnp.bfloat16)}},
          "moments": Moments({"kernel": jax.random.normal(key, (4096,))}, ()),
          "count": jnp.array(step, jnp.int32),
          "flags": jnp.arange(11, dtype=jnp.uint32) % 2 == 0,
          "host_side": np.arange(5, dtype=np.int64) + 2**40 + step},
      "host": {"cursor": step * 512, "controller": {"beta": 0.1 + step}, "names": ["nq", "pop"]}}


def same(a: dict, b: dict) -> bool:
  leaves = zip(jax.tree.leaves(a["arrays"]), jax.tree.leaves(b["arrays"]), strict=True)
  return a["host"] == b["host"] and all(
      np.asarray(x).tobytes() == np.asarray(y).tobytes() and x.dtype == y.dtype for x, y in leaves)


@pytest.fixture
def three(tmp_path) -> pathlib.Path:
  """A folder with steps 1, 2 and 3."""
  saver = checkpoint.Checkpointer(tmp_path / "three", keep=3)
  for step in (1, 2, 3):
    saver.save(step, state_of(step))
  return tmp_path / "three"


def test_what_comes_back_is_what_was_saved(three):
  step, state = checkpoint.Checkpointer(three).restore_newest_whole(state_of(0))
  assert step == 3 and same(state, state_of(3))
  assert isinstance(state["arrays"]["moments"], Moments)
  assert isinstance(state["arrays"]["host_side"], np.ndarray)
  assert same(checkpoint.Checkpointer(three).restore(1, state_of(0)), state_of(1))


def test_an_empty_folder_has_nothing_to_restore(tmp_path):
  saver = checkpoint.Checkpointer(tmp_path / "new")
  assert saver.restore_newest_whole(state_of(0)) is None
  assert saver.steps() == [] and saver.best_step() is None


def mutate(folder: pathlib.Path, rng: random.Random) -> str:
  """Damages one file of a step in one of six ways; files are drawn by size, then evenly."""
  files = sorted(p for p in folder.rglob("*") if p.is_file())
  sized = [p for p in files if p.stat().st_size]
  by_size = rng.random() < 0.6
  path = rng.choices(sized, [p.stat().st_size for p in sized] if by_size else None)[0]
  data, how = bytearray(path.read_bytes()), rng.choice(
      ("flip", "flip", "truncate", "zero", "delete", "swap", "digest"))
  if how == "flip":
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
  elif how == "truncate":
    del data[rng.randrange(len(data)):]
  elif how == "zero":
    start = rng.randrange(len(data))
    data[start:start + 512] = bytes(len(data[start:start + 512]))
  elif how == "swap":
    other = rng.choice(files)
    data, theirs = other.read_bytes(), bytes(data)
    other.write_bytes(theirs)
  elif how == "digest":
    (path,) = folder.glob("record/*.json")
    text = path.read_text()
    # The seal's, or that of a leaf; both as `"name": "hexadecimal digits"`.
    name, digits = rng.choice((('"sha256": "', 64), ('"digest": "', 32)))
    at = text.index(name) + len(name) + rng.randrange(digits)
    data = (text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1:]).encode()
  path.write_bytes(data)
  if how == "delete":
    path.unlink()
  return f"{how} {path.relative_to(folder)}"


def test_no_damage_is_silent_and_the_newest_whole_step_is_used(three, tmp_path):
  # A mutation may hit bytes that hold no state (a time stamp): then step 3 comes back bit for bit.
  fell_back = 0
  for seed in range(60):
    folder = tmp_path / f"copy{seed}"
    for step in (2, 3):
      shutil.copytree(three / f"step_{step:08d}", folder / f"step_{step:08d}")
    done = mutate(folder / "step_00000003", random.Random(seed))
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
      saver = checkpoint.Checkpointer(folder)
      step, state = saver.restore_newest_whole(state_of(0))
    told = [str(w.message) for w in caught
            if issubclass(w.category, checkpoint.DamagedCheckpointWarning)]
    assert same(state, state_of(step)), f"silent: {done}"
    assert (step, len(told)) in ((3, 0), (2, 1)), f"{done}: step {step}, {told}"
    if step == 2:
      fell_back += 1
      assert "step 3" in told[0] and saver.steps() == [2]
      saver.save(3, state_of(3))  # its number is free again
    shutil.rmtree(folder)
  assert fell_back >= 40, f"only {fell_back} of 60 mutations hit the state"


def flip_the_arrays(folder: pathlib.Path) -> None:
  """Flips one bit in the middle of the file that holds the numbers."""
  path = max(folder.rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 4
  path.write_bytes(data)


def test_the_warning_names_the_leaf(three):
  flip_the_arrays(three / "step_00000003")
  told = r"step 3 .*(kernel|moments).*step 2"
  with pytest.warns(checkpoint.DamagedCheckpointWarning, match=told):
    checkpoint.Checkpointer(three).restore_newest_whole(state_of(0))


def test_all_damaged_is_an_error_that_lists_each_and_touches_nothing(three):
  for step in (1, 2, 3):
    flip_the_arrays(three / f"step_{step:08d}")
  saver = checkpoint.Checkpointer(three)
  with pytest.raises(UserError, match="(?s)step 3: .*step 2: .*step 1: "):
    saver.restore_newest_whole(state_of(0))
  assert saver.steps() == [1, 2, 3]


def test_a_record_of_an_earlier_version_is_refused_in_words(three, monkeypatch):
  older = checkpoint.CheckpointReader._record

  def with_other_digests(self, step):
    body = older(self, step)
    leaves = {name: {"sha256" if k == "digest" else k: v for k, v in entry.items()}
              for name, entry in body["leaves"].items()}
    return body | {"leaves": leaves}

  monkeypatch.setattr(checkpoint.CheckpointReader, "_record", with_other_digests)
  with pytest.raises(UserError, match="step 3 was made by an earlier version of this program"):
    checkpoint.Checkpointer(three).restore_newest_whole(state_of(0))
  assert checkpoint.Checkpointer(three).steps() == [1, 2, 3]


def test_another_architecture_is_refused_and_is_not_damage(three):
  other = state_of(0)
  other["arrays"]["params"]["layer.0"]["kernel"] = jnp.zeros((64, 34))
  with pytest.raises(UserError, match=r"float32\[64, 33\], wanted float32\[64, 34\]"):
    checkpoint.Checkpointer(three).restore_newest_whole(other)


def test_a_missing_step_is_refused_with_the_choices(three):
  with pytest.raises(UserError, match=r"no checkpoint of step 9; it has \[1, 2, 3\]"):
    checkpoint.Checkpointer(three).restore(9, state_of(0))


def test_keeps_the_newest_and_the_best(tmp_path):
  saver = checkpoint.Checkpointer(tmp_path, keep=2)
  for step, metric in ((1, 0.2), (2, 0.9), (3, 0.4), (4, None), (5, float("nan"))):
    saver.save(step, state_of(step), metric)
  # The two newest are 4 and 5, the best is 2; a NaN is no score.
  assert saver.steps() == [2, 4, 5] and saver.best_step() == 2
  assert checkpoint.Checkpointer(tmp_path).best_step() == 2
  saver = checkpoint.Checkpointer(tmp_path, keep=1, keep_best=False)
  saver.save(6, state_of(6))
  assert saver.steps() == [6]


def test_leftovers_of_a_kill_are_swept(tmp_path):
  for name in ("step_00000004.orbax-checkpoint-tmp", "deleting_step_00000001"):
    (tmp_path / name / "arrays").mkdir(parents=True)
  assert checkpoint.Checkpointer(tmp_path).steps() == []
  assert list(tmp_path.iterdir()) == []


def everything(folder: pathlib.Path) -> dict[str, bytes]:
  return {str(p): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


def test_a_reader_changes_nothing(three):
  # Another process may be training here: its half-written step is no leftover.
  (three / "step_00000004.orbax-checkpoint-tmp").mkdir()
  flip_the_arrays(three / "step_00000003")
  before, reader = everything(three), checkpoint.CheckpointReader(three)
  with pytest.warns(checkpoint.DamagedCheckpointWarning, match="step 3 .*step 2"):
    step, state = reader.restore_newest_whole(state_of(0))
  assert step == 2 and same(state, state_of(2)) and reader.best_step() is None
  assert everything(three) == before
  assert checkpoint.CheckpointReader(three / "absent").steps() == []
  assert not (three / "absent").exists()


def test_a_step_that_is_replaced_while_it_is_read_is_no_damage(three, monkeypatch):
  real = checkpoint.CheckpointReader._load

  def train_meanwhile(self, step, abstract):
    if step == 3:  # the run keeps one step, and has just saved its fourth
      checkpoint.Checkpointer(three, keep=1).save(4, state_of(4))
    return real(self, step, abstract)

  monkeypatch.setattr(checkpoint.CheckpointReader, "_load", train_meanwhile)
  step, state = checkpoint.CheckpointReader(three).restore_newest_whole(state_of(0))  # no warning
  assert step == 4 and same(state, state_of(4))


def test_a_fingerprint_tells_any_change(tmp_path):
  arrays = lambda **k: {"a": jnp.arange(4.0), "b": jnp.zeros((2, 2), jnp.int32)} | k
  others = [arrays(), arrays(a=jnp.arange(4.0).at[2].set(7)), arrays(b=jnp.zeros(4, jnp.int32)),
            arrays(b=jnp.zeros((2, 2))), {"c": jnp.arange(4.0), "b": jnp.zeros((2, 2), jnp.int32)}]
  found = [checkpoint.fingerprint(x) for x in others] + [checkpoint.fingerprint(arrays(), "qwen3")]
  assert len(set(found)) == len(found) and checkpoint.fingerprint(arrays()) == found[0]


class FullDisk:
  """A save that fails when its end is awaited."""

  def __init__(self, path, _):
    path.with_name(path.name + ".orbax-checkpoint-tmp").mkdir()

  def result(self):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("end", [OSError(28, "No space left"), KeyboardInterrupt()])
def test_a_step_is_there_until_another_has_replaced_it(tmp_path, monkeypatch, end):
  saver = checkpoint.Checkpointer(tmp_path, keep=1)
  saver.save(1, state_of(1), 0.5)
  monkeypatch.setattr(FullDisk, "result", lambda self: (_ for _ in ()).throw(end))
  with monkeypatch.context() as patch:
    patch.setattr(checkpoint.ocp, "save_checkpointables_async", FullDisk)
    with pytest.raises((checkpoint.StorageError, KeyboardInterrupt)):
      saver.save(1, state_of(8), 0.8)
  if isinstance(end, KeyboardInterrupt):  # a kill, after which the program starts again
    assert saver.steps() == [] and (tmp_path / "replaced_step_00000001").is_dir()
    saver = checkpoint.Checkpointer(tmp_path, keep=1)
  assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
  assert same(saver.restore(1, state_of(0)), state_of(1)) and saver.best_step() == 1
  saver.save(1, state_of(9))
  assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
  assert same(saver.restore(1, state_of(0)), state_of(9))


@pytest.mark.parametrize("error, kind", [
    (MemoryError(), UserError),
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: while trying to allocate"), UserError),
    (OSError(5, "Input/output error"), checkpoint.StorageError),
    (ValueError("Error opening: [OS error 24: EMFILE Too many open files]"),
     checkpoint.StorageError)])
def test_what_cannot_be_read_now_is_no_damage(three, monkeypatch, error, kind):
  real = checkpoint.ocp.load_checkpointables

  def lacking(path, abstract):
    if "arrays" not in abstract:
      return real(path, abstract)
    raise RuntimeError("pages of words") from error

  saver = checkpoint.Checkpointer(three)
  with monkeypatch.context() as patch:
    patch.setattr(checkpoint.ocp, "load_checkpointables", lacking)
    with pytest.raises(kind, match="step 3 .* could not be read now .*no damage"):
      saver.restore_newest_whole(state_of(0))
  assert saver.restore_newest_whole(state_of(0))[0] == 3 and saver.steps() == [1, 2, 3]


def test_a_failed_save_rises_at_its_own_step_and_leaves_nothing(tmp_path, monkeypatch):
  for background in (False, True):
    folder = tmp_path / str(background)
    saver = checkpoint.Checkpointer(folder, background=background)
    saver.save(1, state_of(1))
    saver.wait()
    with monkeypatch.context() as patch:
      patch.setattr(checkpoint.ocp, "save_checkpointables_async", FullDisk)
      with pytest.raises(checkpoint.StorageError, match="step 2 .*No space left"):
        saver.save(2, state_of(2))
        saver.wait()
    assert [p.name for p in folder.iterdir()] == ["step_00000001"]
    saver.save(3, state_of(3))  # goes on once there is room
    saver.wait()
    assert saver.steps() == [1, 3]


def test_a_background_save_is_whole_though_the_arrays_are_donated(tmp_path):
  saver = checkpoint.Checkpointer(tmp_path, background=True, keep=9)
  bump = jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x), donate_argnums=0)
  arrays = {"w": jnp.zeros((512, 512)), "n": jnp.array(0.0)}
  for step in range(4):
    saver.save(step, {"arrays": arrays, "host": {}})
    arrays = bump(arrays)
  for step in range(4):
    back = saver.restore(step, {"arrays": arrays})["arrays"]
    assert float(back["n"]) == step and bool((back["w"] == step).all())


def test_the_host_part_must_survive_json(tmp_path):
  saver = checkpoint.Checkpointer(tmp_path)
  for host in ({"a": (1, 2)}, {1: "a"}, {"a": float("nan")}):
    with pytest.raises(ValueError):
      saver.save(1, {"arrays": {}, "host": host})
  with pytest.raises(ValueError, match="count is a int"):
    saver.save(1, {"arrays": {"count": 3}, "host": {}})


def test_saving_every_step_is_cheap(tmp_path):
  saver = checkpoint.Checkpointer(tmp_path)
  state = {"arrays": {str(i): jnp.ones((50, 500)) for i in range(20)}, "host": {}}  # 2 MB
  took = []
  for step in range(6):
    start = time.process_time()  # of all threads; a busy machine does not count
    saver.save(step, state)
    took.append(time.process_time() - start)
  assert sorted(took)[2] < 0.3, took


WRITER = """
import jax, jax.numpy as jnp, sys
from searchr1_jax.run.checkpoint import Checkpointer
saver = Checkpointer(sys.argv[1], keep=2)
found = saver.restore_newest_whole({"arrays": {"w": jnp.zeros((300, 300))}})
step = found[0] if found else 0
print("from", step, flush=True)
while True:
  step += 1
  saver.save(step, {"arrays": {"w": jnp.full((300, 300), float(step))}, "host": {"step": step}})
  print("saved", step, flush=True)
"""


@pytest.mark.slow
def test_sigkill_at_any_moment_loses_at_most_the_step_being_written(tmp_path):
  rng, last = random.Random(1), 0
  for _ in range(10):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], text=True,
                              stdout=subprocess.PIPE, cwd=pathlib.Path(__file__).parent.parent)
    start = int(writer.stdout.readline().split()[1])
    assert start in (last, last + 1)  # a step may be whole though its line was never printed
    lines = [writer.stdout.readline()]  # at least one step a round
    time.sleep(rng.uniform(0, 0.5))
    os.kill(writer.pid, signal.SIGKILL)
    last = int((lines + writer.communicate()[0].splitlines())[-1].split()[1])
  saver = checkpoint.Checkpointer(tmp_path)
  step, state = saver.restore_newest_whole({"arrays": {"w": jnp.zeros((300, 300))}})
  assert step in (last, last + 1) and step >= 10
  assert bool((state["arrays"]["w"] == step).all()) and state["host"] == {"step": step}
  assert not list(tmp_path.glob("*tmp*"))


def test_restores_onto_other_shardings(run_python, tmp_path):
  run_python(f"""
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from searchr1_jax.run.checkpoint import Checkpointer
mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
value = jnp.arange(64.0).reshape(8, 8)
saver = Checkpointer({str(tmp_path)!r})
saver.save(1, {{"arrays": {{"w": put(value, "fsdp", "tensor")}}, "host": {{}}}})
for spec in (("tensor", "fsdp"), ("fsdp",), ()):
  sharding = NamedSharding(mesh, P(*spec))
  wanted = {{"arrays": {{"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)}}}}
  w = saver.restore(1, wanted)["arrays"]["w"]
  assert w.sharding == sharding and np.array_equal(w, value)
alone = {{"arrays": {{"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}}}}
assert len(saver.restore(1, alone)["arrays"]["w"].devices()) == 1
""")


def test_a_signal_sets_the_flag_and_the_second_one_ends():
  code = ("import os, signal; from searchr1_jax.run.checkpoint import StopFlag\n"
          "flag = StopFlag().install(); assert not flag\n"
          "os.kill(os.getpid(), signal.SIGTERM); assert flag; print('first', flush=True)\n"
          "os.kill(os.getpid(), signal.SIGTERM); print('second', flush=True)")
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                        cwd=pathlib.Path(__file__).parent.parent)
  assert (done.returncode, done.stdout) == (-signal.SIGTERM, "first\n")
