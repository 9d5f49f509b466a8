"""Searches in the background: bounded, batched, each with a deadline, none lost or mixed up."""

from __future__ import annotations

import collections
from concurrent import futures
import contextlib
import dataclasses
import random
import threading
import time

from hypothesis import given, settings, strategies as st
import pytest

from retriever.protocol import Passage, RetrievalError
from searchr1_jax.rollout import episode as ep
from searchr1_jax.rollout.searches import Retrieval, Searches
from searchr1_jax.types import UserError

PATIENCE = 20.0  # seconds after which a test gives up; none ever waits that long
MOMENT = 0.05  # long enough for a call that should wait to have shown that it does not


class Held:
  """A search engine that answers when the test says so; requests go by their first query."""

  def __init__(self):
    self.requests: list[tuple[list[str], int]] = []
    self.most = self._running = 0
    self.threads: dict[str, threading.Thread] = {}
    self._outcomes: dict[str, object] = {}
    self._gates = collections.defaultdict(threading.Event)
    self._changed = threading.Condition()

  def __call__(self, queries, top_k):
    with self._changed:
      self.requests.append((list(queries), top_k))
      self.threads[queries[0]] = threading.current_thread()
      self._running += 1
      self.most = max(self.most, self._running)
      self._changed.notify_all()
    try:
      assert self._gates[queries[0]].wait(PATIENCE), "the test never answered"
    finally:
      with self._changed:
        self._running -= 1
    outcome = self._outcomes.get(queries[0])
    if isinstance(outcome, BaseException):
      raise outcome
    return passages(queries) if outcome is None else outcome

  def began(self, count):
    """Waits until so many requests have come, and returns them."""
    with self._changed:
      assert self._changed.wait_for(lambda: len(self.requests) >= count, PATIENCE)
      return list(self.requests)

  def open(self, first_query, outcome=None):
    """Lets a request return its own passages or `outcome`, or raise that, as soon as it comes."""
    self._outcomes[first_query] = outcome
    self._gates[first_query].set()

  def answer(self, first_query, outcome=None):
    """As `open`, and waits until the answer has landed."""
    self.open(first_query, outcome)
    with self._changed:
      assert self._changed.wait_for(lambda: first_query in self.threads, PATIENCE)
    self.threads[first_query].join(PATIENCE)

  def answer_all(self):
    for gate in map(self._gates.__getitem__, list(self.threads)):
      gate.set()


def passages(queries):
  return [[Passage(q, f'"{q}"\ntext of {q}', 1.0)] for q in queries]


def found(query):
  """What the row that asked gets to hear."""
  return ep.SearchDone((passages([query])[0][0],))


@pytest.fixture
def held():
  engine = Held()
  yield engine
  engine.answer_all()


def searches(engine, **how):
  return Searches(engine, Retrieval(**{"deterministic": False} | how))


def ask(searches, row, query, top_k=3):
  searches.ask(row, ep.Search(query, top_k))
  searches.send()


@contextlib.contextmanager
def hearing(searches):
  """`heard(wait=True)` in a thread of its own, as a future."""
  with futures.ThreadPoolExecutor(1) as pool:
    yield pool.submit(searches.heard, True)


def still_waits(future):
  return not futures.wait([future], MOMENT).done


MODES = pytest.mark.parametrize("deterministic", [True, False])


# What goes out, and how much of it at once.


@MODES
def test_queries_that_wait_go_out_together(held, deterministic):
  s = searches(held, in_flight=1, deterministic=deterministic)
  ask(s, 7, "first")
  for row, query in ((3, "a"), (1, "b"), (2, "c")):
    ask(s, row, query)
  assert held.began(1) == [(["first"], 3)] and len(s) == 4
  with hearing(s) as future:
    held.answer("first")
    held.began(2)  # sent while the answer of the first is heard: nobody called `send`
    held.answer("a")
    events = future.result(PATIENCE)
    events += s.heard(wait=True) if len(s) else []
  assert held.requests[1:] == [(["a", "b", "c"], 3)]
  assert events == [(7, found("first")), (3, found("a")), (1, found("b")), (2, found("c"))]
  assert len(s) == 0 and held.most == 1


