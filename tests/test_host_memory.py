"""Reference and moments that wait in the host's pinned memory: the same run, resumed as well."""

from __future__ import annotations

import json

import jax

import tiny_models
import tiny_runs

from searchr1_jax import train
from searchr1_jax.model import sharding
from searchr1_jax.run import learning

PINNED = dict(model__reference_memory="pinned_host", optimizer__moments_memory="pinned_host")


def test_waiting_on_the_host_changes_nothing(tmp_path):
  world, found = tiny_runs.world(tmp_path), []
  for name, changes in (("devices", {}), ("host", PINNED)):
    workdir = tmp_path / name
    for steps in (1, 2):  # the second time the run is resumed
      train.train(tiny_runs.config(world, "grpo", steps=steps, reward__search_cost=0.2,
                                   **changes), workdir)
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    found.append([{k: v for k, v in json.loads(line).items() if not k.startswith(("seconds", "speed"))}
                  for line in lines])
  assert len(found[0]) == 2 and found[0] == found[1]
  assert found[0][1]["kl_ref"] != 0  # so the reference was there, and an update had been made


def test_they_are_where_the_config_says(tmp_path):
  c = tiny_runs.config(tiny_runs.world(tmp_path), "ppo", **PINNED)
  trainer = train.Trainer(c, tmp_path)
  state = trainer.initial_state()
  kinds = lambda tree: {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}
  waiting = (trainer.reference, state.policy.opt_state, state.value.opt_state)
  assert kinds(waiting) == {"pinned_host"}
  assert kinds((state.policy.params, state.value.params)) == {"device"}


def test_the_reference_has_the_dtype_that_it_is_computed_in(tmp_path):
  c = tiny_runs.config(tiny_runs.world(tmp_path), "grpo")
  base = {"embed": jax.numpy.ones((4, 2))}
  reference = lambda: learning.Learning(c, tiny_models.random_shape("qwen3", 1), 100,
                                        sharding.make_mesh(1, 1, 1)).reference(base)
  assert reference() is base  # no copy where none is needed
  c.model.dtype = "bfloat16"
  assert reference()["embed"].dtype == jax.numpy.bfloat16
  c.algo.kl_coef = 0.0
  assert reference() is None
