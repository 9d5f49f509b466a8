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

  A length's rows are `tokens` // length, in multiples of `row_multiple` (devices that share rows).
  """

  lengths: tuple[int, ...]
  tokens: int
  row_multiple: int = 1

  def __post_init__(self):
    if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
      raise UserError(f"update lengths {self.lengths} must be rising, at least one")

  def rows(self, length: int) -> int:
    multiple = self.row_multiple
    return max(self.tokens // length // multiple, 1) * multiple

  def all(self) -> list[tuple[int, int]]:
    return [(self.rows(length), length) for length in self.lengths]


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
    batches = tuple(_pad([members[i] for i in g], length, shapes.rows(length), weighting, totals)
                    for g, length in groups)
    values = sum(int(b.value_mask_BL.sum()) for b in batches)
    batches = tuple(dataclasses.replace(b, value_weight_BL=_value_weight(
        b.value_mask_BL, weighting, values, totals)) for b in batches)
    minibatches.append(batches)
    used += sum(r.length for r in members)
    padded += sum(b.inputs_BL.size for b in batches)
  return UpdatePlan(tuple(minibatches), 1.0 - used / padded if padded else 0.0)


def bucket(lengths: Sequence[int], shapes: BatchShapes) -> list[tuple[list[int], int]]:
  """Groups of rows with the length they are padded to: the longest first, neighbours in length.

  A group takes as many rows as its length allows, so only the last one has empty rows.
  """
  longest = max(lengths)
  if longest > shapes.lengths[-1]:
    raise UserError(f"a trajectory of {longest} tokens fits no update length {shapes.lengths}; "
                    "add a longer one or lower max_episode_tokens")
  order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
  groups = []
  while order:
    length = min(n for n in shapes.lengths if n >= lengths[order[0]])
    take = shapes.rows(length)
    groups.append((order[:take], length))
    order = order[take:]
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
