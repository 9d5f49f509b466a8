"""Several devices and processes: the run of one device up to rounding, and one end for all."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs

from retriever.protocol import CorpusError, Passage, RetrievalError
from searchr1_jax import train
from searchr1_jax.model import sharding
from searchr1_jax.rollout import drive, engine
from searchr1_jax.run import checkpoint, cli, disk, distributed
from searchr1_jax.types import (Question, Role, SearchRecord, Segment, StopReason, Trajectory,
                                UserError)

# `train` as a user types it, which also notes what this process has of every step's episodes.
CHILD = """
import json, os, pathlib, signal, sys
import jax
from searchr1_jax import train
from searchr1_jax.run import cli
step = train.Trainer.step

def noted(self, state, number):
  state, found, episodes = step(self, state, number)
  told = [[t.question.key, t.sample, t.ids, t.sampler_logprobs, s.reward] for t, s in episodes]
  notes = pathlib.Path({notes!r}, f"{{number}}-{{jax.process_index()}}.json")
  notes.write_text(json.dumps(told))
  if (number, jax.process_index()) == {stop!r}:
    os.kill(os.getpid(), signal.{how})
  return state, found, episodes

train.Trainer.step = noted
cli.run_program(train.main)
"""


def free_port() -> int:
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return free.getsockname()[1]


class Runs:
  """Runs of one config, on any number of processes and devices."""

  def __init__(self, folder: pathlib.Path, algorithm: str):
    folder.mkdir()
    self.folder, self.world = folder, tiny_runs.world(folder)
    # Rewards that differ from the first step on, and an eps at which Adam does not turn the last
    # bits of a gradient that ought to be 0 into a step.
    self.config = tiny_runs.config_file(
        folder / "small.py", self.world, algorithm, reward__search_cost=0.2, optimizer__eps=1e-3,
        model__scan_layers=True, eval__every=3, eval__questions=5, eval__sampled=False,
        data__test=(str(self.world / "test_1hop.jsonl"),), rollout__rows=8)

  def start(self, workdir: str, mesh=(1, 1, 1), processes: int = 1, stop=None, how: str = "SIGTERM",
            words=()) -> list[subprocess.Popen]:
    port = free_port()
    sizes = dict(zip(("data", "fsdp", "tensor"), mesh))
    words = [f"--config={self.config}", f"--workdir={self.folder / workdir}", *words,
             *(f"--config.mesh.{k}={v}" for k, v in sizes.items())]
    notes = self.folder / f"{workdir}-notes"
    notes.mkdir(exist_ok=True)
    devices = int(np.prod(mesh)) // processes
    env = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    joined = lambda p: ([f"--coordinator=127.0.0.1:{port}", f"--processes={processes}",
                         f"--process={p}"] if processes > 1 else [])
    return [subprocess.Popen(
        [sys.executable, "-c", CHILD.format(notes=str(notes), stop=stop, how=how), *words,
         *joined(p)], cwd=tiny_runs.ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True) for p in range(processes)]

  def finish(self, workdir: str, code: int = 0, **how) -> list[str]:
    """Runs to an end, the same in every process; what each said."""
    children = self.start(workdir, **how)
    said = [out + err for out, err in (c.communicate(timeout=600) for c in children)]
    assert [c.returncode for c in children] == [code] * len(children), "\n".join(said)
    return said

  def told(self, workdir: str, step: int, process: int = 0) -> list:
    """The episodes of a step as a process had them."""
    return json.loads((self.folder / f"{workdir}-notes" / f"{step}-{process}.json").read_text())

  def end(self, workdir: str):
    """The numbers of all steps, and the last state on one device."""
    folder = self.folder / workdir
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    config = cli.load_config(folder)
    config.mesh.update(data=1, fsdp=1, tensor=1)
    trainer = train.Trainer(config, folder)
    state, done = train._restore(trainer, checkpoint.CheckpointReader(folder / "checkpoints"))
    return lines, [state.policy.params] + ([state.value.params] if state.value else []), done


def alike(runs: Runs, workdir: str, steps: int = 3) -> None:
  """The run of this workdir is the one that was alone, up to rounding."""
  for step in range(steps):
    here, alone = runs.told(workdir, step), runs.told("alone", step)
    assert [x[:3] for x in here] == [x[:3] for x in alone]  # questions, samples and ids
    for mine, theirs in zip(here, alone):
      # Rollouts split heads too, so sums come in another order; this base attends sharply, which
      # carried rounding to 6e-5 in the log-prob of one unlikely token among hundreds.
      np.testing.assert_allclose(mine[3], theirs[3], atol=2e-4)
      assert mine[4] == theirs[4]
  lines, params, done = runs.end(workdir)
  expected, wanted, _ = runs.end("alone")
  assert done == steps and [line["step"] for line in lines] == list(range(steps))
  assert expected[0]["policy/grad_norm"] > 1e-2 and abs(expected[2]["kl_ref"]) > 1e-6  # it moved
  own = ("seconds/", "speed/", "padding",  # and what rows on several devices change
         "rollout/rounds", "rollout/occupancy", "rollout/prefilled", "rollout/shared")
  for mine, theirs in zip(lines, expected):
    for name in (n for n in theirs if not n.startswith(own)):
      # The gap between sampler and trainer is rounding itself: as much as two log-probs may differ by.
      least = 5e-5 if name.startswith("sampler_gap/") else 1e-5
      assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=least), name
  for mine, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(mine, theirs, atol=1e-6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  folder, made = tmp_path_factory.mktemp("distributed"), {}

  def of(algorithm: str) -> Runs:
    if algorithm not in made:
      made[algorithm] = Runs(folder / algorithm, algorithm)
      made[algorithm].finish("alone")
    return made[algorithm]

  return of


TWO = dict(mesh=(2, 2, 2), processes=2)


@pytest.mark.slow
def test_two_processes_stop_together_and_one_goes_on(runs):
  runs = runs("grpo")
  said = runs.finish("two", code=75, stop=(1, 1), **TWO)  # SIGTERM comes to the second one alone
  assert all("stopped by a signal after step 2" in s for s in said)
  assert runs.told("two", 0, 0) == runs.told("two", 0, 1)  # everybody has every episode
  assert checkpoint.CheckpointReader(runs.folder / "two" / "checkpoints").steps()[-1] == 2
  (said,) = runs.finish("two")
  assert "found a checkpoint after step 2" in said
  alike(runs, "two")


@pytest.mark.slow
def test_one_process_stops_and_two_go_on(runs):
  runs = runs("grpo")
  runs.finish("one", code=75, stop=(1, 0))
  runs.finish("one", **TWO)
  alike(runs, "one")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm, how", [
    ("grpo", dict(mesh=(2, 2, 2))), ("ppo", dict(mesh=(2, 2, 2))), ("ppo", TWO)])
def test_many_devices_train_as_one(runs, algorithm, how):
  workdir = f"many{how.get('processes', 1)}"
  runs(algorithm).finish(workdir, **how)
  alike(runs(algorithm), workdir)


@pytest.mark.slow
def test_a_killed_process_ends_the_run_which_goes_on_whole(runs):
  runs = runs("grpo")
  children = runs.start("killed", stop=(1, 1), how="SIGKILL", **TWO)
  (_, said), _ = (c.communicate(timeout=600) for c in children)
  assert children[0].returncode not in (0, 2, 3) and children[1].returncode == -signal.SIGKILL
  assert "Task 1 heartbeat timeout" in said or "stopped sending heartbeats" in said
  runs.finish("killed", **TWO)
  alike(runs, "killed")


# What two processes do with each other, and none of it needs a model.
PAIR = """
import sys
sys.path.insert(0, "tests")
import test_distributed
test_distributed.pair(sys.argv[1:], {folder!r})
"""


def pair(words: list[str], folder: str) -> None:
  """Runs in each of two processes of two devices."""
  values, _ = cli.parse(words, distributed.define_flags)
  distributed.start(values)
  me = jax.process_index()
  assert me == values.process and distributed.is_leader() == (me == 0)
  for sizes in ((0, 5), (3, 0), (1000, 1)):
    assert distributed.gather(bytes([me + 1]) * sizes[me]) == [b"\1" * sizes[0], b"\2" * sizes[1]]
  assert distributed.any_process(me == 1) and not distributed.any_process(False)
  assert distributed.from_leader(lambda: [me, 7]) == [0, 7]
  assert distributed.on_leader(lambda: me) == (0 if me == 0 else None)
  distributed.refuse_differences({"config": "same"})
  with pytest.raises(UserError, match="process 1 has another config"):
    distributed.refuse_differences({"tokenizer": "same", "config": str(me)})
  for kind in (UserError, disk.StorageError, CorpusError, RetrievalError):
    with pytest.raises(kind, match="mend it"):
      distributed.on_leader(lambda: (_ for _ in ()).throw(kind("mend it")))

  with pytest.raises(UserError, match="there are 4 in 2 processes, and all must be used"):
    sharding.make_mesh(1, 2, 1)
  mesh = sharding.make_mesh(2, 2, 1)
  whole = np.arange(24, dtype=np.float32).reshape(4, 6)
  (rows,) = sharding.put_batch(mesh, (whole,))
  assert [x.data.shape for x in rows.addressable_shards] == [(1, 6)] * 2
  here, local = engine.lay_out_here({"layers": {"x": rows}, "y": rows}, jnp.dtype(jnp.bfloat16))
  assert set(here.devices.flat) == set(jax.local_devices()) == local["y"].devices()
  assert local["y"].dtype == jnp.bfloat16
  assert np.array_equal(local["y"], whole) and np.array_equal(local["layers_3"]["x"], whole[3])
  spread_rollout(me)
  saves_of_two(pathlib.Path(folder), rows, mesh, whole)


def spread_rollout(me: int) -> None:
  """Who rolls out what, and that all get all of it."""
  mine = {0: ["a", "a", "c", "c"], 1: ["b", "b"]}[me]

  def scripted(engine, params, tasks, rules, search, *, how, key, retrieval):
    assert [t.question.id for t in tasks] == mine
    stats = drive.RolloutStats(prefilled_tokens=10 ** me, rounds=me)
    return [Trajectory(t.question, t.sample, t.prompt_ids, (Segment(
        Role.ENVIRONMENT, (me, t.sample)),), StopReason.ANSWER) for t in tasks], stats

  drive.rollout = scripted
  tasks = [drive.Task(Question("set", q, "?", ("!",)), g, (1,)) for q in "abc" for g in range(2)]
  found, stats = distributed.rollout(None, None, tasks, None, None, how=None, key=None,
                                      retrieval=None)
  assert [(t.question.id, t.sample) for t in found] == [(q, g) for q in "abc" for g in range(2)]
  assert [t.response_ids[0] for t in found] == [0, 0, 1, 1, 0, 0]
  assert stats.prefilled_tokens == 11 and stats.rounds == me and stats.seconds["wait"] >= 0


def saves_of_two(folder: pathlib.Path, rows, mesh, whole: np.ndarray) -> None:
  """Steps that two processes save, one of them damaged, and one that a single process saved."""
  place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
  wanted = {"arrays": {"w": jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=place)}}
  saves = checkpoint.Checkpointer(folder / "alone")
  step, state = saves.restore_newest_whole(wanted)
  assert step == 1 and state["arrays"]["w"].sharding == place
  _, local = engine.lay_out_here(state["arrays"] | {"layers": state["arrays"]}, jnp.float32)
  assert np.array_equal(local["w"], whole)
  saves = checkpoint.Checkpointer(folder / "both", keep=2)
  for step in (1, 2, 3, 4):
    saves.save(step, {"arrays": {"w": rows}, "host": {"step": step}}, 1.0 / step)
  assert saves.steps() == [1, 3, 4] and saves.best_step() == 1
  distributed.on_leader(lambda: damage(folder / "both" / "step_00000004"))
  with pytest.warns(checkpoint.DamagedCheckpointWarning, match="step 4 .*step 3"):
    step, state = saves.restore_newest_whole(wanted)
  assert step == 3 and state["host"] == {"step": 3} and saves.steps() == [1, 3]


def damage(folder: pathlib.Path) -> None:
  """Flips a bit of the file that holds the most."""
  path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 4
  path.write_bytes(data)


def start_two(code: str) -> list[subprocess.Popen]:
  """Two processes of two devices each, told of each other."""
  port = free_port()
  env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
  return [subprocess.Popen(
      [sys.executable, "-c", code, f"--coordinator=127.0.0.1:{port}", "--processes=2",
       f"--process={p}"], cwd=tiny_runs.ROOT, env=env, stdout=subprocess.PIPE,
      stderr=subprocess.PIPE, text=True) for p in range(2)]


def test_two_processes_share_what_they_have(tmp_path):
  whole = np.arange(24, dtype=np.float32).reshape(4, 6)
  state = {"arrays": {"w": jnp.asarray(whole)}, "host": {"step": 1}}
  checkpoint.Checkpointer(tmp_path / "alone").save(1, state)
  children = start_two(PAIR.format(folder=str(tmp_path)))
  said = [out + err for out, err in (c.communicate(timeout=300) for c in children)]
  assert [c.returncode for c in children] == [0, 0], "\n".join(said)
  step, found = checkpoint.Checkpointer(tmp_path / "both").restore_newest_whole(state)
  assert step == 3 and np.array_equal(found["arrays"]["w"], whole)


LOST = """
import os, signal, sys, time
from searchr1_jax.run import cli, distributed
values, _ = cli.parse(sys.argv[1:], distributed.define_flags)
distributed.start(values)
for step in range(10**6):
  if (step, values.process) == (3, {who}):
    print("lost", flush=True)
    {how}
  distributed.barrier()
