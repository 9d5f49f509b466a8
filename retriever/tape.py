"""Record and replay: (engine's fingerprint, query, top_k) -> passages, in one SQLite file.

The file is a record of what a run saw and a cache that outlives it. Several processes of one
machine may share it, and may be killed at any moment: a row is there whole or not at all. What was
recorded first stays. It must lie on a local disk: SQLite's write-ahead log needs memory that all
its users share, which NFS and its like do not give; give each host a file of its own there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import stamina

from retriever.protocol import (
    CorpusError, Found, Passage, RetrievalError, SearchEngine, all_found, check_top_k)

# A damaged schema is quoted in an error message that is then no text itself.
_FAULTS = (sqlite3.Error, UnicodeDecodeError)
BUSY_SECONDS = 60.0  # how long another process may write before a search fails


class Recorder(SearchEngine):
  """Writes every search to a file, for Replay; what the file already holds is not asked again.

  A failed search is told and never written. `close` closes the engine as well.
  """

  def __init__(self, engine: SearchEngine, path: str | Path):
    self._engine, self._tape = engine, _Tape(Path(path), writable=True)
    self.fingerprint = engine.fingerprint

  def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    return all_found(self.search_each(queries, top_k))

  def search_each(self, queries: Sequence[str], top_k: int) -> list[Found]:
    check_top_k(top_k)
    found: dict[str, Found | None] = self._tape.read(self.fingerprint, queries, top_k)
    missing = [q for q, passages in found.items() if passages is None]
    if missing:
      fresh = dict(zip(missing, self._engine.search_each(missing, top_k), strict=True))
      answers = {q: f for q, f in fresh.items() if not isinstance(f, RetrievalError)}
      found |= fresh | self._tape.write(self.fingerprint, answers, top_k)
    return [_copied(found[q]) for q in queries]

  def close(self) -> None:
    self._tape.close()
    self._engine.close()


class Replay(SearchEngine):
  """Answers from a Recorder's file alone; a search that is not in it is a RetrievalError."""

  def __init__(self, path: str | Path, fingerprint: str | None = None):
    path = Path(path)
    if not path.is_file():
      raise CorpusError(f"{path} is missing; record searches there first, with Recorder")
    self._path, self._tape = path, _Tape(path, writable=False)
    known = self._tape.fingerprints()
    if fingerprint is None and len(known) != 1:
      self.close()
      raise CorpusError(f"{path} holds searches of {len(known)} engines, wanted one; name its "
                        f"fingerprint, one of {known}")
    self.fingerprint = known[0] if fingerprint is None else fingerprint

  def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    return all_found(self.search_each(queries, top_k))

  def search_each(self, queries: Sequence[str], top_k: int) -> list[Found]:
    check_top_k(top_k)
    found = self._tape.read(self.fingerprint, queries, top_k)
    return [self._missed(q, top_k) if found[q] is None else list(found[q]) for q in queries]

  def _missed(self, query: str, top_k: int) -> RetrievalError:
    return RetrievalError(f"{self._path} holds no whole record of {query!r} (top {top_k}, "
                          f"engine {self.fingerprint[:12]}); record it again")

  def close(self) -> None:
    self._tape.close()


