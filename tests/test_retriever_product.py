"""The rows with the largest products: FAISS's own, however the matrix is cut into blocks."""

from __future__ import annotations

import faiss
import numpy as np
import pytest
from hypothesis import given, strategies as st

from retriever import product


def numbers(rows: int, dim: int, seed: int) -> np.ndarray:
  return np.random.default_rng(seed).standard_normal((rows, dim), np.float32)


def test_by_hand():
  # Products with (1, 2): 1, 2, 3, -1; the largest two are rows 2 and 1.
  vectors_PD = np.array([[1, 0], [0, 1], [1, 1], [1, -1]], np.float32)
  rows_QM = product.best_rows(np.array([[1, 2], [-1, 0]], np.float32), vectors_PD, 2)
  assert sorted(rows_QM[0].tolist()) == [1, 2]
  assert 1 in rows_QM[1]  # 0 is its largest; three rows share -1
  assert product.best_rows(vectors_PD[:1], vectors_PD, 9).shape == (1, 4)  # there are no more
  assert product.best_rows(vectors_PD[:0], vectors_PD, 2).shape == (0, 2)


@pytest.mark.parametrize("scores", [1, 7, 64, 1000, 1 << 19])
def test_the_rows_are_those_of_faiss_whatever_the_block(monkeypatch, scores):
  monkeypatch.setattr(product, "BLOCK_SCORES", scores)
  queries_QD, vectors_PD = numbers(20, 16, 0), numbers(500, 16, 1)
  _, want_QM = faiss.knn(queries_QD, vectors_PD, 11, metric=faiss.METRIC_INNER_PRODUCT)
  got_QM = product.best_rows(queries_QD, vectors_PD, 11)
  np.testing.assert_array_equal(got_QM, np.sort(want_QM))


@pytest.mark.parametrize("scores", [1, 50, 1 << 19])
def test_of_equal_products_the_lower_rows_are_taken(monkeypatch, scores):
  monkeypatch.setattr(product, "BLOCK_SCORES", scores)
  vectors_PD = np.ones((40, 2), np.float32)
  vectors_PD[7] = 2
  rows_QM = product.best_rows(np.ones((3, 2), np.float32), vectors_PD, 5)
  assert rows_QM.tolist() == [[0, 1, 2, 3, 7]] * 3


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 9), st.integers(0, 99))
def test_no_row_left_out_is_better_than_one_that_was_taken(rows, count, queries, seed):
  # Whole numbers: products are exact, and many are equal.
  whole = lambda n, s: np.random.default_rng(s).integers(-3, 4, (n, 4)).astype(np.float32)
  queries_QD, vectors_PD = whole(queries, seed), whole(rows, seed + 1)
  for q_D, rows_M in zip(queries_QD, product.best_rows(queries_QD, vectors_PD, count)):
    products_P = vectors_PD @ q_D
    assert len(set(rows_M.tolist())) == len(rows_M) == min(count, rows)
    left_M = np.setdiff1d(np.arange(rows), rows_M)
    assert not len(left_M) or products_P[left_M].max() <= products_P[rows_M].min()
