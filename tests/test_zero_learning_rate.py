"""The cheapest test of a trainer: at a learning rate of 0 nothing may move and all agree."""

from __future__ import annotations

import pathlib

import jax
import numpy as np
import pytest
import tiny_runs

from searchr1_jax import train
from searchr1_jax.run import setup, writers


def check(config, workdir: pathlib.Path, steps: int) -> None:
  """Trains at rate 0 and compares policy, value, sampler, trainer and reference."""
  setup.check(config)
  trainer = train.Trainer(config, workdir)
  state = trainer.initial_state()
  bits = lambda s: [np.asarray(x).tobytes() for x in jax.tree.leaves(
      (s.policy.params, s.value.params if s.value else ()))]
  before = bits(state)
  for step in range(steps):
    state, found, _ = trainer.step(state, step)
    plain = writers.divide(found)
    assert bits(state) == before, step
    assert plain["sampler_gap/max"] <= 1e-4
    assert plain["policy/clip_fraction"] == 0
    assert abs(plain["policy/kl_old"]) <= 1e-6  # log ratios: rho is within 1 +- 1e-4
    assert abs(plain["kl_ref"]) <= 1e-6
    if state.value:
      assert plain["value/value_clip_fraction"] == 0
    assert plain["policy/grad_norm"] < np.inf
  assert int(state.policy.steps) >= steps and int(state.policy.skipped) == 0


@pytest.fixture(scope="module")
def world(tmp_path_factory):
  return tiny_runs.world(tmp_path_factory.mktemp("zero"))


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_nothing_moves(world, tmp_path, algorithm):
  check(tiny_runs.config(world, algorithm, optimizer__policy_lr=0.0, optimizer__value_lr=0.0),
        tmp_path, steps=2)


EIGHT = """
import sys
sys.path.insert(0, "tests")
import pathlib, jax
import test_zero_learning_rate as zero, tiny_runs
assert len(jax.devices()) == 8
config = tiny_runs.config({world!r}, {algorithm!r}, optimizer__policy_lr=0.0,
                          optimizer__value_lr=0.0, batch__tokens=8 * 192)
config.mesh.update(data=2, fsdp=2, tensor=2)
zero.check(config, pathlib.Path({workdir!r}), steps=10)
"""


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_nothing_moves_on_eight_devices(world, tmp_path, run_python, algorithm):
  run_python(EIGHT.format(world=str(world), algorithm=algorithm, workdir=str(tmp_path)),
             devices=8, timeout=900)
