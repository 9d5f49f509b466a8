"""Made-up names from syllables, in three pools of pieces that never meet."""

from __future__ import annotations

import dataclasses
import functools
from typing import Sequence

import numpy as np

CONSONANTS = "bdfghjklmnprstvwzc"
VOWELS = "aeiou"
SYLLABLES = tuple(c + v for c in CONSONANTS for v in VOWELS)
POOLS = ("warm_start", "rl", "test")
_POOL_SIZES = {"warm_start": 5700, "rl": 1200, "test": 1200}
_SPLIT_SEED = 20250312  # fixes which piece belongs to which pool, once and for all


@functools.cache
def pieces(pool: str) -> tuple[str, ...]:
  """The capitalised two-syllable pieces of one pool; pools are disjoint whatever the world's seed."""
  everything = np.array([(a + b).capitalize() for a in SYLLABLES for b in SYLLABLES])
  shuffled = np.random.default_rng(_SPLIT_SEED).permutation(everything)
  start = sum(_POOL_SIZES[p] for p in POOLS[: POOLS.index(pool)])
  return tuple(shuffled[start : start + _POOL_SIZES[pool]].tolist())


@dataclasses.dataclass
class NameMaker:
  """Draws names that no other entity of the world bears.

  `shared`: chance that a many-word name reuses a piece already borne by another entity of its
  kind, which makes the two easy to confuse.
  """

  rng: np.random.Generator
  pool: Sequence[str]
  shared: float = 0.0

  def __post_init__(self):
    self._taken: set[str] = set()
    self._singles = list(self.rng.permutation(np.array(self.pool)))
    self._borne: dict[str, list[str]] = {}

  def single(self) -> str:
    """A one-piece name whose piece no other one-piece name has."""
    return self._take(str(self._singles.pop()))

  def double(self, kind: str) -> str:
    """A first and a last piece."""
    while True:
      name = f"{self._piece(kind + ' first')} {self._piece(kind + ' last')}"
      if name not in self._taken:
        return self._take(name)

  def with_word(self, kind: str, words: Sequence[str], before: bool) -> str:
    """A piece with an ordinary word before or after it."""
    while True:
      word, piece = str(self.rng.choice(words)), self._piece(kind)
      name = f"{word} {piece}" if before else f"{piece} {word}"
      if name not in self._taken:
        return self._take(name)

  def _piece(self, role: str) -> str:
    borne = self._borne.setdefault(role, [])
    if borne and self.rng.random() < self.shared:
      return borne[self.rng.integers(len(borne))]
    piece = str(self.pool[self.rng.integers(len(self.pool))])
    borne.append(piece)
    return piece

  def _take(self, name: str) -> str:
    self._taken.add(name)
    return name
