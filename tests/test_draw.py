"""How an id is drawn from logits: the distribution asked for, and the log-prob under temperature alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchr1_jax.rollout import draw


def draws(logits_V, count, key=0, **how):
  """Ids and log-probs of many independent draws from one row of logits."""
  logits_BV = jnp.broadcast_to(jnp.asarray(logits_V, jnp.float32), (count, len(logits_V)))
  return jax.tree.map(np.asarray, jax.jit(draw.draw)(
      logits_BV, jax.random.uniform(jax.random.key(key), (count,)), draw.sampling(**how)))


def expected_shares(logits_V, temperature, top_p=1.0, top_k=0):
  """The distribution in float64: the k likeliest, of those the smallest set that holds top_p."""
  scaled = np.asarray(logits_V, np.float64) / temperature
  shares = np.exp(scaled - scaled.max())
  shares /= shares.sum()
  kept, mass = np.zeros(len(shares), bool), 0.0
  for rank, i in enumerate(np.argsort(-shares, kind="stable")):
    if rank and (mass >= top_p or (top_k and rank >= top_k)):  # the likeliest always stays
      break
    kept[i] = True
    mass += shares[i]
  cut = np.where(kept, shares, 0.0)
  return shares, cut / cut.sum()


LOGITS = (1.0, -0.5, 2.0, 0.3, -3.0, 1.4, -1e30, 0.9)


@pytest.mark.parametrize("how", [
    dict(temperature=1.0), dict(temperature=0.5), dict(temperature=2.0),
    dict(temperature=1.0, top_k=3), dict(temperature=1.0, top_p=0.8),
    dict(temperature=0.7, top_p=0.9, top_k=4), dict(temperature=1.0, top_p=0.0),
    dict(temperature=1.0, top_k=1), dict(temperature=1.0, top_k=100)])
def test_draws_follow_the_distribution(how):
  count = 20_000
  ids, logprobs = draws(LOGITS, count, **how)
  whole, cut = expected_shares(LOGITS, **how)
  seen = np.bincount(ids, minlength=len(LOGITS)) / count
  # Five standard deviations of a share, sqrt(p (1 - p) / n); what is cut off never comes.
  np.testing.assert_array_less(np.abs(seen - cut), 5 * np.sqrt(cut * (1 - cut) / count) + 1e-9)
  np.testing.assert_allclose(logprobs, np.log(whole[ids]), atol=1e-5)


def test_temperature_zero_is_greedy_and_reports_temperature_one():
  ids, logprobs = draws(LOGITS, 50, temperature=0.0, top_p=0.3)
  assert set(ids.tolist()) == {2}
  np.testing.assert_allclose(logprobs, np.log(expected_shares(LOGITS, 1.0)[0][2]), atol=1e-6)


def test_a_row_draws_by_its_own_number():
  logits_BV = jax.random.normal(jax.random.key(3), (6, 50))
  uniform_B = jax.random.uniform(jax.random.key(4), (6,))
  how = draw.sampling(1.0)
  run = jax.jit(draw.draw)
  ids_B, _ = run(logits_BV, uniform_B, how)
  order = np.array([3, 0, 5, 1, 4, 2])
  np.testing.assert_array_equal(run(logits_BV[order], uniform_B[order], how)[0], ids_B[order])


@pytest.mark.parametrize("vocab", [1, 2, 3, 127, 151_936])
def test_every_number_picks_an_id_that_has_weight(vocab):
  # The ends of [0, 1), and ids of weight 0 at both ends of the vocabulary and between others.
  numbers_B = jnp.asarray([0.0, 2**-24, 0.5, 1 - 2**-24], jnp.float32)
  logits_V = np.where(np.arange(vocab) % 3 == 1, 0.0, -1e30) if vocab > 1 else np.zeros(1)
  logits_BV = jnp.broadcast_to(jnp.asarray(logits_V, jnp.float32), (4, vocab))
  ids_B, logprobs_B = jax.jit(draw.draw)(logits_BV, numbers_B, draw.sampling(1.0))
  allowed = np.flatnonzero(logits_V == 0)
  assert set(np.asarray(ids_B).tolist()) <= set(allowed.tolist())
  assert ids_B[0] == allowed[0] and ids_B[3] >= allowed[-1] - vocab // 100 - 1
  np.testing.assert_allclose(logprobs_B, -np.log(len(allowed)), rtol=1e-5, atol=1e-6)
