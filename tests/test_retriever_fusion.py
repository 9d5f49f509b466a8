"""Reciprocal rank fusion: sums by hand, orders that do not matter, whole answers or errors."""

from __future__ import annotations

import itertools
import threading

import hypothesis
import pytest
from hypothesis import strategies as st

from retriever.fusion import FusionEngine, reciprocal_rank
from retriever.protocol import CorpusError, Passage, RetrievalError, SearchEngine

RANKINGS = st.lists(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8), max_size=5)


def passages(ids, text="contents of "):
  return [Passage(id_, f"{text}{id_}", 1.0 - n / 10) for n, id_ in enumerate(ids)]


class Fake(SearchEngine):
  """Answers from a dictionary; remembers what it was asked, and whether it was closed."""

  def __init__(self, answers, fingerprint="fake", before=lambda: None):
    self.answers, self.fingerprint, self.before = answers, fingerprint, before
    self.asked, self.closed = [], False

  def search_each(self, queries, top_k):
    self.before()
    self.asked.append((list(queries), top_k))
    found = [self.answers[q] for q in queries]
    return [f if isinstance(f, RetrievalError) else f[:top_k] for f in found]

  def search(self, queries, top_k):
    raise AssertionError("the parts are asked query by query")

  def close(self):
    self.closed = True


def ids(found):
  return [p.id for p in found]


# The rule


def test_sums_by_hand():
  """k = 60. a: 1/61 + 1/63 = .0322664; b: 1/62 + 1/61 = .0325225; c: 1/63; d: 1/62.

  d and c are in one ranking each, the second place before the third.
  """
  fused = reciprocal_rank([["a", "b", "c"], ["b", "d", "a"]])
  assert [id_ for id_, _ in fused] == ["b", "a", "d", "c"]
  assert [s for _, s in fused] == pytest.approx(
      [0.03252247, 0.03226646, 0.01612903, 0.01587302], abs=1e-8)


def test_k_and_weights_by_hand():
  """k = 0, weights 3 and 1: a 3/1 + 1/2 = 3.5, b 3/2 + 1/1 = 2.5."""
  assert reciprocal_rank([["a", "b"], ["b", "a"]], 0, [3, 1]) == [("a", 3.5), ("b", 2.5)]
  assert reciprocal_rank([["a", "b"], ["b", "a"]], 0, [1, 3]) == [("b", 3.5), ("a", 2.5)]


def test_equal_scores_come_by_id_and_nothing_gives_nothing():
  assert [i for i, _ in reciprocal_rank([["b", "a"], ["a", "b"]])] == ["a", "b"]
  assert reciprocal_rank([]) == reciprocal_rank([[], []]) == []


@hypothesis.given(rankings=RANKINGS, data=st.data())
def test_the_order_of_rankings_changes_nothing(rankings, data):
  weights = data.draw(st.lists(st.floats(0.1, 9), min_size=len(rankings), max_size=len(rankings)))
  order = data.draw(st.permutations(range(len(rankings))))
  turned = reciprocal_rank([rankings[i] for i in order], 60, [weights[i] for i in order])
  assert turned == reciprocal_rank(rankings, 60, weights)


@hypothesis.given(rankings=RANKINGS)
def test_other_names_in_the_same_order_change_only_names(rankings):
  renamed = [[f"x{id_}" for id_ in ranking] for ranking in rankings]
  assert reciprocal_rank(renamed) == [(f"x{i}", s) for i, s in reciprocal_rank(rankings)]


@hypothesis.given(ranking=st.lists(st.text(max_size=3), unique=True, max_size=9),
                  times=st.integers(1, 4))
def test_rankings_that_agree_are_kept(ranking, times):
  assert [i for i, _ in reciprocal_rank([ranking] * times)] == ranking


@hypothesis.given(rankings=RANKINGS.filter(any))
def test_who_is_before_another_everywhere_is_before_it_in_the_end(rankings):
  place = [{id_: n for n, id_ in enumerate(r)} for r in rankings]
  order = [i for i, _ in reciprocal_rank(rankings)]
  for a, b in itertools.permutations(order, 2):
    if all(p.get(a, 99) <= p.get(b, 99) for p in place) and any(a in p for p in place):
      assert order.index(a) < order.index(b)


def test_what_makes_no_sense_is_refused():
  with pytest.raises(CorpusError, match="'b' twice"):
    reciprocal_rank([["a", "b", "c", "b"]])
  for k in (-1, float("nan"), float("inf")):
    with pytest.raises(CorpusError, match="k is"):
      reciprocal_rank([["a"]], k)
  for weights in ([1], [1, 0], [1, -1], [1, float("nan")], [1, float("inf")], [1, 1, 1]):
    with pytest.raises(CorpusError, match="wanted 2 numbers"):
      reciprocal_rank([["a"], ["b"]], 60, weights)


