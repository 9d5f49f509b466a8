"""Servers that answer for one index, and which of them may be asked now: a circuit breaker each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

OPENS_AFTER = 3  # failures in a row
PROBE_SECONDS = (0.1, 2.0)  # between probes of a server that is out: at first, at most


class Replica:
  """One server. It is out until a probe finds it healthy, and again after failures in a row."""

  def __init__(self, url: str):
    self.url = url
    self.healthy = False
    self.failures = 0
    self.reason = "not asked yet"  # why it is out, or what it did last

  def answered(self) -> None:
    self.failures = 0

  def failed(self, reason: str) -> bool:
    """Notes a failure; whether it puts the server out."""
    self.failures += 1
    self.reason = reason
    if self.healthy and self.failures >= OPENS_AFTER:
      self.healthy = False
      return True
    return False

  def revived(self) -> None:
    """In again, on trial: its next failure puts it out at once."""
    self.healthy, self.failures = True, OPENS_AFTER - 1


class Replicas:
  """Takes turns among healthy servers; those that are out are probed in the background.

  `probe(replica)` says whether it is healthy, and sets its `reason` if it is not. All of this runs
  in one event loop.
  """

  def __init__(self, urls: Sequence[str], probe: Callable[[Replica], Awaitable[bool]]):
    self.all = [Replica(url) for url in urls]
    self._probe, self._turn = probe, 0
    self._revived = asyncio.Event()
    self._probing: dict[Replica, asyncio.Task[None]] = {}

  async def pick(self, avoid: Replica | None = None) -> Replica:
    """The next healthy server, another than `avoid` if there is one; waits until one is healthy."""
    while not (healthy := [r for r in self.all if r.healthy]):
      self._revived.clear()
      await self._revived.wait()
    self._turn += 1
    choice = [r for r in healthy if r is not avoid] or healthy
    return choice[self._turn % len(choice)]

  def failed(self, replica: Replica, reason: str) -> None:
    if replica.failed(reason):
      self._watch(replica)

  async def probe_all(self) -> bool:
    """Probes once every server that is out; whether any is healthy now."""
    out = [r for r in self.all if not r.healthy]
    for replica, healthy in zip(out, await asyncio.gather(*map(self._probe, out))):
      if healthy:
        self._revive(replica)
      else:
        self._watch(replica)
    return any(r.healthy for r in self.all)

  def reasons(self) -> str:
    return "; ".join(f"{r.url}: {r.reason}" for r in self.all)

  def _watch(self, replica: Replica) -> None:
    if replica not in self._probing:
      self._probing[replica] = asyncio.create_task(self._probe_until_healthy(replica))

  async def _probe_until_healthy(self, replica: Replica) -> None:
    seconds, most = PROBE_SECONDS
    while not replica.healthy:
      await asyncio.sleep(seconds * random.uniform(0.5, 1.0))
      seconds = min(2 * seconds, most)
      if not replica.healthy and await self._probe(replica):
        self._revive(replica)
    del self._probing[replica]

  def _revive(self, replica: Replica) -> None:
    if not replica.healthy:
      replica.revived()
      self._revived.set()
