"""A search engine that is elsewhere: HTTP to one or several servers of the same index.

Works with `python -m retriever.serve`, whose every answer it checks against its proof, and with
any server of the same wire form, of whose answers it can check the form alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import random
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import stamina

from retriever import wire
from retriever.exchange import Exchange, Fault, Reply, check_status
from retriever.protocol import (CorpusError, Found, Passage, RetrievalError, SearchEngine,
                                all_found, check_top_k)
from retriever.replicas import Replica, Replicas

HEALTH_SECONDS, CLOSE_SECONDS = 5.0, 5.0
LOOK_SECONDS = 0.2  # between looks for a first server
BACKOFF_SECONDS = (0.05, 5.0)  # before the second try, and at most; jitter comes on top
T = TypeVar("T")


class Client(SearchEngine):
  """Asks servers, again and again until the deadline: faults, lies and delays never get out.

  urls: where the servers are, with or without /retrieve at the end; they take turns.
  seconds: the deadline of a search, over connecting, reading, waiting and trying again.
  attempt_seconds: of one try.
  attempts: how often a query is sent whose failure the server reports.
  token: sent as a bearer token, never along a redirect (none is followed).
  fingerprint: of the index that must answer there; by default, of the one that does when this is
    made. Servers that do not tell give the digest of the addresses for it.
  accept_empty: whether an answer without passages counts, of a server that proves nothing.

  Made, it waits for a first server, up to `seconds`. After a deadline spent in vain further
  searches get one try each, until one succeeds.
  """

  def __init__(self, urls: str | Sequence[str], *, seconds: float = 120.0,
               attempt_seconds: float = 30.0, attempts: int = 4, token: str | None = None,
               fingerprint: str | None = None, accept_empty: bool = False):
    self._urls = _checked_urls(urls)
    for name, value in (("seconds", seconds), ("attempt_seconds", attempt_seconds)):
      if not 0 < value <= 1e6:
        raise ValueError(f"{name} is {value}, wanted above 0")
    if token is not None and not wire.is_token(token):
      raise ValueError("the token is not of printable ASCII characters without spaces around it")
    if attempts < 1:
      raise ValueError(f"attempts is {attempts}, wanted at least 1")
    self._seconds, self._attempt_seconds, self._attempts = seconds, attempt_seconds, attempts
    self._accept_empty, self._vain = accept_empty, False
    # Which index must answer: None where servers do not tell; settled once one has answered.
    self._index, self._settled = fingerprint, fingerprint is not None
    self._wrong: dict[str, str] = {}  # servers that are not the right ones, and why
    self._limits = wire.Limits()
    self._closing, self._closed = threading.Lock(), False
    # Deadlines over whole exchanges need a loop that can give one up wherever it stands.
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever, daemon=True,
                                    name="search-client")
    self._thread.start()
    self._exchange, self._replicas = Exchange(token), Replicas(self._urls, self._is_healthy)
    with contextlib.ExitStack() as undo:
      undo.callback(self.close)
      self._wait(self._open())
      undo.pop_all()
    self.fingerprint = self._index or _digest(self._urls)

  def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    return all_found(self.search_each(queries, top_k))

  def search_each(self, queries: Sequence[str], top_k: int) -> list[Found]:
    check_top_k(top_k)
    try:
      return self._wait(self._search([wire.sendable(q) for q in queries], top_k))
    except RetrievalError as e:
      return [e] * len(queries)

  def close(self) -> None:
    with self._closing:
      if self._closed:
        return
      self._closed = True
      shut = asyncio.run_coroutine_threadsafe(self._shut(), self._loop)
    with contextlib.suppress(TimeoutError):
      shut.result(CLOSE_SECONDS)
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join(CLOSE_SECONDS)
    if not self._thread.is_alive():
      self._loop.close()

  def _wait(self, work: Coroutine[Any, Any, T]) -> T:
    """Runs something in the loop's thread and waits for it here."""
    with self._closing:  # what is sent to the loop before `close` is ended by it
      if self._closed:
        work.close()
        raise RetrievalError("the search client was closed")
      future = asyncio.run_coroutine_threadsafe(work, self._loop)
    try:
      return future.result()
    except concurrent.futures.CancelledError as e:
      raise RetrievalError("the search client was closed") from e
    finally:
      future.cancel()  # where the wait was interrupted: nobody wants the answer any more

  # All below runs in the loop's thread.

  async def _open(self) -> None:
    """Waits for a server, and settles which index it is that answers."""
    try:
      async with asyncio.timeout(self._seconds):
        async for look in stamina.retry_context(Fault, attempts=None, timeout=None,
                                                wait_initial=LOOK_SECONDS, wait_exp_base=1,
                                                wait_jitter=0):
          with look:
            if not await self._replicas.probe_all():
              self._refuse_wrong()
              raise Fault(f"no server yet ({self._replicas.reasons()})")
    except TimeoutError as e:
      raise RetrievalError(f"no server within {self._seconds:g} s "
                           f"({self._replicas.reasons()})") from e
    self._refuse_wrong()

  def _refuse_wrong(self) -> None:
    """Before anything has been searched, a server that is not the right one is a mistake."""
    if self._wrong:
      raise CorpusError("; ".join(f"{url} {reason}" for url, reason in self._wrong.items()))

  async def _shut(self) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
      task.cancel()
    if others:
      await asyncio.wait(others, timeout=CLOSE_SECONDS / 2)
    await self._exchange.close()

  async def _search(self, queries: Sequence[str], top_k: int) -> list[Found]:
    """What became of each query, in as many requests as it takes."""
    limits = self._limits
    if top_k > limits.top_k:
      raise RetrievalError(f"{top_k} passages a query asked of {self._urls[0]}, which gives up to "
                           f"{limits.top_k}")
    found: list[Found] = [
        RetrievalError(f"a query of {len(q):,} characters, where {self._urls[0]} takes up to "
                       f"{limits.query_chars:,}") for q in queries]
    short = [i for i, q in enumerate(queries) if len(q) <= limits.query_chars]
    parts = [[short[i] for i in part]
             for part in wire.split([queries[i] for i in short], top_k, limits)]
    answers = await asyncio.gather(
        *(self._ask([queries[i] for i in part], top_k) for part in parts))
    for part, answer in zip(parts, answers):
      for i, one in zip(part, answer, strict=True):
        found[i] = one
    return found

  async def _ask(self, queries: Sequence[str], top_k: int) -> list[Found]:
    """What became of queries that fit into one request, by the deadline."""
    asking = _Asking(queries)
    try:
      async with asyncio.timeout(self._seconds):
        if self._vain and not await self._replicas.probe_all():
          raise asking.last
        async for attempt in stamina.retry_context(
            asking.pause, attempts=1 if self._vain else None, timeout=None,
            wait_initial=BACKOFF_SECONDS[0], wait_max=BACKOFF_SECONDS[1],
            wait_jitter=BACKOFF_SECONDS[0]):
          with attempt:
            asking.replica = await self._replicas.pick(avoid=asking.replica)
            missing = asking.missing()
            answers = await self._ask_once(asking.replica, [queries[i] for i in missing], top_k)
            asking.note(missing, answers, self._attempts)
    except (Fault, TimeoutError) as e:
      self._vain = not asking.found and asking.last.again
      limit = f"no answer within {self._seconds:g} s; " if isinstance(e, TimeoutError) else ""
      failed = RetrievalError(f"{limit}{asking.last} ({self._replicas.reasons()})")
      return [asking.found.get(i, failed) for i in range(len(queries))]
    return [asking.found[i] for i in range(len(queries))]

  async def _ask_once(self, replica: Replica, queries: Sequence[str], top_k: int) -> list[Found]:
    """One try with one server; whatever goes wrong is a Fault."""
    try:
      reply = await self._exchange.ask(
          "POST", f"{replica.url}/retrieve", self._attempt_seconds,
          wire.write_request(queries, top_k),
          {wire.SECONDS_HEADER: f"{self._attempt_seconds:g}"})
      check_status(reply)
      found = _read(reply, queries, top_k, self._index, self._accept_empty)
    except Fault as e:
      if e.again and e.after is None:
        self._replicas.failed(replica, str(e))
      raise
    replica.answered()
    self._vain = False
    return found

  async def _is_healthy(self, replica: Replica) -> bool:
    """Asks for /healthz; a server that has none is healthy if it says so."""
    try:
      reply = await self._exchange.ask("GET", f"{replica.url}/healthz", HEALTH_SECONDS)
    except Fault as e:
      replica.reason = f"/healthz: {e}"
      return False
    if reply.status >= 500:
      replica.reason = f"/healthz: status {reply.status}"
      return False
    wrong = self._what_is_wrong(reply)
    if wrong is None:
      self._wrong.pop(replica.url, None)
    else:
      replica.reason = self._wrong[replica.url] = wrong
    return wrong is None

  def _what_is_wrong(self, reply: Reply) -> str | None:
    """Why a server that answers is not one of ours; the first one settles what is."""
    health = wire.read_health(reply.body) if reply.status == 200 else None
    index = None if health is None else health.fingerprint
    if not self._settled:
      self._index, self._settled = index, True
    if index != self._index:
      return f"serves {_name(index)}, wanted {_name(self._index)}"
    if health is not None:
      if not health.authorized:
        return ("does not take this client's token; give the spec its token_env, the name of the "
              "environment variable that holds the server's")
      self._limits = wire.stricter(self._limits, health.limits)
    return None