"""


@pytest.mark.parametrize("who, how", [
    (1, "os.kill(os.getpid(), signal.SIGKILL)"),
    pytest.param(0, "os.kill(os.getpid(), signal.SIGKILL)", marks=pytest.mark.slow),
    pytest.param(1, "os.kill(os.getpid(), signal.SIGSTOP)", marks=pytest.mark.slow),
    pytest.param(1, "raise ValueError('mine alone')", marks=pytest.mark.slow)])
def test_a_lost_process_ends_the_other(who, how):
  children = start_two(LOST.format(who=who, how=how))
  lost, left = children[who], children[1 - who]
  while "lost" not in lost.stdout.readline():
    pass
  began = time.monotonic()
  _, said = left.communicate(timeout=60)
  assert time.monotonic() - began < 30 and left.returncode == -signal.SIGABRT
  assert who == 0 or re.search(r"Task 1 heartbeat|unhealthy.*:\n1\n|at the barrier: 1", said), said
  lost.kill()
  lost.communicate()


ERRING = """
import sys
from searchr1_jax.run import cli, disk, distributed
from searchr1_jax.types import UserError

def main(words):
  values, _ = cli.parse(words, distributed.define_flags)
  distributed.start(values)
  distributed.barrier()
  if values.process in {who}:
    raise {error}
  distributed.barrier()

