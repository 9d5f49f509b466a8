"""How often each program of a step runs: from the mean episode to calls by shape. Pure arithmetic."""

from __future__ import annotations

import dataclasses
import math
from typing import Mapping

import ml_collections

from searchr1_jax.algo import collate
from searchr1_jax.rollout import slots
from searchr1_jax.rollout.slots import EngineShapes

OCCUPANCY = 0.9  # share of the seats' steps that write a token (measured: LOG.md)
LONGEST = 2.0  # what the longest episode of a batch writes, in means: no rollout ends before it
PADDING = 0.15  # share of the positions of update batches that hold none


@dataclasses.dataclass(frozen=True)
class Load:
  """The mean episode: tokens of a prompt, searches, tokens of a turn and of an observation."""

  prompt: int = 200
  searches: float = 2.0
  turn: int = 100
  observation: int = 450

  def within(self, rules: ml_collections.ConfigDict) -> Load:
    """The same as far as the rules of a config's episodes allow it."""
    found = Load(max(1, min(self.prompt, rules.max_episode_tokens // 2)),
                 float(min(self.searches, rules.max_turns)), min(self.turn, rules.max_turn_tokens),
                 min(self.observation, rules.max_observation_tokens))
    share = (rules.max_episode_tokens - found.prompt) / (found.length - found.prompt)
    if share >= 1:
      return found
    cut = lambda tokens: max(1, int(share * tokens))
    return dataclasses.replace(found, turn=cut(found.turn), observation=cut(found.observation))

  @property
  def written(self) -> float:
    """Tokens that the policy writes."""
    return (self.searches + 1) * self.turn

  @property
  def length(self) -> float:
    return self.prompt + self.written + self.searches * self.observation


def prefill_calls(load: Load, shapes: EngineShapes, episodes: float,
                  prompts: float) -> Mapping[tuple[int, int, int], float]:
  """Calls of a device by (rows, chunk, width): its prompts, and what each search brings.

  Observations come as turns end, so many together as end a decode call.
  """
  together = min(shapes.row_buckets[-1], max(1, int(shapes.seats[-1] * slots.STOPPED_SHARE)))
  rows = slots.at_least(shapes.row_buckets, together)
  inserts = [(load.prompt, 0, prompts)]
  for search in range(math.ceil(load.searches)):
    behind = load.prompt + (search + 1) * load.turn + search * load.observation
    inserts.append((load.observation, behind, min(1, load.searches - search) * episodes))
  calls: dict[tuple[int, int, int], float] = {}
  for tokens, behind, count in inserts:
    for begin in range(0, tokens, shapes.chunk_buckets[-1]):
      end = min(tokens, begin + shapes.chunk_buckets[-1])
      at = (rows, slots.at_least(shapes.chunk_buckets, end - begin),
            slots.at_least(shapes.widths, min(behind + end, shapes.slots)))
      calls[at] = calls.get(at, 0.0) + count / together
  return calls


def decode_steps(load: Load, shapes: EngineShapes) -> int:
  """Tokens of a decode call with all seats taken: it ends when a share of the turns have."""
  return max(1, min(shapes.tokens, round(load.turn * slots.STOPPED_SHARE)))


def decode_calls(load: Load, shapes: EngineShapes, episodes: float) -> float:
  """Decode calls of a device, all seats taken; the last episode ends long after the others."""
  tokens = max(episodes * load.written / shapes.seats[-1] / OCCUPANCY, LONGEST * load.written)
  return tokens / decode_steps(load, shapes)


def main_batch(load: Load, shapes: collate.BatchShapes) -> tuple[int, int, int]:
  """The (rows, length, kept) of update batches that mean episodes fill."""
  length = slots.at_least(shapes.lengths, min(math.ceil(load.length), shapes.lengths[-1]))
  half, whole = collate.kept_sizes(length)
  return shapes.rows(length)[0], length, half if load.written <= half else whole


def batch_count(load: Load, shapes: collate.BatchShapes, episodes: int, minibatches: int) -> float:
  """Batches of a rollout, padding included; a mini-batch has at least one."""
  rows, length, _ = main_batch(load, shapes)
  return max(episodes * load.length / (1 - PADDING) / (rows * length), float(minibatches))