# The engine


def test_fuses_query_by_query_and_each_passage_comes_once():
  first = Fake({"q": passages("abc"), "r": passages("x")})
  second = Fake({"q": passages("bda"), "r": []})
  engine = FusionEngine([first, second])
  found = engine.search(["q", "r", "q"], 3)
  assert [ids(f) for f in found] == [["b", "a", "d"], ["x"], ["b", "a", "d"]]
  assert found[0][0].contents == "contents of b"
  assert found[0][0].score == pytest.approx(1 / 62 + 1 / 61)
  assert engine.search([], 3) == []


def test_fetches_more_than_it_gives_and_never_less():
  """"c" is third in both; a and b are first in one: only the third places show that c is best."""
  parts = [Fake({"q": passages("axc")}), Fake({"q": passages("byc")})]
  assert ids(FusionEngine(parts, fetch=3, k=60).search(["q"], 1)[0]) == ["c"]
  assert ids(FusionEngine(parts, fetch=2, k=60).search(["q"], 1)[0]) == ["a"]
  FusionEngine(parts, fetch=2).search(["q"], 7)
  assert [part.asked for part in parts] == [[(["q"], 3), (["q"], 2), (["q"], 7)]] * 2


def test_a_part_that_fails_a_query_fails_it_and_no_other():
  down = RetrievalError("the second is down")
  engine = FusionEngine([Fake({"q": passages("a"), "r": passages("b")}),
                         Fake({"q": passages("a"), "r": down})])
  found = engine.search_each(["q", "r"], 3)
  assert ids(found[0]) == ["a"] and found[1] is down
  with pytest.raises(RetrievalError, match="second is down"):
    engine.search(["q", "r"], 3)


def test_an_engine_that_breaks_breaks_the_search():
  class Broken(Fake):
    def search_each(self, queries, top_k):
      raise OSError("no disk")

  class Short(Fake):
    def search_each(self, queries, top_k):
      return super().search_each(queries, top_k)[:-1]

  good = Fake({"q": passages("a")})
  with pytest.raises(OSError, match="no disk"):
    FusionEngine([good, Broken({})]).search(["q"], 1)
  with pytest.raises(ValueError, match="zip"):
    FusionEngine([good, Short({"q": []})]).search(["q"], 1)


def test_one_id_with_two_texts_is_an_error_that_shows_both():
  engine = FusionEngine([Fake({"q": passages("ab")}), Fake({"q": passages("b", "other text of ")})])
  with pytest.raises(CorpusError, match="'b'.*contents of b.*other text of b.*one corpus"):
    engine.search(["q"], 3)


def test_the_parts_are_asked_at_the_same_time():
  together = threading.Barrier(3, timeout=10)  # none passes it before all have come
  parts = [Fake({"q": passages("a")}, before=together.wait) for _ in range(3)]
  assert ids(FusionEngine(parts).search(["q"], 1)[0]) == ["a"]


def test_the_fingerprint_is_of_the_parts_and_of_how_they_are_fused():
  part = lambda name: Fake({}, fingerprint=name)
  engine = lambda a="a", b="b", **options: FusionEngine([part(a), part(b)], **options).fingerprint
  different = [engine(), engine(a="c"), engine(b="c"), engine(a="b", b="a"), engine(fetch=51),
               engine(k=61), engine(weights=[1.0, 2.0])]
  assert len(set(different)) == len(different)
  assert engine() == engine(weights=[1, 1], k=60.0, fetch=50)


def test_closing_closes_the_parts():
  parts = [Fake({"q": passages("a")}), Fake({"q": passages("a")})]
  with FusionEngine(parts) as engine:
    engine.search(["q"], 1)
  assert [part.closed for part in parts] == [True, True]


def test_an_engine_that_cannot_be_is_refused():
  part = Fake({})
  for engines, options, why in (([part], {}, "1 engine"), ([part] * 2, {"fetch": 0}, "fetch is 0"),
                                ([part] * 2, {"weights": [1.0]}, "wanted 2 numbers"),
                                ([part] * 2, {"k": -1}, "k is -1")):
    with pytest.raises(CorpusError, match=why):
      FusionEngine(engines, **options)
  with pytest.raises(ValueError, match="top_k is 0"):
    FusionEngine([part, part]).search(["q"], 0)
