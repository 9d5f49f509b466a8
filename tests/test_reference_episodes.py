"""Scripted episodes against the reference implementation: actions, queries, stops, answers.

The fixture's `rollout` section holds cases: replies scripted per sample, and what the reference
asked its retriever, wrote and counted. Our episodes take the same replies. Where the two differ on
purpose, `DEPARTURES` says how to tell, and a test at the end holds each difference.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re

import pytest

from retriever.protocol import Passage
from searchr1_jax.rollout.episode import (
    EpisodeSettings, Finish, Search, SearchDone, TurnWritten, advance, make_rules, start)
from searchr1_jax.rollout.stops import build_automaton, cut_at_stop
from searchr1_jax.testing import ByteTokenizer
from searchr1_jax.text import actions, prompts
from searchr1_jax.text.observation import make_frame, observe
from searchr1_jax.types import Question, Role, StopReason

FIXTURE = pathlib.Path(__file__).parent / "fixtures" / "reference_numbers.json"
CASES = json.loads(FIXTURE.read_text())["rollout"]
TOKENIZER = ByteTokenizer()
AUTOMATON = build_automaton(TOKENIZER.token_bytes, [t.encode() for t in actions.STOP_TAGS])
# Budgets wide enough that they decide nothing: cutting by length is one of the departures.
ROOMY = 1_000_000

every_case = pytest.mark.parametrize("case", CASES, ids=[c["case"] for c in CASES])


def passages_for(query, top_k):
  return tuple(Passage(str(n), f"Passage {n}\nA word on {query}.", 1.0) for n in range(top_k))


def play(case, sample, replies):
  """One episode over the replies, each cut where our decode loop would stop."""
  config = case["config"]
  settings = EpisodeSettings(
      max_turns=config["max_turns"], top_k=config["topk"], max_turn_tokens=ROOMY,
      max_episode_tokens=100 * ROOMY, max_observation_tokens=ROOMY)
  rules = make_rules(settings, TOKENIZER.encode_plain, TOKENIZER.decode_bytes)
  prompt = TOKENIZER.encode_plain(case["prompts"][sample])
  episode, effect = start(rules, Question("x", str(sample), "?", ()), sample, prompt)
  replies = iter(replies)
  while not isinstance(effect, Finish):
    if isinstance(effect, Search):
      event = SearchDone(passages_for(effect.query, effect.top_k))
    else:
      ids = TOKENIZER.encode_plain(next(replies))
      stop = cut_at_stop(AUTOMATON, ids)
      ids = tuple(ids if stop is None else ids[:stop + 1])
      event = TurnWritten(ids, (0.0,) * len(ids))
    episode, effect = advance(episode, event)
  return effect.trajectory


@functools.cache
def played(number):
  case = CASES[number]
  return [play(case, sample, case["scripted_replies"][str(sample)])
          for sample in range(len(case["prompts"]))]


def ours(case):
  return played(CASES.index(case))


def policy_text(trajectory):
  return "".join(TOKENIZER.decode(s.ids) for s in trajectory.segments if s.role is Role.POLICY)


def answer_of(text):
  found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
  return found[-1].strip() if found else None


# Departures on purpose, each told from the replies alone.


def stops_elsewhere(reply):
  """The reference cuts at </search> even behind an </answer>; we stop at whichever is first."""
  answer, search = reply.find("</answer>"), reply.find("</search>")
  return 0 <= answer < search


def searches_for_nothing(reply):
  """The reference sends an empty query to its retriever; here it is an invalid action."""
  return re.search(r"<search>\s*</search>", reply) is not None


def departs(replies):
  """Whether the first action, as the whole reply has it, is not the one before our stop."""
  def differs(reply):
    whole = re.search(r"<(search|answer)>(.*?)</\1>", reply, re.DOTALL)
    cut = re.search(r"<(search|answer)>(.*?)</\1>", cut_text(reply), re.DOTALL)
    return searches_for_nothing(reply) or (whole and whole[0]) != (cut and cut[0])
  return any(map(differs, replies))


def cut_text(reply):
  ids = TOKENIZER.encode_plain(reply)
  stop = cut_at_stop(AUTOMATON, ids)
  return reply if stop is None else TOKENIZER.decode(ids[:stop + 1])


def comparable(case):
  """(sample, our trajectory) for the samples in which no departure plays a part."""
  return [(sample, trajectory) for sample, trajectory in enumerate(ours(case))
          if not departs(case["scripted_replies"][str(sample)])]


def test_the_fixture_has_cases_and_most_samples_are_compared():
  compared = sum(len(comparable(case)) for case in CASES)
  assert CASES and 2 * compared > sum(len(case["prompts"]) for case in CASES)


@every_case
def test_queries_agree_turn_by_turn(case):
  if len(comparable(case)) < len(case["prompts"]):
    pytest.skip("a sample of this case departs on purpose; requests are batches over samples")
  asked = [[r.query for t in ours(case) for r in t.searches if r.turn == turn]
           for turn in range(1, case["config"]["max_turns"] + 1)]
  wanted = [r["queries"] for r in case["search_requests"]]
  # The reference sends a request even where a turn has no query.
  assert [q for q in asked if q] == [q for q in wanted if q]
  assert {r["topk"] for r in case["search_requests"]} <= {case["config"]["topk"]}


@every_case
def test_counts_of_turns_searches_and_valid_actions_agree(case):
  stats = case["meta_info"]
  for sample, t in comparable(case):
    assert t.turns == stats["turns_stats"][sample]
    assert t.turns - t.invalid_actions == stats["valid_action_stats"][sample]
    # The reference counts the search of the last turn, which it does not run, with the others.
    assert len(t.searches) + t.unexecuted_searches == stats["valid_search_stats"][sample]


@every_case
def test_the_same_samples_finish_with_the_same_answers(case):
  for sample, t in comparable(case):
    unfinished = case["meta_info"]["active_mask"][sample]
    assert t.stop_reason is (StopReason.BUDGET if unfinished else StopReason.ANSWER)
    assert answer_of(policy_text(t)) == answer_of(case["trainable_text"][sample])


@every_case
def test_the_policy_s_own_text_agrees(case):
  for sample, t in comparable(case):
    if not any(map(stops_elsewhere, case["scripted_replies"][str(sample)])):
      assert policy_text(t) == case["trainable_text"][sample]


# The departures.


def test_departure_nothing_is_kept_past_the_stop():
  reply = "<answer>a</answer> and <search>b</search>"
  case = {"config": {"max_turns": 1, "topk": 1}, "prompts": ["Q "]}
  trajectory = play(case, 0, [reply])
  assert policy_text(trajectory) == "<answer>a</answer>"


@every_case
def test_departure_observations_are_never_cut_blindly(case):
  for t in ours(case):
    for segment in t.segments:
      text = TOKENIZER.decode(segment.ids)
      if segment.role is Role.ENVIRONMENT and text != prompts.INVALID_NOTICE:
        assert text.startswith(prompts.OBSERVATION_HEADER)
        assert text.endswith(prompts.OBSERVATION_FOOTER)


@every_case
def test_up_to_that_cut_observations_read_the_same(case):
  frame = make_frame(TOKENIZER.encode_plain, TOKENIZER.decode_bytes)
  before = {p["sample"]: p["prompt"] for p in case["policy_prompts"] if p["turn"] == 0}
  for entry in case["policy_prompts"]:
    written = before[entry["sample"]] + policy_text_of_turn(case, entry["sample"], 0)
    if entry["turn"] != 1 or not entry["prompt"].startswith(written + prompts.OBSERVATION_HEADER):
      continue
    theirs = entry["prompt"][len(written):]
    lines = re.findall(r"Doc \d+\(Title: (.*?)\) (.*)\n", theirs)
    passages = [Passage("", f"{title}\n{text}", 0.0) for title, text in lines]
    text = TOKENIZER.decode(observe(frame, passages, ROOMY).ids)
    # Their last line may be half a passage or half a tag; all before it must be ours.
    whole_lines = theirs[:theirs.rindex("\n") + 1] if lines else prompts.OBSERVATION_HEADER
    assert text.startswith(whole_lines)


def policy_text_of_turn(case, sample, turn):
  return cut_text(case["scripted_replies"][str(sample)][turn])


def test_departure_the_notice_has_words_of_its_own():
  case = {"config": {"max_turns": 1, "topk": 1}, "prompts": ["Q "]}
  trajectory = play(case, 0, ["no tags", "<answer>a</answer>"])
  assert TOKENIZER.decode(trajectory.segments[1].ids) == prompts.INVALID_NOTICE


def test_departure_an_empty_query_is_invalid():
  case = {"config": {"max_turns": 1, "topk": 1}, "prompts": ["Q "]}
  trajectory = play(case, 0, ["<search> </search>", "<answer>a</answer>"])
  assert trajectory.invalid_actions == 1 and not trajectory.searches


@every_case
def test_departure_ids_are_never_made_again_from_text(case):
  for sample, t in enumerate(ours(case)):
    turns = [s.ids for s in t.segments if s.role is Role.POLICY]
    replies = case["scripted_replies"][str(sample)][:len(turns)]
    assert turns == [tuple(TOKENIZER.encode_plain(cut_text(r))) for r in replies]
    # The whole prompt stays too: nothing is cut from the left to fit.
    assert t.prompt_ids == tuple(TOKENIZER.encode_plain(case["prompts"][sample]))
