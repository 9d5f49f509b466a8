"""Rollouts on several devices: rows over `data` and `fsdp`, heads over `tensor`, one device's episodes."""

from __future__ import annotations

import pytest

ROLLOUTS = """
import sys
sys.path.insert(0, "tests")
import dataclasses, jax, numpy as np
import test_engine as te
from searchr1_jax.model import sharding
from searchr1_jax.rollout import drive

shape, params = te.noisy()
tasks = te.tasks_for(40)
usual, _ = te.play(tasks)

def on(mesh, params):
  return jax.device_put(params, sharding.parameter_shardings(mesh, params))

for sizes in {meshes}:
  mesh = sharding.make_mesh(*sizes)
  engine, held = te.engine_for(shape), []
  end = engine.end  # which drops the rows' state
  engine.end = lambda: (held.append(engine._state), end())
  found, stats = te.play(tasks, engine=engine, model=(shape, on(mesh, params)))
  rows = sizes[0] * sizes[1]
  assert engine._mesh.shape == dict(data=rows, fsdp=1, tensor=sizes[2])
  assert stats.prefilled_tokens + stats.shared_tokens == drive.prefill_needed(found)
  for mine, theirs in zip(found, usual, strict=True):
    assert mine.ids == theirs.ids
    for a, b in zip(mine.segments, theirs.segments):
      np.testing.assert_allclose(a.sampler_logprobs, b.sampler_logprobs, atol=1e-5)
  # Every row device holds its own rows and no others; heads are split where they can be.
  k = held[-1].cache[0].k_BKES
  heads = shape.kv_heads // sizes[2] if shape.kv_heads % sizes[2] == 0 else shape.kv_heads
  assert k.shape[0] == rows * te.SHAPES.rows
  assert {{s.data.shape[:2] for s in k.addressable_shards}} == {{(te.SHAPES.rows, heads)}}
  assert len({{s.device for s in k.addressable_shards}}) == rows * sizes[2]
  # Samples of a question meet on one device.
  groups = [dataclasses.replace(t, sample=g) for t in te.tasks_for(rows) for g in range(4)]
  _, stats = te.play(groups, engine=engine, model=(shape, on(mesh, params)))
  assert stats.shared_tokens == 3 * sum(len(t.prompt_ids) for t in te.tasks_for(rows)), sizes
  # Fewer tasks than devices.
  alone, _ = te.play(tasks[:1], engine=engine, model=(shape, on(mesh, params)))
  assert alone[0].ids == usual[0].ids
"""


@pytest.mark.parametrize("meshes", [[(8, 1, 1)], [(2, 2, 2)],
                                    pytest.param([(1, 8, 1), (1, 1, 2), (1, 1, 4), (1, 4, 2)],
                                                 marks=pytest.mark.slow)])
def test_several_devices_write_the_episodes_of_one(run_python, meshes):
  run_python(ROLLOUTS.format(meshes=meshes), devices=8, timeout=300)
