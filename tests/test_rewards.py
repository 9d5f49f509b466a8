"""What earns a reward, and what does not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from retriever.protocol import Passage
from searchr1_jax.text import rewards
from searchr1_jax.types import (
    Question, Role, Score, SearchRecord, Segment, StopReason, Trajectory, UserError)

POLICY, ENVIRONMENT = Role.POLICY, Role.ENVIRONMENT
SEARCH = (POLICY, "<think>I lack this.</think>\n<search>capital of France</search>")
FOUND = (
    ENVIRONMENT, "\n\n<information>Doc 1(Title: France) Its capital: Paris.\n</information>\n\n")
ANSWER = (POLICY, "<think>Now I know.</think>\n<answer> Paris </answer>")
NOTICE = (ENVIRONMENT, "\nThat was no valid action.\n")

words = st.text(alphabet="ab The,.!'\n", max_size=20)


def episode(spans, golds=("Paris",), passages=()):
  """A trajectory of these spans with one token each, and their texts."""
  segments = tuple(
      Segment(role, (0,), (-1.0,) if role is POLICY else ()) for role, _ in spans)
  searches = tuple(SearchRecord(turn, "q", (Passage(str(turn), text, 1.0),))
                   for turn, text in enumerate(passages))
  question = Question("nq", "0", "What is the capital of France?", golds)
  trajectory = Trajectory(question, 0, (1,), segments, StopReason.ANSWER, searches)
  return trajectory, [text for _, text in spans]


def scored(spans, golds=("Paris",), passages=(), **settings_of_reward) -> Score:
  return rewards.score(*episode(spans, golds, passages), **settings_of_reward)


def test_normalising_drops_case_punctuation_articles_and_spare_spaces():
  assert rewards.normalize_answer("  The Quick,\tbrown-fox! ") == "quick brownfox"
  assert rewards.normalize_answer("A theory") == "theory"  # whole words alone are articles


@given(words)
def test_normalising_twice_changes_nothing_more(text):
  once = rewards.normalize_answer(text)
  assert once == " ".join(once.split()) == once.lower()
  assert not set(once.split()) & {"a", "an", "the"}
  assert rewards.normalize_answer(once) == once


@given(words, st.lists(words, max_size=3))
def test_exact_match_implies_the_softer_scores(answer, golds):
  em = rewards.exact_match(answer, golds)
  assert rewards.subem(answer, golds) >= em
  assert rewards.f1(answer, golds) >= em
  assert 0.0 <= rewards.f1(answer, golds) <= 1.0


@given(words, words)
def test_f1_is_symmetric(one, other):
  assert rewards.f1(one, [other]) == rewards.f1(other, [one])


def test_f1_counts_tokens_with_their_repeats():
  # "new york city" against "york new york": overlap new + york = 2 of 3 and 3 tokens: 4 / 6
  assert rewards.f1("New York City", ["York, New York"]) == pytest.approx(2 / 3)
  assert rewards.f1("New York City", ["London", "new york city"]) == 1.0


def test_no_answer_earns_nothing():
  for measure in (rewards.exact_match, rewards.f1, rewards.subem):
    assert measure(None, ["Paris", ""]) == 0.0
    assert measure("Paris", []) == 0.0


def test_where_normalisation_empties_both_the_lower_cased_originals_are_compared():
  assert rewards.exact_match("The", ["the"]) == 1.0
  for measure in (rewards.exact_match, rewards.f1, rewards.subem):
    assert measure("The", ["A"]) == 0.0
    assert measure("!", [""]) == 0.0
    assert measure("-", ["- "]) == 1.0


def test_a_gold_that_normalisation_empties_is_contained_in_nothing():
  assert rewards.subem("the answer", ["The", ""]) == 0.0
  assert rewards.retrieval_hit(["The", ""], [Passage("0", "the text", 1.0)]) == 0.0


def test_the_last_answer_counts_and_must_lie_within_one_span():
  assert rewards.last_answer(["<answer>a</answer>", "x<answer> b\n</answer>."]) == "b"
  assert rewards.last_answer(["<answer>a", "</answer>"]) is None
  assert rewards.last_answer(["<answer>a</answer>", "<answer>never closed"]) == "a"
  assert rewards.last_answer([]) is None


def test_an_answer_in_a_passage_earns_nothing():
  planted = (ENVIRONMENT, "<information><answer>Paris</answer></information>")
  result = scored([SEARCH, planted, (POLICY, "<think>?</think><answer>Rome</answer>")])
  assert (result.answer, result.em, result.reward) == ("Rome", 0.0, 0.0)
  assert scored([SEARCH, planted, (POLICY, "<think>?</think>")]).answer is None


def test_think_search_read_answer_is_well_formed():
  assert rewards.format_valid([SEARCH, FOUND, ANSWER])
  assert rewards.format_valid([SEARCH, FOUND, SEARCH, FOUND, ANSWER])
  assert rewards.format_valid([ANSWER])


@pytest.mark.parametrize("spans", [
    [],
    [(POLICY, "<answer>Paris</answer>")],                                   # no thought
    [SEARCH, FOUND, (POLICY, "<answer>Paris</answer>")],                    # none after reading
    [(POLICY, "<think>a</think><think>b</think><answer>c</answer>")],       # two in a row
    [(POLICY, "<think>a<think>b</think></think><answer>c</answer>")],       # nested
    [(POLICY, "<think>a</think> so <answer>c</answer>")],                   # text between tags
    [(POLICY, "<think>a</think><answer>c</answer> and more")],              # text at the end
    [(POLICY, "<think>a</think><search>q</answer>")],                       # crossed tags
    [(POLICY, "<think>a</think>")],                                         # no action
    [SEARCH], [SEARCH, FOUND],                                              # no answer
    [SEARCH, NOTICE, ANSWER], [NOTICE, ANSWER], [ANSWER, NOTICE],           # a notice
    [FOUND, ANSWER], [ANSWER, FOUND],                                       # unasked information
    [SEARCH, ANSWER],                                                       # no information
    [(POLICY, SEARCH[1] + FOUND[1] + ANSWER[1])],                           # it wrote its own
])
def test_what_is_not_well_formed(spans):
  assert not rewards.format_valid(spans)


def test_what_passages_hold_does_not_touch_the_format():
  strange = (ENVIRONMENT, "<information><think></answer> </information> x</information>")
  assert rewards.format_valid([SEARCH, strange, ANSWER])


@pytest.mark.parametrize("tail", [".", ".\n", "><", "\n\n"])
def test_what_the_token_that_ends_an_action_holds_past_it_is_forgiven(tail):
  search, answer = (POLICY, SEARCH[1] + tail), (POLICY, ANSWER[1] + tail)
  assert rewards.format_valid([search, FOUND, answer])


@given(st.lists(st.sampled_from([SEARCH, FOUND, ANSWER, NOTICE]), max_size=6))
@settings(max_examples=200)
def test_legal_orders_are_those_of_the_grammar(spans):
  # valid = (search found)* answer, and nothing else that these four spans can spell
  pairs, rest = spans[:-1], spans[-1:]
  grammar = rest == [ANSWER] and pairs == [SEARCH, FOUND] * (len(pairs) // 2)
  assert rewards.format_valid(spans) == grammar


def test_the_table_of_answers_and_form():
  table = {(c, v, a): rewards.format_reward(c, v, a, structure=0.2, final=0.1)
           for c, v, a in [(True, True, True), (True, False, True), (False, True, True),
                           (False, False, True), (False, True, False), (False, False, False)]}
  assert list(table.values()) == [1.0, 0.8, 0.2, 0.1, 0.2, 0.0]


def test_each_reward_trains_what_it_names():
  spans = [(POLICY, "<answer>Paris, France</answer>")]  # F1: overlap 1 of 2 and 1 tokens: 2 / 3
  rewarded = {name: scored(spans, name=name).reward for name in rewards.REWARDS}
  assert rewarded == {
      "em": 0.0, "f1": pytest.approx(2 / 3), "subem": 1.0, "em_format": pytest.approx(0.1)}
  assert scored([SEARCH, FOUND, ANSWER], name="em_format").reward == 1.0
  with pytest.raises(UserError, match="em, f1, subem, em_format"):
    scored(spans, name="bleu")


def test_added_terms_are_logged_apart_and_add_up():
  spans = [SEARCH, FOUND, SEARCH, FOUND, (POLICY, "<think>no idea</think>")]
  result = scored(spans, passages=("France\nParis is its capital", "Rome\nnothing"),
                  retrieval_bonus=0.3, search_cost=0.05, no_answer_penalty=0.5)
  assert result.retrieval_hit == 1.0
  assert result.parts == {
      "main": 0.0, "retrieval": 0.3, "search": pytest.approx(-0.1), "no_answer": -0.5}
  assert result.reward == pytest.approx(-0.3)  # 0 + 0.3 - 2 * 0.05 - 0.5


def test_texts_must_be_one_a_segment():
  trajectory, texts = episode([SEARCH, FOUND, ANSWER])
  with pytest.raises(ValueError):
    rewards.score(trajectory, texts[:-1])
