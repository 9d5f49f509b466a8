"""The index on a mesh: FAISS Flat's answers, whatever the devices, the blocks and the kernel."""

from __future__ import annotations

import json
import threading

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from retriever import encoders, mesh_index
from retriever.encoders import HashingEncoder
from retriever.faiss_index import FlatIndex
from retriever.mesh_index import MeshIndex
from retriever.protocol import CorpusError


def random(rows, dim, seed=0):
  return np.random.default_rng(seed).normal(size=(rows, dim)).astype(np.float32)


def unit(vectors):
  return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def clustered(rows, dim, centres=200, seed=0):
  """Unit vectors about random centres, as encoders give: near ones are much alike."""
  rng = np.random.default_rng(seed)
  return unit(random(centres, dim, seed + 1)[rng.integers(centres, size=rows)]
              + 0.5 * random(rows, dim, seed + 2))


def read(path, key):
  return [json.loads(line)[key] for line in path.read_text().splitlines()]


def flat(vectors):
  return FlatIndex(vectors)


def rows_of(found):
  return [[row for row, _ in one] for one in found]


# Against FAISS


@pytest.mark.parametrize("rows", [1, 31, 4096, 9001])
def test_rows_and_scores_are_those_of_flat_to_the_last_bit(rows):
  vectors, queries = random(rows, 96), random(40, 96, seed=7)
  assert MeshIndex(vectors).search(queries, 5) == flat(vectors).search(queries, 5)


def test_eight_devices_answer_as_one_and_as_flat(run_python):
  """Rows that the devices do not divide, several with nothing but filling; ties across devices."""
  run_python("""
import jax, numpy as np
from retriever.faiss_index import FlatIndex
from retriever.mesh_index import MeshIndex
devices = np.array(jax.devices())
assert len(devices) == 8
rng = np.random.default_rng(0)
queries = rng.normal(size=(20, 48)).astype(np.float32)
for rows in (5, 10_033, 40_000):
  vectors = rng.normal(size=(rows, 48)).astype(np.float32)
  vectors[rows // 2:rows // 2 + 2] = vectors[0]
  vectors[-1] = vectors[0]  # each of them alone on a device, where there are rows enough
  queries[0] = vectors[0]
  wanted = FlatIndex(vectors).search(queries, 3)
  assert [row for row, _ in wanted[0]] == [0, rows // 2, rows // 2 + 1]
  for mesh in (None, jax.sharding.Mesh(devices.reshape(2, 4), ("data", "tensor")),
               jax.sharding.Mesh(devices[:1], ("one",)), jax.sharding.Mesh(devices[:3], ("x",))):
    assert MeshIndex(vectors, mesh).search(queries, 3) == wanted, (rows, mesh)
  halves = MeshIndex(vectors, dtype="bfloat16").search(queries, 3)
  assert halves == wanted, rows
""")


@pytest.mark.assets
def test_real_passages_are_found_as_by_flat(assets):
  """The hashing vectors of 10,033 passages, unlike random ones: sparse, and of many near scores."""
  passages = read(assets / "wiki-vital" / "corpus.jsonl", "contents")
  encoder = HashingEncoder.fit(passages, 512)
  vectors = encoder.encode_passages(passages)
  queries = encoder.encode_queries(read(assets / "trivia" / "test.jsonl", "question"))
  assert MeshIndex(vectors).search(queries, 5) == flat(vectors).search(queries, 5)


@pytest.mark.assets
def test_vectors_of_a_real_encoder_are_found_as_by_flat(assets):
  """MiniLM's: 100 questions look for those most like them among 400 others, in either dtype."""
  spec = encoders.wanted_spec(str(assets / "minilm-l6"))
  encoder = encoders.from_spec(spec, assets)
  vectors = encoder.encode_passages(read(assets / "trivia" / "train.jsonl", "question")[:400])
  queries = encoder.encode_queries(read(assets / "trivia" / "test.jsonl", "question")[:100])
  wanted = flat(vectors).search(queries, 3)
  for dtype in mesh_index.DTYPES:
    assert MeshIndex(vectors, dtype=dtype).search(queries, 3) == wanted


@hypothesis.settings(max_examples=25)
@hypothesis.given(rows=st.integers(1, 9000), ties=st.integers(1, 8), top_k=st.integers(1, 40),
                  seed=st.integers(0, 10**6))
def test_equal_scores_come_by_row_wherever_they_lie(rows, ties, top_k, seed):
  """Whole numbers: scores are exact, and so are their ties, of which there are many."""
  rng = np.random.default_rng(seed)
  vectors = rng.integers(-ties, ties + 1, size=(rows, 4)).astype(np.float32)
  query = rng.integers(-3, 4, size=(1, 4)).astype(np.float32)
  scores = vectors @ query[0]
  wanted = sorted(range(rows), key=lambda row: (-scores[row], row))[:top_k]
  for dtype in ("float32", "bfloat16"):  # whole numbers below 256 are exact in bfloat16 too
    found = MeshIndex(vectors, dtype=dtype).search(query, top_k)[0]
    assert found == [(row, float(scores[row])) for row in wanted]


