"""Recall, memory and speed of FAISS's approximate indexes against Flat, on clustered vectors.

  python -m benchmarks.indexes --rows 2000000 --dim 384 --kinds pq --cpus 0,1

`build_peak_gib`: what building takes beyond where it began, of the process's own memory, pages of
mapped files left out. Queries are noisy copies of rows. `memory_share`: bytes of the index file over Flat's (the float16 vectors that
candidates are scored with stay on the disk, and are read where they are needed). One JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import tempfile
import threading
import time

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--rows", type=int, default=2_000_000)
p.add_argument("--dim", type=int, default=384)
p.add_argument("--clusters", type=int, default=20_000)
p.add_argument("--spread", type=float, default=0.6, help="length of the noise around a centre of 1")
p.add_argument("--queries", type=int, default=500)
p.add_argument("--k", type=int, default=3)
p.add_argument("--kinds", default="pq", help="of pq, ivf, hnsw; with commas")
p.add_argument("--probes", default="", help="numbers to try with ivf and pq; with commas")
p.add_argument("--fetch", default="", help="candidates scored again, numbers to try")
p.add_argument("--folder", default=None, help="where files are made and kept")
p.add_argument("--seed", type=int, default=0)
p.add_argument("--cpus", default=None)
args = p.parse_args()
if args.cpus:
  os.sched_setaffinity(0, {int(c) for c in args.cpus.split(",")})

import faiss
import numpy as np

from retriever import faiss_index, store
from retriever.faiss_index import Effort

faiss.omp_set_num_threads(len(os.sched_getaffinity(0)))
BLOCK = 65_536


def anonymous_bytes() -> int:
  """Memory that is the process's own: resident, without pages of mapped files."""
  text = pathlib.Path("/proc/self/status").read_text()
  return 1024 * int(text.split("RssAnon:")[1].split()[0])


class Peak:
  """The most of it while this runs, looked at every 20 ms: FAISS lets other threads run."""

  def __enter__(self) -> Peak:
    self._start = self._most = anonymous_bytes()
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._look)
    self._thread.start()
    return self

  def __exit__(self, *_) -> None:
    self._ended.set()
    self._thread.join()

  def gib(self) -> float:
    """Above where it began."""
    return round((self._most - self._start) / 2**30, 3)

  def _look(self) -> None:
    while not self._ended.wait(0.02):
      self._most = max(self._most, anonymous_bytes())


def make(folder: pathlib.Path, stored: str) -> None:
  """Unit vectors around centres whose sizes are uneven, as topics of texts are."""
  if (folder / store.file_name(stored)).is_file():
    return
  rng = np.random.default_rng(args.seed)
  centres_CD = rng.standard_normal((args.clusters, args.dim), np.float32)
  centres_CD /= np.linalg.norm(centres_CD, axis=1, keepdims=True)
  share_C = 1.0 / np.arange(1, args.clusters + 1) ** 0.5
  share_C /= share_C.sum()
  with store.Writer(folder, args.dim, stored) as writer:
    while writer.rows < args.rows:
      count = min(BLOCK, args.rows - writer.rows)
      noise_MD = rng.standard_normal((count, args.dim), np.float32)
      noise_MD *= args.spread / args.dim ** 0.5
      block_MD = centres_CD[rng.choice(args.clusters, count, p=share_C)] + noise_MD
      writer.append(block_MD / np.linalg.norm(block_MD, axis=1, keepdims=True))
    writer.keep()


def ask(vectors_PD) -> np.ndarray:
  rng = np.random.default_rng(args.seed + 1)
  rows_Q = np.sort(rng.choice(args.rows, args.queries, replace=False))
  queries_QD = np.asarray(vectors_PD[rows_Q], np.float32)
  noise_QD = rng.standard_normal(queries_QD.shape, np.float32)
  queries_QD += 0.5 * args.spread / args.dim ** 0.5 * noise_QD
  return queries_QD / np.linalg.norm(queries_QD, axis=1, keepdims=True)


def exact(vectors_PD, queries_QD) -> list[set[int]]:
  """Flat's answers, a block of rows at a time."""
  best = faiss.ResultHeap(len(queries_QD), args.k, keep_max=True)
  at = 0
  for block_MD in store.blocks(vectors_PD, BLOCK):
    scores_QK, rows_QK = faiss.knn(queries_QD, block_MD, args.k,
                                   metric=faiss.METRIC_INNER_PRODUCT)
    best.add_result(scores_QK, rows_QK + at)
    at += len(block_MD)
  best.finalize()
  return [set(rows) for rows in best.I.tolist()]


def numbers(text: str) -> list[int | None]:
  return [int(n) for n in text.split(",")] if text else [None]


def measure(kind: str, folder: pathlib.Path, truth, queries_QD) -> dict:
  stored = open_stored(folder)
  path = folder / f"{kind}.faiss"
  began = time.perf_counter()
  word = faiss_index.factory(kind, args.rows, args.dim)
  with Peak() as peak:
    if not path.is_file():
      faiss_index.build(stored, word, path)
  built = time.perf_counter() - began
  found = []
  for probes in numbers(args.probes if kind != "hnsw" else ""):
    for fetch in numbers(args.fetch):
      index = faiss_index.FaissIndex(faiss_index.read(path, args.rows, args.dim), stored,
                                     Effort(probes=probes, fetch=fetch), faiss_index.FETCH[kind])
      index.search(queries_QD[:8], args.k)
      began = time.perf_counter()
      answers = [index.search(q_D[None], args.k)[0] for q_D in queries_QD]
      seconds = time.perf_counter() - began
      hits = sum(len(t & {row for row, _ in a}) for t, a in zip(truth, answers))
      found.append({"probes": probes, "fetch": fetch, "recall": hits / (args.k * len(truth)),
                    "ms_a_query": round(1e3 * seconds / len(truth), 3)})
  return {"kind": kind, "factory": word, "build_seconds": round(built, 1),
          "index_mb": round(path.stat().st_size / 1e6, 1),
          "memory_share": round(path.stat().st_size / (4 * args.rows * args.dim), 4),
          "build_peak_gib": peak.gib(), "found": found}


def open_stored(folder: pathlib.Path):
  return store.open_vectors(folder, args.rows, args.dim, "float16")


def main(folder: pathlib.Path) -> None:
  folder.mkdir(parents=True, exist_ok=True)
  make(folder, "float16")
  stored = open_stored(folder)
  queries_QD = ask(stored)
  truth = exact(stored, queries_QD)
  results = [measure(kind, folder, truth, queries_QD) for kind in args.kinds.split(",")]
  print(json.dumps({"rows": args.rows, "dim": args.dim, "queries": args.queries, "k": args.k,
                    "results": results, "faiss": faiss.__version__,
                    "cpus": len(os.sched_getaffinity(0))}))


if args.folder:
  main(pathlib.Path(args.folder))
else:
  with tempfile.TemporaryDirectory() as scratch:
    main(pathlib.Path(scratch))
