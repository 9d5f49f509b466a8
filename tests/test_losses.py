"""The loss terms: hand-worked numbers, and the properties that every masked function has."""

from __future__ import annotations

import functools
import math

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from searchr1_jax.algo import losses
from searchr1_jax.types import UserError

B, L, V = 3, 6, 5
LIMIT = losses.GAP_LIMIT
GLOBAL_MODES = [m for m in losses.AGGREGATIONS if m != "microbatch-token-mean"]
few = settings(max_examples=8)
numbers_BL = hnp.arrays(np.float32, (B, L), elements=st.floats(-3, 3, width=32))
masks_BL = hnp.arrays(np.bool_, (B, L)).map(lambda m: m.astype(np.float32))
junk = st.sampled_from([np.inf, -np.inf, np.nan, 1e30])


def f32(x):
  return jnp.asarray(x, jnp.float32)


def surrogate(ratio_of, trained_BL, old_BL, advantages_BL, mask_BL, **options):
  gap_BL = ratio_of(trained_BL, old_BL, mask_BL)
  return losses.policy_loss(gap_BL, advantages_BL, mask_BL, 0.2, 0.3, **options).loss_BL


def squared(clip, values_BL, old_BL, returns_BL, mask_BL):
  return losses.value_loss(values_BL, old_BL, returns_BL, mask_BL, clip).loss_BL


def kl(kind, compat, policy_BL, ref_BL, _, mask_BL):
  return losses.kl_estimate(policy_BL, ref_BL, mask_BL, kind, compat)


def sampler_weight(old_BL, sampler_BL, _, mask_BL):
  return losses.truncated_importance_weight(old_BL, sampler_BL, mask_BL)


# Each takes (what is trained, what it is compared with, advantages or returns, mask).
TERMS = {
    "ppo": functools.partial(surrogate, losses.log_ratio),
    "dual clip": functools.partial(surrogate, losses.log_ratio, dual_clip=3.0),
    "gspo": functools.partial(surrogate, losses.sequence_log_ratio),
    "llds": losses.lost_likelihood,
    "value": functools.partial(squared, 0.5),
    "value, no clip": functools.partial(squared, None),
    "sampler weight": sampler_weight,
    "k3, published": functools.partial(kl, "k3", True),
} | {kind: functools.partial(kl, kind, False) for kind in losses.KL_KINDS}


@functools.cache
def graded(name):
  """`(arrays, weights, mask) -> loss and its gradient by each of the three arrays`, compiled."""

  def loss(trained_BL, other_BL, third_BL, weight_BL, mask_BL):
    term_BL = TERMS[name](trained_BL, other_BL, third_BL, mask_BL)
    return losses.weighted_sum(term_BL, weight_BL, mask_BL)

  compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
  return lambda arrays, weight_BL, mask_BL: compiled(
      *(f32(a) for a in arrays), f32(weight_BL), f32(mask_BL))


def weights(mask_BL, mode="token-mean", rows=None, **overrides):
  whole_BL = mask_BL if rows is None else rows
  known = dict(sequences=len(whole_BL), tokens=int(whole_BL.sum()), max_episode_tokens=16,
               micro_batches=1)
  return losses.aggregation_weights(mask_BL, mode, **known | overrides)


every_term = pytest.mark.parametrize("name", TERMS)


@every_term
@few
@given(numbers_BL, numbers_BL, numbers_BL, masks_BL, junk)
def test_junk_under_the_mask_changes_neither_value_nor_gradient(name, a, b, c, mask_BL, value):
  clean, clean_grads = graded(name)((a, b, c), weights(mask_BL), mask_BL)
  dirty_arrays = [np.where(mask_BL > 0, x, np.float32(value)) for x in (a, b, c)]
  dirty, dirty_grads = graded(name)(dirty_arrays, weights(mask_BL), mask_BL)
  assert clean == dirty and np.isfinite(clean)
  jax.tree.map(np.testing.assert_array_equal, clean_grads, dirty_grads)


