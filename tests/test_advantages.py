"""Rewards to advantages: hand-worked numbers, and what must hold for any numbers."""

from __future__ import annotations

import functools

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from searchr1_jax.algo import advantages
from searchr1_jax.types import UserError

B, L = 3, 6
few = settings(max_examples=15)
numbers_BL = hnp.arrays(np.float32, (B, L), elements=st.floats(-3, 3, width=32))
masks_BL = hnp.arrays(np.bool_, (B, L)).map(lambda m: m.astype(np.float32))
junk = st.sampled_from([np.inf, -np.inf, np.nan])
gae = jax.jit(advantages.gae)
token_rewards = jax.jit(advantages.token_rewards)
whiten = jax.jit(advantages.whiten)


def f32(x):
  return jnp.asarray(x, jnp.float32)


@jax.jit
@functools.partial(jax.value_and_grad, argnums=(0, 1))
def graded_gae(rewards_BL, values_BL, mask_BL):
  return jnp.sum(jnp.square(advantages.gae(rewards_BL, values_BL, mask_BL, 0.9, 0.8)[0]))


def under(mask_BL, x_BL, other):
  return f32(np.where(mask_BL > 0, x_BL, np.float32(other)))


def gae_by_hand(rewards, values, gamma, lam):
  """The recursion written out over one list of tokens, in float64."""
  out, next_value, next_advantage = [], 0.0, 0.0
  for r, v in reversed(list(zip(rewards, values))):
    next_advantage = r + gamma * next_value - v + gamma * lam * next_advantage
    next_value = v
    out.append(next_advantage)
  return out[::-1]


