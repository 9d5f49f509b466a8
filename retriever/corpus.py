"""A corpus on disk: one `{"id", "contents"}` a line, memory-mapped, any row in one seek."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from retriever.protocol import CorpusError

UNPACKED = "corpus.jsonl"
OFFSETS = "offsets.u64"  # where each line starts, then where the last one ends; little-endian
MAX_LINE_BYTES = 64 << 20
WANTED = r'wanted {"id": "0", "contents": "\"Title\"\nText"}'
FLUSH_ROWS = 65_536


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
    if path.is_file() and _is_older(path, offsets_path):
      return cls(folder / UNPACKED if is_packed(path) else path, offsets_path)
    folder.mkdir(parents=True, exist_ok=True)
    return cls(prepare(path, folder), offsets_path)

  def __len__(self) -> int:
    return len(self._starts) - 1

  def __getitem__(self, row: int) -> tuple[str, str]:
    if not 0 <= row < len(self):
      raise IndexError(f"row {row} of a corpus of {len(self)}")
    line = self._bytes[int(self._starts[row]):int(self._starts[row + 1])]
    return parse_line(line, f"{self.path}:{row + 1}")

  def __iter__(self) -> Iterator[tuple[str, str]]:
    return (self[row] for row in range(len(self)))


def prepare(path: Path, folder: Path, on_bytes: Callable[[int], None] = lambda n: None) -> Path:
  """Checks every line, writes the offsets and, of a packed corpus, the text; says where it is.

  `on_bytes` hears how much of the file has been read.
  """
  packed = is_packed(path)
  target = folder / UNPACKED if packed else path
  temporary = folder / f".{OFFSETS}.{os.getpid()}"
  try:
    with (_open(path) as source, temporary.open("wb") as offsets,
          target.open("wb") if packed else contextlib.nullcontext() as out):
      text = gzip.GzipFile(fileobj=source) if packed else source
      _scan(text, path, offsets, out, lambda: on_bytes(source.tell()))
    temporary.replace(folder / OFFSETS)
  except (EOFError, gzip.BadGzipFile, zlib.error) as e:
    raise CorpusError(f"{path} is cut or damaged ({e}); wanted a whole gzip file") from e
  finally:
    temporary.unlink(missing_ok=True)
  return target


def is_packed(path: Path) -> bool:
  """Whether the corpus is compressed; refuses what can't be unpacked here."""
  if path.suffix in (".zst", ".xz", ".bz2", ".zip", ".7z"):
    raise CorpusError(f"{path} is packed as {path.suffix}; unpack it, or pack it as .gz")
  return path.suffix == ".gz"


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


def _scan(text: io.BufferedIOBase, path: Path, offsets: io.BufferedIOBase,
          out: io.BufferedIOBase | None, on_progress: Callable[[], None]) -> None:
  """Checks each line of `text`, copies it to `out`, and writes where each starts."""
  starts, end, number = [0], 0, 0
  while line := text.readline(MAX_LINE_BYTES + 1):
    number += 1
    if len(line) > MAX_LINE_BYTES:
      raise CorpusError(f"{path}:{number}: the line is longer than {MAX_LINE_BYTES:,} bytes; "
                        "split the passage")
    parse_line(line, f"{path}:{number}")
    if out is not None:
      out.write(line)
    end += len(line)
    starts.append(end)
    if len(starts) >= FLUSH_ROWS:
      offsets.write(np.asarray(starts, "<u8").tobytes())
      starts.clear()
    if number % 1024 == 0:
      on_progress()
  if not number:
    raise CorpusError(f"{path} is empty; {WANTED}, one a line")
  offsets.write(np.asarray(starts, "<u8").tobytes())
  on_progress()


def _is_older(path: Path, than: Path) -> bool:
  return than.is_file() and path.stat().st_mtime_ns <= than.stat().st_mtime_ns


def _open(path: Path) -> io.BufferedIOBase:
  try:
    return path.open("rb")
  except OSError as e:
    raise CorpusError(f"{path} can't be read: {e.strerror}; name a corpus that exists") from e
