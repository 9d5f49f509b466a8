"""BM25 over an inverted index in mapped files: nothing is loaded, workers share the pages.

The files are those of the bm25s library, which opens them too (`bm25s.BM25.load(folder,
load_vocab=False)`); words lie beside them, sorted, to be looked up where they lie. What the library
does itself is not used for two reasons. It builds from lists of all words of all passages, of which
21 million take well over 50 GB; this streams. And its import starts JAX on every device, where a
server of words has no business.
"""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from retriever import inverted
from retriever.protocol import CorpusError, check_top_k

KIND = "bm25"
PARAMS = "params.index.json"
RULE = "NFKC, casefold, \\w+"
# Lucene's. Left out of a query that has other words, never of the index: "The Who" and "It" are
# found. Answers are found as often without them, and they are most of what a question reads.
STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then "
    "there these they this to was will with".split())
BLOCK = 1024  # passages whose best score is looked at first


class BM25:
  """Ranks passages by the words that they share with a query; safe to call from several threads."""

  files = [*inverted.FILES, PARAMS]

  def __init__(self, spec: Mapping[str, Any], index: inverted.Inverted):
    self._spec, self._index = spec, index

  @classmethod
  def build(cls, passages: Iterable[str], folder: Path, k1: float = 0.9, b: float = 0.4,
            stop_words: bool = True) -> BM25:
    """Writes the index of passages, read once and in order, and opens it.

    k1, b: as Anserini has them for passages of Wikipedia; 1.2 or 1.5 and 0.75 found fewer answers.
    stop_words: whether queries do without STOP_WORDS.
    """
    spec = wanted_spec(k1, b, stop_words)
    params = {"k1": k1, "b": b, "delta": 0.5, "method": "lucene", "idf_method": "lucene",
              "dtype": "float32", "int_dtype": "int32", "backend": "numpy", "version": "0.3.16",
              "num_docs": inverted.build(passages, folder, k1, b)}
    (folder / PARAMS).write_text(json.dumps(params, indent=2) + "\n")
    return cls.load(folder, spec)

  @classmethod
  def load(cls, folder: Path, spec: Mapping[str, Any] | None = None) -> BM25:
    """Maps what `build` wrote; a CorpusError where it is not whole, or not by `spec`, if given."""
    try:
      params = json.loads((folder / PARAMS).read_bytes())
      found = wanted_spec(params["k1"], params["b"])
      passages = int(params["num_docs"])
    except (OSError, ValueError, KeyError, TypeError) as e:
      raise CorpusError(f"{folder / PARAMS} can't be read ({type(e).__name__}: {e}); build the "
                        "index again") from e
    spec = found if spec is None else spec
    found["stop_words"] = spec.get("stop_words") is True  # of the queries, not of the files
    if {k: spec.get(k) for k in found} != found or not 0 < passages < 2**31:
      raise CorpusError(f"{folder} holds {passages} passages by {found}, wanted {dict(spec)}; "
                        "build the index again")
    return cls(found, inverted.Inverted(folder, passages))

  def __len__(self) -> int:
    return self._index.passages

  def spec(self) -> dict[str, Any]:
    """What a manifest says of it."""
    return dict(self._spec)

  def rank(self, queries: Sequence[str], top_k: int) -> list[list[tuple[int, float]]]:
    """The best `top_k` (row, score) of each query, best first, equal scores by row.

    A passage without a word of the query has no score, and never comes.
    """
    check_top_k(top_k)
    return [best(self._index.scores(self._asked(query)), top_k) for query in queries]

  def _asked(self, query: str) -> dict[str, int]:
    """The words of a query and how often it has them."""
    asked = collections.Counter(inverted.split(query))
    if self._spec["stop_words"] and asked.keys() - STOP_WORDS:
      return {word: times for word, times in asked.items() if word not in STOP_WORDS}
    return dict(asked)


def wanted_spec(k1: float = 0.9, b: float = 0.4, stop_words: bool = True) -> dict[str, Any]:
  """The spec of an index with these parameters, before any corpus was seen."""
  if not (0 <= k1 < math.inf and 0 <= b <= 1):
    raise CorpusError(f"k1 is {k1} and b is {b}, wanted k1 of at least 0 and b from 0 to 1 "
                      "(0.9 and 0.4 do well)")
  return {"k1": k1, "b": b, "words": RULE, "stop_words": stop_words}


def best(scores_P: Float32[np.ndarray, "P"], top_k: int) -> list[tuple[int, float]]:
  """The best `top_k` (row, score) above 0, best first, equal scores by row.

  The best K rows lie in those K blocks that have the best ones: sorting them all would take longer
  than adding up the scores.
  """
  tops_M = np.maximum.reduceat(scores_P, np.arange(0, len(scores_P), BLOCK))
  blocks_M = np.sort(np.argsort(-tops_M, kind="stable")[:top_k])
  rows_M = (blocks_M[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
  rows_M = rows_M[rows_M < len(scores_P)]
  rows_M = rows_M[scores_P[rows_M] > 0]
  order_M = np.argsort(-scores_P[rows_M], kind="stable")[:top_k]
  return [(int(row), float(scores_P[row])) for row in rows_M[order_M]]