@every_term
@few
@given(numbers_BL, numbers_BL, numbers_BL, masks_BL, junk)
def test_more_padding_changes_nothing(name, a, b, c, mask_BL, value):
  short, (grad_BL, *_) = graded(name)((a, b, c), weights(mask_BL, "seq-mean"), mask_BL)
  wide = ((0, 0), (0, 3))
  arrays = [np.pad(x, wide, constant_values=value) for x in (a, b, c)]
  mask_wide = np.pad(mask_BL, wide)
  padded, (grad_wide, *_) = graded(name)(arrays, weights(mask_wide, "seq-mean"), mask_wide)
  np.testing.assert_allclose(short, padded, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(np.pad(grad_BL, wide), grad_wide, rtol=1e-5, atol=1e-6)


@every_term
@few
@given(numbers_BL, numbers_BL, numbers_BL, masks_BL, st.sampled_from(GLOBAL_MODES))
def test_micro_batches_add_up_to_the_batch(name, a, b, c, mask_BL, mode):
  whole, (grad_BL, *_) = graded(name)((a, b, c), weights(mask_BL, mode), mask_BL)
  parts = [graded(name)((a[r], b[r], c[r]), weights(mask_BL[r], mode, rows=mask_BL), mask_BL[r])
           for r in (slice(0, 1), slice(1, 3))]
  np.testing.assert_allclose(whole, sum(value for value, _ in parts), rtol=1e-5, atol=1e-6)
  joined = np.concatenate([grads[0] for _, grads in parts])
  np.testing.assert_allclose(grad_BL, joined, rtol=1e-5, atol=1e-6)


@every_term
@pytest.mark.parametrize("mode", losses.AGGREGATIONS)
def test_an_empty_mask_gives_0(name, mode):
  nothing_BL, infinite_BL = np.zeros((B, L), np.float32), np.full((B, L), np.inf, np.float32)
  value, grads = graded(name)([infinite_BL] * 3, weights(nothing_BL, mode), nothing_BL)
  assert value == 0.0
  jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0.0), grads)


@every_term
@few
@given(numbers_BL, numbers_BL, numbers_BL, masks_BL)
def test_gradient_flows_into_what_is_trained_alone(name, a, b, c, mask_BL):
  """None into advantages, returns, or the old, reference and sampler's arrays."""
  _, (_, *others) = graded(name)((a, b, c), weights(mask_BL), mask_BL)
  jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0.0), others)


@pytest.mark.parametrize("name", ["ppo", "dual clip"])
@few
@given(numbers_BL, numbers_BL, masks_BL, st.sampled_from(losses.AGGREGATIONS))
def test_the_on_policy_gradient_is_reinforce(name, logprobs, advantages, mask_BL, mode):
  # REINFORCE: d/dlogp of -sum w A logp is -w A
  weight_BL = weights(mask_BL, mode)
  _, (grad_BL, *_) = graded(name)((logprobs, logprobs, advantages), weight_BL, mask_BL)
  np.testing.assert_allclose(grad_BL, -weight_BL * advantages, rtol=1e-5, atol=1e-7)


@few
@given(numbers_BL, hnp.arrays(np.float32, (B, 1), elements=st.floats(-3, 3, width=32)), masks_BL)
def test_the_on_policy_gradient_of_gspo_is_reinforce(logprobs, advantage_B1, mask_BL):
  # one ratio a sequence: each of its n tokens moves it by 1/n, so n tokens of weight 1/(n B) and
  # one advantage A move by -A/(n B) each, as in REINFORCE with seq-mean
  weight_BL = weights(mask_BL, "seq-mean")
  advantages_BL = np.broadcast_to(advantage_B1, (B, L))
  _, (grad_BL, *_) = graded("gspo")((logprobs, logprobs, advantages_BL), weight_BL, mask_BL)
  np.testing.assert_allclose(grad_BL, -weight_BL * advantages_BL, rtol=1e-4, atol=1e-6)