class _Tape:
  """Searches in SQLite, each row with its own digest, so that a damaged row is no row."""

  def __init__(self, path: Path, writable: bool):
    self._path, self._lock = path, threading.Lock()
    try:
      self._db = _open(path, writable)
    except sqlite3.OperationalError as e:
      raise CorpusError(f"{path} can't be opened ({e}); name a file in a folder that exists") from e
    except _FAULTS as e:
      raise CorpusError(f"{path} is no record of searches ({e}); name another file") from e

  def fingerprints(self) -> list[str]:
    with self._lock:
      try:
        rows = self._db.execute("SELECT DISTINCT fingerprint FROM searches").fetchall()
      except _FAULTS as e:
        self._db.close()
        raise CorpusError(f"{self._path} is no record of searches ({e}); name another") from e
    return [str(row[0]) for row in rows]

  def read(self, fingerprint: str, queries: Sequence[str], top_k: int,
           ) -> dict[str, list[Passage] | None]:
    """What is recorded of each query, None where that is nothing whole."""
    with self._lock:
      try:
        return {q: self._row(fingerprint, _asked(q, top_k)) for q in dict.fromkeys(queries)}
      except _FAULTS as e:
        raise self._failed(e) from e

  def write(self, fingerprint: str, found: Mapping[str, list[Passage]], top_k: int,
            ) -> dict[str, list[Passage]]:
    """Records what isn't there yet, all of it or nothing; returns what is there now."""
    now = {}
    with self._lock:
      try:
        self._db.execute("BEGIN IMMEDIATE")
        try:
          for query, passages in found.items():
            asked = _asked(query, top_k)
            # Another process may have asked the same meanwhile, and seen another answer.
            now[query] = self._row(fingerprint, asked)
            if now[query] is None:
              text = json.dumps([dataclasses.asdict(p) for p in passages])
              self._db.execute("INSERT OR REPLACE INTO searches VALUES (?, ?, ?, ?)",
                               (fingerprint, asked, text, _digest(fingerprint, asked, text)))
              now[query] = list(passages)
          self._db.execute("COMMIT")
        finally:
          if self._db.in_transaction:
            self._db.execute("ROLLBACK")
      except _FAULTS as e:
        raise self._failed(e) from e
    return now

  def close(self) -> None:
    with self._lock:
      self._db.close()

  def _row(self, fingerprint: str, asked: str) -> list[Passage] | None:
    row = self._db.execute("SELECT passages, digest FROM searches WHERE fingerprint = ? AND "
                           "asked = ?", (fingerprint, asked)).fetchone()
    # Any column may hold anything after damage, even bytes in the place of text.
    if row is None or not isinstance(row[0], str) or row[1] != _digest(fingerprint, asked, row[0]):
      return None
    return [Passage(**p) for p in json.loads(row[0])]

  def _failed(self, error: Exception) -> RetrievalError:
    return RetrievalError(
        f"the record of searches {self._path} failed ({error}); if it is damaged, delete it and "
        "its -wal and -shm files: what it held is asked again")


def _open(path: Path, writable: bool) -> sqlite3.Connection:
  """A connection that commits when told to, with the table there if it may write."""
  if not writable:
    # A folder that can't be written holds no live log either: then the file alone is the record.
    frozen = not _has_log(path) and not _can_be_read(path)
    return _connect(f"{path.absolute().as_uri()}?{'immutable=1' if frozen else 'mode=ro'}")
  db = _connect(path.absolute().as_uri())
  try:
    # SQLite does not wait for its lock here, and processes that start together all ask for it.
    for attempt in stamina.retry_context(
        on=_is_busy, attempts=None, timeout=BUSY_SECONDS, wait_initial=0.01, wait_jitter=0.05,
        wait_max=0.5):
      with attempt:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE IF NOT EXISTS searches (fingerprint TEXT, asked TEXT, "
                   "passages TEXT, digest TEXT, PRIMARY KEY (fingerprint, asked))")
  except _FAULTS:
    db.close()
    raise
  return db


def _connect(uri: str) -> sqlite3.Connection:
  db = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, check_same_thread=False,
                       isolation_level=None)
  # A row whose bytes are damaged is read all the same: its digest then tells.
  db.text_factory = lambda text: text.decode("utf-8", "replace")
  return db


def _has_log(path: Path) -> bool:
  return Path(f"{path}-wal").exists()


def _can_be_read(path: Path) -> bool:
  db = _connect(f"{path.absolute().as_uri()}?mode=ro")
  try:
    db.execute("SELECT * FROM sqlite_schema").fetchone()
  except sqlite3.OperationalError:
    return False
  except _FAULTS:
    return True  # damaged, or no database: whoever reads it next will say so
  finally:
    db.close()
  return True


def _is_busy(error: BaseException) -> bool:
  return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def _asked(query: str, top_k: int) -> str:
  return json.dumps([query, top_k])


def _digest(*parts: str) -> str:
  return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _copied(found: Found) -> Found:
  return found if isinstance(found, RetrievalError) else list(found)
