"""Rows by their inner products with queries: the largest of a matrix, and candidates in order."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float32, Int, Int64

BLOCK_SCORES = 1 << 19  # scores at a time, over all queries: 2 MiB, which stay in the cache


def best_rows(queries_QD: Float32[np.ndarray, "Q D"], vectors_PD: Float32[np.ndarray, "P D"],
              count: int) -> Int64[np.ndarray, "Q M"]:
  r"""The `count` rows (at most P) of each query with the largest inner products, in order of rows.

  argtop_p q \cdot v_p, block after block of rows: a row is looked at again only if its product is
  above the smallest of the best so far, so that nearly all of the time goes into matrix products.
  Of equal products at the edge, the lower rows.

  queries_QD, vectors_PD: finite; a memory-mapped matrix is read once, in order.
  """
  count, block = min(count, len(vectors_PD)), max(1, BLOCK_SCORES // max(1, len(queries_QD)))
  scores_QM = np.full((len(queries_QD), count), -np.inf, np.float32)
  rows_QM = np.full((len(queries_QD), count), -1, np.int64)
  floor_Q = scores_QM.min(axis=1, initial=np.inf)
  for start in range(0, len(vectors_PD), block):
    products_QM = queries_QD @ vectors_PD[start:start + block].T
    for q in np.flatnonzero(products_QM.max(axis=1) > floor_Q):
      new_M = np.flatnonzero(products_QM[q] > floor_Q[q])
      merged_M = np.concatenate([scores_QM[q], products_QM[q, new_M]])
      kept_M = _largest(merged_M, count)
      rows_QM[q] = np.concatenate([rows_QM[q], start + new_M])[kept_M]
      scores_QM[q] = merged_M[kept_M]
      floor_Q[q] = scores_QM[q].min()
  return rows_QM


def ranked(query_D: Float32[np.ndarray, "D"], rows_M: Int[np.ndarray, "M"],
           vectors_MD: Float[np.ndarray, "M D"], top_k: int) -> list[tuple[int, float]]:
  """The best `top_k` (row, score) of candidates in order of rows, best first, equal scores by row.

  Each score is summed by itself in float32, so that it does not depend on the other candidates.
  """
  scores_M = (vectors_MD.astype(np.float32) * query_D).sum(axis=1)
  order_M = np.argsort(-scores_M, kind="stable")[:top_k]
  return [(int(rows_M[i]), float(scores_M[i])) for i in order_M]


def _largest(scores_M: Float32[np.ndarray, "M"], count: int) -> Int64[np.ndarray, "K"]:
  """Where the `count` largest stand, in their order; of equals at the edge, the first."""
  edge = np.partition(scores_M, len(scores_M) - count)[len(scores_M) - count]
  above_M = np.flatnonzero(scores_M > edge)
  equal_M = np.flatnonzero(scores_M == edge)[:count - len(above_M)]
  return np.sort(np.concatenate([above_M, equal_M]))
