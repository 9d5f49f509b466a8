"""Indexes of FAISS: Flat's answers, or nearly; nothing that is damaged or foreign is believed."""

from __future__ import annotations

import random

import faiss
import numpy as np
import pytest

from retriever import faiss_index, store
from retriever.faiss_index import Effort, FaissIndex, FlatIndex
from retriever.protocol import CorpusError

ROWS, DIM = 10_000, 32


def clustered(rows=ROWS, dim=DIM, seed=0):
  """Unit vectors around 40 centres."""
  rng = np.random.default_rng(seed)
  centres = rng.standard_normal((40, dim))
  made = centres[rng.integers(40, size=rows)] + 0.7 * rng.standard_normal((rows, dim))
  return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)


def written(folder, vectors_PD, dtype="float16"):
  with store.Writer(folder, vectors_PD.shape[1], dtype) as writer:
    writer.append(vectors_PD)
    writer.keep()
  return store.open_vectors(folder, *vectors_PD.shape, dtype)


def recall(index, truth, queries_QD, k=3):
  found = [{row for row, _ in hits} for hits in index.search(queries_QD, k)]
  return np.mean([len(a & b) / k for a, b in zip(truth, found)])


def best_rows(vectors_PD, queries_QD, k=3):
  scores_QP = queries_QD.astype(np.float64) @ vectors_PD.astype(np.float64).T
  return [set(np.argsort(-s_P, kind="stable")[:k].tolist()) for s_P in scores_QP]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
  return written(tmp_path_factory.mktemp("stored"), clustered())


QUERIES = clustered(60, seed=1)


def test_equal_scores_come_by_row_and_no_row_is_minus_one():
  index = FlatIndex(np.array([[0, 1], [1, 0], [1, 0], [0.5, 0]], np.float32))
  query_QD = np.array([[1, 0]], np.float32)
  assert index.search(query_QD, 3) == [[(1, 1.0), (2, 1.0), (3, 0.5)]]
  assert [row for row, _ in index.search(query_QD, 99)[0]] == [1, 2, 3, 0]


def test_flat_compares_every_vector_of_the_mapped_file(tmp_path):
  vectors_PD = written(tmp_path, clustered(), "float32")
  assert isinstance(vectors_PD, np.memmap)
  assert recall(FlatIndex(vectors_PD), best_rows(vectors_PD, QUERIES), QUERIES) == 1.0


def test_an_answer_does_not_depend_on_what_is_asked_beside(stored):
  vectors_PD = np.asarray(stored, np.float32)
  vectors_PD[100:1000:30] = vectors_PD[5]  # a passage that stands there many times
  index = FlatIndex(vectors_PD)
  assert len(QUERIES) >= faiss_index.BATCH
  together = index.search(QUERIES, 5)
  twin = index.search(np.concatenate([vectors_PD[5:6], QUERIES]), 3)[0]
  assert [row for row, _ in twin] == [5, 100, 130] and twin == index.search(vectors_PD[5:6], 3)[0]
  assert together == [index.search(q_D[None], 5)[0] for q_D in QUERIES]


class Fixed(faiss.IndexFlatIP):
  """An index that finds what it is told to, as approximate ones may."""

  rows = None

  def find(self, *rows):
    self.rows = np.array([rows])
    return self

  def search(self, queries_QD, k):
    return np.zeros(self.rows.shape, np.float32), self.rows


@pytest.mark.parametrize("own", [False, True])
def test_ids_of_minus_one_never_become_passages(own):
  ones_PD = np.ones((20, 2), np.float32)
  index = Fixed(2)
  index.add(ones_PD)
  found = FaissIndex(index.find(4, -1, -1), None if own else ones_PD, Effort())
  assert found.search(ones_PD[:1], 3) == [[(4, 2.0)]]


def test_a_row_that_is_not_there_is_an_error_and_no_passage():
  ones_PD = np.ones((20, 2), np.float32)
  index = Fixed(2)
  index.add(ones_PD)
  with pytest.raises(CorpusError, match="names row 20 of 20"):
    FaissIndex(index.find(1, 20), ones_PD, Effort()).search(ones_PD[:1], 3)


