"""What an update minimises, token by token.

Every [B, L] array speaks of the target token at its position. A function here returns one term a
token, in float32, 0 outside the mask; whatever lies under the mask (inf, NaN) reaches neither the
value nor the gradient, since it is replaced before it is used. How much a token counts is said
once, by `aggregation_weights`, and a loss is `weighted_sum`: so buckets, micro-batches and devices
simply add up. Only the current policy's (or value's) arrays carry gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from searchr1_jax.types import Mean, UserError

Scalar = int | float | Float[Array, ""]
"""A number that may be traced, so that changing it recompiles nothing."""

GAP_LIMIT = 20.0
PUBLISHED_KL_LIMIT = 10.0
AGGREGATIONS = ("seq-mean", "token-mean", "seq-sum-norm", "microbatch-token-mean")
KL_KINDS = ("k1", "abs", "k2", "k3")


class PolicyTerms(NamedTuple):
  """Of each token: its loss, whether the clip decided it, and old - policy in nats."""

  loss_BL: Float[Array, "B L"]
  clipped_BL: Float[Array, "B L"]
  kl_BL: Float[Array, "B L"]


class ValueTerms(NamedTuple):
  """Of each token: its loss, and whether the clip decided it."""

  loss_BL: Float[Array, "B L"]
  clipped_BL: Float[Array, "B L"]


def aggregation_weights(
    mask_BL: Float[Array | np.ndarray, "B L"],
    mode: str,
    *,
    sequences: int,
    tokens: int,
    max_episode_tokens: int,
    micro_batches: int,
) -> Float[Array | np.ndarray, "B L"]:
  """The share of each token in the loss of the whole optimizer step, for numpy and JAX alike.

  seq-mean               I / (sum_l I) / sequences
  token-mean             I / tokens
  seq-sum-norm           I / (max_episode_tokens * sequences)
  microbatch-token-mean  I / (sum_bl I) / micro_batches, the sum over this batch alone (published)

  Args:
    mask_BL: I, 1 where the target counts; an empty row or batch weighs nothing.
    mode: one of `AGGREGATIONS`.
    sequences: sequences in the GLOBAL mini-batch.
    tokens: mask tokens in the GLOBAL mini-batch.
    max_episode_tokens: the token budget of an episode, a constant.
    micro_batches: batches that this one is added up with.
  Source: Search-R1, arXiv:2503.09516, equation 3 (seq-mean); Yu et al. 2025, arXiv:2503.14476
    (token-mean); Liu et al. 2025, arXiv:2503.20783 (seq-sum-norm).
  """
  if mode == "seq-mean":
    return mask_BL / mask_BL.sum(axis=1, keepdims=True).clip(1) / max(sequences, 1)
  if mode == "token-mean":
    return mask_BL / max(tokens, 1)
  if mode == "seq-sum-norm":
    return mask_BL / (max_episode_tokens * max(sequences, 1))
  if mode == "microbatch-token-mean":
    return mask_BL / mask_BL.sum(keepdims=True).clip(1) / micro_batches
  raise _unknown("aggregation", mode, AGGREGATIONS)


def weighted_sum(
    term_BL: Float[Array, "B L"],
    weight_BL: Float[Array, "B L"],
    mask_BL: Float[Array, "B L"],
) -> Float[Array, ""]:
  """A loss: the terms under the mask, each times its weight, added up."""
  return jnp.sum(jnp.where(mask_BL > 0, _float32(weight_BL) * _float32(term_BL), 0.0))


def masked_mean(x_BL: Float[Array, "B L"], mask_BL: Float[Array, "B L"]) -> Mean:
  """A mean over the mask on its way to a writer: undivided, and 0 of 0 where the mask is empty."""
  mine_BL = mask_BL > 0
  return Mean(
      jnp.sum(jnp.where(mine_BL, _float32(x_BL), 0.0)),
      jnp.sum(mine_BL).astype(jnp.float32))


def token_logprobs(
    logits_BLV: Float[Array, "B L V"], targets_BL: Int[Array, "B L"]) -> Float[Array, "B L"]:
  """The log-probability of each target, in nats.

  log p(y) = z_y - log sum_v exp z_v

  Args:
    logits_BLV: logits, already divided by the temperature; -inf where an id can't be sampled.
    targets_BL: the id at each position.
  Source: the definition of the softmax.
  """
  logits_BLV = _float32(logits_BLV)
  target_BL1 = jnp.take_along_axis(logits_BLV, targets_BL[..., None], axis=-1)
  return target_BL1[..., 0] - jax.nn.logsumexp(logits_BLV, axis=-1)


def entropy_BL(
    logits_BLV: Float[Array, "B L V"], mask_BL: Float[Array, "B L"]) -> Float[Array, "B L"]:
  """The entropy of each position's distribution, in nats.

  H = -sum_v p_v log p_v,  where p_v = 0 adds nothing

  Args:
    logits_BLV: logits, already divided by the temperature; -inf where an id can't be sampled.
    mask_BL: 1 where the policy wrote the target.
  Source: Shannon's definition.
  """
  mine_BL1 = mask_BL[..., None] > 0
  logp_BLV = jax.nn.log_softmax(jnp.where(mine_BL1, _float32(logits_BLV), 0.0), axis=-1)
  logp_BLV = jnp.where(logp_BLV == -jnp.inf, 0.0, logp_BLV)  # so that 0 log 0 is 0, not NaN
  return -jnp.sum(jnp.where(mine_BL1, jnp.exp(logp_BLV) * logp_BLV, 0.0), axis=-1)


def log_ratio(
    policy_logprobs_BL: Float[Array, "B L"],
    old_logprobs_BL: Float[Array, "B L"],
    mask_BL: Float[Array, "B L"],
) -> Float[Array, "B L"]:
  """How much likelier each token has become, in nats; `policy_loss` bounds it before it exps it.

  log rho = policy - old

  Args:
    policy_logprobs_BL: log-probabilities under the policy being trained; the gradient's way in.
    old_logprobs_BL: under the policy before this batch's updates.
    mask_BL: 1 where the policy wrote the target.
  Source: Schulman et al. 2017, arXiv:1707.06347, section 3.
  """
  policy_BL = _under(mask_BL, policy_logprobs_BL)
  return policy_BL - jax.lax.stop_gradient(_under(mask_BL, old_logprobs_BL))


def sequence_log_ratio(
    policy_logprobs_BL: Float[Array, "B L"],
    old_logprobs_BL: Float[Array, "B L"],
    mask_BL: Float[Array, "B L"],
) -> Float[Array, "B L"]:
  """GSPO's ratio: one for a whole sequence, written at each of its tokens, in nats a token.

  log s = (sum_l I (policy - old)) / (sum_l I)

  Args:
    policy_logprobs_BL, old_logprobs_BL, mask_BL: as for `log_ratio`, which this replaces.
  Source: Zheng et al. 2025, arXiv:2507.18071, equation 7.
  """
  gap_BL = log_ratio(policy_logprobs_BL, old_logprobs_BL, mask_BL)
  mine_BL = mask_BL > 0
  count_B1 = jnp.maximum(jnp.sum(mine_BL, axis=1, keepdims=True), 1)
  mean_B1 = jnp.sum(gap_BL, axis=1, keepdims=True) / count_B1.astype(jnp.float32)
  return jnp.where(mine_BL, mean_B1, 0.0)


def policy_loss(
    log_ratio_BL: Float[Array, "B L"],
    advantages_BL: Float[Array, "B L"],
    mask_BL: Float[Array, "B L"],
    clip_low: Scalar,
    clip_high: Scalar,
    dual_clip: Scalar | None = None,
) -> PolicyTerms:
  """PPO's clipped objective, as a loss a token.

  loss = max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A),  rho = exp(clip(log rho, +-20));
  with dual clip, where A < 0:  loss = min(loss, -dual_clip A)

  Args:
    log_ratio_BL: log rho of `log_ratio` or `sequence_log_ratio`, nats.
    advantages_BL: how much better than expected; no gradient flows into it.
    mask_BL: 1 where the policy wrote the target.
    clip_low: how far below 1 a ratio may still gain.
    clip_high: how far above 1 a ratio may still gain (DAPO sets it apart from clip_low).
    dual_clip: bound on the ratio of a bad token, above 1; None leaves it unbounded.
  Source: Schulman et al. 2017, arXiv:1707.06347, equation 7; Ye et al. 2020, arXiv:1912.09729.
  """
  gap_BL = _under(mask_BL, log_ratio_BL)
  advantages_BL = jax.lax.stop_gradient(_under(mask_BL, advantages_BL))
  ratio_BL = _bounded_exp(gap_BL)
  free_BL = -ratio_BL * advantages_BL
  clipped_BL = -jnp.clip(ratio_BL, 1.0 - clip_low, 1.0 + clip_high) * advantages_BL
  loss_BL = jnp.maximum(free_BL, clipped_BL)
  if dual_clip is not None:
    bounded_BL = jnp.minimum(loss_BL, -dual_clip * advantages_BL)
    loss_BL = jnp.where(advantages_BL < 0, bounded_BL, loss_BL)
  decided_BL = (clipped_BL > free_BL).astype(jnp.float32)
  return PolicyTerms(loss_BL, decided_BL, jax.lax.stop_gradient(-gap_BL))


def value_loss(
    values_BL: Float[Array, "B L"],
    old_values_BL: Float[Array, "B L"],
    returns_BL: Float[Array, "B L"],
    mask_BL: Float[Array, "B L"],
    clip: Scalar | None,
) -> ValueTerms:
  """Squared error of the value, pessimistic about moves further than the clip.

  loss = 0.5 max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2)

  Args:
    values_BL: v, what the value being trained expects before each token.
    old_values_BL: v_old, from the scoring pass.
    returns_BL: R, from `gae`.
    mask_BL: 1 where the value is trained.
    clip: how far from v_old a move may still gain, in reward; None leaves it out.
  Source: Schulman et al. 2017, arXiv:1707.06347, as in the reference PPO implementations.
  """
  values_BL = _under(mask_BL, values_BL)
  old_BL = jax.lax.stop_gradient(_under(mask_BL, old_values_BL))
  returns_BL = jax.lax.stop_gradient(_under(mask_BL, returns_BL))
  free_BL = jnp.square(values_BL - returns_BL)
  if clip is None:
    return ValueTerms(0.5 * free_BL, jnp.zeros_like(free_BL))
  clipped_BL = jnp.square(jnp.clip(values_BL, old_BL - clip, old_BL + clip) - returns_BL)
  decided_BL = (clipped_BL > free_BL).astype(jnp.float32)
  return ValueTerms(0.5 * jnp.maximum(free_BL, clipped_BL), decided_BL)


def kl_estimate(
    policy_logprobs_BL: Float[Array, "B L"],
    ref_logprobs_BL: Float[Array, "B L"],
    mask_BL: Float[Array, "B L"],
    kind: str,
    compat: bool = False,
) -> Float[Array, "B L"]:
  """Estimates the KL from the policy to the reference from the sampled token alone, in nats.

  d = ref - policy;  k1 = -d,  abs = |d|,  k2 = d^2 / 2,  k3 = exp(d) - d - 1 with d in +-20

  Args:
    policy_logprobs_BL: under the policy; the gradient's way in.
    ref_logprobs_BL: under the frozen reference.
    mask_BL: 1 where the policy wrote the target.
    kind: one of `KL_KINDS`.
    compat: also bounds k3 to +-10 after the exp, as published.
  Source: Schulman 2020, "Approximating KL divergence".
  """
  gap_BL = -log_ratio(policy_logprobs_BL, ref_logprobs_BL, mask_BL)
  if kind == "k1":
    return -gap_BL
  if kind == "abs":
    return gap_BL * jax.lax.stop_gradient(jnp.sign(gap_BL))  # at 0, jnp.abs would pull one way
  if kind == "k2":
    return 0.5 * jnp.square(gap_BL)
  if kind == "k3":
    gap_BL = jnp.clip(gap_BL, -GAP_LIMIT, GAP_LIMIT)
    k3_BL = jnp.expm1(gap_BL) - gap_BL  # expm1: near 0 the difference would be all rounding
    return jnp.clip(k3_BL, -PUBLISHED_KL_LIMIT, PUBLISHED_KL_LIMIT) if compat else k3_BL
  raise _unknown("KL estimator", kind, KL_KINDS)


def truncated_importance_weight(
    old_logprobs_BL: Float[Array, "B L"],
    sampler_logprobs_BL: Float[Array, "B L"],
    mask_BL: Float[Array, "B L"],
    cap: Scalar = 2.0,
) -> Float[Array, "B L"]:
  """Corrects for a sampler that is not quite the policy which the trainer scores.

  w = min(exp(old - sampler), cap),  without gradient

  Args:
    old_logprobs_BL: of the trainer's own program, before this batch's updates.
    sampler_logprobs_BL: what the tokens were drawn with.
    mask_BL: 1 where the policy wrote the target.
    cap: the largest weight.
  Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy training".
  """
  weight_BL = jnp.minimum(
      _bounded_exp(log_ratio(old_logprobs_BL, sampler_logprobs_BL, mask_BL)), cap)
  return jax.lax.stop_gradient(_under(mask_BL, weight_BL))


def lost_likelihood(
    policy_logprobs_BL: Float[Array, "B L"],
    old_logprobs_BL: Float[Array, "B L"],
    advantages_BL: Float[Array, "B L"],
    mask_BL: Float[Array, "B L"],
) -> Float[Array, "B L"]:
  """LLDS: what a good response's tokens have lost, in the turns that became less likely, in nats.

  loss = [A >= 0] [sum over the turn of (old - policy) > 0] max(0, old - policy);
  a turn is an unbroken run of the mask. Scaled by the caller (0.2) and aggregated like the loss.

  Args:
    policy_logprobs_BL, old_logprobs_BL, mask_BL: as for `log_ratio`.
    advantages_BL: only their sign is read.
  Source: Deng et al. 2025, arXiv:2512.04220, with its gate on actions.
  """
  lost_BL = -log_ratio(policy_logprobs_BL, old_logprobs_BL, mask_BL)
  fell_BL = jax.lax.stop_gradient(_turn_sums(lost_BL, mask_BL)) > 0
  chosen_BL = fell_BL & (_under(mask_BL, advantages_BL) >= 0) & (mask_BL > 0)
  return jnp.where(chosen_BL, jnp.maximum(lost_BL, 0.0), 0.0)


def _turn_sums(x_BL: Array, mask_BL: Array) -> Array:
  """At each token, the sum of `x` over the unbroken run of the mask that it belongs to."""
  mine_BL = mask_BL > 0
  before_BL = jnp.pad(mine_BL[:, :-1], ((0, 0), (1, 0)))
  turn_BL = jnp.cumsum(mine_BL & ~before_BL, axis=1)  # 0 before the first turn, then 1, 2, ...
  sum_turns = jax.vmap(lambda x_L, turn_L: jax.ops.segment_sum(x_L, turn_L, x_L.size + 1)[turn_L])
  return sum_turns(jnp.where(mine_BL, x_BL, 0.0), turn_BL)


def _bounded_exp(gap_BL: Array) -> Array:
  return jnp.exp(jnp.clip(gap_BL, -GAP_LIMIT, GAP_LIMIT))


def _under(mask_BL: Array, x_BL: Array) -> Array:
  """`x` in float32, with 0 in place of whatever lies outside the mask."""
  return jnp.where(mask_BL > 0, _float32(x_BL), 0.0)


def _float32(x: Array) -> Array:
  return jnp.asarray(x, jnp.float32)


def _unknown(what: str, came: str, choices: tuple[str, ...]) -> UserError:
  return UserError(f"unknown {what} {came!r}; choose one of {', '.join(choices)}")
