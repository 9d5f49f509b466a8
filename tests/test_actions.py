"""Actions: the first complete pair of a turn, against a regular expression that says the same."""

from __future__ import annotations

import re

import hypothesis
import hypothesis.strategies as st
import pytest

from searchr1_jax.text import actions, prompts
from searchr1_jax.text.actions import INVALID, Action, ActionKind, parse_action


def search(query):
  return Action(ActionKind.SEARCH, query)


def answer(text):
  return Action(ActionKind.ANSWER, text)


@pytest.mark.parametrize("text, wanted", [
    ("<think>who?</think><search> Ada Lovelace </search>", search("Ada Lovelace")),
    ("<answer>\n1815\n</answer>", answer("1815")),
    ("<answer></answer>", answer("")),  # a wrong answer, but an answer
    ("<search>  </search>", INVALID),
    ("<search></search><answer>x</answer>", INVALID),  # the first one counts
    ("<answer>a</answer> then <search>b</search>", answer("a")),
    ("<search>a <answer>b</answer>", answer("b")),  # the search is not complete
    ("<search>a<search>b</search>", search("a<search>b")),
    ("</search><search>a</search>", search("a")),
    ("<search>a", INVALID),
    ("a</search>", INVALID),
    ("<Search>a</Search>", INVALID),
    ("< search>a</search>", INVALID),
    ("", INVALID),
])
def test_the_first_complete_pair_is_the_action(text, wanted):
  assert parse_action(text) == wanted


def test_content_is_kept_whatever_it_is():
  for content in ("\0", "x" * 10_000, "née\u200b", "<think>"):
    assert parse_action(f"<search>{content}</search>") == search(content)


pieces = st.sampled_from(
    ["<search>", "</search>", "<answer>", "</answer>", "<", "/", "search>", " ", "q", "\n"])


@hypothesis.given(st.lists(pieces, max_size=12).map("".join))
@hypothesis.settings(max_examples=500, deadline=None)
def test_agrees_with_the_regular_expression(text):
  match = re.search(r"<(search|answer)>(.*?)</\1>", text, re.DOTALL)
  wanted = Action(ActionKind(match[1]), match[2].strip()) if match else INVALID
  if wanted == search(""):
    wanted = INVALID
  assert parse_action(text) == wanted


def test_many_opening_tags_cost_no_more_than_one():
  # Quadratic search would take minutes here.
  assert parse_action("<search>" * 200_000) == INVALID


def test_notices_hold_nothing_that_could_be_read_as_a_tag():
  for notice in (prompts.INVALID_NOTICE, prompts.NO_SEARCH_LEFT_NOTICE):
    assert "<" not in notice and ">" not in notice
    assert parse_action(notice) == INVALID


def test_the_prompts_name_the_tags_that_they_ask_for_and_end_with_the_question():
  for tag in actions.TAGS:
    assert f"<{tag}>" in prompts.SEARCH_PROMPT and f"</{tag}>" in prompts.SEARCH_PROMPT
    asked = tag in ("think", "answer")
    assert (f"<{tag}>" in prompts.REASONING_PROMPT) == asked
  for template in (prompts.SEARCH_PROMPT, prompts.REASONING_PROMPT):
    assert prompts.fill_template(template, "Who {x}?").endswith("Question: Who {x}?\n")
