"""Whole training steps of a pretrained model on real questions and passages."""

from __future__ import annotations

import importlib
import json
import math

import jax
import numpy as np
import pytest

from retriever import build
from searchr1_jax import train as program

pytestmark = [pytest.mark.assets, pytest.mark.slow]


@pytest.fixture(scope="module")
def index(assets, tmp_path_factory):
  out = tmp_path_factory.mktemp("wiki") / "index"
  build.build(assets / "wiki-vital" / "corpus.jsonl", out, dim=1024, quiet=True)
  return out


@pytest.mark.parametrize("name", ["grpo_smollm2", "ppo_smollm2"])
def test_a_step_searches_learns_and_stays_finite(name, assets, index, tmp_path, monkeypatch):
  monkeypatch.setenv("SEARCHR1_ASSETS", str(assets))
  config = importlib.import_module(f"configs.{name}").get_config()
  config.steps = 1
  config.retriever.index = str(index)
  config.algo.kl_coef = 0.0  # no reference: half the memory, and the step is the same
  config.log.tensorboard = False
  config.checkpoint.every = 1
  trainer = program.Trainer(config, tmp_path)
  state = trainer.initial_state()
  before = jax.device_get(state.policy.params["layers"]["mlp"]["down"]["kernel"][0])
  after, found, episodes = trainer.step(state, 0)
  assert found["rollout/searches"] >= 3
  losses = {k: float(v.total) for k, v in found.items() if k.endswith("_loss")}
  assert losses and all(math.isfinite(v) for v in losses.values())
  moved = jax.device_get(after.policy.params["layers"]["mlp"]["down"]["kernel"][0])
  # Nothing moves only where every episode earned the same, which GRPO cannot learn from.
  rewards = {s.reward for _, s in episodes}
  if name == "ppo_smollm2" or len(rewards) > 1:
    assert not np.array_equal(before, moved)
  shown = [t for t, _ in episodes if t.searches]
  assert any(p.text for t in shown for s in t.searches for p in s.passages)
  json.dumps(after.host)
