"""Passages' vectors in one raw file, row after row: written as they come, then only mapped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Float, Float32

from retriever.protocol import CorpusError

DTYPES = {"float32": "<f4", "float16": "<f2"}
BLOCK_ROWS = 16_384


def file_name(dtype: str) -> str:
  """What the file is called in an index folder."""
  return f"vectors.{dtype}"


def open_vectors(folder: Path, rows: int, dim: int, dtype: str) -> Float[np.ndarray, "P D"]:
  """The vectors of an index folder, mapped: read from the disk where and when they are used."""
  path = folder / file_name(dtype)
  try:
    size = path.stat().st_size
    if size != rows * dim * np.dtype(DTYPES[dtype]).itemsize:
      raise CorpusError(f"{path} has {size:,} bytes, wanted {rows:,} vectors of {dim} {dtype}; "
                        "build the index again")
    return np.memmap(path, DTYPES[dtype], "r", shape=(rows, dim))
  except OSError as e:
    raise CorpusError(f"{path} can't be read: {e.strerror}; build the index again") from e


def blocks(vectors_PD: Float[np.ndarray, "P D"],
           rows: int = BLOCK_ROWS) -> Iterator[Float32[np.ndarray, "M D"]]:
  """All vectors in order, `rows` at a time, in float32."""
  for start in range(0, len(vectors_PD), rows):
    yield np.asarray(vectors_PD[start:start + rows], np.float32)


class Writer:
  """Appends vectors to a file; what `keep` has put on the disk survives a kill."""

  def __init__(self, folder: Path, dim: int, dtype: str):
    self._dim, self._dtype = dim, np.dtype(DTYPES[dtype])
    self._noted = folder / f".{file_name(dtype)}.rows"
    self._file = (folder / file_name(dtype)).open("ab")
    row_bytes = dim * self._dtype.itemsize
    self.rows = min(self._kept_rows(), self._file.tell() // row_bytes)
    self._file.truncate(self.rows * row_bytes)

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, *_) -> None:
    self._file.close()

  def append(self, vectors_MD: Float32[np.ndarray, "M D"]) -> None:
    """Adds rows. A number that is not finite is a CorpusError: it would rank before everything."""
    if vectors_MD.shape[1] != self._dim:
      raise CorpusError(f"the encoder gave vectors of {vectors_MD.shape[1]} numbers, wanted "
                        f"{self._dim}; check its folder")
    with np.errstate(over="ignore"):  # said below
      stored_MD = vectors_MD.astype(self._dtype)
    finite_M = np.isfinite(stored_MD).all(axis=1)
    if not finite_M.all():
      row = self.rows + int(np.argmin(finite_M))
      raise CorpusError(f"the vector of row {row} is not finite in {self._dtype.name}; check the "
                        "encoder's weights")
    self._file.write(stored_MD.tobytes())
    self.rows += len(stored_MD)

  def keep(self) -> None:
    """Makes sure that a later Writer goes on from here."""
    self._file.flush()
    os.fsync(self._file.fileno())
    temporary = self._noted.with_name(f"{self._noted.name}.new")
    temporary.write_text(json.dumps(self.rows))
    temporary.replace(self._noted)

  def _kept_rows(self) -> int:
    try:
      return int(json.loads(self._noted.read_text()))
    except (OSError, ValueError):
      return 0
