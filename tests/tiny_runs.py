"""Runs small enough for tests: the shipped tiny policy, few episodes, everything written down."""

from __future__ import annotations

import importlib
import pathlib

import ml_collections

from searchr1_jax.worlds import files

ROOT = pathlib.Path(__file__).resolve().parent.parent


def world(folder: pathlib.Path) -> pathlib.Path:
  """A generated world; made once, it serves every run of a test file."""
  return files.write_world(folder / "world", "tiny", 0, 1)


def config(world_folder: str | pathlib.Path, algorithm: str, **changes) -> ml_collections.ConfigDict:
  """The tiny config of `ppo` or `grpo`, made smaller; `changes` are dotted keys with `__`."""
  c = importlib.import_module(f"configs.{algorithm}_tiny").get_config()
  folder = pathlib.Path(world_folder)
  c.world.name = ""
  c.data.update(train=(str(folder / "train.jsonl"),), test=(), questions=6)
  c.retriever.index = str(folder / "index")
  c.steps = 3
  c.episode.update(max_turns=2)
  c.rollout.update(rows=6, seats=(6,), row_buckets=(6,), chunk_buckets=(64,), deterministic=True)
  c.batch.update(lengths=(192,), tokens=6 * 192)
  c.algo.drop_flat_groups = False
  c.algo.value_only_steps = 0
  if algorithm == "grpo":
    c.data.questions, c.algo.group_size = 2, 3
  c.eval.update(every=0, around=False)
  c.checkpoint.every = 1
  c.log.tensorboard = False
  for name, value in changes.items():
    group, _, key = name.rpartition("__")
    (c[group] if group else c)[key] = value
  return c


def config_file(path: pathlib.Path, world_folder: pathlib.Path, algorithm: str, **changes) -> str:
  """A config file that says the same."""
  path.write_text(f"""import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import tiny_runs

def get_config():
  return tiny_runs.config({str(world_folder)!r}, {algorithm!r}, **{changes!r})
""")
  return str(path)