def test_each_number_of_passages_is_a_request_of_its_own(held):
  s = searches(held)
  for row, (query, top_k) in enumerate([("a", 2), ("b", 5), ("c", 2), ("d", 5)]):
    s.ask(row, ep.Search(query, top_k))
  assert held.requests == []  # asking sends nothing
  s.send()
  assert sorted(held.began(2)) == [(["a", "c"], 2), (["b", "d"], 5)]
  held.answer("b")
  assert s.heard(wait=True) == [(1, found("b")), (3, found("d"))]
  held.answer("a")
  assert s.heard(wait=True) == [(0, found("a")), (2, found("c"))]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_more_requests_than_allowed_are_in_flight(held, limit):
  s = searches(held, in_flight=limit)
  for row in range(6):
    ask(s, row, f"q{row}")
  held.began(limit)
  time.sleep(MOMENT)  # one too many would have come by now
  assert len(held.requests) == limit and len(s) == 6
  heard = []
  while len(s):
    held.answer_all()
    heard += s.heard(wait=True)
  assert sorted(heard) == [(row, found(f"q{row}")) for row in range(6)]
  assert held.most == limit and len(held.requests) == limit + 1  # the others went together


@settings(max_examples=25)
@given(steps=st.lists(st.sampled_from(["ask", "ask", "answer", "hear"]), max_size=25),
       limit=st.integers(1, 3), seed=st.integers(0, 99))
def test_whatever_happens_each_row_hears_its_own_answer_once(steps, limit, seed):
  held, order = Held(), random.Random(seed)
  s, asked, heard, answered = searches(held, in_flight=limit), 0, [], set()
  for step in steps:
    if step == "ask":
      s.ask(asked, ep.Search(f"q{asked}", 3 + order.randint(0, 1)))
      s.send()
      asked += 1
    elif step == "answer" and (waiting := sorted(set(held.threads) - answered)):
      answered.add(first_query := order.choice(waiting))
      held.answer(first_query)
    elif step == "hear":
      heard += s.heard(wait=False)
    assert held.most <= limit and len(s) + len(heard) == asked
  while len(s):
    held.answer_all()
    heard += s.heard(wait=True)
  assert sorted(heard) == sorted((row, found(f"q{row}")) for row in range(asked))
  assert held.most <= limit


# When answers are heard.


def test_deterministic_answers_are_heard_all_together_in_the_order_they_were_asked(held):
  s = searches(held, deterministic=True)
  for row, query in ((5, "early"), (1, "late"), (3, "last")):
    ask(s, row, query)
  held.answer("last")
  held.answer("late")
  assert s.heard(wait=False) == []  # no clock decides what comes when
  with hearing(s) as future:
    assert still_waits(future)
    held.answer("early")
    assert future.result(PATIENCE) == [(5, found("early")), (1, found("late")), (3, found("last"))]
  assert len(s) == 0 and s.heard(wait=True) == []


def test_an_answer_is_heard_once_it_is_there_and_nobody_waits_for_others(held):
  s = searches(held)
  ask(s, 0, "slow")
  ask(s, 1, "quick")
  assert s.heard(wait=False) == []
  with hearing(s) as future:
    assert still_waits(future)
    held.answer("quick")
    assert future.result(PATIENCE) == [(1, found("quick"))]
  assert s.heard(wait=False) == [] and len(s) == 1
  held.answer("slow")
  assert s.heard(wait=False) == [(0, found("slow"))]
  assert s.heard(wait=True) == [] and s.heard(wait=False) == []  # nothing is under way


