"""Inner-product search with FAISS: every vector compared, or the promising ones, scored again.

Whatever finds the candidates, their scores are computed here, one row at a time from the stored
vectors, so that an answer does not depend on what is asked beside it, nor on how codes round.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import faiss
import numpy as np
from jaxtyping import Float, Float32, Int64

from retriever import product, store
from retriever.protocol import CorpusError

NAME = "index.faiss"
SAMPLE_BYTES = 1 << 29  # of float32 vectors that an index is taught by
BATCH = 12  # of 100,000 × 384: FAISS 6 ms a query, one product 56 ms for 16, 104 for 64
SPARE = 8  # FAISS rounds by batch size: this many more are fetched, scored again and cut
# Mapped; without tables that only L2 distances use, which are larger than the index.
_READING = faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE
_LIMIT_LOCK = threading.Lock()  # FAISS keeps its limits per process


class VectorIndex(abc.ABC):
  """Rows of a stored matrix, found by the inner product with a query."""

  def __init__(self, rows: int, spare: int):
    self._rows, self._spare = rows, spare

  def __len__(self) -> int:
    return self._rows

  def search(
      self, queries_QD: Float32[np.ndarray, "Q D"], top_k: int) -> list[list[tuple[int, float]]]:
    """The best `top_k` (row, score) of each query, best first, equal scores by row."""
    if not np.isfinite(queries_QD).all():
      raise ValueError("a query's vector is not finite; check the encoder's weights")
    candidates_QM = self._candidates(queries_QD, min(top_k + self._spare, len(self)))
    return [self._rank(q_D, rows_M, top_k) for q_D, rows_M in zip(queries_QD, candidates_QM)]

  @abc.abstractmethod
  def _candidates(self, queries_QD: Float32[np.ndarray, "Q D"],
                  count: int) -> Int64[np.ndarray, "Q M"]:
    """Rows that may be among the best; -1 where there is none."""

  @abc.abstractmethod
  def _vectors(self, rows_M: Int64[np.ndarray, "M"]) -> Float[np.ndarray, "M D"]:
    """The stored vectors of rows."""

  def _rank(self, query_D: Float32[np.ndarray, "D"], rows_M: Int64[np.ndarray, "M"],
            top_k: int) -> list[tuple[int, float]]:
    rows_M = np.sort(rows_M[rows_M >= 0])  # -1 stands for "found no more"
    if rows_M.size and rows_M[-1] >= len(self):
      raise CorpusError(f"the index names row {rows_M[-1]} of {len(self)}; build it again")
    return product.ranked(query_D, rows_M, self._vectors(rows_M), top_k)


class FlatIndex(VectorIndex):
  """Every vector compared, straight from the mapped file: nothing to build, nothing to load.

  FAISS reads the matrix once a query; from BATCH queries on one product for all of them is faster.
  """

  def __init__(self, vectors_PD: Float32[np.ndarray, "P D"]):
    super().__init__(len(vectors_PD), SPARE)
    self._vectors_PD = vectors_PD

  def _candidates(self, queries_QD: Float32[np.ndarray, "Q D"],
                  count: int) -> Int64[np.ndarray, "Q M"]:
    if len(queries_QD) >= BATCH:
      return product.best_rows(queries_QD, self._vectors_PD, count)
    _, rows_QM = faiss.knn(queries_QD, self._vectors_PD, count, metric=faiss.METRIC_INNER_PRODUCT)
    return rows_QM

  def _vectors(self, rows_M: Int64[np.ndarray, "M"]) -> Float32[np.ndarray, "M D"]:
    return self._vectors_PD[rows_M]


@dataclasses.dataclass(frozen=True)
class Effort:
  """How hard an approximate index looks; None leaves what the index was built with.

  `probes`: lists of an IVF that are read. `ef_search`: nodes of an HNSW that are kept in sight.
  `fetch`: candidates beyond `top_k` that are scored again from the stored vectors. `gpu`: the
  index is copied to all GPUs (needs faiss-gpu).
  """

  probes: int | None = None
  ef_search: int | None = None
  fetch: int | None = None
  gpu: bool = False

  def __post_init__(self):
    for name in ("probes", "ef_search", "fetch"):
      value = getattr(self, name)
      if value is not None and (type(value) is not int or value < 1):
        raise CorpusError(f"{name} is {value!r}; wanted a whole number above 0")


class FaissIndex(VectorIndex):
  """An index of FAISS; candidates are scored again from `vectors_PD`, else from what it holds."""

  def __init__(self, index: faiss.Index, vectors_PD: Float[np.ndarray, "P D"] | None,
               effort: Effort, fetch: int = SPARE):
    super().__init__(index.ntotal, fetch if effort.fetch is None else effort.fetch)
    _set_effort(index, effort)
    ivf = faiss.try_extract_index_ivf(index)
    if vectors_PD is None and ivf is not None:
      ivf.make_direct_map()  # else a row's vector can't be found
    self._held, self._vectors_PD = index, vectors_PD
    self._index = _to_gpus(index) if effort.gpu else index

  def _candidates(self, queries_QD: Float32[np.ndarray, "Q D"],
                  count: int) -> Int64[np.ndarray, "Q M"]:
    _, rows_QM = self._index.search(queries_QD, count)
    return rows_QM

  def check(self) -> None:
    """Reads a vector back, which some kinds of FAISS can't; that is a RuntimeError."""
    self._vectors(np.zeros(1, np.int64))

  def _vectors(self, rows_M: Int64[np.ndarray, "M"]) -> Float[np.ndarray, "M D"]:
    if self._vectors_PD is None:
      return self._held.reconstruct_batch(rows_M)
    return self._vectors_PD[rows_M]