def test_token_rewards_by_hand():
  mask_BL = f32([[0, 1, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
  kl_BL = f32(np.full((3, 5), 2.0))
  # each mask token pays 0.1 * 2 = 0.2; the last of each row also gets the row's reward
  np.testing.assert_allclose(
      token_rewards(f32([1.0, 0.5, 9.0]), mask_BL, kl_BL, 0.1),
      [[0, -0.2, 0, 0.8, 0], [0.3, 0, 0, 0, 0], [0, 0, 0, 0, 0]], rtol=1e-6)


@few
@given(masks_BL, numbers_BL, junk)
def test_token_rewards_ignore_junk_and_padding(mask_BL, kl_BL, junk_value):
  reward_B = f32([1.0, -1.0, 0.5])
  clean = advantages.token_rewards(reward_B, f32(mask_BL), f32(kl_BL), 0.5)
  dirty = token_rewards(
      reward_B, f32(mask_BL), under(mask_BL, kl_BL, junk_value), 0.5)
  np.testing.assert_array_equal(clean, dirty)
  wider = token_rewards(
      reward_B, f32(np.pad(mask_BL, ((0, 0), (0, 4)))), f32(np.pad(kl_BL, ((0, 0), (0, 4)))), 0.5)
  np.testing.assert_array_equal(wider, np.pad(clean, ((0, 0), (0, 4))))


def test_gae_by_hand():
  # gamma 0.5, lam 0.5, tokens 0 and 2 of the mask (1 is an observation and costs no discount):
  #   A_2 = 1 - 0.4 = 0.6;  A_0 = 0 + 0.5 * 0.4 - 0.2 + 0.25 * 0.6 = 0.15
  advantages_BL, returns_BL = gae(
      f32([[0, 7, 1]]), f32([[0.2, 7, 0.4]]), f32([[1, 0, 1]]), 0.5, 0.5)
  np.testing.assert_allclose(advantages_BL, [[0.15, 0, 0.6]], rtol=1e-6)
  np.testing.assert_allclose(returns_BL, [[0.35, 0, 1.0]], rtol=1e-6)


@few
@given(numbers_BL, numbers_BL, masks_BL, st.floats(0, 1), st.floats(0, 1))
def test_gae_skips_what_is_outside_the_mask(rewards_BL, values_BL, mask_BL, gamma, lam):
  """Masked equals subset: as if the tokens outside had never been there."""
  advantages_BL, returns_BL = gae(f32(rewards_BL), f32(values_BL), f32(mask_BL), gamma, lam)
  for b in range(B):
    mine = mask_BL[b] > 0
    expected = gae_by_hand(
        rewards_BL[b, mine].astype(float), values_BL[b, mine].astype(float), gamma, lam)
    np.testing.assert_allclose(np.asarray(advantages_BL)[b, mine], expected, rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(np.asarray(advantages_BL)[mask_BL == 0], 0)
  np.testing.assert_array_equal(np.asarray(returns_BL)[mask_BL == 0], 0)


@few
@given(numbers_BL, numbers_BL, masks_BL, junk)
def test_gae_ignores_junk_under_the_mask_in_value_and_gradient(
    rewards_BL, values_BL, mask_BL, junk_value):

  clean, clean_grads = graded_gae(f32(rewards_BL), f32(values_BL), f32(mask_BL))
  dirty, dirty_grads = graded_gae(
      under(mask_BL, rewards_BL, junk_value), under(mask_BL, values_BL, junk_value), f32(mask_BL))
  assert clean == dirty
  jax.tree.map(np.testing.assert_array_equal, clean_grads, dirty_grads)


@few
@given(numbers_BL, numbers_BL, masks_BL)
def test_with_gamma_and_lambda_1_returns_are_the_rewards_to_come(rewards_BL, values_BL, mask_BL):
  _, returns_BL = gae(f32(rewards_BL), f32(values_BL), f32(mask_BL), 1.0, 1.0)
  to_come_BL = np.cumsum((rewards_BL * mask_BL)[:, ::-1].astype(float), axis=1)[:, ::-1]
  np.testing.assert_allclose(returns_BL, to_come_BL * mask_BL, rtol=1e-4, atol=1e-5)


def test_whiten_by_hand():
  # 1, 2 and 3 under two masks: mean 2, sample variance 1, so -1, 0 and 1
  xs = [f32([[1.0, 50.0], [2.0, 50.0]]), f32([[50.0, 50.0, 3.0]])]
  masks = [f32([[1, 0], [1, 0]]), f32([[0, 0, 1]])]
  one, other = whiten(xs, masks)
  np.testing.assert_allclose(one, [[-1, 0], [0, 0]], atol=1e-6)
  np.testing.assert_allclose(other, [[0, 0, 1]], atol=1e-6)


@few
@given(numbers_BL, masks_BL, junk)
def test_whitening_is_the_same_however_the_batch_is_cut_and_padded(x_BL, mask_BL, junk_value):
  (whole_BL,) = whiten([f32(x_BL)], [f32(mask_BL)])
  wide = ((0, 0), (0, 3))
  x_wide = np.pad(np.where(mask_BL > 0, x_BL, junk_value), wide, constant_values=junk_value)
  mask_wide = np.pad(mask_BL, wide)
  xs, masks = [f32(x_BL[:1]), f32(x_wide[1:])], [f32(mask_BL[:1]), f32(mask_wide[1:])]
  first, rest = whiten(xs, masks)
  np.testing.assert_allclose(first, whole_BL[:1], rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(rest, np.pad(whole_BL[1:], wide), rtol=1e-4, atol=1e-4)


def test_whitening_nothing_gives_0_and_one_token_stays_finite():
  x_BL = f32([[np.nan, 5.0]])
  np.testing.assert_array_equal(whiten([x_BL], [f32([[0, 0]])])[0], [[0, 0]])
  np.testing.assert_array_equal(whiten([x_BL], [f32([[0, 1]])])[0], [[0, 0]])
  assert whiten([], []) == []


def grpo(rewards, groups, survived=None, **options):
  survived = [True] * len(rewards) if survived is None else survived
  return advantages.grpo_advantages(
      np.asarray(rewards, np.float32), groups, np.asarray(survived), **options)


def test_grpo_by_hand():
  # group a: 1 and 0, mean 0.5, sample std sqrt(0.5): +-0.5 / (0.70710678 + 1e-6) = +-0.7071058
  # group b: 0, 0 and 3, mean 1, sample std sqrt(3): -1 / 1.7320518 and 2 / 1.7320518
  advantages_B, keep_B = grpo([1, 0, 0, 0, 3], ["a", "b", "a", "b", "b"])
  np.testing.assert_allclose(
      advantages_B, [0.7071058, -0.5773499, -0.7071058, -0.5773499, 1.1546998], rtol=1e-6)
  assert keep_B.all()
  no_std_B, _ = grpo([1, 0, 0, 0, 3], ["a", "b", "a", "b", "b"], use_std=False)
  np.testing.assert_allclose(no_std_B, [0.5, -1, -0.5, -1, 2])


@few
@given(st.sampled_from([np.float32, np.float64]), st.floats(0, 1), st.integers(2, 16))
@example(np.float64, 0.1, 3)  # three times 0.1 does not average to 0.1, in float64 either
def test_a_flat_group_gets_exactly_0(dtype, reward, size):
  episodes = np.full(size, reward, dtype), ["q"] * size, np.ones(size, np.bool_)
  for compare in (advantages.grpo_advantages, advantages.rloo_advantages):
    advantages_B, keep_B = compare(*episodes)
    np.testing.assert_array_equal(advantages_B, 0.0)
    assert keep_B.all()


def test_a_group_of_one_gets_its_reward():
  np.testing.assert_allclose(grpo([0.5, -2], [4, 9])[0], [0.5 / (1 + 1e-6), -2 / (1 + 1e-6)])
  np.testing.assert_array_equal(grpo([0.5, -2], [4, 9], use_std=False)[0], [0.5, -2])


def test_statistics_run_over_the_survivors():
  # the failed episode's reward means nothing: the other two are +-0.5 / (sqrt(0.5) + 1e-6)
  advantages_B, keep_B = grpo([np.nan, 1, 0], ["q"] * 3, [False, True, True])
  np.testing.assert_allclose(advantages_B, [0, 0.7071058, -0.7071058], rtol=1e-6)
  assert keep_B.tolist() == [False, True, True]


def test_a_group_with_fewer_than_two_survivors_is_dropped():
  groups, survived = ["q", "q", "r", "r", "s"], [True, False, False, False, False]
  advantages_B, keep_B = grpo([1, 0, 1, 0, 1], groups, survived)
  np.testing.assert_array_equal(advantages_B, 0.0)
  assert not keep_B.any()


def test_two_questions_of_one_row_number_are_told_apart_by_their_dataset():
  rewards, row = [1, 1, 0, 0], [5, 5, 5, 5]
  datasets = ["nq", "nq", "hotpotqa", "hotpotqa"]
  np.testing.assert_array_equal(grpo(rewards, zip(datasets, row), group_size=2)[0], 0.0)
  with pytest.raises(UserError, match=r"4 episodes, wanted 2.*\(dataset, row id\)"):
    grpo(rewards, row, group_size=2)


def test_rloo_by_hand():
  # 3 against the mean of 0 and 1: 2.5;  0 against 2: -2;  1 against 1.5: -0.5
  advantages_B, keep_B = advantages.rloo_advantages(
      np.float32([3, 0, 1, 7]), ["q"] * 4, np.array([True, True, True, False]))
  np.testing.assert_allclose(advantages_B, [2.5, -2, -0.5, 0])
  assert keep_B.tolist() == [True, True, True, False]
  with pytest.raises(UserError, match="at least 2 episodes"):
    advantages.rloo_advantages(np.float32([1]), ["q"], np.array([True]))


@few
@given(st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=8))
def test_advantages_of_a_group_add_up_to_0(rewards):
  for result in (grpo(rewards, ["q"] * len(rewards))[0],
                 grpo(rewards, ["q"] * len(rewards), use_std=False)[0]):
    assert abs(result.sum()) < 1e-4


def test_adaptive_kl_by_hand():
  # 3 / 2 - 1 = 0.5 is clipped to 0.2; 0.2 * 50 / 100 = 0.1 more
  assert advantages.adaptive_kl(1.0, 3.0, 2.0, 100, 50) == pytest.approx(1.1)
  # 1.8 / 2 - 1 = -0.1; -0.1 * 50 / 100 = 0.05 less
  assert advantages.adaptive_kl(1.0, 1.8, 2.0, 100, 50) == pytest.approx(0.95)
  assert advantages.fixed_kl(0.25, 3.0, 2.0, 100, 50) == 0.25
