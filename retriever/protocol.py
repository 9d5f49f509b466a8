"""What a search takes and gives: standard library only, so that anything may import it."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Passage:
  """One retrieved document: `contents` is `"Title"` on the first line, then the text."""

  id: str
  contents: str
  score: float

  @property
  def title(self) -> str:
    return self.contents.partition("\n")[0].strip().strip('"')

  @property
  def text(self) -> str:
    return self.contents.partition("\n")[2]


class RetrievalError(Exception):
  """The engine failed, not the query: the episode that asked is dropped, never scored."""


class UserError(Exception):
  """Something a user can mend: says what came, what was wanted, and what to do."""


class CorpusError(UserError):
  """A corpus, an index or their pairing is not what it should be: says where and what to do."""


Found = list[Passage] | RetrievalError
"""What became of one query: its passages, best first, or why the engine could not answer it."""

Search = Callable[[Sequence[str], int], list[Found]]
"""`search(queries, top_k)`: what became of each query, in order."""


class SearchEngine(abc.ABC):
  """What every engine is: a Search, with a fingerprint that changes when its answers may."""

  fingerprint: str
  most: int | None = None  # passages a query, where there is a limit

  @abc.abstractmethod
  def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    """The best `top_k` passages of each query, best first; a RetrievalError if one has none."""

  def search_each(self, queries: Sequence[str], top_k: int) -> list[Found]:
    """The same where one query's failure is not the others': overridden where that can be."""
    try:
      return list(self.search(queries, top_k))
    except RetrievalError as e:
      return [e] * len(queries)

  def __call__(self, queries: Sequence[str], top_k: int) -> list[Found]:
    return self.search_each(queries, top_k)

  def close(self) -> None:
    """Lets go of files, connections and threads."""

  def __enter__(self) -> SearchEngine:
    return self

  def __exit__(self, *_) -> None:
    self.close()


def all_found(found: Sequence[Found]) -> list[list[Passage]]:
  """The passages of every query, or the first error among them, raised."""
  for one in found:
    if isinstance(one, RetrievalError):
      raise one
  return list(found)


def check_top_k(top_k: int) -> None:
  """A caller's mistake, not the engine's."""
  if top_k < 1:
    raise ValueError(f"top_k is {top_k}, wanted at least 1")
