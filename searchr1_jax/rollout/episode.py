"""The method itself: one episode as a pure state machine over text and ids.

    policy writes a turn -> what is its action?
      answer   -> the episode ends
      search   -> passages come back and are inserted -> the next turn
      neither  -> a short notice is inserted          -> the next turn

`start` gives the first effect and `advance` turns each event into the next one; whoever drives an
episode samples, searches and hands in what came of it. Nothing here samples, searches or waits.
"""

from __future__ import annotations

import dataclasses
from typing import Callable, Sequence

from retriever.protocol import Passage
from searchr1_jax.text import actions, observation, prompts
from searchr1_jax.text.actions import Action, ActionKind
from searchr1_jax.types import (
    Question, Role, SearchRecord, Segment, StopReason, Trajectory, UserError)

MIN_TURN_TOKENS = 16
"""An episode goes on only where the next turn has room for this many tokens."""


@dataclasses.dataclass(frozen=True)
class EpisodeSettings:
  """The bounds of an episode, in turns, tokens and passages.

  `max_turns`: turns that may search; one last turn follows. `max_episode_tokens` counts the
  prompt. `max_searches`: searches that run, where that shall be fewer than `max_turns`.
  """

  max_turns: int = 4
  max_turn_tokens: int = 500
  max_episode_tokens: int = 4096
  max_observation_tokens: int = 500
  top_k: int = 3
  max_searches: int | None = None

  def __post_init__(self):
    least = {"max_turns": 0, "max_turn_tokens": 1, "max_episode_tokens": 1,
             "max_observation_tokens": 1, "top_k": 1, "max_searches": 0}
    for name, bound in least.items():
      value = getattr(self, name)
      if value is not None and value < bound:
        raise UserError(f"{name} is {value}; it must be at least {bound}")


@dataclasses.dataclass(frozen=True)
class TurnWritten:
  """Event: the policy wrote these ids, up to and with the token that stopped it."""

  ids: tuple[int, ...]
  sampler_logprobs: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class SearchDone:
  """Event: the engine answered, best passage first."""

  passages: tuple[Passage, ...]


@dataclasses.dataclass(frozen=True)
class SearchFailed:
  """Event: the engine gave up; the episode will be counted and dropped, never scored."""

  reason: str


Event = TurnWritten | SearchDone | SearchFailed


@dataclasses.dataclass(frozen=True)
class Write:
  """Effect: put `insert` behind what is there, then let the policy write up to `max_tokens`."""

  max_tokens: int
  insert: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Search:
  """Effect: ask the engine for `top_k` passages."""

  query: str
  top_k: int


@dataclasses.dataclass(frozen=True)
class Finish:
  """Effect: the episode is over."""

  trajectory: Trajectory


Effect = Write | Search | Finish


@dataclasses.dataclass(frozen=True)
class Rules:
  """The settings, the way from text to ids and back, and the fixed pieces of text as ids."""

  settings: EpisodeSettings
  decode_bytes: Callable[[Sequence[int]], bytes]
  frame: observation.Frame
  invalid_notice: tuple[int, ...]
  no_search_left: tuple[int, ...]


def make_rules(
    settings: EpisodeSettings, encode_plain: Callable[[str], Sequence[int]],
    decode_bytes: Callable[[Sequence[int]], bytes]) -> Rules:
  """What all episodes of a run share; the two functions are the tokenizer's."""
  frame = observation.make_frame(encode_plain, decode_bytes)
  no_search_left = (
      frame.header + tuple(encode_plain(prompts.NO_SEARCH_LEFT_NOTICE)) + frame.footer)
  if settings.max_turns and settings.max_observation_tokens < frame.shortest:
    raise UserError(
        f"max_observation_tokens is {settings.max_observation_tokens}; with this tokenizer the "
        f"shortest observation takes {frame.shortest}: set at least that")
  return Rules(
      settings, decode_bytes, frame, tuple(encode_plain(prompts.INVALID_NOTICE)), no_search_left)


@dataclasses.dataclass(frozen=True)
class Episode:
  """An episode under way. `asked`: the query that the engine is at work on, None otherwise."""

  rules: Rules
  room: int  # tokens that may still be added
  so_far: Trajectory  # its stop reason means nothing before the end
  asked: str | None = None


def start(
    rules: Rules, question: Question, sample: int, prompt_ids: Sequence[int]
) -> tuple[Episode, Effect]:
  """A new episode behind its prompt, and its first effect."""
  blank = Trajectory(question, sample, tuple(prompt_ids), (), StopReason.LENGTH)
  room = rules.settings.max_episode_tokens - len(blank.prompt_ids)
  return _write(Episode(rules, room, blank))