@every_term
def test_whatever_comes_in_float32_comes_out(name):
  half_BL = jnp.full((B, L), -1.0, jnp.bfloat16)
  assert TERMS[name](half_BL, half_BL, half_BL, f32(np.ones((B, L)))).dtype == jnp.float32


@every_term
def test_huge_gaps_stay_finite(name):
  far_BL, near_BL = np.full((B, L), -200.0), np.zeros((B, L))
  mask_BL = np.ones((B, L), np.float32)
  for a, b in ((far_BL, near_BL), (near_BL, far_BL)):
    value, grads = graded(name)((a, b, -np.ones((B, L))), weights(mask_BL), mask_BL)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((value, grads)))


def test_aggregation_weights_by_hand():
  mask_BL = np.float32([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
  known = dict(sequences=5, tokens=10, max_episode_tokens=16, micro_batches=2)
  weights_BL = {mode: losses.aggregation_weights(mask_BL, mode, **known)
                for mode in losses.AGGREGATIONS}
  share = {mode: weight_BL[:2, 0] for mode, weight_BL in weights_BL.items()}
  np.testing.assert_allclose(share["seq-mean"], [1 / 2 / 5, 1 / 1 / 5])
  np.testing.assert_allclose(share["token-mean"], [1 / 10, 1 / 10])
  np.testing.assert_allclose(share["seq-sum-norm"], [1 / (16 * 5)] * 2)
  np.testing.assert_allclose(share["microbatch-token-mean"], [1 / 3 / 2, 1 / 3 / 2])
  for weight_BL in weights_BL.values():
    np.testing.assert_array_equal(weight_BL[mask_BL == 0], 0.0)  # an empty row weighs 0, not NaN
  with pytest.raises(UserError, match="seq-mean, token-mean"):
    losses.aggregation_weights(mask_BL, "mean", **known)


@pytest.mark.parametrize("mode", losses.AGGREGATIONS)
def test_aggregation_weights_are_one_for_numpy_and_jax(mode):
  mask_BL = np.float32([[1, 1, 0, 0], [1, 0, 0, 0]])
  on_host, on_device = weights(mask_BL, mode), weights(f32(mask_BL), mode, tokens=3)
  assert isinstance(on_host, np.ndarray) and isinstance(on_device, jax.Array)
  assert on_host.dtype == on_device.dtype == np.float32
  np.testing.assert_allclose(on_host, on_device, rtol=1e-6)


def policy_terms(ratio, advantage, **options):
  gap_BL, one_BL = f32([[math.log(ratio)]]), f32([[1]])
  return losses.policy_loss(gap_BL, f32([[advantage]]), one_BL, 0.2, 0.3, **options)


@pytest.mark.parametrize("ratio, advantage, loss, clipped", [
    (1.1, 2.0, -2.2, 0),   # within the clip: -1.1 * 2
    (1.5, 2.0, -2.6, 1),   # above, and good: -1.3 * 2
    (1.5, -2.0, 3.0, 0),   # above, and bad: the pessimistic side is free, 1.5 * 2
    (0.5, 2.0, -1.0, 0),   # below, and good: free, -0.5 * 2
    (0.5, -2.0, 1.6, 1),   # below, and bad: 0.8 * 2
])
def test_policy_loss_by_hand(ratio, advantage, loss, clipped):
  terms = policy_terms(ratio, advantage)
  assert terms.loss_BL.item() == pytest.approx(loss, rel=1e-6)
  assert terms.clipped_BL.item() == clipped
  assert terms.kl_BL.item() == pytest.approx(-math.log(ratio), rel=1e-6)


def test_dual_clip_bounds_the_loss_of_a_bad_token_alone():
  assert policy_terms(9.0, -2.0, dual_clip=3.0).loss_BL.item() == pytest.approx(6.0)  # 3 * 2
  assert policy_terms(9.0, -2.0).loss_BL.item() == pytest.approx(18.0)                # 9 * 2
  assert policy_terms(9.0, 2.0, dual_clip=3.0).loss_BL.item() == pytest.approx(-2.6)  # 1.3 * 2


def test_sequence_log_ratio_is_the_mean_gap_of_each_sequence():
  # gaps 1 and 2 under the mask, mean 1.5
  gap_BL = losses.sequence_log_ratio(
      f32([[1, 9, 2], [9, 9, 9]]), f32(np.zeros((2, 3))), f32([[1, 0, 1], [0, 0, 0]]))
  np.testing.assert_allclose(gap_BL, [[1.5, 0, 1.5], [0, 0, 0]])


@pytest.mark.parametrize("value, loss, clipped", [
    (1.2, 0.5 * 0.8**2, 0),  # moved 0.2 towards 2: both squares are 0.8^2
    (1.9, 0.5 * 0.5**2, 1),  # moved 0.9: clipped to 1.5, whose square is the larger
    (-1.0, 0.5 * 3.0**2, 0),  # moved away: the free square is the larger
])
def test_value_loss_by_hand(value, loss, clipped):
  terms = losses.value_loss(f32([[value]]), f32([[1]]), f32([[2]]), f32([[1]]), 0.5)
  assert terms.loss_BL.item() == pytest.approx(loss, rel=1e-6)
  assert terms.clipped_BL.item() == clipped


def kl_of(gap, kind, compat=False):
  """KL of one token, `gap` = ref - policy, and its derivative by the policy's log-prob."""
  estimate = lambda p: losses.kl_estimate(  # noqa: E731
      p, f32([[gap]]), f32([[1]]), kind, compat)[0, 0]
  value, grad = jax.value_and_grad(estimate)(f32([[0]]))
  return value.item(), grad.item()


def test_kl_estimates_by_hand():
  # d = 2: -2, 2, 2 and e^2 - 3; derivatives by logp are those by -d: 1, -1, -2 and 1 - e^2
  assert kl_of(2.0, "k1") == (-2.0, 1.0)
  assert kl_of(2.0, "abs") == (2.0, -1.0)
  assert kl_of(0.0, "abs") == (0.0, 0.0)
  assert kl_of(2.0, "k2") == (2.0, -2.0)
  assert kl_of(2.0, "k3") == pytest.approx((math.e**2 - 3, 1 - math.e**2), rel=1e-6)
  with pytest.raises(UserError, match="k1, abs, k2, k3"):
    kl_of(2.0, "full")


def test_k3_is_bounded_before_the_exp_and_as_published_also_after():
  assert kl_of(1000.0, "k3") == pytest.approx((math.exp(LIMIT) - LIMIT - 1, 0.0), rel=1e-5)
  assert kl_of(-1000.0, "k3") == pytest.approx((LIMIT - 1, 0.0))  # e^-20 + 20 - 1
  assert kl_of(5.0, "k3", compat=True) == (losses.PUBLISHED_KL_LIMIT, 0.0)
  assert kl_of(1e-3, "k3")[0] == pytest.approx(0.5e-6, rel=1e-3)  # d^2 / 2, not rounding noise


def test_truncated_importance_weight_by_hand():
  # e^0.5 = 1.6487, e^1 is cut to 2, and nothing is said outside the mask
  weight_BL = losses.truncated_importance_weight(
      f32([[-1, -1, -1]]), f32([[-1.5, -2, -2]]), f32([[1, 1, 0]]))
  np.testing.assert_allclose(weight_BL, [[math.exp(0.5), 2.0, 0.0]], rtol=1e-6)


def test_lost_likelihood_by_hand():
  # old - policy: turn one 3 - 1 = 2 fell, so its loser pays 3; turn two 1 - 2 = -1 rose, free
  mask = [[1, 1, 0, 1, 1]]
  policy, old = [[-4.0, -1.0, 0.0, -2.0, -1.0]], [[-1.0, -2.0, 0.0, -1.0, -3.0]]
  good, bad = np.full((1, 5), 0.0), np.full((1, 5), -1.0)
  args = f32(policy), f32(old)
  np.testing.assert_allclose(
      losses.lost_likelihood(*args, f32(good), f32(mask)), [[3, 0, 0, 0, 0]])
  np.testing.assert_array_equal(losses.lost_likelihood(*args, f32(bad), f32(mask)), 0.0)
  # without the observation it is one turn that fell by 2 - 1 = 1: both losers pay
  np.testing.assert_allclose(
      losses.lost_likelihood(*args, f32(good), f32([[1, 1, 1, 1, 1]])), [[3, 0, 0, 1, 0]])


@few
@given(numbers_BL, numbers_BL, masks_BL)
def test_llds_is_0_by_construction_before_the_first_update(logprobs, advantages, mask_BL):
  value, (grad_BL, *_) = graded("llds")((logprobs, logprobs, advantages), weights(mask_BL), mask_BL)
  assert value == 0.0
  np.testing.assert_array_equal(grad_BL, 0.0)


def test_entropy_by_hand():
  # four equal logits: log 4; two of them impossible: log 2; certain: 0
  rows = [[1, 1, 1, 1], [1, 1, -np.inf, -np.inf], [0, -np.inf, -np.inf, -np.inf]]
  np.testing.assert_allclose(
      losses.entropy_BL(f32([rows]), f32([[1, 1, 1]])),
      [[math.log(4), math.log(2), 0]], rtol=1e-6, atol=1e-7)
  broken = losses.entropy_BL(f32(np.full((1, 1, 4), np.nan)), f32([[1]]))
  assert np.isnan(broken).all()  # a model that has diverged is not hidden


@jax.jit
@jax.value_and_grad
def graded_entropy(logits_BLV, mask_BL):
  return jnp.sum(losses.entropy_BL(logits_BLV, mask_BL))


@few
@given(hnp.arrays(np.float32, (B, L, V), elements=st.floats(-3, 3, width=32)), masks_BL, junk)
def test_entropy_ignores_junk_and_impossible_ids(logits_BLV, mask_BL, value):
  clean, clean_grad = graded_entropy(f32(logits_BLV), f32(mask_BL))
  dirty, dirty_grad = graded_entropy(
      f32(np.where(mask_BL[..., None] > 0, logits_BLV, value)), f32(mask_BL))
  assert clean == dirty
  np.testing.assert_array_equal(clean_grad, dirty_grad)
  padded = np.pad(logits_BLV, ((0, 0), (0, 0), (0, 2)), constant_values=-np.inf)
  wider, wider_grad = graded_entropy(f32(padded), f32(mask_BL))
  np.testing.assert_allclose(wider, clean, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(wider_grad[..., :V], clean_grad, rtol=1e-4, atol=1e-6)
  np.testing.assert_array_equal(wider_grad[..., V:], 0.0)
  nothing, no_grad = graded_entropy(f32(logits_BLV), f32(np.zeros((B, L))))
  assert nothing == 0.0 and not no_grad.any()


def test_token_logprobs_by_hand():
  # exp of the logits 1, 3 and 4, so p = 1/8, 3/8 and 4/8
  logits_BLV = f32(np.log([[[1, 3, 4], [1, 3, 4]]]))
  np.testing.assert_allclose(
      losses.token_logprobs(logits_BLV, jnp.asarray([[1, 2]])),
      [[math.log(3 / 8), math.log(1 / 2)]], rtol=1e-6)


def test_masked_mean_travels_undivided():
  mean = losses.masked_mean(f32([[1, np.nan], [3, 5]]), f32([[1, 0], [1, 0]]))
  assert (mean.total, mean.count) == (4.0, 2.0)
  nothing = losses.masked_mean(f32([[np.inf]]), f32([[0]]))
  assert (nothing.total, nothing.count) == (0.0, 0.0)
