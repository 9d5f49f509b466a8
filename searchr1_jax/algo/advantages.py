"""From rewards to advantages: who did better than expected, and by how much.

Every [B, L] array speaks of the target token at its position, and is 0 outside its mask on return.
REINFORCE++ needs nothing of its own: it is `whiten` over `gae` with values of 0 and lambda of 1.
"""

from __future__ import annotations

from typing import Callable, Hashable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from searchr1_jax.types import UserError

Scalar = int | float | Float[Array, ""]
"""A number that may be traced, so that changing it recompiles nothing."""

WHITEN_EPSILON = 1e-8
GROUP_EPSILON = 1e-6


def token_rewards(
    reward_B: Float[Array, "B"],
    mask_BL: Float[Array, "B L"],
    kl_BL: Float[Array, "B L"],
    kl_coef: Scalar,
) -> Float[Array, "B L"]:
  """Puts a trajectory's reward on its last policy token, and charges each token its KL.

  r_t = [t is the last of the mask] reward - kl_coef * kl_t

  Args:
    reward_B: the reward of each trajectory.
    mask_BL: 1 where the policy wrote the target; a row without a 1 earns nothing.
    kl_BL: estimate of the KL to the reference at each token, in nats.
    kl_coef: reward charged for one nat.
  Source: Ouyang et al. 2022, arXiv:2203.02155, section 3.5; Search-R1, arXiv:2503.09516.
  """
  mine_BL = mask_BL > 0
  from_here_BL = jnp.cumsum(mine_BL[:, ::-1], axis=1)[:, ::-1]
  last_BL = mine_BL & (from_here_BL == 1)
  paid_BL = jnp.where(last_BL, _float32(reward_B)[:, None], 0.0)
  return paid_BL - jnp.where(mine_BL, _float32(kl_BL), 0.0) * kl_coef


def gae(
    rewards_BL: Float[Array, "B L"],
    values_BL: Float[Array, "B L"],
    mask_BL: Float[Array, "B L"],
    gamma: Scalar,
    lam: Scalar,
) -> tuple[Float[Array, "B L"], Float[Array, "B L"]]:
  """Generalised advantage estimates, and the returns that the value learns.

  A_t = r_t + gamma V_t' - V_t + gamma lam A_t',  with t' the next token OF THE MASK (0 past the
  last); return_t = A_t + V_t. Tokens outside the mask are skipped, not counted as zeros: an
  observation between two turns costs no discount. A mask of ones over the response positions is
  the published arithmetic.

  Args:
    rewards_BL: reward at each token.
    values_BL: what the scoring pass expected before each token.
    mask_BL: 1 where the recursion runs.
    gamma: discount a token.
    lam: weight of the longer estimates, 0 to 1.
  Source: Schulman et al. 2016, arXiv:1506.02438, equations 11 and 16.
  """
  mine_BL = mask_BL > 0
  rewards_BL = jnp.where(mine_BL, _float32(rewards_BL), 0.0)
  values_BL = jnp.where(mine_BL, _float32(values_BL), 0.0)

  def back(carry, token):
    next_value_B, next_advantage_B = carry
    reward_B, value_B, mine_B = token
    surprise_B = reward_B + gamma * next_value_B - value_B
    advantage_B = surprise_B + gamma * lam * next_advantage_B
    carry = (
        jnp.where(mine_B, value_B, next_value_B),
        jnp.where(mine_B, advantage_B, next_advantage_B))
    return carry, jnp.where(mine_B, advantage_B, 0.0)

  nothing_B = jnp.zeros(mask_BL.shape[0], jnp.float32)
  _, advantages_LB = jax.lax.scan(
      back, (nothing_B, nothing_B), (rewards_BL.T, values_BL.T, mine_BL.T), reverse=True)
  advantages_BL = advantages_LB.T
  return advantages_BL, advantages_BL + values_BL


