"""A corpus on disk: one `{"id", "contents"}` a line, memory-mapped, any row in one seek."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import mmap
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import UInt64

from retriever.protocol import CorpusError

if sys.version_info >= (3, 14):
  from compression import zstd
else:
  from backports import zstd

UNPACKED = "corpus.jsonl"
OFFSETS = "offsets.u64"  # where each passage's line starts, then the size; little-endian
MAX_LINE_BYTES = 64 << 20
WANTED = r'wanted {"id": "0", "contents": "\"Title\"\nText"}'
FLUSH_ROWS = 65_536
REASONS = 5  # of bad lines, kept as examples


@dataclasses.dataclass(frozen=True)
class Scan:
  """What a pass over a corpus found: the text to read (unpacked, if it was packed), how many
  lines are passages, how many were skipped, and the first few reasons."""

  path: Path
  rows: int
  skipped: int = 0
  reasons: tuple[str, ...] = ()


class Corpus:
  """Random access by row: `corpus[row]` is `(id, contents)`; nothing is kept in memory."""

  def __init__(self, path: Path, offsets_path: Path):
    self.path = path
    try:
      size, table_size = path.stat().st_size, offsets_path.stat().st_size
      if table_size % 8 or table_size < 16:
        raise CorpusError(f"{offsets_path} is cut short; delete it, or build the index again")
      self._starts = np.memmap(offsets_path, "<u8", mode="r")
      if self._starts[-1] != size:
        raise CorpusError(f"{path} has {size:,} bytes, {offsets_path} was made for "
                          f"{int(self._starts[-1]):,}; delete it, or build the index again")
      with path.open("rb") as f:
        self._bytes = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
      raise CorpusError(f"{e.filename} can't be read: {e.strerror}") from e

  @classmethod
  def open(cls, path: str | Path, folder: str | Path | None = None) -> Corpus:
    """Opens a corpus, scanning it into `folder` (`<path>.rows`) unless that was done before."""
    path = Path(path)
    folder = Path(f"{path}.rows") if folder is None else Path(folder)
    offsets_path = folder / OFFSETS
    if path.is_file() and _is_of(path, offsets_path):
      return cls(folder / UNPACKED if is_packed(path) else path, offsets_path)
    folder.mkdir(parents=True, exist_ok=True)
    before = path.stat().st_mtime_ns if path.is_file() else 0
    scan = prepare(path, folder)
    os.utime(offsets_path, ns=(before, before))  # says which corpus they are of
    return cls(scan.path, offsets_path)

  def __enter__(self) -> Corpus:
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def close(self) -> None:
    """Lets the file go; rows can't be read any more."""
    self._bytes.close()

  def __len__(self) -> int:
    return len(self._starts) - 1

  def __getitem__(self, row: int) -> tuple[str, str]:
    if not 0 <= row < len(self):
      raise IndexError(f"row {row} of a corpus of {len(self)}")
    start, end = int(self._starts[row]), int(self._starts[row + 1])
    newline = self._bytes.find(b"\n", start, end)  # what follows it, up to `end`, was skipped
    line = self._bytes[start:end if newline < 0 else newline]
    return parse_line(line, f"{self.path}, row {row}")

  def __iter__(self) -> Iterator[tuple[str, str]]:
    return (self[row] for row in range(len(self)))


def prepare(path: Path, folder: Path, on_bytes: Callable[[int], None] = lambda n: None,
            skip_bad: bool = False) -> Scan:
  """Checks every line, writes the offsets and, of a packed corpus, the text.

  `on_bytes` hears how much of the file has been read. `skip_bad`: lines that are no passages are
  counted and left out; else the first one is a CorpusError that names its number.
  """
  packed = is_packed(path)
  target = folder / UNPACKED if packed else path
  temporary = folder / f".{OFFSETS}.{os.getpid()}"
  try:
    with (_open(path) as source, temporary.open("wb") as offsets,
          target.open("wb") if packed else contextlib.nullcontext() as out):
      scan = _Scan(path, offsets, out, skip_bad)
      scan.read(_unpacked(source, path), lambda: on_bytes(source.tell()))
    with Corpus(target, temporary) as corpus:
      _refuse_twins(corpus, scan.ids())
    temporary.replace(folder / OFFSETS)
  except (EOFError, gzip.BadGzipFile, zlib.error, zstd.ZstdError) as e:
    raise CorpusError(f"{path} is cut or damaged ({e}); wanted a whole {path.suffix} file") from e
  finally:
    temporary.unlink(missing_ok=True)
  return Scan(target, scan.rows, scan.skipped, tuple(scan.reasons))


def is_packed(path: Path) -> bool:
  """Whether the corpus is compressed; refuses what can't be unpacked here."""
  if path.suffix in (".xz", ".bz2", ".zip", ".7z"):
    raise CorpusError(f"{path} is packed as {path.suffix}; unpack it, or pack it as .gz or .zst")
  return path.suffix in (".gz", ".zst")


