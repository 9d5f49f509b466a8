"""Exact inner-product search with FAISS, whose answers do not depend on what is asked beside."""

from __future__ import annotations

import threading
from pathlib import Path

import faiss
import numpy as np
from jaxtyping import Float32, Int64

from retriever.protocol import CorpusError

KIND = "flat"
NAME = "index.faiss"
SPARE = 8  # FAISS rounds by batch size: this many more are fetched, scored again and cut
_LIMIT_LOCK = threading.Lock()  # FAISS keeps its limits per process


class FlatIndex:
  """Every vector in memory, every vector compared."""

  def __init__(self, index: faiss.IndexFlatIP):
    self._index = index

  @classmethod
  def empty(cls, dim: int) -> FlatIndex:
    return cls(faiss.IndexFlatIP(dim))

  @classmethod
  def load(cls, path: Path, rows: int, dim: int) -> FlatIndex:
    """Reads an index of `rows` vectors of `dim` numbers; anything else is a CorpusError."""
    try:
      with _LIMIT_LOCK:
        before = faiss.get_deserialization_vector_byte_limit()
        faiss.set_deserialization_vector_byte_limit(path.stat().st_size)
        try:
          index = faiss.read_index(str(path))
        finally:
          faiss.set_deserialization_vector_byte_limit(before)
    except (OSError, RuntimeError, MemoryError) as e:
      reason = str(e).strip().partition("\n")[0]
      raise CorpusError(f"{path} can't be read ({reason}); build the index again") from e
    if not isinstance(index, faiss.IndexFlatIP):
      raise CorpusError(f"{path} holds a {type(index).__name__}, wanted an IndexFlatIP; build the "
                        "index again")
    if (index.ntotal, index.d) != (rows, dim):
      raise CorpusError(f"{path} holds {index.ntotal} vectors of {index.d} numbers, wanted {rows} "
                        f"of {dim}; build the index again")
    return cls(index)

  def __len__(self) -> int:
    return self._index.ntotal

  def add(self, vectors_MD: Float32[np.ndarray, "M D"]) -> None:
    self._index.add(vectors_MD)

  def save(self, path: Path) -> None:
    faiss.write_index(self._index, str(path))

  def search(
      self, queries_QD: Float32[np.ndarray, "Q D"], top_k: int) -> list[list[tuple[int, float]]]:
    """The best `top_k` (row, score) of each query, best first, equal scores by row."""
    _, rows_QM = self._index.search(queries_QD, min(top_k + SPARE, len(self)))
    return [self._rank(q_D, rows_M, top_k) for q_D, rows_M in zip(queries_QD, rows_QM)]

  def _rank(self, query_D: Float32[np.ndarray, "D"], rows_M: Int64[np.ndarray, "M"],
            top_k: int) -> list[tuple[int, float]]:
    rows_M = np.sort(rows_M[rows_M >= 0])  # -1 stands for "found no more"
    scores_M = (self._index.reconstruct_batch(rows_M) * query_D).sum(axis=1)
    order_M = np.argsort(-scores_M, kind="stable")[:top_k]
    return [(int(rows_M[i]), float(scores_M[i])) for i in order_M]