def test_a_query_that_is_not_finite_is_refused(stored):
  query_QD = np.full((1, DIM), np.nan, np.float32)
  with pytest.raises(ValueError, match="not finite"):
    FlatIndex(np.asarray(stored, np.float32)).search(query_QD, 3)


@pytest.mark.parametrize("kind, hard, least", [
    ("ivf", Effort(probes=10_000), 1.0), ("hnsw", Effort(ef_search=400), 0.99),
    ("pq", Effort(probes=10_000, fetch=100), 0.99)])
def test_an_approximate_index_that_looks_hard_finds_what_flat_finds(
    stored, tmp_path, kind, hard, least):
  path, heard = tmp_path / "i.faiss", []
  faiss_index.build(stored, faiss_index.factory(kind, ROWS, DIM), path, heard.append)
  assert heard[-1] == ROWS and [p.name for p in tmp_path.iterdir()] == ["i.faiss"]
  truth = best_rows(np.asarray(stored, np.float32), QUERIES)
  index = lambda effort: FaissIndex(faiss_index.read(path, ROWS, DIM), stored, effort)
  assert recall(index(hard), truth, QUERIES) >= least
  lazy = Effort(probes=1) if kind != "hnsw" else Effort(ef_search=1)
  assert recall(index(lazy), truth, QUERIES) < recall(index(hard), truth, QUERIES)
  # Scores are those of the stored vectors, not of codes.
  (row, score), *_ = index(hard).search(QUERIES[:1], 1)[0]
  assert score == (stored[row].astype(np.float32) * QUERIES[0]).sum()


def test_codes_alone_miss_what_scoring_again_finds(stored, tmp_path):
  path = tmp_path / "i.faiss"
  faiss_index.build(stored, "PQ4x4", path)  # two bytes a vector
  truth = best_rows(np.asarray(stored, np.float32), QUERIES)
  index = lambda fetch: FaissIndex(faiss_index.read(path, ROWS, DIM), stored, Effort(fetch=fetch))
  assert recall(index(1), truth, QUERIES) < 0.6 and recall(index(ROWS), truth, QUERIES) == 1.0


@pytest.mark.parametrize("kind, effort, said", [
    ("ivf", Effort(ef_search=9), "ef_search means nothing to a IndexIVFFlat"),
    ("hnsw", Effort(probes=9), "probes means nothing to a IndexHNSWFlat"),
    ("ivf", Effort(gpu=True), "no GPU here")])
def test_effort_that_an_index_can_not_make_is_refused(stored, tmp_path, kind, effort, said):
  path = tmp_path / "i.faiss"
  faiss_index.build(stored[:500], faiss_index.factory(kind, 500, DIM), path)
  with pytest.raises(CorpusError, match=said):
    FaissIndex(faiss_index.read(path, 500, DIM), stored[:500], effort)
  with pytest.raises(CorpusError, match="probes is 0"):
    Effort(probes=0)


@pytest.mark.parametrize("rows, dim", [(1, 4), (10, 384), (5000, 768), (2_000_000, 384),
                                       (21_015_324, 768)])
def test_a_factory_suits_the_size(rows, dim):
  for kind in faiss_index.KINDS:
    index = faiss.index_factory(dim, faiss_index.factory(kind, rows, dim),
                                faiss.METRIC_INNER_PRODUCT)
    assert index.d == dim
  ivf = faiss.index_factory(dim, faiss_index.factory("ivf", rows, dim))
  # FAISS wants 39 vectors a list, and they must fit into the sample.
  assert ivf.nlist == 1 or 39 * ivf.nlist * 4 * dim <= min(rows * 4 * dim, 1 << 29)


def test_a_factory_that_faiss_does_not_know_is_named(stored, tmp_path):
  for word in ("HNWS32", "PQ5x8"):  # a typo; 32 numbers are not cut into 5 parts
    with pytest.raises(CorpusError, match=f"can't make '{word}'"):
      faiss_index.build(stored, word, tmp_path / "i.faiss")


