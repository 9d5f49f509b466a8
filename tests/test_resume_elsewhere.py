"""A run goes on where the devices are others: the same parameters, and the same next step."""

from __future__ import annotations

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import tiny_runs

from searchr1_jax import train

ONE, TWO, FOUR, EIGHT, WIDE = (1, 1, 1), (1, 2, 1), (2, 1, 2), (2, 2, 2), (1, 8, 1)

# Every mesh is made of the first of eight simulated devices.
CHILD = """
import sys
sys.path.insert(0, "tests")
import test_resume_elsewhere
test_resume_elsewhere.resume_everywhere({folder!r}, {algorithm!r}, {pairs!r})
"""


def resume_everywhere(folder: str, algorithm: str, pairs: list[tuple[tuple, tuple]]) -> None:
  """Trains one step on the first mesh of each pair, and the next on the second."""
  world = tiny_runs.world(pathlib.Path(folder))
  expected: dict[str, float] = {}
  for before, after in pairs:
    first = pathlib.Path(folder, "from" + "".join(map(str, before)))
    if not first.exists():
      saved = run(world, algorithm, before, first, 1)
      assert saved["restored"] is None
    second = shutil.copytree(first, pathlib.Path(folder, "then" + "".join(map(str, after))),
                             dirs_exist_ok=True)
    found = run(world, algorithm, after, second, 2)
    assert found["restored"] == FINAL[first.name], (before, after)
    for name in ("policy/policy_loss", "kl_ref", "value/value_loss"):
      if name in found["metrics"]:
        number = found["metrics"][name]
        assert abs(number - expected.setdefault(name, number)) <= 1e-5, (before, after, name)
    shutil.rmtree(second)


FINAL: dict[str, list[bytes]] = {}  # what a run saved, bit for bit


def run(world: pathlib.Path, algorithm: str, mesh: tuple, workdir: pathlib.Path, steps: int) -> dict:
  """`train.train`, and what it found, and left, in its checkpoints."""
  config = tiny_runs.config(
      world, algorithm, steps=steps, reward__search_cost=0.2, model__scan_layers=True,
      batch__tokens=8 * 192)
  config.mesh.update(**dict(zip(("data", "fsdp", "tensor"), mesh)))
  seen = {"restored": None}
  restore, save = train._restore, train.checkpoint.Checkpointer.save
  bits = lambda arrays: [np.asarray(x).tobytes() for x in jax.tree.leaves(arrays)]

  def restored(trainer, saves):
    state, done = restore(trainer, saves)
    if done:
      seen["restored"] = bits(state.to_checkpoint()["arrays"])
      leaves = jax.tree.leaves(state.policy.params)
      assert {x.sharding.mesh.devices.size for x in leaves} == {int(np.prod(mesh))}
    return state, done

  def saved(self, step, state, metric=None):
    FINAL[workdir.name] = bits(state["arrays"])
    return save(self, step, state, metric)

  train._restore, train.checkpoint.Checkpointer.save = restored, saved
  try:
    train.train(config, workdir)
  finally:
    train._restore, train.checkpoint.Checkpointer.save = restore, save
  seen["metrics"] = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])
  assert seen["metrics"]["step"] == steps - 1 and seen["metrics"]["policy/grad_norm"] > 1e-2
  return seen


def check(run_python, folder: pathlib.Path, algorithm: str, pairs) -> None:
  run_python(CHILD.format(folder=str(folder), algorithm=algorithm, pairs=pairs), devices=8,
             timeout=3000, env={"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
                                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
                                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"})


def test_two_devices_go_on_as_one_and_one_as_two(run_python, tmp_path):
  check(run_python, tmp_path, "grpo", [(ONE, TWO), (TWO, ONE)])


@pytest.mark.slow
def test_each_mesh_is_left_and_reached(run_python, tmp_path):
  ring = (ONE, TWO, FOUR, EIGHT, WIDE, ONE)
  check(run_python, tmp_path, "grpo", [*zip(ring[:-1], ring[1:]), (EIGHT, ONE), (ONE, EIGHT)])


@pytest.mark.soak
def test_any_devices_go_on_as_any_others(run_python, tmp_path):
  meshes = (ONE, TWO, FOUR, EIGHT, WIDE)
  check(run_python, tmp_path, "grpo", [(a, b) for a in meshes for b in meshes])


@pytest.mark.slow
def test_so_does_a_value_model(run_python, tmp_path):
  check(run_python, tmp_path, "ppo", [(EIGHT, ONE)])
