"""Shared engines: what is kept, and single queries of many callers that travel as one batch."""

from __future__ import annotations

import concurrent.futures
import threading
import time

import pytest
from hypothesis import given, strategies as st

from retriever.protocol import RetrievalError, SearchEngine
from retriever.sharing import Batched, Busy, Cached, Kept
from tests.search_servers import PATIENCE, ToyEngine, passages, wait_until


class Held(SearchEngine):
  """Answers one search each time the test lets it, and notes what it was asked."""

  fingerprint = "held"

  def __init__(self):
    self.asked: list[tuple[list[str], int]] = []
    self.outcome = None
    self.closed = False
    self._gate = threading.Semaphore(0)

  def search(self, queries, top_k):
    raise NotImplementedError

  def search_each(self, queries, top_k):
    self.asked.append((list(queries), top_k))
    assert self._gate.acquire(timeout=PATIENCE), "the test never answered"
    if isinstance(self.outcome, BaseException):
      raise self.outcome
    return [passages(q, top_k) for q in queries] if self.outcome is None else self.outcome

  def answer(self, times=1):
    self._gate.release(times)

  def began(self, count):
    wait_until(lambda: len(self.asked) >= count)

  def close(self):
    self.closed = True


@pytest.fixture
def held():
  engine = Held()
  yield engine
  engine.answer(100)


def found(future):
  return future.result(PATIENCE)


# Batched.


def test_queries_that_wait_go_together_and_equal_ones_once(held):
  with Batched(held) as batched:
    first = batched.submit(["first"], 2)
    held.began(1)
    others = [batched.submit(queries, 2) for queries in (["a"], ["b", "a"], ["a"], [])]
    assert len(batched) == 4
    held.answer(2)
    assert found(first) == [passages("first", 2)]
    assert [found(f) for f in others] == [
        [passages("a", 2)], [passages("b", 2), passages("a", 2)], [passages("a", 2)], []]
    assert held.asked == [(["first"], 2), (["a", "b"], 2)] and len(batched) == 0
    assert found(others[0])[0] is not found(others[2])[0]  # nobody can change another's list


def test_a_lone_query_is_searched_for_at_once(held):
  with Batched(held) as batched:
    for n in range(3):
      future = batched.submit([f"q{n}"], 1)
      held.began(n + 1)
      held.answer()
      assert found(future) == [passages(f"q{n}", 1)]


def test_a_batch_holds_one_top_k_and_no_more_than_it_may(held):
  with Batched(held, max_queries=2) as batched:
    futures = [batched.submit(["first"], 1)]
    held.began(1)
    futures += [batched.submit([q], k) for q, k in
                (("a", 1), ("b", 3), ("c", 1), ("d", 1), ("e", 3), ("a", 1))]
    held.answer(10)
    for future in futures:
      found(future)
    # The first in line says which top_k; the second "a" joins the first one's batch.
    assert held.asked == [(["first"], 1), (["a", "c"], 1), (["b", "e"], 3), (["d"], 1)]


def test_a_request_may_take_several_batches(held):
  with Batched(held, max_queries=2) as batched:
    future = batched.submit(list("abcde"), 1)
    held.answer(3)
    assert found(future) == [passages(q, 1) for q in "abcde"]
    assert [queries for queries, _ in held.asked] == [["a", "b"], ["c", "d"], ["e"]]


def test_when_too_many_wait_the_next_is_refused_with_a_time(held):
  sizes = []
  with Batched(held, max_waiting=3, on_batch=lambda size, s: sizes.append(size)) as batched:
    assert held.answer() or found(batched.submit(["pace"], 1))
    first = batched.submit(["first"], 1)
    held.began(2)
    waiting = [batched.submit(["a", "b"], 1), batched.submit(["c"], 1)]
    with pytest.raises(Busy, match="3 queries wait already") as e:
      batched.submit(["d"], 1)
    # 3 wait and 1 is searched for, each as long as "pace" took.
    assert e.value.seconds == pytest.approx(4 * batched._pace) and e.value.seconds > 0
    (refused,) = batched.search_each(["d"], 1)
    assert isinstance(refused, Busy) and isinstance(refused, RetrievalError)
    held.answer(2)
    found(first)
    for future in waiting:
      found(future)
    big = batched.submit(list("abcdefgh"), 1)  # it could never come in otherwise
    held.answer()
    assert len(found(big)) == 8
    assert sizes == [1, 1, 3, 8]


