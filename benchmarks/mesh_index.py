"""The index on a mesh: on paper for machines that are elsewhere, and beside FAISS Flat on this one.

  python -m benchmarks.mesh_index --targets h100x8 v5p-8 --dtypes bfloat16
  python -m benchmarks.mesh_index --targets --rows 200000 --dim 384 --queries 64 --cpus 1

The first compiles a search for each target and reads off what it takes; nothing of it is run. The
second runs both indexes over the same clustered vectors, in turns. One JSON line each.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from typing import Any, Callable

from benchmarks import common

PASSAGES, DIM = 21_015_324, 768  # English Wikipedia of 2018 in parts of 100 words, by E5-base


def planned(name: str, dtype: str, queries: int, top_k: int, overfetch: int) -> dict[str, Any]:
  """What one search takes on each device of a target, from its compiled program."""
  import jax
  import jax.numpy as jnp
  import numpy as np
  from jax.sharding import Mesh, NamedSharding, PartitionSpec
  from retriever import mesh_index
  from searchr1_jax import plan
  from searchr1_jax.planning import costs, programs, targets

  target = targets.find(name)
  mesh = Mesh(np.asarray(targets.devices(target)), ("rows",))
  stored, width = mesh_index._padded(PASSAGES, DIM, target.chips)
  kept = mesh_index._kept(top_k + overfetch)
  described = lambda shape, kind, axes: jax.ShapeDtypeStruct(
      shape, kind, sharding=NamedSharding(mesh, PartitionSpec(*axes)))
  program = programs.Program(
      "search", f"{queries} queries, top {top_k}", mesh_index.search_program(mesh, kept),
      (described((stored, width), jnp.dtype(dtype), ("rows",)),
       described((queries, width), jnp.dtype(dtype), ()), described((), jnp.int32, ())))
  cost = costs.measure(program, target, plan.kept_folder())
  # By hand: what the plan counts of a kernel is the causal half of an attention.
  again = min(kept * mesh_index.GROUP, stored // target.chips)
  cost = dataclasses.replace(cost, flops=2.0 * queries * width * (stored / target.chips + again))
  seconds = cost.seconds(target)
  bound = max(seconds, key=seconds.get)
  return {"target": name, "dtype": dtype, "kept": kept, **dataclasses.asdict(cost),
          "matrix": mesh_index.bytes_per_device(PASSAGES, DIM, dtype, target.chips),
          "ms": {part: round(1e3 * s, 3) for part, s in seconds.items()},
          "roofline_ms": round(1e3 * seconds[bound], 3), "bound": bound}


def measured(rows: int, dim: int, queries: int, repeats: int, seed: int) -> dict[str, Any]:
  """Seconds of a search of both indexes in turns, and whether they found the same."""
  import faiss
  import numpy as np
  from retriever.faiss_index import FlatIndex
  from retriever.mesh_index import MeshIndex

  faiss.omp_set_num_threads(1)
  rng = np.random.default_rng(seed)
  normal = lambda *size: rng.normal(size=size).astype(np.float32)
  unit = lambda x_MD: x_MD / np.linalg.norm(x_MD, axis=1, keepdims=True)
  vectors_PD = unit(normal(1000, dim)[rng.integers(1000, size=rows)] + 0.5 * normal(rows, dim))
  queries_QD = unit(vectors_PD[rng.integers(rows, size=queries)] + 0.02 * normal(queries, dim))
  indexes = {"flat": FlatIndex(vectors_PD), "mesh": MeshIndex(vectors_PD),
             "mesh bfloat16": MeshIndex(vectors_PD, dtype="bfloat16")}
  bare = faiss.IndexFlatIP(dim)
  bare.add(vectors_PD)
  search: dict[str, Callable] = {
      **{name: functools.partial(index.search, queries_QD, 3) for name, index in indexes.items()},
      "faiss alone": functools.partial(bare.search, queries_QD, 3)}
  found = {name: search[name]() for name in indexes}
  seconds: dict[str, list[float]] = {name: [] for name in search}
  for _ in range(repeats):
    for name, run in search.items():
      began = time.perf_counter()
      run()
      seconds[name].append(time.perf_counter() - began)
  same = lambda name: sum(len({r for r, _ in f} & {r for r, _ in w}) / 3 for f, w in
                          zip(found[name], found["flat"])) / queries
  spread = {name: common.spread(s) for name, s in seconds.items()}
  return {"rows": rows, "dim": dim, "queries": queries, "seconds": spread,
          "equal": found["mesh"] == found["flat"],
          "recall": {name: same(name) for name in indexes},
          "over_mesh": {name: round(s["median"] / spread["mesh"]["median"], 2)
                        for name, s in spread.items()}}


def main() -> None:
  p = argparse.ArgumentParser(description=__doc__,
                              formatter_class=argparse.RawDescriptionHelpFormatter)
  p.add_argument("--targets", nargs="*", default=["h100x8", "v5p-8"])
  p.add_argument("--dtypes", nargs="*", default=["bfloat16"])
  p.add_argument("--top-k", type=int, default=3)
  p.add_argument("--overfetch", type=int, default=8)
  p.add_argument("--rows", type=int, default=200_000)
  p.add_argument("--dim", type=int, default=384)
  p.add_argument("--queries", type=int, default=512)
  p.add_argument("--repeats", type=int, default=5)
  p.add_argument("--seed", type=int, default=0)
  p.add_argument("--cpus", default=None, help="pin to these cores, e.g. 0 or 0,1")
  args = p.parse_args()
  common.pin(args.cpus)
  from searchr1_jax.planning import targets
  targets.prepare(1)
  for name in args.targets:
    for dtype in args.dtypes:
      common.report(bench="mesh_index_plan", queries=args.queries, top_k=args.top_k,
                    **planned(name, dtype, args.queries, args.top_k, args.overfetch))
  if not args.targets:
    common.report(bench="mesh_index", **measured(args.rows, args.dim, args.queries, args.repeats,
                                                 args.seed))


if __name__ == "__main__":
  main()
