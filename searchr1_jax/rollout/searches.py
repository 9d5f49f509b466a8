"""Searches behind the back of a decoding device: batched, bounded, with a deadline each.

Queries go out as their rows stop, together with all that wait; their rows are answered when the
engine does. A search that fails, or that nobody has heard of by its deadline, is a failed search.
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
import time

from retriever.protocol import Found, RetrievalError, Search
from searchr1_jax.rollout import episode as ep
from searchr1_jax.types import UserError

LONGEST = 1e6  # seconds: a lock cannot be waited for as long as a float can say


@dataclasses.dataclass(frozen=True)
class Retrieval:
  """How searches are run: at most `in_flight` requests at a time, `seconds` for each of them.

  A request that ran out of time is given up and no longer counted, though its thread may hang on.
  `deterministic`: what a decode call found is asked before the next one and heard after it,
  however long that takes, so that no clock but a deadline decides what the device computes.
  """

  in_flight: int = 4
  seconds: float = 120.0
  deterministic: bool = True

  def __post_init__(self):
    if self.in_flight < 1 or not 0 < self.seconds <= LONGEST:
      raise UserError(f"{self.in_flight} requests in flight of {self.seconds} s each cannot be; "
                      f"set in_flight to 1 or more, seconds above 0 and up to {LONGEST:g}")


@dataclasses.dataclass
class _Request:
  asked: dict[int, ep.Search]
  deadline: float
  ended: bool = False
  answer: list[Found] | BaseException | None = None


class Searches:
  """The searches of one rollout. Rows are named by number; each has one search at a time."""

  def __init__(self, search: Search, how: Retrieval):
    self._search, self._how = search, how
    self._waiting: dict[int, ep.Search] = {}
    self._flying: collections.OrderedDict[int, _Request] = collections.OrderedDict()
    self._landed: queue.SimpleQueue[int] = queue.SimpleQueue()
    self._sent = 0

  def __len__(self) -> int:
    """Rows that wait for passages."""
    return len(self._waiting) + sum(len(r.asked) for r in self._flying.values())

  def ask(self, row: int, search: ep.Search) -> None:
    """Notes a search; `send` sends it."""
    self._waiting[row] = search

  def send(self) -> None:
    """Sends all that wait as one request (one for each top_k), as far as `in_flight` allows."""
    while self._waiting and len(self._flying) < self._how.in_flight:
      top_k = next(iter(self._waiting.values())).top_k
      asked = {row: s for row, s in self._waiting.items() if s.top_k == top_k}
      self._waiting = {row: s for row, s in self._waiting.items() if row not in asked}
      request = _Request(asked, time.monotonic() + self._how.seconds)
      self._sent += 1
      self._flying[self._sent] = request
      # A daemon: a search that hangs holds up neither the rollout nor the end of the program.
      threading.Thread(target=self._run, args=(self._sent, request, top_k), daemon=True,
                       name=f"search-{self._sent}").start()

  def heard(self, wait: bool) -> list[tuple[int, ep.Event]]:
    """Answers that came; if `wait`, at least one request's, or in deterministic mode all."""
    events: list[tuple[int, ep.Event]] = []
    if self._how.deterministic:
      while wait and self._flying:
        self._land(wait=True)
        events += self._settled(in_order=True)
        self.send()
      return events
    while self._flying:
      self._land(wait and not events)
      came = self._settled(in_order=False)
      if not came and not wait:
        break
      events += came
      self.send()
      if events:
        wait = False
    return events

  def _run(self, number: int, request: _Request, top_k: int) -> None:
    try:
      request.answer = self._search([s.query for s in request.asked.values()], top_k)
    except BaseException as e:  # told to the rollout, which decides
      request.answer = e
    request.ended = True
    self._landed.put(number)

  def _land(self, wait: bool) -> None:
    """Hears of requests that ended; waits for one until the first deadline, if asked to."""
    first = min(r.deadline for r in self._flying.values())
    try:
      self._landed.get(timeout=max(0.0, first - time.monotonic()) if wait else 0.0)
    except queue.Empty:
      pass

  def _settled(self, in_order: bool) -> list[tuple[int, ep.Event]]:
    """Takes the requests that ended or ran out of time; `in_order`: none before an older one."""
    events: list[tuple[int, ep.Event]] = []
    for number, request in list(self._flying.items()):
      if not request.ended and time.monotonic() < request.deadline:
        if in_order:
          break
        continue
      del self._flying[number]
      events += self._events(request)
    return events

  def _events(self, request: _Request) -> list[tuple[int, ep.Event]]:
    """What became of each row's search; an error other than the engine's own is raised."""
    asked, answer = request.asked, request.answer
    if not request.ended:
      reason = f"no answer within {self._how.seconds:g} s"
    elif isinstance(answer, RetrievalError):
      reason = str(answer)
    elif isinstance(answer, BaseException):
      raise answer
    elif answer is None or len(answer) != len(asked):
      answered = 0 if answer is None else len(answer)
      reason = f"the engine answered {answered} queries of {len(asked)}"
    else:
      return [(row, _event(found)) for row, found in zip(asked, answer)]
    return [(row, ep.SearchFailed(reason)) for row in asked]


def _event(found: Found) -> ep.Event:
  """A query's own failure takes its own row's episode, not its neighbours'."""
  if isinstance(found, RetrievalError):
    return ep.SearchFailed(str(found))
  return ep.SearchDone(tuple(found))