def test_who_came_too_late_or_gave_up_costs_no_search(held):
  with Batched(held) as batched:
    first = batched.submit(["first"], 1)
    held.began(1)
    late, gone = batched.submit(["late"], 1, 0.02), batched.submit(["gone", "too"], 1)
    last = batched.submit(["last"], 1)
    assert gone.cancel()
    time.sleep(0.03)
    held.answer(2)
    found(first), found(last)
    assert held.asked == [(["first"], 1), (["last"], 1)]
    (error,) = found(late)
    assert isinstance(error, RetrievalError) and "within its time" in str(error)


def test_a_caller_waits_no_longer_than_the_deadline(held):
  with Batched(held, seconds=0.05) as batched:
    began = time.monotonic()
    for error in batched.search_each(["a", "b"], 1):
      assert isinstance(error, RetrievalError) and "no answer within 0.05 s" in str(error)
    with pytest.raises(RetrievalError, match="no answer"):
      batched.search(["c"], 1)
    assert time.monotonic() - began < 1.0
    held.answer(2)


def test_an_error_is_its_own_query_s_and_each_of_those_who_asked_it():
  with Batched(ToyEngine(seconds=0.02, bad=("bad",))) as batched:
    futures = [batched.submit(q, 1) for q in (["x"], ["bad"], ["good", "bad"], ["good"])]
    (bad,), (good, bad_too), (good_too,) = [found(f) for f in futures[1:]]
    assert isinstance(bad, RetrievalError) and bad is bad_too
    assert good == good_too == passages("good", 1)


@pytest.mark.parametrize("outcome, says", [
    (RetrievalError("down"), "down"), ([], "answered 0 queries of 1"),
    ([[], []], "answered 2 queries of 1")])
def test_an_engine_that_fails_or_miscounts_is_an_error(held, outcome, says):
  held.outcome = outcome
  with Batched(held) as batched:
    held.answer()
    (error,) = batched.search_each(["a"], 1)
    assert isinstance(error, RetrievalError) and says in str(error)


@pytest.mark.parametrize("bug", [ZeroDivisionError("a bug"), TimeoutError("the engine's own")])
def test_a_bug_is_raised_where_answers_are_awaited_and_ends_nothing(held, bug):
  held.outcome = bug
  with Batched(held) as batched:
    held.answer()
    with pytest.raises(type(bug), match=str(bug)):
      batched.search(["a"], 1)
    held.outcome = None
    held.answer()
    assert batched.search(["a"], 1) == [passages("a", 1)]


def test_closing_lets_the_search_under_way_end_and_fails_the_others(held):
  batched = Batched(held)
  under_way = batched.submit(["a"], 1)
  held.began(1)
  waits = batched.submit(["b"], 1)
  threading.Timer(0.05, held.answer).start()
  batched.close()
  assert found(under_way) == [passages("a", 1)] and held.closed
  with pytest.raises(RetrievalError, match="closed"):
    found(waits)
  (error,) = batched.search_each(["c"], 1)
  assert "closed" in str(error) and held.asked == [(["a"], 1)]
  assert not batched._thread.is_alive()


def test_a_search_that_hangs_holds_up_neither_closing_nor_the_program(held, monkeypatch):
  monkeypatch.setattr("retriever.sharing.CLOSE_SECONDS", 0.05)
  batched = Batched(held)
  batched.submit(["a"], 1)
  held.began(1)
  batched.close()
  assert not held.closed and batched._thread.daemon


