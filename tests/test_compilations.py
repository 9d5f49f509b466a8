"""A run compiles its closed list of shapes and then nothing more."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import pytest
import tiny_runs

from searchr1_jax import train


@pytest.fixture
def compilations():
  """A list that grows by one with every program that the backend compiles."""
  seen: list[str] = []

  def listen(event: str, seconds: float, **kwargs) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
      seen.append(str(kwargs))

  jax.monitoring.register_event_duration_secs_listener(listen)
  with contextlib.ExitStack() as stack:
    stack.callback(jax.monitoring.unregister_event_duration_listener, listen)
    yield seen


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_shapes_come_from_the_closed_list(tmp_path, monkeypatch, compilations, algorithm):
  config = tiny_runs.config(
      tiny_runs.world(tmp_path), algorithm, batch__lengths=(96, 192), batch__tokens=2 * 192,
      rollout__row_buckets=(3, 6), rollout__chunk_buckets=(32, 64),
      rollout__deterministic=False, rollout__widths=(64, 128))
  trainer = train.Trainer(config, tmp_path)
  state, programs = trainer.initial_state(), 0
  batches = set()
  score = trainer.learning.score
  monkeypatch.setattr(trainer.learning, "score", lambda *models_and_batch: (
      batches.add((*models_and_batch[-1].inputs_BL.shape,
                   models_and_batch[-1].kept_BP.shape[1])), score(*models_and_batch))[1])
  for step in range(2):
    state, found, _ = trainer.step(state, step)
    programs += found["speed/compilations"]
  copy = lambda tree: jax.tree.map(jnp.copy, tree)  # an update donates what it is given
  again = train.RunState(copy(state.policy), copy(state.value), dict(state.host))
  state, _, _ = trainer.step(state, 2)
  so_far = len(compilations)
  trainer.step(again, 2)  # the same step: every shape has been met
  assert compilations[so_far:] == []

  engine, closed = trainer.model.engine.shapes, len(trainer.shapes.all())
  assert batches <= set(trainer.shapes.all())
  assert trainer.learning.score_tokens._cache_size() <= closed
  learn = trainer.learning
  learners = [learn.policy_learner] + ([learn.value_learner] if state.value else [])
  for learner in learners:
    # A shape may be a mini-batch by itself, which adds to nothing, or one of several.
    assert learner.gradient._cache_size() <= 2 * closed
    assert learner.apply._cache_size() == 1
  assert 3 <= programs <= engine.programs()