cli.run_program(main)
"""


@pytest.mark.parametrize("who, error, codes", [
    ((0, 1), "UserError('mend it')", [2, 2]),
    ((1,), "disk.StorageError('mend it')", [-signal.SIGABRT, 6])])
def test_an_error_keeps_its_exit_code(who, error, codes):
  children = start_two(ERRING.format(who=who, error=error))
  said = [c.communicate(timeout=90)[1] for c in children]
  assert [c.returncode for c in children] == codes, "\n".join(said)
  assert all("error: mend it" in said[p] for p in who)


def test_a_port_that_is_taken_or_never_opened_is_named(monkeypatch):
  monkeypatch.setattr(distributed, "PATIENCE", 0.3)
  start = lambda port, process: distributed.start(cli.parse(
      [f"--coordinator=127.0.0.1:{port}", "--processes=2", f"--process={process}"],
      distributed.define_flags)[0])
  with socket.create_server(("127.0.0.1", 0)) as other:
    with pytest.raises(UserError, match="cannot be opened here .*in use.*; name a free one"):
      start(other.getsockname()[1], 0)
  with pytest.raises(UserError, match="process 0 has not opened .* for 0.3 s"):
    start(free_port(), 1)


def test_episodes_survive_the_journey():
  question = Question("set", "7", "Who?", ("A",), meta={"hops": 1})
  passage = Passage("3", '"T"\nnot \ud800 whole', 0.1)
  segments = (Segment(Role.POLICY, (5, 6), (-0.5, -1e-8)), Segment(Role.ENVIRONMENT, (9,)),
              Segment(Role.POLICY, (2**20,), (float(np.float32(-0.1)),)))
  full = Trajectory(question, 2, (1, 2), segments, StopReason.ANSWER,
                    (SearchRecord(0, "q\n", (passage, passage)),), turns=2, invalid_actions=1,
                    unexecuted_searches=3, truncated_observations=4, forged_information=5)
  rounded = dataclasses.replace(full, segments=(
      dataclasses.replace(segments[0], sampler_logprobs=(-0.5, float(np.float32(-1e-8)))),
      *segments[1:]))
  empty = Trajectory(question, 0, (1,), (), StopReason.LENGTH)
  stats = drive.RolloutStats(prefilled_tokens=3, generated_tokens=2, searches=1)
  tasks = [drive.Task(t.question, t.sample, t.prompt_ids) for t in (full, empty)]
  found, totals = distributed.unpack(distributed.pack([full, empty], stats), tasks)
  assert found == [rounded, empty]
  assert {k: n for k, n in totals.items() if n} == {
      "prefilled_tokens": 3, "generated_tokens": 2, "searches": 1}
  assert distributed.unpack(distributed.pack([], stats), [])[0] == []


@pytest.mark.parametrize("words, says", [
    (["--coordinator=h:1", "--processes=2"], "some are missing"),
    (["--process=1"], "some are missing"),
    (["--coordinator=h:1", "--processes=2", "--process=2"], "wanted 0 to 1"),
    (["--distributed", "--process=0"], "give it or them"),
    (["--coordinator=h", "--processes=2", "--process=1"], "is 'h'; wanted host:port"),
    (["--coordinator=h:70000", "--processes=2", "--process=1"], "wanted host:port"),
    (["--coordinator=http://h:1", "--processes=2", "--process=0"], "wanted host:port"),
    (["--distributed"], "could not be joined")])
def test_flags_that_join_nothing_are_refused(words, says):
  values, _ = cli.parse(words, distributed.define_flags)
  with pytest.raises(UserError, match=says):
    distributed.start(values)