def advance(episode: Episode, event: Event) -> tuple[Episode, Effect]:
  """What the episode becomes after `event`, and what is to be done next."""
  if isinstance(event, TurnWritten) and episode.asked is None:
    return _after_turn(episode, event)
  if isinstance(event, SearchDone) and episode.asked is not None:
    return _after_search(episode, event.passages)
  if isinstance(event, SearchFailed) and episode.asked is not None:
    return _finish(episode, StopReason.RETRIEVAL_ERROR)
  waiting_for = "a turn" if episode.asked is None else "a search"
  raise ValueError(f"the episode waits for {waiting_for}, {type(event).__name__} came")


def _after_turn(episode: Episode, event: TurnWritten) -> tuple[Episode, Effect]:
  """Books the turn, reads its action, and acts on it."""
  ids = event.ids
  allowed = _turn_room(episode)
  if not 0 < len(ids) <= allowed:
    raise ValueError(f"a turn of 1 to {allowed} tokens was due, {len(ids)} came")
  text = episode.rules.decode_bytes(ids).decode("utf-8", "replace")
  so_far = episode.so_far
  episode = _append(
      episode, Segment(Role.POLICY, tuple(ids), tuple(event.sampler_logprobs)),
      turns=so_far.turns + 1,
      forged_information=so_far.forged_information + text.count(actions.INFORMATION_OPEN))
  action = actions.parse_action(text)
  if action.kind is ActionKind.ANSWER:
    return _finish(episode, StopReason.ANSWER)
  if action.kind is ActionKind.SEARCH:
    return _on_search(episode, action)
  return _on_invalid(episode)


def _on_search(episode: Episode, action: Action) -> tuple[Episode, Effect]:
  """Runs the search where turns, searches and tokens allow; otherwise counts it as not run."""
  rules, so_far = episode.rules, episode.so_far
  unexecuted = _count(episode, unexecuted_searches=1)
  if _was_last(episode):
    return _finish(unexecuted, StopReason.BUDGET)
  limit = rules.settings.max_searches
  if limit is not None and len(so_far.searches) >= limit:
    return _insert(unexecuted, rules.no_search_left)
  if episode.room < rules.frame.shortest + MIN_TURN_TOKENS:
    return _finish(unexecuted, StopReason.LENGTH)
  effect = Search(action.content, rules.settings.top_k)
  return dataclasses.replace(episode, asked=action.content), effect


def _on_invalid(episode: Episode) -> tuple[Episode, Effect]:
  """Counts the turn as invalid and says so to the policy, if it has another turn."""
  episode = _count(episode, invalid_actions=1)
  if episode.room == 0:
    return _finish(episode, StopReason.LENGTH)
  if _was_last(episode):
    return _finish(episode, StopReason.BUDGET)
  return _insert(episode, episode.rules.invalid_notice)


def _after_search(episode: Episode, passages: Sequence[Passage]) -> tuple[Episode, Effect]:
  """Inserts what was found, shortened to what the budgets leave."""
  rules, so_far = episode.rules, episode.so_far
  budget = min(rules.settings.max_observation_tokens, episode.room - MIN_TURN_TOKENS)
  found = observation.observe(rules.frame, passages, budget)
  record = SearchRecord(so_far.turns, episode.asked, found.passages)
  episode = dataclasses.replace(
      _count(episode, truncated_observations=int(found.truncated)), asked=None)
  return _insert(episode, found.ids, searches=so_far.searches + (record,))


def _was_last(episode: Episode) -> bool:
  """Whether the turn just written was the one after the turns that may search."""
  return episode.so_far.turns > episode.rules.settings.max_turns


def _insert(episode: Episode, ids: tuple[int, ...], **changes) -> tuple[Episode, Effect]:
  """Puts the environment's tokens in, if a turn fits behind them; ends the episode otherwise."""
  if episode.room < len(ids) + MIN_TURN_TOKENS:
    return _finish(episode, StopReason.LENGTH)
  return _write(_append(episode, Segment(Role.ENVIRONMENT, ids), **changes), ids)


def _write(episode: Episode, insert: tuple[int, ...] = ()) -> tuple[Episode, Effect]:
  if episode.room <= 0:
    return _finish(episode, StopReason.LENGTH)
  return episode, Write(_turn_room(episode), insert)


def _finish(episode: Episode, reason: StopReason) -> tuple[Episode, Effect]:
  done = dataclasses.replace(episode.so_far, stop_reason=reason)
  return dataclasses.replace(episode, so_far=done, asked=None), Finish(done)


def _turn_room(episode: Episode) -> int:
  return min(episode.rules.settings.max_turn_tokens, episode.room)


def _append(episode: Episode, segment: Segment, **changes) -> Episode:
  so_far = episode.so_far
  grown = dataclasses.replace(so_far, segments=so_far.segments + (segment,), **changes)
  return dataclasses.replace(episode, room=episode.room - len(segment.ids), so_far=grown)


def _count(episode: Episode, **more: int) -> Episode:
  """The episode with its counters raised."""
  raised = {name: getattr(episode.so_far, name) + n for name, n in more.items()}
  return dataclasses.replace(episode, so_far=dataclasses.replace(episode.so_far, **raised))