def test_those_who_shared_a_search_are_waited_for_a_tenth_of_it():
  """32 callers in lockstep: without the pause every other search would be one query alone."""
  engine = ToyEngine(seconds=0.1)
  with Batched(engine) as batched, concurrent.futures.ThreadPoolExecutor(32) as pool:
    ask = lambda n: [batched.search([f"{n} {i}"], 1) for i in range(8)]
    for n, answers in enumerate(pool.map(ask, range(32))):
      assert answers == [[passages(f"{n} {i}", 1)] for i in range(8)]
  # Without it 16: 1, 31, 1, 31, ... With it 9: 1, 31, 32, ...; stragglers may add some.
  assert len(engine.batches) <= 12


@given(st.lists(st.tuples(st.lists(st.sampled_from("abcdef"), max_size=4), st.integers(1, 3)),
                max_size=12), st.integers(1, 5))
def test_whatever_is_asked_together_each_hears_its_own(requests, most):
  with Batched(ToyEngine(), max_queries=most) as batched:
    futures = [batched.submit(queries, k) for queries, k in requests]
    for (queries, k), future in zip(requests, futures):
      assert found(future) == [passages(q, k) for q in queries]


def test_top_k_is_checked(held):
  with Batched(held) as batched, pytest.raises(ValueError, match="top_k is 0"):
    batched.submit(["a"], 0)


# Cached.


def test_what_was_found_is_not_asked_again_and_equal_queries_are_asked_once():
  engine = ToyEngine(bad=("bad",))
  with Cached(engine) as cached:
    assert cached.fingerprint == engine.fingerprint
    assert cached.search(["a", "b", "a"], 2) == [passages(q, 2) for q in "aba"]
    assert cached.search(["b", "c"], 2) == [passages(q, 2) for q in "bc"]
    assert cached.search(["a"], 3) == [passages("a", 3)]  # another top_k is another search
    bad, good = cached.search_each(["bad", "a"], 2)
    assert isinstance(bad, RetrievalError) and good == passages("a", 2)
    cached.search_each(["bad"], 2)  # a failure is not kept
    assert engine.batches == [["a", "b"], ["c"], ["a"], ["bad"], ["bad"]]
    cached.search(["a"], 2)[0].clear()  # nor can a caller change what is kept
    assert cached.search(["a"], 2) == [passages("a", 2)]
  assert engine.closed == 1


def test_the_least_recently_used_go_first_when_there_is_no_room():
  # A search of 1 passage: 256 bytes for each of its 2 texts, a query of 1 and a passage of
  # len('"a"\nno. 0 of 1') = 14 characters: 527. Two fit into 1,060, three do not.
  kept = Kept(1060)
  for query in "ab":
    kept.put(query, 1, passages(query, 1))
  assert kept.get("a", 1) == passages("a", 1)
  kept.put("c", 1, passages("c", 1))
  assert kept.get("b", 1) is None
  assert kept.get("a", 1) == passages("a", 1) and kept.get("c", 1) == passages("c", 1)
  kept.put("a", 1, passages("a", 1))  # again: it takes no more room than before
  assert kept.get("c", 1) is not None
  kept.put("long" * 1000, 1, [])
  assert [kept.get(q, 1) for q in ("a", "b", "c", "long" * 1000)] == [None] * 4
  assert kept._room == 1060


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 3)), max_size=60),
       st.integers(0, 4000))
def test_whatever_is_kept_a_search_is_the_engine_s(asked, room):
  with Cached(ToyEngine(), room) as cached:
    for query, top_k in asked:
      assert cached.search([query], top_k) == [passages(query, top_k)]
    assert 0 <= cached._kept._room <= room


def test_threads_share_what_is_kept():
  with Cached(ToyEngine(), 20_000) as cached, concurrent.futures.ThreadPoolExecutor(8) as pool:
    ask = lambda n: cached.search([f"q{n % 40}"], 1) == [passages(f"q{n % 40}", 1)]
    assert all(pool.map(ask, range(2000)))
  kept = cached._kept
  assert kept._room == 20_000 - sum(
      256 * 2 + len(q) + len(p[0].contents) for (q, _), p in kept._found.items())