def moments(
    xs: Sequence[Array], masks: Sequence[Array],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Mean and sample variance over the masks of all buckets together.

  mean = sum x / n;  variance = sum (x - mean)^2 / (n - 1), both 0 where n leaves them undefined

  Args:
    xs: buckets [B, L], each of its own shape.
    masks: 1 where a bucket's entry counts.
  Source: Bessel's correction, as in the published `masked_var`.
  """
  n = sum((jnp.sum(m > 0).astype(jnp.float32) for m in masks), jnp.zeros((), jnp.float32))
  total = sum((_masked_sum(x, m) for x, m in zip(xs, masks, strict=True)), jnp.zeros_like(n))
  mean = total / jnp.maximum(n, 1.0)
  squares = sum(
      (_masked_sum(jnp.square(_float32(x) - mean), m) for x, m in zip(xs, masks)),
      jnp.zeros_like(n))
  return mean, squares / jnp.maximum(n - 1.0, 1.0)


def whiten(xs: Sequence[Array], masks: Sequence[Array]) -> list[Array]:
  """Shifts and scales all buckets together to mean 0 and variance 1 over their masks.

  y = (x - mean) / sqrt(variance + 1e-8),  with the moments of the whole global batch

  Args:
    xs: buckets [B, L], each of its own shape, so that bucketing never changes the result.
    masks: 1 where a bucket's entry counts; no entry at all gives zeros, one entry gives 0.
  Source: the published `masked_whiten`; Andrychowicz et al. 2021, arXiv:2006.05990, choice C67.
  """
  mean, variance = moments(xs, masks)
  scale = jax.lax.rsqrt(variance + WHITEN_EPSILON)
  return [jnp.where(m > 0, (_float32(x) - mean) * scale, 0.0) for x, m in zip(xs, masks)]


def grpo_advantages(
    rewards_B: Float[np.ndarray, "B"],
    group_ids_B: Iterable[Hashable],
    survived_B: Bool[np.ndarray, "B"],
    use_std: bool = True,
    group_size: int | None = None,
) -> tuple[Float[np.ndarray, "B"], Bool[np.ndarray, "B"]]:
  """Compares each episode with the other episodes of its question; also says which to keep.

  A_i = (r_i - mean r) / (std r + 1e-6),  ddof 1, over the survivors of the group. A group whose
  rewards are all equal gets exactly 0. A group of one episode gets r / (1 + 1e-6), as published.
  Where a group of more has fewer than two survivors, nothing can be compared and it is dropped.

  Args:
    rewards_B: the reward of each episode.
    group_ids_B: what an episode's group is called: (dataset, row id), the same for G episodes.
    survived_B: False where retrieval failed and the reward means nothing.
    use_std: False leaves the division out (Dr.GRPO).
    group_size: the G that every group must have, where the caller knows it.
  Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2; Liu et al. 2025, arXiv:2503.20783.
  """
  def compare(rewards_M: np.ndarray) -> np.ndarray:
    scale = rewards_M.std(ddof=1) + GROUP_EPSILON if use_std else 1.0
    return (rewards_M - rewards_M.mean()) / scale

  def alone(rewards_M: np.ndarray) -> np.ndarray:
    return rewards_M / (1.0 + GROUP_EPSILON) if use_std else rewards_M

  return _by_group(rewards_B, group_ids_B, survived_B, compare, alone, group_size)


def rloo_advantages(
    rewards_B: Float[np.ndarray, "B"],
    group_ids_B: Iterable[Hashable],
    survived_B: Bool[np.ndarray, "B"],
    group_size: int | None = None,
) -> tuple[Float[np.ndarray, "B"], Bool[np.ndarray, "B"]]:
  """Compares each episode with the mean of the others of its group; also says which to keep.

  A_i = r_i - sum_{j != i} r_j / (n - 1),  over the n survivors; exactly 0 where all are equal

  Args:
    rewards_B, group_ids_B, survived_B, group_size: as for `grpo_advantages`; a group of one has
      no others and is refused.
  Source: Ahmadian et al. 2024, arXiv:2402.14740, section 3.3.
  """
  def compare(rewards_M: np.ndarray) -> np.ndarray:
    return rewards_M - (rewards_M.sum() - rewards_M) / (len(rewards_M) - 1)

  def alone(rewards_M: np.ndarray) -> np.ndarray:
    raise UserError(
        "RLOO got a group of 1 episode, and compares an episode with the others of its group: "
        "sample at least 2 episodes a question, or train with REINFORCE++ or PPO")

  return _by_group(rewards_B, group_ids_B, survived_B, compare, alone, group_size)


def fixed_kl(
    coef: float, current_kl: float, target: float, horizon: int, n_steps: int) -> float:
  """Leaves the coefficient of the KL penalty as it is."""
  return coef


def adaptive_kl(
    coef: float, current_kl: float, target: float, horizon: int, n_steps: int) -> float:
  """Steers the coefficient of the KL penalty so that the measured KL approaches its target.

  coef' = coef (1 + clip(kl / target - 1, -0.2, 0.2) n_steps / horizon)

  Args:
    coef: the coefficient in use, reward a nat.
    current_kl: KL to the reference measured on this batch, in nats.
    target: the KL to keep, in nats, above 0.
    horizon: episodes over which an error of the full 0.2 changes the coefficient by a fifth.
    n_steps: episodes in this batch.
  Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
  """
  error = min(max(current_kl / target - 1.0, -0.2), 0.2)
  return coef * (1.0 + error * n_steps / horizon)


def _by_group(
    rewards_B: np.ndarray,
    group_ids_B: Iterable[Hashable],
    survived_B: np.ndarray,
    compare: Callable[[np.ndarray], np.ndarray],
    alone: Callable[[np.ndarray], np.ndarray],
    group_size: int | None,
) -> tuple[np.ndarray, np.ndarray]:
  """Applies `compare` to the survivors of each group, `alone` to a group made of one episode."""
  rows: dict[Hashable, list[int]] = {}
  for row, group in zip(range(len(rewards_B)), group_ids_B, strict=True):
    rows.setdefault(group, []).append(row)
  advantages_B = np.zeros(len(rewards_B), np.float32)
  keep_B = np.zeros(len(rewards_B), np.bool_)
  for group, members in rows.items():
    if group_size is not None and len(members) != group_size:
      raise UserError(
          f"group {group!r} has {len(members)} episodes, wanted {group_size}: key groups by "
          "(dataset, row id), and hand over every episode, the failed ones included")
    alive = [row for row in members if survived_B[row]]
    if len(alive) < min(2, len(members)):
      continue
    rewards_M = np.asarray(rewards_B[alive], np.float64)
    keep_B[alive] = True
    if len(members) == 1:
      advantages_B[alive] = alone(rewards_M)
    elif np.any(rewards_M != rewards_M[0]):  # a flat group stays 0: its mean need not be exact
      advantages_B[alive] = compare(rewards_M)
  return advantages_B, keep_B


def _masked_sum(x_BL: Array, mask_BL: Array) -> Array:
  return jnp.sum(jnp.where(mask_BL > 0, _float32(x_BL), 0.0))


def _float32(x: Array) -> Array:
  return jnp.asarray(x, jnp.float32)
