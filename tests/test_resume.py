"""Killed at any moment and started again, a run ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
import tiny_runs

from searchr1_jax.run import checkpoint

# Where a run is killed: a function of the program, its how-manieth call, before or after it.
MOMENTS = {
    "config": ("searchr1_jax.run.cli.save_config", 1, "before"),
    "prefill": ("searchr1_jax.rollout.engine.Engine.insert", 3, "after"),
    "decode": ("searchr1_jax.rollout.engine.Engine.decode", 4, "before"),
    "search": ("searchr1_jax.rollout.drive._search_all", 2, "before"),
    "between updates": ("searchr1_jax.algo.update.Learner.learn", 2, "after"),
    "metrics written, nothing saved": ("searchr1_jax.run.writers.JsonlWriter.write", 2, "after"),
    "before a save": ("searchr1_jax.run.checkpoint.Checkpointer.save", 2, "before"),
    "inside a write": ("orbax.checkpoint.v1.save_checkpointables_async", 2, "after"),
    "before the old goes": ("searchr1_jax.run.checkpoint.Checkpointer._remove", 1, "after"),
    "after a save": ("searchr1_jax.run.checkpoint.Checkpointer.save", 2, "after"),
}

# The child pins itself to one core, since bits depend on the number of cores.
CHILD = """
import importlib, os, signal, sys
os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
moment = {moment!r}
sys.argv = ["train", *{words!r}]
from searchr1_jax import train
from searchr1_jax.run import cli

if moment:
  name, left, when = moment
  path, _, attribute = name.rpartition(".")
  while True:
    try:
      owner = importlib.import_module(path)
      break
    except ModuleNotFoundError:
      path, _, middle = path.rpartition(".")
      owner = getattr(importlib.import_module(path), middle)
      break
  real = getattr(owner, attribute)

  def hooked(*args, **kwargs):
    global left
    left -= 1
    if left == 0 and when == "before":
      os.kill(os.getpid(), signal.SIGKILL)
    out = real(*args, **kwargs)
    if left == 0:
      os.kill(os.getpid(), signal.SIGKILL)
    return out

  setattr(owner, attribute, hooked)

cli.run_program(train.main)
"""


class Runs:
  """A config, the run of it that nobody disturbed, and a compilation cache shared by all."""

  def __init__(self, folder: pathlib.Path, world: pathlib.Path, algorithm: str):
    folder.mkdir()
    self.folder, self.algorithm = folder, algorithm
    self.config = tiny_runs.config_file(folder / "small.py", world, algorithm,
                                        checkpoint__keep=2, algo__updates_per_batch=2)
    self.start("undisturbed").communicate()
    self.expected = self.end("undisturbed")

  def start(self, workdir: str, moment=None) -> subprocess.Popen:
    words = [f"--config={self.config}", f"--workdir={self.folder / workdir}"]
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(self.folder.parent / "compiled"),
                        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD.format(moment=moment, words=words)], cwd=tiny_runs.ROOT,
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

  def end(self, workdir: str):
    """The SHA-256 of every leaf, the host's part, and all metrics but the seconds."""
    folder = self.folder / workdir
    saves = checkpoint.CheckpointReader(folder / "checkpoints")
    record = saves._record(saves.steps()[-1])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    numbers = [{k: v for k, v in line.items() if not k.startswith(("seconds/", "speed/"))} for line in lines]
    return {"steps": saves.steps()[-1], "leaves": record["leaves"], "host": record["host"],
            "metrics": numbers}

  def finish(self, workdir: str) -> None:
    """Runs to the end, which must be the undisturbed one."""
    child = self.start(workdir)
    _, stderr = child.communicate()
    assert child.returncode == 0, stderr
    end = self.end(workdir)
    assert [m["step"] for m in end["metrics"]] == [m["step"] for m in self.expected["metrics"]]
    assert end == self.expected
    leftovers = [p.name for p in (self.folder / workdir / "checkpoints").iterdir()
                 if not p.name.startswith("step_")]
    assert leftovers == []

  def killed(self, workdir: str, moment) -> None:
    child = self.start(workdir, moment)
    _, stderr = child.communicate()
    assert child.returncode == -signal.SIGKILL, stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  folder = tmp_path_factory.mktemp("resume")
  world, made = tiny_runs.world(folder), {}

  def of(algorithm: str) -> Runs:
    if algorithm not in made:
      made[algorithm] = Runs(folder / algorithm, world, algorithm)
    return made[algorithm]

  return of


def test_the_undisturbed_run_learns_something(runs):
  # Otherwise equal ends would prove nothing.
  end = runs("grpo").expected
  assert end["steps"] == 3 and len(end["metrics"]) == 3
  assert any(m["policy/grad_norm"] > 0 for m in end["metrics"])


@pytest.mark.parametrize("algorithm, moments", [
    ("grpo", ["metrics written, nothing saved", "inside a write"]), ("ppo", ["between updates"])])
def test_killed_and_resumed_is_undisturbed(runs, algorithm, moments):
  for moment in moments:
    runs(algorithm).killed("few", MOMENTS[moment])
  runs(algorithm).finish("few")


@pytest.mark.soak
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_every_named_moment(runs, algorithm, moment):
  workdir = moment.replace(" ", "-").replace(",", "")
  runs(algorithm).killed(workdir, MOMENTS[moment])
  runs(algorithm).finish(workdir)


@pytest.mark.soak
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_random_moments(runs, algorithm):
  rng = np.random.default_rng(0)
  for kill in range(10):
    child = runs(algorithm).start("random")
    try:
      child.communicate(timeout=float(rng.uniform(2, 15)))
      break  # it reached its end
    except subprocess.TimeoutExpired:
      child.kill()
      child.communicate()
  runs(algorithm).finish("random")
