"""What a search takes and gives: standard library only, so that anything may import it."""

from __future__ import annotations

import dataclasses
from typing import Callable, Sequence


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
  """The engine failed (not the query): after retries, the episode that asked is dropped, never scored."""


class CorpusError(Exception):
  """A corpus, an index or their pairing is not what it should be: says where and what to do."""


Search = Callable[[Sequence[str], int], list[list[Passage]]]
"""`search(queries, top_k) -> passages`: one list a query, best first."""
