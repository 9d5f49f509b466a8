"""Engines that many callers share: searches are kept, and single queries travel as one batch."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError

from retriever.protocol import (Found, Passage, RetrievalError, SearchEngine, all_found,
                                check_top_k)

OVERHEAD_BYTES = 256  # of Python's objects, for each passage and each search kept
# Of the last shared search: how long the next one waits for those it answered. Without it the first
# of them to ask again is searched for alone, every other time: a fifth of the throughput of 64.
PAUSE = 0.1
CLOSE_SECONDS = 5.0  # that a search under way may still take


class Busy(RetrievalError):
  """So many queries wait already that this one was not taken; `seconds` until there is room."""

  def __init__(self, waiting: int, seconds: float):
    super().__init__(f"{waiting} queries wait already; ask again in {seconds:.1f} s")
    self.seconds = seconds


class Kept:
  """The latest searches within `max_bytes` of text (0: none), safe between threads."""

  def __init__(self, max_bytes: int):
    self._room, self._lock = max_bytes, threading.Lock()
    self._found: collections.OrderedDict[tuple[str, int], tuple[Passage, ...]] = (
        collections.OrderedDict())

  def get(self, query: str, top_k: int) -> list[Passage] | None:
    with self._lock:
      passages = self._found.get((query, top_k))
      if passages is None:
        return None
      self._found.move_to_end((query, top_k))
    return list(passages)

  def put(self, query: str, top_k: int, passages: Sequence[Passage]) -> None:
    with self._lock:
      old = self._found.pop((query, top_k), None)
      self._room += 0 if old is None else _bytes(query, old)
      self._found[query, top_k] = tuple(passages)
      self._room -= _bytes(query, passages)
      while self._room < 0:
        (oldest, _), dropped = self._found.popitem(last=False)
        self._room += _bytes(oldest, dropped)


class Cached(SearchEngine):
  """Answers what it has answered before; asks `engine`, which it owns, for the rest, each once.

  `max_bytes`: text of queries and passages to keep, the latest used (LRU). Failures are not kept.
  """

  def __init__(self, engine: SearchEngine, max_bytes: int = 32 << 20):
    self.engine, self._kept = engine, Kept(max_bytes)
    self.fingerprint = engine.fingerprint

  def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    return all_found(self.search_each(queries, top_k))

  def search_each(self, queries: Sequence[str], top_k: int) -> list[Found]:
    check_top_k(top_k)
    found: dict[str, Found | None] = {q: self._kept.get(q, top_k) for q in queries}
    missing = [q for q, passages in found.items() if passages is None]
    if missing:
      for query, one in zip(missing, self.engine.search_each(missing, top_k), strict=True):
        found[query] = one
        if not isinstance(one, RetrievalError):
          self._kept.put(query, top_k, one)
    return [f if isinstance(f, RetrievalError) else list(f) for f in map(found.get, queries)]

  def close(self) -> None:
    self.engine.close()


class Batched(SearchEngine):
  """Lets callers of `engine`, which it owns, share its searches: what comes in during one search
  makes up the next one, equal queries once.

  max_queries: different queries in one search.
  max_waiting: queries that may wait; more are refused (Busy).
  seconds: how long a caller waits for its answer, after which it gets a RetrievalError and, if its
    query has not been searched for by then, it never is.
  on_batch: told the size of each search and the seconds it took.

  Nobody waits for others to come, but for this: after a search that several shared, the next one
  is held back up to a tenth of its time, so that those it answered can ask again together.
  """

  def __init__(self, engine: SearchEngine, *, max_queries: int = 512, max_waiting: int = 4096,
               seconds: float = 120.0,
               on_batch: Callable[[int, float], None] = lambda size, seconds: None):
    self._engine, self._on_batch = engine, on_batch
    self._max_queries, self._max_waiting, self._seconds = max_queries, max_waiting, seconds
    self.fingerprint = engine.fingerprint
    self._changed = threading.Condition()
    self._waiting: collections.deque[_Query] = collections.deque()
    self._closed = False
    self._searching = 0  # queries in the search under way
    self._pace = 0.0  # seconds a query, of late
    self._last, self._pause_until = 0, 0.0  # queries of the last search; until when the next waits
    # A daemon: a search that hangs does not hold up the end of the program.
    self._thread = threading.Thread(target=self._run, daemon=True, name="batched-search")
    self._thread.start()

  def __len__(self) -> int:
    """Queries that wait for a search."""
    return len(self._waiting)

  def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    return all_found(self.search_each(queries, top_k))

  def search_each(self, queries: Sequence[str], top_k: int) -> list[Found]:
    try:
      future = self.submit(queries, top_k)
      return future.result(self._seconds)
    except RetrievalError as e:
      return [e] * len(queries)
    except TimeoutError:
      if future.done():  # the engine's own, not this wait's
        raise
      future.cancel()
      return [RetrievalError(f"no answer within {self._seconds:g} s")] * len(queries)

  def submit(self, queries: Sequence[str], top_k: int,
             seconds: float | None = None) -> Future[list[Found]]:
    """Queues the queries and returns at once; Busy if there is no room for them.

    What has not been searched for within `seconds`, or is cancelled by then, never is.
    """
    check_top_k(top_k)
    until = time.monotonic() + (self._seconds if seconds is None else seconds)
    request = _Request(len(queries), until)
    with self._changed:
      if self._closed:
        raise RetrievalError("the engine was closed")
      if self._waiting and len(self._waiting) + len(queries) > self._max_waiting:
        ahead = len(self._waiting) + self._searching
        raise Busy(len(self._waiting), ahead * self._pace)
      self._waiting.extend(_Query(q, top_k, request, i) for i, q in enumerate(queries))
      self._changed.notify_all()
    return request.future

  def close(self) -> None:
    """Lets the search under way end, fails what waits, and closes the engine."""
    with self._changed:
      self._closed = True
      left, self._waiting = self._waiting, collections.deque()
      self._changed.notify_all()
    self._thread.join(CLOSE_SECONDS)
    for query in left:
      query.request.fail(RetrievalError("the engine was closed"))
    if not self._thread.is_alive():
      self._engine.close()

  def _run(self) -> None:
    while batch := self._next_batch():
      began = time.monotonic()
      queries = list(batch)
      try:
        found = self._engine.search_each(queries, batch[queries[0]][0].top_k)
      except BaseException as e:  # raised again by whoever waits for it
        found = e
      self._settle(batch, found, time.monotonic() - began)

  def _next_batch(self) -> dict[str, list[_Query]]:
    """Who asks for each of the next queries, all of one top_k; empty once closed."""
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._waiting or self._closed)
        pause = self._pause_until - time.monotonic()
        if pause > 0:
          self._changed.wait_for(lambda: self._closed or len(self._waiting) >= self._last, pause)
        if self._closed:
          return {}
        batch, late, self._waiting = _take(self._waiting, self._max_queries, time.monotonic())
        self._searching = len(batch)
      for query in late:
        query.answer(RetrievalError("nobody came to search for it within its time"))
      if batch:
        return batch

  def _settle(self, batch: dict[str, list[_Query]], found: Sequence[Found] | BaseException,
              seconds: float) -> None:
    asked = [query for asking in batch.values() for query in asking]
    with self._changed:
      pace = seconds / len(batch)
      self._pace = 0.8 * self._pace + 0.2 * pace if self._pace else pace
      self._searching, self._last = 0, len(asked)
      self._pause_until = time.monotonic() + (PAUSE * seconds if len(asked) > 1 else 0.0)
    self._on_batch(len(batch), seconds)
    if not isinstance(found, BaseException) and len(found) != len(batch):
      found = RetrievalError(f"the engine answered {len(found)} queries of {len(batch)}")
    if isinstance(found, RetrievalError):
      found = [found] * len(batch)
    if isinstance(found, BaseException):
      for query in asked:
        query.request.fail(found)
      return
    for asking, one in zip(batch.values(), found):
      for query in asking:
        query.answer(one)


class _Request:
  """One call of `submit`: its answers so far, told when they are all there."""

  def __init__(self, size: int, until: float):
    self.future: Future[list[Found]] = Future()
    self.until = until
    self._found: list[Found | None] = [None] * size
    self._missing = size
    if not size:
      self.future.set_result([])

  def answer(self, position: int, found: Found) -> None:
    """Called by the thread that searches."""
    self._found[position] = found
    self._missing -= 1
    if not self._missing:
      with contextlib.suppress(InvalidStateError):  # its caller gave up just now
        self.future.set_result(self._found)

  def fail(self, error: BaseException) -> None:
    """Every query of the request at once."""
    with contextlib.suppress(InvalidStateError):  # it has failed already, or nobody waits
      self.future.set_exception(error)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Query:
  text: str
  top_k: int
  request: _Request
  position: int

  def answer(self, found: Found) -> None:
    self.request.answer(self.position, found if isinstance(found, RetrievalError) else list(found))


def _take(waiting: collections.deque[_Query], most: int, now: float) -> tuple[
    dict[str, list[_Query]], list[_Query], collections.deque[_Query]]:
  """(the next batch, those who came too late, who still waits): the first in line says top_k."""
  batch: dict[str, list[_Query]] = {}
  late: list[_Query] = []
  left: collections.deque[_Query] = collections.deque()
  top_k = None
  for query in waiting:
    if query.request.future.done():  # cancelled, or failed with another of its queries
      continue
    if query.request.until < now:
      late.append(query)
    elif query.top_k != (top_k := top_k or query.top_k):
      left.append(query)
    elif query.text in batch or len(batch) < most:
      batch.setdefault(query.text, []).append(query)
    else:
      left.append(query)
  return batch, late, left


def _bytes(query: str, passages: Sequence[Passage]) -> int:
  """About what a kept search takes."""
  texts = [query, *(p.contents for p in passages)]
  return sum(map(len, texts)) + OVERHEAD_BYTES * len(texts)
