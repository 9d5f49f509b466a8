"""Controls: engines that find nothing, anything, or sometimes the wrong thing."""

from __future__ import annotations

import random

import numpy as np
import pytest

from retriever.controls import EmptyEngine, NoisyEngine, RandomEngine
from retriever.protocol import Passage, RetrievalError, SearchEngine, check_top_k

QUERIES = [f"query {n}" for n in range(2000)] + ["", "\ud800 \0"]


class Rows(SearchEngine):
  """Three hundred passages, of which each query finds the first."""

  fingerprint = "rows"

  def __init__(self):
    self.asked, self.closed = [], False

  def __len__(self):
    return 300

  def passage(self, row, score):
    return Passage(str(row), f'"{row}"\ntext', score)

  def search(self, queries, top_k):
    raise AssertionError("a control asks for each query's own fate")

  def search_each(self, queries, top_k):
    check_top_k(top_k)
    self.asked.append(list(queries))
    return [RetrievalError("down") if q == "bad" else
            [self.passage(row, 1.0) for row in range(top_k)] for q in queries]

  def close(self):
    self.closed = True


def test_the_empty_engine_finds_nothing():
  assert EmptyEngine()(["a", "b"], 3) == [[], []]


def test_the_share_of_noise_is_p_and_the_rest_is_the_engines():
  engine = Rows()
  noisy = NoisyEngine(engine, 0.3, 0)
  found = noisy.search(QUERIES, 3)
  drawn = RandomEngine(engine, 0).search(QUERIES, 3)
  own = engine.search_each(QUERIES, 3)
  hit = [f == d for f, d in zip(found, drawn)]
  # 2,002 draws of p = 0.3: mean 600.6, standard deviation sqrt(2002 * 0.3 * 0.7) = 20.5.
  assert abs(sum(hit) - 600.6) < 4 * 20.5
  assert all(f == (d if h else o) for f, d, o, h in zip(found, drawn, own, hit))
  assert all(p.score == 0.0 for f, h in zip(found, hit) if h for p in f)
  # What is drawn says nothing of whether it is: rows 0 to 299 average 149.5, +- 86.6 / sqrt(600).
  assert abs(np.mean([int(f[0].id) for f, h in zip(found, hit) if h]) - 149.5) < 4 * 3.6
  # A query that gets noise costs no search.
  assert engine.asked[0] == [q for q, h in zip(QUERIES, hit) if not h]


def test_noise_depends_on_seed_and_query_alone():
  noisy = NoisyEngine(Rows(), 0.5, 7)
  together = dict(zip(QUERIES, noisy.search(QUERIES, 2)))
  shuffled = random.Random(0).sample(QUERIES, len(QUERIES))
  again = NoisyEngine(Rows(), 0.5, 7)
  assert all(again.search([q], 2)[0] == together[q] for q in shuffled[:300])
  other = NoisyEngine(Rows(), 0.5, 8).search(QUERIES, 2)
  assert sum(a == b for a, b in zip(together.values(), other)) < 0.4 * len(QUERIES)
  # Whether a query is noisy says nothing of what it would get: more noise adds, and changes none.
  more = NoisyEngine(Rows(), 0.8, 7).search(QUERIES, 2)
  drawn = RandomEngine(Rows(), 7).search(QUERIES, 2)
  assert all(m == d for m, f, d in zip(more, together.values(), drawn) if f == d)


def test_no_noise_and_nothing_but_noise():
  assert NoisyEngine(Rows(), 0.0, 0).search(QUERIES, 3) == Rows().search_each(QUERIES, 3)
  engine = Rows()
  drawn = RandomEngine(Rows(), 0).search(QUERIES, 3)
  assert NoisyEngine(engine, 1.0, 0).search(QUERIES, 3) == drawn
  assert engine.asked == []


def test_one_querys_failure_is_its_own():
  for seed in range(20):  # some of which give "bad" noise, which cannot fail
    noisy = NoisyEngine(Rows(), 0.5, seed)
    found = noisy.search_each(["a", "bad", "b"], 2)
    assert isinstance(found[1], RetrievalError) != (
        found[1] == RandomEngine(Rows(), seed).search(["bad"], 2)[0])
    assert len(found[0]) == len(found[2]) == 2
    if isinstance(found[1], RetrievalError):
      with pytest.raises(RetrievalError, match="down"):
        noisy.search(["a", "bad"], 2)


def test_fingerprints_tell_controls_apart():
  engine = Rows()
  prints = [c.fingerprint for c in (
      EmptyEngine(), engine, RandomEngine(engine, 0), RandomEngine(engine, 1),
      NoisyEngine(engine, 0.3, 0), NoisyEngine(engine, 0.3, 1), NoisyEngine(engine, 0.30001, 0))]
  assert len(set(prints)) == len(prints)


@pytest.mark.parametrize("make", [lambda e: RandomEngine(e, 0), lambda e: NoisyEngine(e, 0.5, 0)])
def test_controls_are_engines(make):
  engine = Rows()
  with make(engine) as control:
    assert len(control) == 300 and isinstance(control, SearchEngine)
    assert control.search([], 3) == [] == control.search_each([], 3)
    with pytest.raises(ValueError, match="top_k is 0"):
      control.search(["q"], 0)
    assert all(len({p.id for p in found}) == min(300, 999) for found in control.search(["x"], 300))
  assert engine.closed


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_p_is_a_probability(p):
  with pytest.raises(ValueError, match="wanted a probability"):
    NoisyEngine(Rows(), p, 0)
  with pytest.raises(ValueError, match="seed is -1"):
    NoisyEngine(Rows(), 0.5, -1)
