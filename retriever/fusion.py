"""Several engines over one corpus as one: their rankings added up, their scores never compared."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from retriever.protocol import (CorpusError, Found, Passage, RetrievalError, SearchEngine,
                                all_found, check_top_k)

FETCH = 50  # places of each ranking that count
K = 60  # as published: what a place is worth falls slowly


class FusionEngine(SearchEngine):
  """Asks its parts at the same time and ranks by `reciprocal_rank`; whole answers or an error.

  fetch: how many passages each part is asked for, at least. weights: one a part, 1 for each if
  None. A query that one part could not answer has that part's error, never the others' answer:
  what a query finds must not depend on which engine is up.
  """

  def __init__(self, engines: Sequence[SearchEngine], fetch: int = FETCH, k: float | int = K,
               weights: Sequence[float | int] | None = None):
    if len(engines) < 2:
      raise CorpusError(f"{len(engines)} engine to fuse, wanted two or more; use it alone")
    if fetch < 1:
      raise CorpusError(f"fetch is {fetch}, wanted at least 1 ({FETCH} does well)")
    self._engines, self._fetch, self._k = list(engines), fetch, k
    self._weights = [1.0] * len(engines) if weights is None else [float(w) for w in weights]
    _check(len(engines), k, self._weights)

  @property
  def fingerprint(self) -> str:
    """Changes with any part's, and with how they are fused."""
    parts = [engine.fingerprint for engine in self._engines]
    text = json.dumps(["fuse", self._fetch, float(self._k), self._weights, parts])
    return hashlib.sha256(text.encode()).hexdigest()

  def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    return all_found(self.search_each(queries, top_k))

  def search_each(self, queries: Sequence[str], top_k: int) -> list[Found]:
    check_top_k(top_k)
    fetch = max(self._fetch, top_k)
    with ThreadPoolExecutor(len(self._engines), thread_name_prefix="fusion") as pool:
      asked = [pool.submit(e.search_each, queries, fetch) for e in self._engines]
      answers = zip(*(future.result() for future in asked), strict=True)
    return [self._fuse(parts, top_k) for parts in answers]

  def close(self) -> None:
    for engine in self._engines:
      engine.close()

  def _fuse(self, parts: Sequence[Found], top_k: int) -> Found:
    """One query's answer from those of the parts."""
    for found in parts:
      if isinstance(found, RetrievalError):
        return found
    passages: dict[str, Passage] = {}
    for passage in (p for found in parts for p in found):
      known = passages.setdefault(passage.id, passage)
      if known.contents != passage.contents:
        raise CorpusError(f"two passages are called {passage.id!r}: one begins "
                          f"{known.contents[:60]!r}, one {passage.contents[:60]!r}; fuse engines "
                          "over one corpus, whose ids are unique")
    ranked = reciprocal_rank([[p.id for p in found] for found in parts], self._k, self._weights)
    return [Passage(id_, passages[id_].contents, score) for id_, score in ranked[:top_k]]


def reciprocal_rank(rankings: Sequence[Sequence[str]], k: float | int = K,
                    weights: Sequence[float | int] | None = None) -> list[tuple[str, float]]:
  r"""Fuses rankings: each passage's id and score, best first, equal ones by their ids.

  s(d) = \sum_r w_r / (k + rank_r(d)), over those rankings r that have d

  rankings: ids of passages, best first; ranks count from 1. k: how little the first places stand
  out, at least 0. weights: w_r, above 0, one a ranking; 1 for each if None. The order of the
  rankings changes nothing. Source: Cormack, Clarke and Büttcher, "Reciprocal Rank Fusion
  outperforms Condorcet and individual Rank Learning Methods", SIGIR 2009; there without weights,
  and k = 60.
  """
  weights = [1.0] * len(rankings) if weights is None else weights
  _check(len(rankings), k, weights)
  terms: dict[str, list[float]] = {}
  for ranking, weight in zip(rankings, weights):
    if len(set(ranking)) != len(ranking):
      twice = next(id_ for n, id_ in enumerate(ranking) if id_ in ranking[:n])
      raise CorpusError(f"a ranking has {twice!r} twice; give each passage an id of its own")
    for rank, id_ in enumerate(ranking, 1):
      terms.setdefault(id_, []).append(weight / (k + rank))
  scores = {id_: math.fsum(parts) for id_, parts in terms.items()}
  return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


def _check(rankings: int, k: float | int, weights: Sequence[float | int]) -> None:
  if not 0 <= k < math.inf:
    raise CorpusError(f"k is {k}, wanted at least 0 ({K} does well)")
  if len(weights) != rankings or not all(0 < w < math.inf for w in weights):
    raise CorpusError(f"weights are {list(weights)}, wanted {rankings} numbers above 0; leave out "
                      "an engine that shall not count")
