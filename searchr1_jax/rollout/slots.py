"""Who is served next, and in which shapes: the closed list of an engine, and its plans over it.

Rows of the cache hold episodes; seats of the desk write. All of it is counted per device.
"""

from __future__ import annotations

import dataclasses
from typing import Sequence

from searchr1_jax.types import UserError

# A call ends when this share of its turns has. Fewer, larger calls leave seats idle behind turns
# that ended; more, smaller ones prefill a few rows at a time.
STOPPED_SHARE = 1 / 8


@dataclasses.dataclass(frozen=True)
class EngineShapes:
  """Everything that compiles, for each device (or group of devices that share heads).

  `rows` x `slots` tokens of cache; up to `tokens` a row from one decode call, of one of `seats`
  rows; prefills of each of `row_buckets` x each of `chunk_buckets`; a call reads one of `widths`
  of a row's slots, of which `slots` is always one.
  """

  rows: int
  slots: int
  tokens: int
  seats: tuple[int, ...]
  row_buckets: tuple[int, ...]
  chunk_buckets: tuple[int, ...]
  widths: tuple[int, ...] = ()

  def __post_init__(self):
    for name in ("seats", "row_buckets"):
      sizes = getattr(self, name)
      if not sizes or not 0 < min(sizes) <= max(sizes) <= self.rows:
        raise UserError(f"rollout.{name} is {sizes}; wanted sizes from 1 to rollout.rows="
                        f"{self.rows}: lower them, or raise rollout.rows")
      object.__setattr__(self, name, tuple(sorted(set(sizes))))
    if not self.chunk_buckets or min(self.chunk_buckets) < 1:
      raise UserError(f"rollout.chunk_buckets is {self.chunk_buckets}; name at least one length "
                      "of a prefill, 1 or more")
    if self.slots < 1:
      raise UserError(f"a row of {self.slots} slots holds nothing; set 1 or more")
    if self.tokens < 1:
      raise UserError(f"a decode call of {self.tokens} tokens writes nothing; set 1 or more")
    if min(self.widths, default=1) < 1:
      raise UserError(f"rollout.widths is {self.widths}; wanted sizes of 1 or more")
    object.__setattr__(self, "chunk_buckets", tuple(sorted(set(self.chunk_buckets))))
    # A narrower desk could not hold what a call writes.
    kept = {w for w in self.widths if self.tokens <= w < self.slots}
    object.__setattr__(self, "widths", (*sorted(kept), self.slots))
    object.__setattr__(self, "tokens", min(self.tokens, self.slots))

  def fixed(self) -> EngineShapes:
    """One shape of each kind, but for chunks: what a row computes then depends on that row alone.

    A chunk's length follows from the row's own tokens, whatever is beside it.
    """
    return dataclasses.replace(self, seats=self.seats[-1:], row_buckets=self.row_buckets[:1],
                               widths=())

  def within(self, budget: int, row_bytes: int) -> EngineShapes:
    """As many of the rows and seats as a budget of bytes holds; a seat needs as much as a row."""
    fit = budget // row_bytes
    if fit < 2:
      raise UserError(f"config.rollout.cache_gib={budget / 2**30:.3g} is less than the "
                      f"{2 * row_bytes / 2**30:.3g} that one row and its seat take; raise it or "
                      "lower config.episode.max_episode_tokens")
    wanted = self.rows + self.seats[-1]
    if fit >= wanted:
      return self
    seats = max(1, fit * self.seats[-1] // wanted)  # they keep their share
    cut = lambda sizes, most: (*(s for s in sizes if s < most), most)
    return dataclasses.replace(
        self, rows=fit - seats, seats=cut(self.seats, seats),
        row_buckets=cut(self.row_buckets, min(self.row_buckets[-1], fit - seats)))

  def programs(self) -> int:
    """How many programs an engine may compile: prefills, sharing, decoding."""
    prefills = len(self.row_buckets) * len(self.chunk_buckets)
    return len(self.widths) * (prefills + 1 + len(self.seats))


@dataclasses.dataclass(frozen=True)
class Insert:
  """Tokens for one row. `fresh`: the row begins anew, its randomness addressed by `seeds`.

  After it the policy may write up to `max_tokens` tokens.
  """

  row: int
  ids: Sequence[int]
  max_tokens: int
  fresh: bool
  seeds: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Part:
  """Tokens [begin, end) of an insert, of which `start` are in the row before them."""

  insert: Insert
  begin: int
  end: int
  start: int


@dataclasses.dataclass(frozen=True)
class PrefillCall:
  """One program's work: the parts of each device, and the shapes."""

  parts: tuple[tuple[Part, ...], ...]
  rows: int
  chunk: int
  width: int


def at_least(sizes: Sequence[int], wanted: int) -> int:
  """The smallest of the sizes that holds `wanted`."""
  return min(s for s in sizes if s >= wanted)


def plan_prefill(inserts: Sequence[Insert], lengths: Sequence[int], shapes: EngineShapes,
                 devices: int = 1) -> list[PrefillCall]:
  """Calls that insert all tokens. `lengths`: what the row of each insert holds before it.

  Parts of one chunk and width go together, as many rows a call as the largest bucket holds. A
  row's parts come in order, since its later tokens attend to the earlier ones.
  """
  longest, most = shapes.chunk_buckets[-1], shapes.row_buckets[-1]
  calls: list[PrefillCall] = []
  pending = [(insert, 0, length) for insert, length in zip(inserts, lengths, strict=True)]
  while pending:
    alike: dict[tuple[int, int], list[list[Part]]] = {}
    for insert, begin, length in pending:
      part = Part(insert, begin, min(len(insert.ids), begin + longest), length + begin)
      chunk = at_least(shapes.chunk_buckets, part.end - begin)
      width = at_least(shapes.widths, part.start + part.end - begin)
      by_device = alike.setdefault((chunk, width), [[] for _ in range(devices)])
      by_device[insert.row // shapes.rows].append(part)
    for (chunk, width), by_device in sorted(alike.items()):
      while any(by_device):
        parts = tuple(tuple(p[:most]) for p in by_device)
        by_device = [p[most:] for p in by_device]
        rows = at_least(shapes.row_buckets, max(map(len, parts)))
        calls.append(PrefillCall(parts, rows, chunk, width))
    pending = [(i, begin + longest, n) for i, begin, n in pending
               if begin + longest < len(i.ids)]
  return calls


def seats_for(ready: int, shapes: EngineShapes) -> int:
  """Seats of a call that `ready` rows wait for: a size that holds them, or nearly all of them."""
  fitting = [s for s in shapes.seats if s >= ready]
  smaller = [s for s in shapes.seats if s < ready]
  if not fitting or smaller and ready <= smaller[-1] * (1 + STOPPED_SHARE):
    return smaller[-1]
  return fitting[0]


def seat(before: Sequence[int | None], chosen: Sequence[int]) -> tuple[list[int], list[int]]:
  """Seats 0, 1, … for the chosen rows: (row of each seat, seats whose rows have to be brought).

  A row that sat on one of these seats in the call before stays there.
  """
  wanted = set(chosen)
  rows: list[int | None] = [r if r in wanted else None for r in before[: len(chosen)]]
  rows += [None] * (len(chosen) - len(rows))
  new = iter(r for r in chosen if r not in set(rows))
  brought = [i for i, r in enumerate(rows) if r is None]
  for i in brought:
    rows[i] = next(new)
  return rows, brought

