"""Trajectories to padded batches: the only shift, the only padding, the one policy mask.

Position l of a row reads token l and predicts token l + 1; every mask and weight speaks of the
predicted token. Rows go into a closed list of lengths, each with its number of rows; what a token
weighs is counted over the whole mini-batch before, so bucketing never changes the gradient.
"""

from __future__ import annotations

import dataclasses
from typing import Sequence

import numpy as np

from searchr1_jax.algo import losses
from searchr1_jax.types import TokenBatch, Trajectory, UpdatePlan, UserError


@dataclasses.dataclass(frozen=True)
class BatchShapes:
  """The closed list of [rows, length] that an update may see, shortest first.

  A batch has `tokens` // length rows, or a quarter of that for the rows that are left over, in
  multiples of `row_multiple` (devices that share rows). Of a row, half or all positions are kept:
  those that are scored.
  """

  lengths: tuple[int, ...]
  tokens: int
  row_multiple: int = 1

  def __post_init__(self):
    if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
      raise UserError(f"update lengths {self.lengths} must be rising, at least one")

  def rows(self, length: int) -> tuple[int, ...]:
    """The numbers of rows that a batch of this length may have, most first."""
    multiple = self.row_multiple
    whole = max(self.tokens // length // multiple, 1)
    return tuple(n * multiple for n in sorted({whole, max(whole // 4, 1)}, reverse=True))

  def all(self) -> list[tuple[int, int, int]]:
    """Every (rows, length, kept)."""
    return [(rows, length, kept) for length in self.lengths for rows in self.rows(length)
            for kept in sorted(set(kept_sizes(length)))]


def kept_sizes(length: int) -> tuple[int, int]:
  """How many positions of a row of `length` may be kept: prompts and passages fill most of it."""
  return -(-length // 2), length


def kept_positions(read_BL: np.ndarray) -> np.ndarray:
  """The positions [B, P] that a mask reads, rising, filled up with L; P is one of `kept_sizes`."""
  length = read_BL.shape[1]
  counts_B = np.count_nonzero(read_BL, axis=1)
  kept = min(n for n in kept_sizes(length) if n >= counts_B.max())
  order_BL = np.argsort(read_BL == 0, axis=1, kind="stable")[:, :kept]
  return np.where(np.arange(kept) < counts_B[:, None], order_BL, length).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Weighting:
  """How tokens are weighed: `aggregation` of SPEC's losses over `max_episode_tokens`.

  `mask_observations` False counts every response token as the policy's (the paper's ablation).
  `compat`: values are trained over the response and the position behind it, as published.
  """

  aggregation: str
  max_episode_tokens: int
  mask_observations: bool = True
  compat: bool = False


def split_minibatches(count: int, updates: int) -> list[range]:
  """`updates` runs of neighbouring rows, sizes differing by one at most; none is empty."""
  if updates > count:
    raise UserError(f"{count} episodes cannot make {updates} updates; lower updates_per_batch")
  edges = np.linspace(0, count, updates + 1).round().astype(int)
  return [range(a, b) for a, b in zip(edges[:-1], edges[1:])]


def collate(trajectories: Sequence[Trajectory], rewards_B: np.ndarray, advantages_B: np.ndarray, *,
            shapes: BatchShapes, weighting: Weighting, updates: int = 1,
            taught_B: np.ndarray | None = None) -> UpdatePlan:
  """The updates of one rollout: mini-batches in order, each as batches of the closed shapes.

  Rows that `taught_B` excludes (flat groups), and rows in which nothing was written since the
  prompt filled the episode, are counted in every denominator and left out of the batches; a
  mini-batch of nothing else is left out altogether.
  """
  if not trajectories:
    raise UserError("no trajectory to learn from")
  taught_B = np.ones(len(trajectories), bool) if taught_B is None else taught_B
  minibatches, used, padded = [], 0, 0
  for rows in split_minibatches(len(trajectories), updates):
    everyone = [_Row(trajectories[i], float(rewards_B[i]), float(advantages_B[i]), weighting)
                for i in rows]
    members = [r for i, r in zip(rows, everyone) if taught_B[i] and trajectories[i].segments]
    if not members:
      continue
    groups = bucket([r.length for r in members], shapes)
    tokens = sum(int(r.policy.sum()) for r in everyone)
    totals = dict(sequences=len(everyone), tokens=tokens, micro_batches=len(groups),
                  max_episode_tokens=weighting.max_episode_tokens)
    batches = tuple(_pad([members[i] for i in g], length, count, weighting, totals)
                    for g, count, length in groups)
    values = sum(int(b.value_mask_BL.sum()) for b in batches)
    batches = tuple(dataclasses.replace(b, value_weight_BL=_value_weight(
        b.value_mask_BL, weighting, values, totals)) for b in batches)
    minibatches.append(batches)
    used += sum(r.length for r in members)
    padded += sum(b.inputs_BL.size for b in batches)
  return UpdatePlan(tuple(minibatches), 1.0 - used / padded if padded else 0.0)


def bucket(lengths: Sequence[int], shapes: BatchShapes) -> list[tuple[list[int], int, int]]:
  """Groups (rows, size, length they are padded to): the longest first, neighbours in length.

  Of all ways to cut the sorted rows into batches of the closed list, one with the least padding. A
  longer length than needed may have fewer rows, and so the least.
  """
  longest = max(lengths)
  if longest > shapes.lengths[-1]:
    raise UserError(f"a trajectory of {longest} tokens fits no update length {shapes.lengths}; "
                    "add a longer one or lower max_episode_tokens")
  order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
  # best[i]: the fewest positions that hold the rows from order[i] on, and the first batch of them.
  best = [(0, 0, 0)] * (len(order) + 1)
  for i in reversed(range(len(order))):
    best[i] = min(((size * length + best[min(i + size, len(order))][0], size, length)
                   for length in shapes.lengths if length >= lengths[order[i]]
                   for size in shapes.rows(length)), key=lambda found: found[0])
  groups, i = [], 0
  while i < len(order):
    _, size, length = best[i]
    groups.append((order[i : i + size], size, length))
    i += size
  return groups


class _Row:
  """One trajectory, shifted: arrays as long as its ids, the last target being padding."""

  def __init__(self, t: Trajectory, reward: float, advantage: float, weighting: Weighting):
    self.ids = np.asarray(t.ids, np.int32)
    self.length = len(self.ids)
    self.reward, self.advantage = reward, advantage
    shift = lambda x, dtype: np.append(np.asarray(x, dtype)[1:], dtype(0))
    self.response = np.zeros(self.length, np.float32)
    self.response[len(t.prompt_ids) - 1 : self.length - 1] = 1
    self.policy = (shift(t.policy_mask, np.float32) if weighting.mask_observations
                   else self.response)
    self.sampler_logprobs = shift(t.sampler_logprobs, np.float32)
    self.value = self.policy
    if weighting.compat:
      self.value = self.response.copy()
      self.value[-1] = 1  # the published mask reaches the first position behind the response


def _pad(rows: Sequence[_Row], length: int, count: int, weighting: Weighting,
         totals: dict) -> TokenBatch:
  """A batch of `count` rows of `length`; the rows that are missing are empty."""
  def laid(pick, dtype=np.float32):
    out = np.zeros((count, length), dtype)
    for i, row in enumerate(rows):
      value = pick(row)
      out[i, : len(value)] = value
    return out

  def column(pick, dtype=np.float32):
    return np.array([pick(r) for r in rows] + [0] * (count - len(rows)), dtype)

  policy_BL = laid(lambda r: r.policy)
  weight_BL = losses.aggregation_weights(policy_BL, weighting.aggregation, **totals)
  value_BL = laid(lambda r: r.value)
  return TokenBatch(
      inputs_BL=laid(lambda r: r.ids, np.int32),
      targets_BL=laid(lambda r: r.ids[1:], np.int32),
      lengths_B=column(lambda r: r.length, np.int32),
      kept_BP=kept_positions((policy_BL > 0) | (value_BL > 0)),
      policy_mask_BL=policy_BL,
      response_mask_BL=laid(lambda r: r.response),
      value_mask_BL=value_BL,
      loss_weight_BL=weight_BL.astype(np.float32),
      value_weight_BL=np.zeros_like(value_BL),
      sampler_logprobs_BL=laid(lambda r: r.sampler_logprobs),
      reward_B=column(lambda r: r.reward),
      advantage_B=column(lambda r: r.advantage))


def _value_weight(mask_BL: np.ndarray, weighting: Weighting, tokens: int,
                  totals: dict) -> np.ndarray:
  """Values are always a token mean: of the mini-batch, or of each batch as published."""
  mode = ("microbatch-token-mean" if weighting.aggregation == "microbatch-token-mean"
          else "token-mean")
  weight_BL = losses.aggregation_weights(mask_BL, mode, **(totals | {"tokens": tokens}))
  return weight_BL.astype(np.float32)
