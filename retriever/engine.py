"""One `search(queries, top_k) -> passages` over an index folder; controls; record and replay."""

from __future__ import annotations

import abc
import collections
import dataclasses
import hashlib
import json
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from retriever import corpus as corpus_lib
from retriever import encoders, faiss_index
from retriever import manifest as manifest_lib
from retriever.protocol import CorpusError, Passage, RetrievalError

CACHED_SEARCHES = 4096


class SearchEngine(abc.ABC):
  """What every engine is: a Search, with a fingerprint that changes when its answers may."""

  fingerprint: str

  @abc.abstractmethod
  def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    """The best `top_k` passages of each query, best first."""

  def __call__(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    return self.search(queries, top_k)


class Engine(SearchEngine):
  """Encodes queries, asks the index, reads the passages; may be called from several threads."""

  def __init__(self, encoder: encoders.Encoder, index: faiss_index.FlatIndex,
               corpus: corpus_lib.Corpus, fingerprint: str):
    self._encoder, self._index, self._corpus = encoder, index, corpus
    self.fingerprint = fingerprint
    self._cache = _Cache(CACHED_SEARCHES)

  def __len__(self) -> int:
    return len(self._corpus)

  def passage(self, row: int, score: float) -> Passage:
    id_, contents = self._corpus[row]
    return Passage(id_, contents, score)

  def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    _check_top_k(top_k)
    found = {q: self._cache.get((q, top_k)) for q in queries}
    missing = [q for q, passages in found.items() if passages is None]
    if missing:
      hits = self._index.search(self._encoder.encode_queries(missing), top_k)
      for query, rows in zip(missing, hits, strict=True):
        found[query] = tuple(self.passage(row, score) for row, score in rows)
        self._cache.put((query, top_k), found[query])
    return [list(found[q]) for q in queries]


def open_engine(index_dir: str | Path) -> Engine:
  """Opens what `retriever.build` wrote, once every file has proved to be the one it wrote."""
  folder = Path(index_dir)
  if not (folder / manifest_lib.NAME).is_file():
    raise CorpusError(f"{folder} holds no index (no {manifest_lib.NAME}); build one with "
                      f"`python -m retriever.build corpus.jsonl --out {folder}`")
  manifest = manifest_lib.Manifest.load(folder)
  corpus_path = (folder / manifest.corpus_path).resolve()
  rebuild = f"`python -m retriever.build {corpus_path} --out {folder} --overwrite`"
  manifest.corpus.verify(corpus_path, f"put it back, or build again with {rebuild}")
  for name, fingerprint in manifest.files.items():
    fingerprint.verify(folder / name, f"build again with {rebuild}")
  corpus = corpus_lib.Corpus(corpus_path, folder / corpus_lib.OFFSETS)
  encoder = encoders.from_spec(manifest.encoder, folder)
  if manifest.index != {"kind": faiss_index.KIND}:
    raise CorpusError(f"{folder} holds an index of kind {manifest.index['kind']!r}, this version "
                      f"reads {faiss_index.KIND!r}; build again with {rebuild}")
  index = faiss_index.FlatIndex.load(folder / faiss_index.NAME, len(corpus), encoder.dim)
  return Engine(encoder, index, corpus, manifest.fingerprint)


class EmptyEngine(SearchEngine):
  """A control: finds nothing, whatever is asked."""

  fingerprint = "empty"

  def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    return [[] for _ in queries]


class RandomEngine(SearchEngine):
  """A control: passages that have nothing to do with the query, always the same ones for it."""

  def __init__(self, engine: Engine, seed: int):
    self._engine, self._seed = engine, seed
    self.fingerprint = f"random-{seed}-{engine.fingerprint}"

  def __len__(self) -> int:
    return len(self._engine)

  def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    _check_top_k(top_k)
    return [[self._engine.passage(row, 0.0) for row in self._rows(q, top_k)] for q in queries]

  def _rows(self, query: str, top_k: int) -> list[int]:
    digest = hashlib.blake2b(query.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    rng = np.random.default_rng([self._seed, int.from_bytes(digest, "little")])
    return rng.choice(len(self), min(top_k, len(self)), replace=False).tolist()


class Recorder(SearchEngine):
  """Writes every search to a file, for Replay; what the file already holds is not asked again."""

  def __init__(self, engine: SearchEngine, path: str | Path):
    self._engine, self._tape = engine, _Tape(Path(path))
    self.fingerprint = engine.fingerprint

  def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    found = {q: self._tape.read(self.fingerprint, q, top_k) for q in queries}
    missing = [q for q, passages in found.items() if passages is None]
    if missing:
      fresh = dict(zip(missing, self._engine.search(missing, top_k), strict=True))
      self._tape.write(self.fingerprint, fresh, top_k)
      found |= fresh
    return [list(found[q]) for q in queries]

  def close(self) -> None:
    self._tape.close()


class Replay(SearchEngine):
  """Answers from a Recorder's file alone; a search that is not in it is a RetrievalError."""

  def __init__(self, path: str | Path, fingerprint: str | None = None):
    path = Path(path)
    if not path.is_file():
      raise CorpusError(f"{path} is missing; record searches there first, with Recorder")
    self._path, self._tape = path, _Tape(path)
    known = self._tape.fingerprints()
    if fingerprint is None and len(known) != 1:
      self.close()
      raise CorpusError(f"{path} holds searches of {len(known)} engines, wanted one; name its "
                        f"fingerprint, one of {known}")
    self.fingerprint = known[0] if fingerprint is None else fingerprint

  def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    found = {q: self._tape.read(self.fingerprint, q, top_k) for q in queries}
    missed = [q for q, passages in found.items() if passages is None]
    if missed:
      raise RetrievalError(f"{self._path} holds no whole record of {missed[0]!r} (top {top_k}, "
                           f"engine {self.fingerprint[:12]}); record it again")
    return [list(found[q]) for q in queries]

  def close(self) -> None:
    self._tape.close()


class _Tape:
  """Searches in SQLite, each row with its own digest, so that a damaged row is no row."""

  def __init__(self, path: Path):
    self._lock = threading.Lock()
    try:
      self._db = sqlite3.connect(path, timeout=60, check_same_thread=False)
    except sqlite3.Error as e:
      raise CorpusError(f"{path} can't be opened ({e}); name a file in a folder that exists") from e
    try:
      with self._db:
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS searches (fingerprint TEXT, asked TEXT, passages TEXT, "
            "digest TEXT, PRIMARY KEY (fingerprint, asked))")
    except sqlite3.Error as e:
      self._db.close()
      raise CorpusError(f"{path} is no record of searches ({e}); name another file") from e

  def fingerprints(self) -> list[str]:
    return [row[0] for row in self._run("SELECT DISTINCT fingerprint FROM searches")]

  def read(self, fingerprint: str, query: str, top_k: int) -> tuple[Passage, ...] | None:
    asked = json.dumps([query, top_k])
    rows = self._run("SELECT passages, digest FROM searches WHERE fingerprint = ? AND asked = ?",
                     [(fingerprint, asked)])
    if not rows or rows[0][1] != _digest(fingerprint, asked, rows[0][0]):
      return None
    return tuple(Passage(**p) for p in json.loads(rows[0][0]))

  def write(self, fingerprint: str, found: dict[str, list[Passage]], top_k: int) -> None:
    rows = []
    for query, passages in found.items():
      asked = json.dumps([query, top_k])
      text = json.dumps([dataclasses.asdict(p) for p in passages])
      rows.append((fingerprint, asked, text, _digest(fingerprint, asked, text)))
    self._run("INSERT OR REPLACE INTO searches VALUES (?, ?, ?, ?)", rows)

  def close(self) -> None:
    self._db.close()

  def _run(self, statement: str, rows: Sequence[tuple] = ((),)) -> list[tuple]:
    """One transaction; every row's results together."""
    try:
      with self._lock, self._db:
        return [result for row in rows for result in self._db.execute(statement, row)]
    except sqlite3.Error as e:
      raise RetrievalError(f"the record of searches failed ({e})") from e


class _Cache:
  """The last searches, safe to share between threads."""

  def __init__(self, size: int):
    self._size, self._lock = size, threading.Lock()
    self._found: collections.OrderedDict = collections.OrderedDict()

  def get(self, key: tuple[str, int]) -> tuple[Passage, ...] | None:
    with self._lock:
      if key in self._found:
        self._found.move_to_end(key)
      return self._found.get(key)

  def put(self, key: tuple[str, int], passages: tuple[Passage, ...]) -> None:
    with self._lock:
      self._found[key] = passages
      self._found.move_to_end(key)
      if len(self._found) > self._size:
        self._found.popitem(last=False)


def _check_top_k(top_k: int) -> None:
  if top_k < 1:
    raise ValueError(f"top_k is {top_k}, wanted at least 1")


def _digest(*parts: str) -> str:
  return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
