"""Ten thousand episodes in one process: what the host and the device hold does not grow."""

from __future__ import annotations

import gc
import threading

import jax
import pytest
import test_engine

from benchmarks import weights
from searchr1_jax.rollout import draw, drive
from searchr1_jax.rollout.searches import Retrieval
from searchr1_jax.rollout.slots import EngineShapes


@pytest.mark.slow
def test_ten_thousand_episodes_leave_nothing_behind():
  shape, params = test_engine.noisy()
  engine = test_engine.engine_for(shape, EngineShapes(
      rows=96, slots=256, tokens=24, seats=(16, 64), row_buckets=(16, 64), chunk_buckets=(64, 128),
      widths=(128,)))
  tasks = test_engine.tasks_for(1000, sample_of=lambda i: i % 5)
  rules = test_engine.rules(max_episode_tokens=256)
  held = []
  for key in range(10):
    _, stats = drive.rollout(
        engine, params, tasks, rules, test_engine.found, how=draw.sampling(1.0),
        key=jax.random.key(key), retrieval=Retrieval(deterministic=False))
    assert stats.searches > 50
    gc.collect()
    live = sum(x.nbytes for x in jax.live_arrays())
    held.append((weights.resident("VmRSS"), live, threading.active_count()))
  # Everything has compiled by the third rollout.
  assert {(live, threads) for _, live, threads in held[2:]} == {held[-1][1:]}
  assert held[-1][0] < 1.02 * held[3][0]
