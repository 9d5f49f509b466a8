"""Two processes of a real training, each started as its cluster would start it."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest
import stand_ins
import tiny_runs

from searchr1_jax.run import cli


class Pairs:
  """A training of a few steps for two processes, and what starts it."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    world = tiny_runs.world(folder)
    self.config = tiny_runs.config_file(folder / "small.py", world, "grpo", model__scan_layers=True)
    (folder / "bin").mkdir()
    self.box = stand_ins.Box(folder / "bin")
    self.box.env |= {
        "PYTHON": sys.executable, "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}

  def words(self, workdir: str, steps: int = 1) -> list[str]:
    return [f"--config={self.config}", f"--workdir={self.folder / workdir}",
            f"--config.steps={steps}", "--config.mesh.fsdp=2"]

  def start(self, workdir: str, envs: list[dict[str, str]], steps: int = 1
            ) -> list[subprocess.Popen]:
    words = self.words(workdir, steps)
    return [self.box.start(stand_ins.LAUNCH / "node.sh", *words, env=env) for env in envs]

  def finish(self, workdir: str, children: list[subprocess.Popen]) -> list[str]:
    said = [out + err for out, err in (c.communicate(timeout=600) for c in children)]
    assert [c.returncode for c in children] == [0] * len(children), "\n".join(said)
    assert json.loads((self.folder / workdir / "summary.json").read_text())["steps"] > 0
    return said


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Pairs:
  return Pairs(tmp_path_factory.mktemp("pairs"))


def free_port(lowest: int = 1024) -> int:
  for port in range(max(lowest, 30000 + os.getpid() % 9999), 2**16):
    try:
      socket.create_server(("", port)).close()
      return port
    except OSError:
      continue
  raise OSError("no free port")


def as_jobset() -> list[dict[str, str]]:
  port = str(free_port())
  return [{"SEARCHR1_COORDINATOR": "localhost", "SEARCHR1_PROCESSES": "2", "SEARCHR1_TRIES": "1",
           "SEARCHR1_PORT": port, "JOB_COMPLETION_INDEX": str(n)} for n in range(2)]


def as_sky() -> list[dict[str, str]]:
  port = str(free_port())
  return [{"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_NODES": "2",
           "SKYPILOT_NODE_RANK": str(n), "SEARCHR1_PORT": port} for n in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("envs", [as_jobset, as_sky])
def test_two_nodes_train_together(pairs, envs):
  said = pairs.finish(envs.__name__, pairs.start(envs.__name__, envs()))
  assert sum("1 steps in" in s for s in said) == 1  # process 0 alone tells what it came to


@pytest.mark.slow
def test_two_slurm_tasks_train_together(pairs):
  """A stand-in for srun starts both tasks with the variables that Slurm gives them."""
  pairs.box.put("srun", """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_LOCALID=0
SLURM_PROCID=1 "$@" &
SLURM_PROCID=0 "$@" && wait $!
""")
  port = free_port(2**16 - 2**12)  # of the last 4096, JAX takes the job's number's
  child = pairs.box.start("bash", stand_ins.LAUNCH / "slurm.sbatch", *pairs.words("slurm"), env={
      "SLURM_JOB_ID": str(port - (2**16 - 2**12)), "SLURM_GPUS_ON_NODE": "8"})
  pairs.finish("slurm", [child])


@pytest.mark.slow
def test_two_nodes_come_back_together(pairs):
  """One process is killed; its launcher and the other's start again, and the run ends whole."""
  children = pairs.start("killed", as_sky(), steps=3)
  metrics = pairs.folder / "killed" / "metrics.jsonl"
  while not (metrics.is_file() and metrics.read_text().count("\n")):
    time.sleep(0.1)
    assert [c.poll() for c in children] == [None, None]
  (trainer,) = stand_ins.children_of(children[1].pid)
  os.kill(trainer, signal.SIGKILL)
  said = pairs.finish("killed", children)
  assert all("start 2 of 10 in 30 s" in s and "start 3" not in s for s in said)
  assert "exit code 134" in said[0] and "exit code 137" in said[1]
  lines = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
  assert lines == [0, 1, 2]


@pytest.mark.slow
def test_a_stopped_launcher_leaves_a_saved_run(pairs):
  words = [w for w in pairs.words("stopped", 50) if "mesh" not in w]
  child = pairs.box.start(stand_ins.LAUNCH / "local.sh", *words)
  metrics = pairs.folder / "stopped" / "metrics.jsonl"
  while not metrics.is_file():
    time.sleep(0.1)
    assert child.poll() is None
  os.kill(child.pid, signal.SIGTERM)
  _, err = child.communicate(timeout=120)
  assert child.returncode == cli.STOPPED and "stopped by a signal after step" in err
  assert list((pairs.folder / "stopped" / "checkpoints").glob("step_*"))