class _Asking:
  """One request's queries: what has been found so far, and what went wrong last."""

  def __init__(self, queries: Sequence[str]):
    self._size, self._tries = len(queries), 0
    self.found: dict[int, Found] = {}
    self.last = Fault("no server is up")
    self.replica: Replica | None = None

  def missing(self) -> list[int]:
    """The queries without passages."""
    return [i for i in range(self._size) if not isinstance(self.found.get(i), list)]

  def note(self, asked: Sequence[int], answers: Sequence[Found], attempts: int) -> None:
    """Takes the answers; a Fault if some are failures that may do better in another try."""
    self.found |= zip(asked, answers, strict=True)
    self._tries += 1
    errors = [f for f in answers if isinstance(f, RetrievalError)]
    if errors and self._tries < attempts:
      raise Fault(str(errors[0]))

  def pause(self, error: BaseException) -> bool | float:
    """Whether to try again after an error, or after how many seconds."""
    if not isinstance(error, Fault):
      return False
    self.last = error
    if error.after is None:
      return error.again
    return max(error.after, BACKOFF_SECONDS[0]) * random.uniform(1.0, 1.25)


def _read(reply: Reply, queries: Sequence[str], top_k: int, index: str | None,
          accept_empty: bool) -> list[Found]:
  try:
    return wire.read_reply(reply.body, queries, top_k, fingerprint=index,
                           accept_empty=accept_empty)
  except wire.BadReply as e:
    raise Fault(str(e)) from e


def _name(index: str | None) -> str:
  return "an index that it does not name" if index is None else f"index {index[:12]}"


def _checked_urls(urls: str | Sequence[str]) -> list[str]:
  """Addresses without the path of the search itself; a wrong one is a ValueError."""
  urls = urls.split(",") if isinstance(urls, str) else urls
  if not urls:
    raise ValueError("no address of a search server; name one, such as http://127.0.0.1:8000")
  return list(dict.fromkeys(_checked_url(url.strip()) for url in urls))


def _checked_url(url: str) -> str:
  parts = urlsplit(url)
  if "@" in parts.netloc:
    raise ValueError(f"the address of {parts.hostname} holds a name or password; give a token "
                     "instead")
  try:
    sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
  except ValueError:
    sound = False
  if not sound or parts.query or parts.fragment:
    raise ValueError(f"{url!r} is no address of a search server; wanted something like "
                     "http://127.0.0.1:8000")
  return url.rstrip("/").removesuffix("/retrieve")


def _digest(urls: Sequence[str]) -> str:
  return "urls-" + hashlib.sha256("\n".join(sorted(urls)).encode()).hexdigest()
