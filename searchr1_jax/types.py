"""Everything that flows between the rooms, with its axes.

Axes: B sequences, Q questions, G samples a question, L tokens, V vocabulary, D model width,
H heads, K key-value heads, N layers, S cache slots. An array's name ends in its axes.
"""

from __future__ import annotations

import dataclasses
import enum
import typing
from typing import Any, Mapping

import jax
from jaxtyping import Array, Float, Int

from retriever.protocol import Passage, UserError as UserError  # it is this package's, too


@dataclasses.dataclass(frozen=True)
class Question:
  """One row of a dataset. `prompt`: the row's own rendered chat messages, where it has them."""

  dataset: str
  id: str
  question: str
  golden_answers: tuple[str, ...]
  prompt: tuple[Mapping[str, str], ...] | None = None
  meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def key(self) -> tuple[str, str]:
    """Groups are keyed by this pair: a row id alone restarts in every merged dataset."""
    return (self.dataset, self.id)


class Role(enum.Enum):
  """Who wrote a segment."""

  POLICY = "policy"
  ENVIRONMENT = "environment"


@dataclasses.dataclass(frozen=True)
class Segment:
  """An unbroken run of tokens by one writer; `sampler_logprobs` has one entry a policy token."""

  role: Role
  ids: tuple[int, ...]
  sampler_logprobs: tuple[float, ...] = ()

  def __post_init__(self):
    wanted = len(self.ids) if self.role is Role.POLICY else 0
    if len(self.sampler_logprobs) != wanted:
      raise ValueError(
          f"a {self.role.value} segment of {len(self.ids)} tokens came with "
          f"{len(self.sampler_logprobs)} log-probs, wanted {wanted}")


@dataclasses.dataclass(frozen=True)
class SearchRecord:
  """A search that ran: the turn it ended, its query, and the passages shown."""

  turn: int
  query: str
  passages: tuple[Passage, ...]


class StopReason(enum.Enum):
  """Why an episode ended."""

  ANSWER = "answer"
  BUDGET = "budget"
  LENGTH = "length"
  RETRIEVAL_ERROR = "retrieval_error"


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """The tokens of one episode, exactly as sampled and inserted, with their bookkeeping."""

  question: Question
  sample: int
  prompt_ids: tuple[int, ...]
  segments: tuple[Segment, ...]
  stop_reason: StopReason
  searches: tuple[SearchRecord, ...] = ()
  turns: int = 0
  invalid_actions: int = 0
  unexecuted_searches: int = 0
  truncated_observations: int = 0
  forged_information: int = 0

  @property
  def response_ids(self) -> tuple[int, ...]:
    return tuple(i for s in self.segments for i in s.ids)

  @property
  def ids(self) -> tuple[int, ...]:
    return self.prompt_ids + self.response_ids

  @property
  def policy_mask(self) -> tuple[int, ...]:
    """1 where the policy sampled the token of `ids`; built from who wrote it, never from text."""
    response = (int(s.role is Role.POLICY) for s in self.segments for _ in s.ids)
    return (0,) * len(self.prompt_ids) + tuple(response)

  @property
  def sampler_logprobs(self) -> tuple[float, ...]:
    """One entry for each of `ids`; 0 where the policy did not write."""
    out: list[float] = [0.0] * len(self.prompt_ids)
    for s in self.segments:
      out.extend(s.sampler_logprobs or (0.0,) * len(s.ids))
    return tuple(out)


@dataclasses.dataclass(frozen=True)
class Score:
  """How one episode did. `reward` is what trains; the rest is logged for every episode, in [0, 1]."""

  reward: float
  em: float
  f1: float
  subem: float
  format_valid: float
  retrieval_hit: float
  answer: str | None
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)


@typing.no_type_check  # jax.eval_shape and tree_map put other things than arrays into the fields
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
  """A mean on its way: the total and the count travel undivided; the writer divides once."""

  total: Float[Array, ""]
  count: Float[Array, ""]

  def __add__(self, other: "Mean") -> "Mean":
    return Mean(self.total + other.total, self.count + other.count)


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBatch:
  """Padded rows, already shifted: position l reads `inputs_BL[l]` and predicts `targets_BL[l]`.

  Every other [B, L] field speaks of the TARGET at that position. Masks are 0.0 or 1.0.
  `loss_weight_BL` is the share of each target in the loss of the whole optimizer step (0 outside
  `policy_mask_BL`), so that summing over rows, micro-batches and devices gives the global mean.
  `kept_BP` names the positions of each row that any mask reads, rising; the others are never
  scored. A row with fewer than P of them is filled up with L.
  """

  inputs_BL: Int[Array, "B L"]
  targets_BL: Int[Array, "B L"]
  lengths_B: Int[Array, "B"]
  kept_BP: Int[Array, "B P"]
  policy_mask_BL: Float[Array, "B L"]
  response_mask_BL: Float[Array, "B L"]
  value_mask_BL: Float[Array, "B L"]
  loss_weight_BL: Float[Array, "B L"]
  value_weight_BL: Float[Array, "B L"]
  sampler_logprobs_BL: Float[Array, "B L"]
  reward_B: Float[Array, "B"]
  advantage_B: Float[Array, "B"]


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Targets:
  """What an update learns from, beside its TokenBatch: the trainer's own scores of the same tokens."""

  old_logprobs_BL: Float[Array, "B L"]
  ref_logprobs_BL: Float[Array, "B L"]
  advantages_BL: Float[Array, "B L"]
  old_values_BL: Float[Array, "B L"]
  returns_BL: Float[Array, "B L"]


@dataclasses.dataclass(frozen=True)
class UpdatePlan:
  """One rollout's updates: mini-batches (one optimizer step each), each a list of bucketed batches."""

  minibatches: tuple[tuple[TokenBatch, ...], ...]
  padding_share: float