def test_of_more_equal_rows_than_are_looked_at_the_first_come():
  """The last row is best; all others are equal, 31 of them in its group, which is found first."""
  vectors = np.ones((9024, 4), np.float32)  # 282 whole groups
  vectors[-1] = 2.0
  found = MeshIndex(vectors).search(np.ones((1, 4), np.float32), 3)
  assert rows_of(found) == [[9023, 0, 1]]


def test_filling_never_comes_out_though_all_scores_are_negative():
  """Filled-up rows score 0, or as much as the last row: neither may take a passage's place."""
  vectors = -1.0 - np.abs(random(4097, 8))
  query = np.ones((1, 8), np.float32)
  assert rows_of(MeshIndex(vectors).search(query, 3)) == rows_of(flat(vectors).search(query, 3))
  best_last = vectors.copy()
  best_last[-1] = -0.5  # what the filling repeats is now the best of all
  wanted = flat(best_last).search(query, 3)
  assert MeshIndex(best_last).search(query, 3) == wanted and wanted[0][0] == (4096, -4.0)
  found = MeshIndex(best_last).search(query, 5000)[0]
  assert len(found) == 4097 and found[0] == (4096, -4.0)
  assert sorted(row for row, _ in found) == list(range(4097))


def test_filling_takes_no_place_among_the_groups_that_are_looked_at():
  """The best 16 in 16 blocks, all that are looked at; the last row, of a filled group, worst."""
  vectors = np.full((16 * 4096 + 1, 4), -10.0, np.float32)
  vectors[:-1:4096] = -np.linspace(1, 2, 16, dtype=np.float32)[:, None]
  vectors[-1] = -100.0
  found = MeshIndex(vectors, overfetch=0).search(np.ones((1, 4), np.float32), 16)
  assert rows_of(found) == [list(range(0, 16 * 4096, 4096))]


# bfloat16


def test_bfloat16_finds_what_float32_does_on_clustered_vectors():
  vectors = clustered(60_000, 128)
  queries = unit(vectors[::600] + 0.05 * random(100, 128, seed=9))
  wanted = flat(vectors).search(queries, 3)
  found = MeshIndex(vectors, dtype="bfloat16").search(queries, 3)
  hits = sum(len({r for r, _ in f} & {r for r, _ in w}) for f, w in zip(found, wanted))
  assert hits / 300 >= 0.99
  for f, w in zip(found, wanted):
    scores = dict(w)
    assert all(scores.get(row, score) == score for row, score in f)  # float32 scores, both


def test_rows_that_only_bfloat16_tells_apart_come_by_row():
  """1 + 2^-10 rounds to 1 in bfloat16, which holds 1 and 2^-10 apart: row 1 seems better there."""
  vectors = np.array([[1 + 2**-10, 0], [1, 2**-10]], np.float32)
  found = MeshIndex(vectors, dtype="bfloat16").search(np.ones((1, 2), np.float32), 2)
  assert found == [[(0, 1 + 2**-10), (1, 1 + 2**-10)]]


def test_scores_come_from_the_vectors_named_for_it():
  vectors, query = random(100, 16), random(1, 16, seed=1)
  found = MeshIndex(vectors, rescore=2 * vectors).search(query, 3)[0]
  assert found == flat(2 * vectors).search(query, 3)[0]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_vectors_are_taken_as_they_are(dtype):
  vectors, queries = random(500, 24).astype(dtype), random(9, 24, seed=1)
  wanted = flat(vectors.astype(np.float32)).search(queries, 4)
  assert MeshIndex(vectors).search(queries, 4) == wanted


# The kernel, which only accelerators run: here its interpreter does


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("queries", [16, 256])
def test_the_kernel_makes_the_maxima_that_blocks_make(platform, dtype, queries):
  vectors = jnp.asarray(random(4096, 256), dtype)
  asked = jnp.asarray(random(queries, 256, seed=1), dtype)
  made = mesh_index.tiled_maxima(vectors, asked, platform, interpret=True)
  wanted = mesh_index.group_maxima(vectors, asked, "cpu")
  scores = np.asarray(vectors, np.float64) @ np.asarray(asked, np.float64).T
  np.testing.assert_allclose(wanted, scores.reshape(128, 32, -1).max(axis=1), atol=1e-4)
  np.testing.assert_allclose(made, wanted, atol=1e-4)


