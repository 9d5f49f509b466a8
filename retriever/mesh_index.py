"""Exact inner-product search over a matrix that lies by rows on all devices of a mesh.

A search reads the matrix once, in three steps that are exact, ties included. The first writes only
the best score of each group of 32 rows; the best K rows lie in the best K groups, whose rows are
scored again in the second; the third merges the devices. What comes out is ranked by float32 scores
from vectors on the host, so that a matrix of bfloat16 only decides what is looked at.
Axes: Q queries, P passages, S rows of a device, G groups, K kept, D dims.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from retriever import product
from retriever.protocol import CorpusError, check_top_k

KIND = "mesh"
DTYPES = ("float32", "bfloat16")
QUERIES = (16, 64, 256, 512)  # searches are filled up to one of these, so that few are compiled
# A group's best score costs 4 bytes a query to keep, a group that is chosen its rows once more:
# of 2.6 M rows of 768, for 512 queries and 16 groups, .7 and .4 GB at 32 rows, .3 and .8 at 64.
GROUP = 32
# Rows whose scores exist at once where there is no kernel: 8 MiB for 512 queries, which a
# processor's cache and a TPU's VMEM hold. Devices hold a multiple of it.
BLOCK = 4096
SPARE = 8  # rounding may move what is kept so far: this many more are scored on the host, and cut
WIDEST = 1024  # dims of which the kernel's tiles fit into a TPU's core


class MeshIndex:
  """Every vector on the accelerators, every vector compared; safe to call from several threads.

  vectors_PD: float16, bfloat16 or float32, in memory or mapped; read once, one device's rows at a
  time. mesh: where they go, this process's devices if None. dtype: as what they lie there.
  rescore: the exact vectors, from which the scores come; `vectors_PD` if None. Rows of it are read
  with every search. overfetch: how many more than asked for are scored on the host, at least.
  """

  def __init__(self, vectors_PD: Float[np.ndarray, "P D"], mesh: Mesh | None = None,
               dtype: str = "float32", rescore: np.ndarray | None = None,
               overfetch: int = SPARE):
    self._exact_PD = vectors_PD if rescore is None else rescore
    _check(vectors_PD, self._exact_PD, dtype, overfetch)
    devices = np.asarray(jax.local_devices()) if mesh is None else mesh.devices.reshape(-1)
    if any(d.process_index != jax.process_index() for d in devices):
      raise CorpusError("the mesh has devices of other processes, and each process asks queries of "
                        "its own; give the index this process's devices, or serve it over HTTP")
    self._rows, self._overfetch = len(vectors_PD), overfetch
    self._mesh = Mesh(devices, ("rows",))
    self._matrix = _spread(vectors_PD, self._mesh, dtype)

  def __len__(self) -> int:
    return self._rows

  def search(
      self, queries_QD: Float32[np.ndarray, "Q D"], top_k: int) -> list[list[tuple[int, float]]]:
    """The best `top_k` (row, score) of each query, best first, equal scores by row."""
    check_top_k(top_k)
    if queries_QD.shape[1] != self._exact_PD.shape[1]:
      raise ValueError(f"the queries' vectors have {queries_QD.shape[1]} numbers, the passages' "
                       f"{self._exact_PD.shape[1]}; encode both with one encoder")
    if not np.isfinite(queries_QD).all():
      raise ValueError("a query's vector is not finite; check the encoder's weights")
    most = QUERIES[-1]
    parts = [self._find(queries_QD[i : i + most], top_k) for i in range(0, len(queries_QD), most)]
    return [self._rank(query_D, rows_K, top_k)
            for query_D, rows_K in zip(queries_QD, (r for part in parts for r in part))]

  def _find(self, queries_QD: Float32[np.ndarray, "Q D"], top_k: int) -> Int32[np.ndarray, "Q K"]:
    """Rows that hold the best `top_k`, and some more, in no order that counts."""
    count, dim = queries_QD.shape
    size = next(n for n in QUERIES if n >= count)
    filled_QD = np.zeros((size, self._matrix.shape[1]), self._matrix.dtype)
    filled_QD[:count, :dim] = queries_QD
    find = search_program(self._mesh, _kept(top_k + self._overfetch))
    return np.asarray(find(self._matrix, filled_QD, np.int32(self._rows)))[:count]

  def _rank(self, query_D: Float32[np.ndarray, "D"], rows_K: Int32[np.ndarray, "K"],
            top_k: int) -> list[tuple[int, float]]:
    rows_K = np.sort(rows_K[rows_K < self._rows])  # the others only fill up
    return product.ranked(query_D, rows_K, self._exact_PD[rows_K], top_k)


def bytes_per_device(rows: int, dim: int, dtype: str, devices: int) -> int:
  """What the matrix takes on each of `devices`; a search takes its temporaries besides."""
  stored, width = _padded(rows, dim, devices)
  return stored // devices * width * jnp.dtype(dtype).itemsize


@functools.lru_cache(maxsize=64)
def search_program(mesh: Mesh, kept: int) -> Callable[[Array, Array, Array], Array]:
  """Compiles to `find(matrix, queries, rows)`, int32 [Q, K]: the best `kept` of `rows` rows.

  The matrix [P, D] lies by rows over the mesh's one axis, as `_spread` puts it; the queries
  [Q, D] have its dtype. Where there are fewer rows, numbers of `rows` and more fill up.
  """
  platform, axis = mesh.devices.flat[0].platform, mesh.axis_names[0]

  def on_device(vectors_SD, queries_QD, rows):
    first = lax.axis_index(axis).astype(jnp.int32) * np.int32(vectors_SD.shape[0])
    best_GQ = group_maxima(vectors_SD, queries_QD, platform)
    scores_QK, rows_QK = best_rows(vectors_SD, queries_QD, best_GQ, first, rows, kept)
    together = lambda x: lax.all_gather(x, axis, axis=1, tiled=True)
    return best_of(together(scores_QK), together(rows_QK), kept)[1]

  by_row, whole = PartitionSpec(axis), PartitionSpec()
  # Not checked: that all devices make the same of what they gathered, which XLA cannot see.
  return jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=(by_row, whole, whole),
                               out_specs=whole, check_vma=False))


def group_maxima(vectors_SD: Array, queries_QD: Array, platform: str) -> Float32[Array, "G Q"]:
  """The best score of every GROUP rows for each query; scores themselves stay on the chip."""
  if platform == "gpu" or platform == "tpu" and vectors_SD.shape[1] <= WIDEST:
    return tiled_maxima(vectors_SD, queries_QD, platform)
  blocks_MSD = vectors_SD.reshape(-1, BLOCK, vectors_SD.shape[1])
  best_MGQ = lax.map(lambda block_SD: _maxima(_scores(block_SD, queries_QD.T)), blocks_MSD)
  return best_MGQ.reshape(-1, queries_QD.shape[0])


def tiled_maxima(vectors_SD: Array, queries_QD: Array, platform: str,
                 interpret: bool = False) -> Float32[Array, "G Q"]:
  """`group_maxima` as one kernel, whose tiles of scores never leave the core that makes them."""
  (rows, dim), queries = vectors_SD.shape, len(queries_QD)
  gpu = platform != "tpu"
  tile, wide, deep = (128, min(queries, 128), 64) if gpu else (512, queries, dim)

  def kernel(vectors_ref, queries_ref, best_ref):
    def add(n, scores):
      part = pl.ds(n * deep, deep)
      return scores + _scores(vectors_ref[:, part], queries_ref[part, :])

    best_ref[...] = _maxima(lax.fori_loop(0, dim // deep, add, jnp.zeros((tile, wide))))

  # Queries first: a GPU takes the tiles of one after the other, so that all the queries' tiles
  # meet the same rows while its cache has them. A TPU has one tile of queries.
  return pl.pallas_call(
      kernel, grid=(queries // wide, rows // tile), interpret=interpret,
      in_specs=[pl.BlockSpec((tile, dim), lambda q, s: (s, 0)),
                pl.BlockSpec((dim, wide), lambda q, s: (0, q))],
      out_specs=pl.BlockSpec((tile // GROUP, wide), lambda q, s: (s, q)),
      out_shape=jax.ShapeDtypeStruct((rows // GROUP, queries), jnp.float32),
      compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=3) if gpu else None,
  )(vectors_SD, queries_QD.T)


def best_rows(vectors_SD: Array, queries_QD: Array, best_GQ: Float32[Array, "G Q"], first: Array,
              rows: Array, kept: int) -> tuple[Float32[Array, "Q K"], Int32[Array, "Q K"]]:
  """The best scores of a device and their rows, from its groups' best scores.

  first: the number of its first row. rows: how many there are on all devices.
  """
  starts_G = first + jnp.arange(len(best_GQ), dtype=jnp.int32) * GROUP
  best_GQ = jnp.where(starts_G[:, None] < rows, best_GQ, -jnp.inf)
  chosen_QK = best_groups(best_GQ, kept)
  grouped_GMD = vectors_SD.reshape(-1, GROUP, vectors_SD.shape[1])

  def again(query_D, chosen_K):
    members_KMD = grouped_GMD[chosen_K].astype(jnp.float32)
    scores_KM = jnp.sum(members_KMD * query_D.astype(jnp.float32)[None, None], axis=2)
    numbers_KM = starts_G[chosen_K][:, None] + jnp.arange(GROUP, dtype=jnp.int32)[None]
    return jnp.where(numbers_KM < rows, scores_KM, -jnp.inf), numbers_KM

  scores_QKM, numbers_QKM = lax.map(lambda x: again(*x), (queries_QD, chosen_QK), batch_size=16)
  flat = lambda x_QKM: x_QKM.reshape(len(queries_QD), -1)
  return best_of(flat(scores_QKM), flat(numbers_QKM), kept)


def best_groups(best_GQ: Float32[Array, "G Q"], kept: int) -> Int32[Array, "Q K"]:
  """The `kept` groups with the best scores for each query, in their order; of equal ones the first.

  The same trick once more, for a GPU sorts all of what it looks for more than 16 in: the best
  groups lie in those blocks of groups that have the best ones.
  """
  block_QBM = best_GQ.T.reshape(best_GQ.shape[1], -1, BLOCK // GROUP)
  _, blocks_QK = lax.top_k(block_QBM.max(axis=2), min(kept, block_QBM.shape[1]))
  blocks_QK = jnp.sort(blocks_QK, axis=1)
  scores_QKM = jnp.take_along_axis(block_QBM, blocks_QK[:, :, None], axis=1)
  members_M = jnp.arange(BLOCK // GROUP, dtype=jnp.int32)
  groups_QKM = blocks_QK[:, :, None] * (BLOCK // GROUP) + members_M[None, None]
  flat = lambda x_QKM: x_QKM.reshape(len(blocks_QK), -1)
  return jnp.sort(best_of(flat(scores_QKM), flat(groups_QKM), kept)[1], axis=1)


def best_of(scores_QM: Float32[Array, "Q M"], rows_QM: Int32[Array, "Q M"],
            kept: int) -> tuple[Float32[Array, "Q K"], Int32[Array, "Q K"]]:
  """The best `kept` scores and their rows; of equal ones those that stand first."""
  scores_QK, places_QK = lax.top_k(scores_QM, min(kept, scores_QM.shape[1]))
  return scores_QK, jnp.take_along_axis(rows_QM, places_QK, axis=1)


def _scores(vectors_SD: Array, queries_DQ: Array) -> Float32[Array, "S Q"]:
  return jnp.dot(vectors_SD, queries_DQ, preferred_element_type=jnp.float32,
                 precision=lax.Precision.HIGHEST if vectors_SD.dtype == jnp.float32 else None)


def _maxima(scores_SQ: Float32[Array, "S Q"]) -> Float32[Array, "G Q"]:
  return scores_SQ.reshape(-1, GROUP, scores_SQ.shape[1]).max(axis=1)


def _spread(vectors_PD: Float[np.ndarray, "P D"], mesh: Mesh, dtype: str) -> Array:
  """The matrix on its devices, filled up; on the host never more than one device's part of it.

  Rows that fill up repeat the last one, so that the best score of its group is a passage's.
  """
  rows, dim = vectors_PD.shape
  stored, width = _padded(rows, dim, mesh.size)
  each, parts = stored // mesh.size, []
  for n, device in enumerate(mesh.devices.flat):
    part_SD = np.zeros((each, width), jnp.dtype(dtype))
    for i in range(0, each, BLOCK):
      own_MD = vectors_PD[n * each + i : n * each + i + BLOCK]
      part_SD[i : i + len(own_MD), :dim] = own_MD
      part_SD[i + len(own_MD) : i + BLOCK, :dim] = vectors_PD[-1]
      finite_M = np.isfinite(part_SD[i : i + BLOCK]).all(axis=1)
      if not finite_M.all():
        row = min(n * each + i + int(np.argmin(finite_M)), rows - 1)
        raise CorpusError(f"the vector of row {row} is not finite as {dtype}; encode the corpus "
                          "again")
    parts.append(jax.device_put(part_SD, device).block_until_ready())
  return jax.make_array_from_single_device_arrays(
      (stored, width), NamedSharding(mesh, PartitionSpec("rows")), parts)


def _padded(rows: int, dim: int, devices: int) -> tuple[int, int]:
  """How many rows and dims are stored: whole blocks on every device, whole lanes of 128."""
  return -(-rows // (BLOCK * devices)) * BLOCK * devices, -(-dim // 128) * 128


def _kept(least: int) -> int:
  """A power of two, of which few are ever met, so that few are compiled."""
  return max(16, 1 << (least - 1).bit_length())


def _check(vectors_PD: np.ndarray, exact_PD: np.ndarray, dtype: str, overfetch: int) -> None:
  if dtype not in DTYPES:
    raise CorpusError(f"dtype is {dtype!r}, choose one of {', '.join(DTYPES)}")
  if overfetch < 0:
    raise CorpusError(f"overfetch is {overfetch}, wanted at least 0")
  if vectors_PD.ndim != 2 or not vectors_PD.size:
    raise CorpusError(f"the vectors have shape {vectors_PD.shape}, wanted [passages, dims]")
  if exact_PD.shape != vectors_PD.shape:
    raise CorpusError(f"the vectors to rescore from have shape {exact_PD.shape}, the others "
                      f"{vectors_PD.shape}; build both from one corpus")
  if len(vectors_PD) > 2**31 - 2**26:
    raise CorpusError(f"{len(vectors_PD):,} rows are more than int32 can number; shard the corpus")
