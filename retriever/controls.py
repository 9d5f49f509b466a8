"""Engines for ablations: what a policy learns when the search is of no use."""

from __future__ import annotations

import hashlib
import typing
from collections.abc import Sequence

import numpy as np

from retriever.protocol import Found, Passage, SearchEngine, all_found, check_top_k


@typing.runtime_checkable
class Local(typing.Protocol):
  """An engine whose passages can also be read by row: what random ones are drawn from."""

  fingerprint: str

  def __len__(self) -> int:
    """How many passages there are."""

  def passage(self, row: int, score: float) -> Passage:
    """The passage of a row."""

  def search_each(self, queries: Sequence[str], top_k: int) -> list[Found]:
    """As a SearchEngine's."""

  def close(self) -> None:
    """As a SearchEngine's."""


class EmptyEngine(SearchEngine):
  """A control: finds nothing, whatever is asked."""

  fingerprint = "empty"

  def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    return [[] for _ in queries]


class RandomEngine(SearchEngine):
  """A control: passages that have nothing to do with the query, always the same ones for it."""

  def __init__(self, engine: Local, seed: int):
    self._engine, self._seed = engine, _checked(seed)
    self.fingerprint = f"random-{seed}-{engine.fingerprint}"

  def __len__(self) -> int:
    return len(self._engine)

  def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    check_top_k(top_k)
    return [self._draw(q, top_k) for q in queries]

  def close(self) -> None:
    self._engine.close()

  def _draw(self, query: str, top_k: int) -> list[Passage]:
    rows = _rng(self._seed, query).choice(len(self), min(top_k, len(self)), replace=False)
    return [self._engine.passage(row, 0.0) for row in rows.tolist()]


class NoisyEngine(SearchEngine):
  """A control: with probability `p` a query gets random passages, and otherwise the engine's own.

  Which queries those are, and what they get, depends on seed and query alone: not on order,
  neighbours or processes. The random passages are RandomEngine's for the same seed.
  """

  def __init__(self, engine: Local, p: float, seed: int):
    if not 0 <= p <= 1:
      raise ValueError(f"p is {p}, wanted a probability from 0 to 1")
    self._engine, self._p, self._seed = engine, p, _checked(seed)
    self._random = RandomEngine(engine, seed)
    self.fingerprint = f"noisy-{float(p)!r}-{seed}-{engine.fingerprint}"

  def __len__(self) -> int:
    return len(self._engine)

  def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    return all_found(self.search_each(queries, top_k))

  def search_each(self, queries: Sequence[str], top_k: int) -> list[Found]:
    check_top_k(top_k)
    noisy = [self._is_noisy(q) for q in queries]
    kept = [q for q, hit in zip(queries, noisy) if not hit]
    found = iter(self._engine.search_each(kept, top_k) if kept else [])
    drawn = iter(self._random.search([q for q, hit in zip(queries, noisy) if hit], top_k))
    return [next(drawn if hit else found) for hit in noisy]

  def close(self) -> None:
    self._engine.close()

  def _is_noisy(self, query: str) -> bool:
    return bool(_rng(self._seed, query, 1).random() < self._p)


def _rng(seed: int, query: str, stream: int = 0) -> np.random.Generator:
  """The random numbers of one query; `stream` 1 is independent of 0."""
  digest = hashlib.blake2b(query.encode("utf-8", "surrogatepass"), digest_size=8).digest()
  # Zeros at the end would count for nothing: stream 0 is the seed without one.
  return np.random.default_rng([seed, int.from_bytes(digest, "little"), *[stream] * (stream > 0)])


def _checked(seed: int) -> int:
  if seed < 0:
    raise ValueError(f"seed is {seed}, wanted 0 or more")
  return seed