def read(path: Path, rows: int, dim: int) -> faiss.Index:
  """Maps an index file of `rows` vectors of `dim` numbers; anything else is a CorpusError."""
  try:
    with _LIMIT_LOCK:
      before = faiss.get_deserialization_vector_byte_limit()
      faiss.set_deserialization_vector_byte_limit(path.stat().st_size)
      try:
        index = faiss.read_index(str(path), _READING)
      finally:
        faiss.set_deserialization_vector_byte_limit(before)
  except (OSError, RuntimeError, MemoryError) as e:
    reason = str(e).strip().partition("\n")[0]
    raise CorpusError(f"{path} can't be read ({reason}); build the index again") from e
  if (index.ntotal, index.d) != (rows, dim):
    raise CorpusError(f"{path} holds {index.ntotal} vectors of {index.d} numbers, wanted {rows} "
                      f"of {dim}; build the index again")
  if index.metric_type != faiss.METRIC_INNER_PRODUCT:
    raise CorpusError(f"{path} does not search by inner product; build it with "
                      "METRIC_INNER_PRODUCT")
  return index


def build(vectors_PD: Float[np.ndarray, "P D"], factory_: str, path: Path,
          on_rows: Callable[[int], None] = lambda n: None) -> None:
  """Builds FAISS's index of stored vectors and writes the file, a block in memory at a time.

  `factory_`: FAISS's own word for the kind, such as `IVF1024,Flat`. `on_rows` hears of progress.
  """
  rows, dim = vectors_PD.shape
  at_M = np.linspace(0, rows - 1, min(rows, SAMPLE_BYTES // (4 * dim))).astype(np.int64)
  sample_MD = np.asarray(vectors_PD[at_M], np.float32)
  try:
    index = faiss.index_factory(dim, factory_, faiss.METRIC_INNER_PRODUCT)
    if isinstance(index, faiss.IndexPreTransform) and len(sample_MD) < dim:
      raise RuntimeError("a rotation needs as many vectors as they have numbers")  # FAISS crashes
    _shorten_rotation(index)
    index.train(sample_MD)
  except RuntimeError as e:
    reason = str(e).strip().partition("\n")[0]
    raise CorpusError(f"FAISS can't make {factory_!r} of {len(sample_MD)} vectors of {dim} numbers "
                      f"({reason}); choose another --factory") from e
  del sample_MD
  for block_MD in store.blocks(vectors_PD):
    index.add(block_MD)
    on_rows(index.ntotal)
  _set_effort(index, _usual_effort(index))
  temporary = path.with_name(f".{path.name}.new")
  faiss.write_index(index, str(temporary))
  temporary.replace(path)


def factory(kind: str, rows: int, dim: int) -> str:
  """What FAISS calls an index of that kind that suits the size."""
  sample = min(rows, SAMPLE_BYTES // (4 * dim))
  most = max(1, min(4 * math.isqrt(rows), sample // 39))  # FAISS warns of fewer vectors a list
  lists = 1 << (most.bit_length() - 1)
  if kind == "ivf":
    return f"IVF{lists},Flat"
  if kind == "hnsw":
    return "HNSW32,Flat"
  if sample < 39 * 16:
    return "IVF1,SQ8"  # too few to learn codes from
  parts = next(m for m in (dim // 4, dim // 8, 1) if m and dim % m == 0)
  bits = 8 if sample >= 39 * 256 else 4  # there, too
  rotation = f"OPQ{parts}," if sample >= max(dim, 39 * 256) else ""  # it learns codes of its own
  return f"{rotation}IVF{lists},PQ{parts}x{bits}"  # a byte for four numbers


KINDS: Sequence[str] = ("ivf", "hnsw", "pq")
# Found by recall on clustered vectors: `benchmarks/indexes.py`.
FETCH = {"ivf": SPARE, "hnsw": SPARE, "pq": 100}
PROBES, EF_SEARCH = 32, 128


def _shorten_rotation(index: faiss.Index) -> None:
  """OPQ's 50 rounds over 65,536 vectors cost minutes where fewer find nearly the same rotation."""
  if isinstance(index, faiss.IndexPreTransform):
    for i in range(index.chain.size()):
      step = faiss.downcast_VectorTransform(index.chain.at(i))
      if isinstance(step, faiss.OPQMatrix):
        step.niter, step.niter_pq_0, step.max_train_points = 6, 10, 16_384


def _usual_effort(index: faiss.Index) -> Effort:
  """What is written into the file, for those who don't ask for another."""
  ivf = faiss.try_extract_index_ivf(index)
  return Effort(probes=None if ivf is None else PROBES,
                ef_search=EF_SEARCH if isinstance(index, faiss.IndexHNSW) else None)


def _set_effort(index: faiss.Index, effort: Effort) -> None:
  ivf = faiss.try_extract_index_ivf(index)
  inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index
  for name, value, there in (("probes", effort.probes, ivf is not None),
                             ("ef_search", effort.ef_search, isinstance(inner, faiss.IndexHNSW))):
    if value is not None and not there:
      raise CorpusError(f"{name} means nothing to a {type(inner).__name__}; leave it out")
  if effort.probes is not None:
    ivf.nprobe = min(effort.probes, ivf.nlist)
  if effort.ef_search is not None:
    inner.hnsw.efSearch = effort.ef_search


def _to_gpus(index: faiss.Index) -> faiss.Index:
  if not hasattr(faiss, "index_cpu_to_all_gpus") or not faiss.get_num_gpus():
    raise CorpusError("FAISS finds no GPU here; install faiss-gpu in place of faiss-cpu, or leave "
                      "gpu out (or search on the accelerators with JAX: kind=mesh)")
  return faiss.index_cpu_to_all_gpus(index)
