"""The engine of an index folder: queries to vectors or words, to rows, to passages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from retriever import bm25, encoders, faiss_index, mesh_index, store
from retriever import corpus as corpus_lib
from retriever import manifest as manifest_lib
from retriever.faiss_index import Effort
from retriever.manifest import Manifest
from retriever.protocol import CorpusError, Passage, SearchEngine, check_top_k

KINDS = ("flat", "mesh", *faiss_index.KINDS, "faiss", "bm25")


@runtime_checkable
class Ranker(Protocol):
  """Rows of a corpus by how well they answer."""

  def rank(self, queries: Sequence[str], top_k: int) -> list[list[tuple[int, float]]]:
    """The best `top_k` (row, score) of each query, best first, equal scores by row."""


class Dense:
  """A Ranker by vectors: an encoder, and an index of what it made of the passages."""

  def __init__(self, encoder: encoders.Encoder, index: Any):
    self._encoder, self._index = encoder, index

  def rank(self, queries: Sequence[str], top_k: int) -> list[list[tuple[int, float]]]:
    return self._index.search(self._encoder.encode_queries(queries), top_k)


class Engine(SearchEngine):
  """Asks the ranker, reads the passages; may be called from several threads."""

  def __init__(self, ranker: Ranker, corpus: corpus_lib.Corpus, fingerprint: str):
    self._ranker, self._corpus = ranker, corpus
    self.fingerprint = fingerprint

  def __len__(self) -> int:
    return len(self._corpus)

  def passage(self, row: int, score: float) -> Passage:
    id_, contents = self._corpus[row]
    return Passage(id_, contents, score)

  def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    check_top_k(top_k)
    if not queries:
      return []
    return [[self.passage(row, score) for row, score in rows]
            for rows in self._ranker.rank(queries, top_k)]

  def close(self) -> None:
    self._corpus.close()


def open_index(folder: str | Path, *, kind: str | None = None, model: str | None = None,
               dtype: str = "float32", probes: int | None = None, ef_search: int | None = None,
               fetch: int | None = None, gpu: bool = False) -> Engine:
  """Opens what `retriever.build` wrote, once every file has proved to be the one it wrote.

  `kind`: mesh searches the vectors of a flat index on JAX's devices, in `dtype` (float32 or
  bfloat16, whose candidates are scored again); flat does the converse. `model`: where the
  encoder's weights lie now. The others: see `faiss_index.Effort`.
  """
  folder = Path(folder)
  if not (folder / manifest_lib.NAME).is_file():
    raise CorpusError(f"{folder} holds no index (no {manifest_lib.NAME}); build one with "
                      f"`python -m retriever.build corpus.jsonl --out {folder}`")
  manifest = Manifest.load(folder)
  corpus_path = (folder / manifest.corpus_path).resolve()
  rebuild = f"repeat the command that built {folder}, with --overwrite"
  manifest.corpus.verify(corpus_path, f"put it back, or {rebuild}")
  for name, fingerprint in manifest.files.items():
    fingerprint.verify(folder / name, f"put it back, or {rebuild}")
  corpus = corpus_lib.Corpus(corpus_path, folder / corpus_lib.OFFSETS)
  if len(corpus) != manifest.rows:
    raise CorpusError(f"{folder} has offsets of {len(corpus)} passages, its manifest says "
                      f"{manifest.rows}; {rebuild}")
  kind = _kind(manifest, kind, folder)
  effort = Effort(probes, ef_search, fetch, gpu)
  if kind == "bm25":
    _refuse_options(kind, model=model, dtype=dtype != "float32", effort=effort != Effort())
    return Engine(bm25.BM25.load(folder, manifest.index), corpus, manifest.fingerprint)
  if model and not manifest.model:
    raise CorpusError(f"{folder} has an encoder without a model; leave the option model out")
  spec = {**manifest.encoder, "model": manifest.model} if manifest.model else manifest.encoder
  encoder = encoders.from_spec(spec, folder, model)
  index = _open_vectors(kind, manifest, folder, encoder.dim, dtype, effort)
  asked = {"kind": kind, "dtype": dtype, **vars(effort)}
  return Engine(Dense(encoder, index), corpus, _fingerprint(manifest, asked))


def _open_vectors(kind: str, manifest: Manifest, folder: Path, dim: int, dtype: str,
                  effort: Effort) -> Any:
  """The index over the vectors of a folder."""
  stored = manifest.index.get("vectors")  # an imported index holds its own
  vectors_PD = stored and store.open_vectors(folder, manifest.rows, dim, stored)
  if kind == "mesh":
    _refuse_options(kind, effort=effort != Effort(fetch=effort.fetch))
    spare = mesh_index.SPARE if effort.fetch is None else effort.fetch
    return mesh_index.MeshIndex(vectors_PD, dtype=dtype, overfetch=spare)
  _refuse_options(kind, dtype=dtype != "float32")
  if kind == "flat":
    _refuse_options(kind, effort=effort != Effort())
    return faiss_index.FlatIndex(vectors_PD)
  name = next(n for n in manifest.files if n.endswith(manifest.index["file"]))
  index = faiss_index.read(folder / name, manifest.rows, dim)
  return faiss_index.FaissIndex(index, vectors_PD if stored else None, effort,
                                faiss_index.FETCH.get(kind, faiss_index.SPARE))


def _kind(manifest: Manifest, asked: str | None, folder: Path) -> str:
  built = manifest.index["kind"]
  if built not in KINDS:
    raise CorpusError(f"{folder} holds an index of kind {built!r}, this version reads "
                      f"{', '.join(KINDS)}; build it again")
  if asked in (None, built):
    return built
  if {asked, built} <= {"flat", "mesh"}:
    return asked
  raise CorpusError(f"{folder} holds an index of kind {built!r} and can't be opened as {asked!r}; "
                    "flat and mesh share their files, others are built")


def _refuse_options(kind: str, **given: object) -> None:
  """What is set and not used would mislead."""
  for name, value in given.items():
    if value:
      what = "probes, ef_search, fetch or gpu" if name == "effort" else name
      raise CorpusError(f"{what} means nothing to an index of kind {kind!r}; leave it out")


def _fingerprint(manifest: Manifest, asked: Mapping[str, Any]) -> str:
  """The manifest's own, unless it is opened in a way that may change its answers."""
  usual = {"kind": manifest.index["kind"], "dtype": "float32", **vars(Effort())}
  changed = {k: v for k, v in asked.items() if v != usual[k]}
  if not changed:
    return manifest.fingerprint
  text = json.dumps([manifest.fingerprint, changed], sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()