@pytest.mark.parametrize("damage", [
    lambda b: b[:-1], lambda b: b[:40], lambda b: b"", lambda b: b"junk" + b[4:],
    lambda b: b[:4] + b"\xff\xff\xff\x7f" + b[8:]])
def test_a_damaged_file_is_a_corpus_error(tmp_path, damage):
  index = faiss.IndexFlatIP(8)
  index.add(np.eye(8, dtype=np.float32))
  path = tmp_path / "i.faiss"
  faiss.write_index(index, str(path))
  limit = faiss.get_deserialization_vector_byte_limit()
  assert faiss_index.read(path, 8, 8).ntotal == 8
  path.write_bytes(damage(path.read_bytes()))
  with pytest.raises(CorpusError, match="i.faiss") as caught:
    faiss_index.read(path, 8, 8)
  assert "\n" not in str(caught.value)
  assert faiss.get_deserialization_vector_byte_limit() == limit


def test_an_index_of_another_size_or_metric_is_refused(tmp_path):
  path = tmp_path / "i.faiss"
  faiss.write_index(faiss.IndexFlatIP(8), str(path))
  with pytest.raises(CorpusError, match="0 vectors of 8 numbers, wanted 1 of 8"):
    faiss_index.read(path, 1, 8)
  faiss.write_index(faiss.IndexFlatL2(8), str(path))
  with pytest.raises(CorpusError, match="inner product"):
    faiss_index.read(path, 0, 8)


def test_vectors_that_were_kept_are_not_written_again(tmp_path):
  rows_PD = clustered(10, 4)
  with store.Writer(tmp_path, 4, "float16") as writer:
    writer.append(rows_PD[:4])
    writer.keep()
    writer.append(rows_PD[4:7])  # as much as a killed process may have left, and then
  with (tmp_path / "vectors.float16").open("ab") as f:
    f.write(b"half a ro")
  with store.Writer(tmp_path, 4, "float16") as writer:
    assert writer.rows == 4
    writer.append(rows_PD[4:])
    writer.keep()
  assert (store.open_vectors(tmp_path, 10, 4, "float16") == rows_PD.astype(np.float16)).all()
  with store.Writer(tmp_path, 4, "float16") as writer:
    assert writer.rows == 10


@pytest.mark.parametrize("value, dtype", [(np.nan, "float32"), (np.inf, "float32"),
                                          (70_000.0, "float16")])
def test_a_vector_that_is_not_finite_is_named_and_not_stored(tmp_path, value, dtype):
  with store.Writer(tmp_path, 2, dtype) as writer:
    writer.append(np.ones((3, 2), np.float32))
    with pytest.raises(CorpusError, match=f"row 4 is not finite in {dtype}"):
      writer.append(np.array([[1, 1], [value, 1]], np.float32))
    with pytest.raises(CorpusError, match="3 numbers, wanted 2"):
      writer.append(np.ones((1, 3), np.float32))
    assert writer.rows == 3


def test_vectors_of_another_size_are_refused(tmp_path):
  written(tmp_path, clustered(10, 4))
  with pytest.raises(CorpusError, match="80 bytes, wanted 11 vectors of 4 float16"):
    store.open_vectors(tmp_path, 11, 4, "float16")
  with pytest.raises(CorpusError, match="vectors.float32 can't be read"):
    store.open_vectors(tmp_path, 10, 4, "float32")


def test_no_flip_in_a_mapped_index_ends_the_process(stored, tmp_path):
  """What a manifest's digest would refuse first: FAISS itself stays an error or a number."""
  path = tmp_path / "i.faiss"
  faiss_index.build(stored[:600], "IVF8,Flat", path)
  whole = path.read_bytes()
  rng = random.Random(0)
  for _ in range(60):
    flipped = bytearray(whole)
    flipped[rng.randrange(300)] ^= 1 << rng.randrange(8)
    path.write_bytes(flipped)
    try:
      faiss_index.read(path, 600, DIM)
    except CorpusError as e:
      assert "\n" not in str(e)