def test_float32_is_multiplied_whole_where_devices_would_round_it():
  """A CPU does so anyway; accelerators round factors to bfloat16 or TF32 unless they are told."""
  for platform in ("cpu", "gpu", "tpu"):
    made = lambda dtype: str(jax.make_jaxpr(lambda *x: mesh_index.group_maxima(*x, platform))(
        jnp.zeros((4096, 128), dtype), jnp.zeros((16, 128), dtype)))
    assert "HIGHEST" in made("float32") and "HIGHEST" not in made("bfloat16")


# What it costs and what it refuses


def test_few_programs_are_compiled():
  """Four sizes of queries, one of what is kept for up to 8 results, whatever is asked of whom."""
  index = MeshIndex(random(300, 8))
  program = mesh_index.search_program(index._mesh, 16)
  before = program._cache_size()
  for count in (1, 2, 15, 16, 17, 40, 200, 256, 300, 512, 513, 1100):
    for top_k in (1, 3, 8):
      assert len(index.search(random(count, 8), top_k)) == count
  MeshIndex(random(301, 8)).search(random(20, 8), 3)
  assert program._cache_size() - before <= len(mesh_index.QUERIES)
  assert mesh_index._kept(8 + 8) == 16 and mesh_index._kept(9 + 8) == 32


def test_an_answer_does_not_depend_on_what_is_asked_beside():
  vectors, queries = clustered(5000, 64), clustered(600, 64, seed=3)
  index = MeshIndex(vectors)
  together = index.search(queries, 3)
  for n in (0, 17, 599):
    assert index.search(queries[n : n + 1], 3)[0] == together[n]


def test_threads_may_ask_at_once():
  index, queries = MeshIndex(random(5000, 32)), random(64, 32, seed=1)
  wanted, found = index.search(queries, 3), {}

  def ask(n):
    found[n] = index.search(queries[n : n + 16], 3)

  threads = [threading.Thread(target=ask, args=(n,)) for n in range(0, 64, 16)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert [one for n in sorted(found) for one in found[n]] == wanted


def test_the_vectors_are_read_in_blocks_never_whole(tmp_path):
  class Watched(np.memmap):
    largest = 0

    def __getitem__(self, key):
      taken = super().__getitem__(key)
      Watched.largest = max(Watched.largest, getattr(taken, "size", 1))
      return taken

  vectors = random(20_000, 16)
  vectors.tofile(tmp_path / "v.f32")
  mapped = np.memmap(tmp_path / "v.f32", np.float32, "r", shape=vectors.shape).view(Watched)
  index = MeshIndex(mapped)
  queries = random(3, 16, seed=1)
  assert index.search(queries, 3) == flat(vectors).search(queries, 3)
  assert 0 < Watched.largest <= mesh_index.BLOCK * 16


def test_bytes_of_a_device_are_those_that_it_holds():
  index = MeshIndex(random(10_033, 100), dtype="bfloat16")
  held = index._matrix.addressable_shards[0].data.nbytes
  # 10,033 rows fill 3 blocks of 4,096, 100 dims one of 128 lanes, 2 bytes each.
  assert held == mesh_index.bytes_per_device(10_033, 100, "bfloat16", 1) == 3 * 4096 * 128 * 2
  # 21,015,324 rows on 8 devices: 642 blocks each (641.3 filled), 768 dims.
  assert (mesh_index.bytes_per_device(21_015_324, 768, "bfloat16", 8)
          == 642 * 4096 * 768 * 2 == 4_039_114_752)


def test_what_cannot_be_searched_is_refused():
  vectors = random(10, 4)
  index = MeshIndex(vectors)
  for bad in (np.nan, np.inf):
    with pytest.raises(ValueError, match="not finite"):
      index.search(np.array([[0, 1, 2, 3], [0, bad, 0, 0]], np.float32), 1)
  with pytest.raises(ValueError, match="5 numbers"):
    index.search(random(1, 5), 1)
  with pytest.raises(ValueError, match="top_k is 0"):
    index.search(random(1, 4), 0)
  assert index.search(np.zeros((0, 4), np.float32), 3) == []
  with pytest.raises(CorpusError, match="float16"):
    MeshIndex(vectors, dtype="float16")
  with pytest.raises(CorpusError, match=r"\(0, 4\)"):
    MeshIndex(vectors[:0])
  with pytest.raises(CorpusError, match=r"\(9, 4\)"):
    MeshIndex(vectors, rescore=vectors[:9])
  with pytest.raises(CorpusError, match="overfetch is -1"):
    MeshIndex(vectors, overfetch=-1)
  broken = vectors.copy()
  broken[7, 2] = np.nan
  with pytest.raises(CorpusError, match="row 7 "):
    MeshIndex(broken)


def test_a_mesh_of_several_processes_is_refused(monkeypatch):
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  with pytest.raises(CorpusError, match="other processes"):
    MeshIndex(random(10, 4))