def parse_line(line: bytes, where: str) -> tuple[str, str]:
  """`(id, contents)` of one line, or a CorpusError that says where and what was wanted."""
  try:
    record = json.loads(line.decode("utf-8")) if line.strip() else None
  except UnicodeDecodeError as e:
    raise CorpusError(f"{where}: byte {e.start + 1} is not UTF-8; {WANTED} in UTF-8") from e
  except (ValueError, RecursionError) as e:
    raise CorpusError(f"{where}: not JSON ({e}); {WANTED}") from e
  if record is None:
    raise CorpusError(f"{where}: the line is empty; {WANTED}, or no line at all")
  if not isinstance(record, dict):
    raise CorpusError(f"{where}: a JSON {type(record).__name__}, not an object; {WANTED}")
  for key in ("id", "contents"):
    if key not in record:
      raise CorpusError(f"{where}: no {key!r}; {WANTED}")
  id_, contents = record["id"], record["contents"]
  if isinstance(id_, int) and not isinstance(id_, bool):
    id_ = str(id_)
  for key, value in (("id", id_), ("contents", contents)):
    if not isinstance(value, str):
      raise CorpusError(f"{where}: {key!r} is a {type(value).__name__}, not a string; {WANTED}")
    if not value.strip():
      raise CorpusError(f"{where}: {key!r} is empty; {WANTED}")
    if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
      raise CorpusError(f"{where}: {key!r} holds half a surrogate pair; {WANTED} in UTF-8")
  return id_, contents


class _Scan:
  """One pass over the lines: where the good ones start, and what was wrong with the others."""

  def __init__(self, path: Path, offsets: io.BufferedIOBase, out: io.BufferedIOBase | None,
               skip_bad: bool):
    self._path, self._offsets, self._out, self._skip_bad = path, offsets, out, skip_bad
    self.rows, self.skipped, self.reasons = 0, 0, []
    self._starts: list[int] = []
    self._ids: list[np.ndarray] = []
    self._new_ids = bytearray()

  def read(self, text: io.BufferedIOBase, on_progress: Callable[[], None]) -> None:
    """Checks each line, copies the good ones to `out`, and writes where each starts."""
    end, number = 0, 0
    while line := text.readline(MAX_LINE_BYTES + 1):
      number += 1
      if len(line) > MAX_LINE_BYTES:
        raise CorpusError(f"{self._path}:{number}: the line is longer than {MAX_LINE_BYTES:,} "
                          "bytes; split the passage")
      good = self._note(line, number, end)
      if self._out is not None and good:
        self._out.write(line)
      if self._out is None or good:
        end += len(line)
      if number % 1024 == 0:
        on_progress()
    if not self.rows:
      raise CorpusError(f"{self._path} {'has no good line' if number else 'is empty'}; {WANTED}, "
                        "one a line")
    self._starts.append(end)
    self._flush()
    on_progress()

  def ids(self) -> UInt64[np.ndarray, "P"]:
    """Eight bytes of a hash of each passage's id."""
    return np.concatenate(self._ids)

  def _note(self, line: bytes, number: int, start: int) -> bool:
    try:
      id_, _ = parse_line(line, f"{self._path}:{number}")
    except CorpusError as e:
      if not self._skip_bad:
        raise
      self.skipped += 1
      if len(self.reasons) < REASONS:
        self.reasons.append(str(e))
      return False
    self.rows += 1
    self._starts.append(start)
    self._new_ids += hashlib.blake2b(id_.encode(), digest_size=8).digest()
    if len(self._starts) >= FLUSH_ROWS:
      self._flush()
    return True

  def _flush(self) -> None:
    self._offsets.write(np.asarray(self._starts, "<u8").tobytes())
    self._ids.append(np.frombuffer(bytes(self._new_ids), np.uint64))
    self._starts.clear()
    self._new_ids.clear()


def _refuse_twins(corpus: Corpus, ids_P: UInt64[np.ndarray, "P"]) -> None:
  """Two passages of one id: a search that names it would mean either."""
  order_P = np.argsort(ids_P, kind="stable")
  sorted_P = ids_P[order_P]
  for at in np.flatnonzero(sorted_P[1:] == sorted_P[:-1]):
    first, second = int(order_P[at]), int(order_P[at + 1])
    if corpus[first][0] == corpus[second][0]:  # and not just their hashes
      raise CorpusError(f"{corpus.path}: rows {first} and {second} (counted from 0) both have the "
                        f"id {corpus[first][0]!r}; give each passage its own")


def _unpacked(source: io.BufferedIOBase, path: Path) -> io.BufferedIOBase:
  if path.suffix == ".gz":
    return gzip.GzipFile(fileobj=source)
  if path.suffix == ".zst":
    return zstd.ZstdFile(source)
  return source


def _is_of(path: Path, offsets_path: Path) -> bool:
  return offsets_path.is_file() and path.stat().st_mtime_ns == offsets_path.stat().st_mtime_ns


def _open(path: Path) -> io.BufferedIOBase:
  try:
    return path.open("rb")
  except OSError as e:
    raise CorpusError(f"{path} can't be read: {e.strerror}; name a corpus that exists") from e