def test_several_answers_may_be_heard_at_once(held):
  s = searches(held)
  for row in range(3):
    ask(s, row, f"q{row}")
  for row in (2, 0, 1):
    held.answer(f"q{row}")
  assert sorted(s.heard(wait=False)) == [(row, found(f"q{row}")) for row in range(3)]


# What goes wrong.


@MODES
def test_a_search_that_hangs_fails_at_its_deadline_and_is_forgotten(held, deterministic):
  s = searches(held, seconds=0.1, deterministic=deterministic)
  began = time.monotonic()
  ask(s, 4, "hangs")
  (row, event), = s.heard(wait=True)
  assert 0.1 <= time.monotonic() - began < PATIENCE
  assert row == 4 and event == ep.SearchFailed("no answer within 0.1 s") and len(s) == 0
  # The row, with another episode in it, searches again, with all the time it wants. The first
  # answer comes late: nobody hears it, nor takes it for the one that is awaited.
  s._how = dataclasses.replace(s._how, seconds=PATIENCE)
  ask(s, 4, "again")
  held.answer("hangs")
  with hearing(s) as future:
    assert still_waits(future)
    held.answer("again")
    assert future.result(PATIENCE) == [(4, found("again"))]
  assert s.heard(wait=True) == [] == s.heard(wait=False) and len(s) == 0


@MODES
def test_a_search_that_hangs_holds_up_no_other(held, deterministic):
  s = searches(held, in_flight=1, seconds=0.2, deterministic=deterministic)
  held.open("waits")
  ask(s, 0, "hangs")
  ask(s, 1, "waits")  # there is no room for it before the first has failed
  events = s.heard(wait=True)
  events += s.heard(wait=True) if len(s) else []
  assert events == [(0, ep.SearchFailed("no answer within 0.2 s")), (1, found("waits"))]


@MODES
def test_a_failed_request_fails_its_own_rows_only(held, deterministic):
  s = searches(held, deterministic=deterministic)
  s.ask(0, ep.Search("bad", 3))
  ask(s, 1, "its neighbour")
  ask(s, 2, "good")
  held.answer("good")
  held.answer("bad", RetrievalError("the engine is down"))
  down = ep.SearchFailed("the engine is down")
  assert s.heard(wait=True) == [(0, down), (1, down), (2, found("good"))]


@MODES
@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), SystemExit("leaves")])
def test_another_error_is_raised_where_answers_are_heard(held, deterministic, error):
  s = searches(held, deterministic=deterministic)
  ask(s, 0, "q")
  held.answer("q", error)
  with pytest.raises(type(error), match=str(error)):
    s.heard(wait=True)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_answers_than_queries_is_a_failure(held, count):
  s = searches(held)
  s.ask(0, ep.Search("a", 3))
  ask(s, 1, "b")
  held.answer("a", passages("abc")[:count])
  failed = ep.SearchFailed(f"the engine answered {count} queries of 2")
  assert s.heard(wait=True) == [(0, failed), (1, failed)]


def test_no_answer_at_all_is_a_failure_at_once():
  s = Searches(lambda queries, top_k: None, Retrieval(seconds=60.0))
  ask(s, 0, "a")
  assert s.heard(wait=True) == [
      (0, ep.SearchFailed("the engine answered 0 queries of 1"))]


@pytest.mark.parametrize("wrong", [
    {"in_flight": 0}, {"in_flight": -1}, {"seconds": 0.0}, {"seconds": -2.0},
    {"seconds": float("nan")}, {"seconds": float("inf")}])
def test_numbers_that_search_for_nothing_are_refused(wrong):
  with pytest.raises(UserError, match="in_flight to 1 or more, seconds above 0 and up to"):
    Retrieval(**wrong)


def test_a_search_that_hangs_does_not_hold_up_the_end_of_the_program(held):
  s = searches(held)
  ask(s, 0, "a")
  held.began(1)
  assert held.threads["a"].daemon and held.threads["a"] is not threading.main_thread()
