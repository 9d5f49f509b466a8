"""Words and trigrams hashed to vectors: needs no model, learns from the corpus which are rare."""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64, UInt32

from retriever.protocol import CorpusError
from retriever.vectors import Encoder, batched

FEATURES = 1 << 18  # words are hashed into the lower half, trigrams into the upper
HALF = FEATURES // 2
FIT_BATCH = 512
_WORD = re.compile(r"\w+")


class HashingEncoder(Encoder):
  r"""Words and character trigrams hashed to `dim` signed slots: needs no model, learns one table.

  v_j = \sum_{f: slot(f) = j} sign(f) (1 + ln tf(f)) idf(f), then v / |v|

  A passage's title (its first line) is read twice; idf(f) = ln((P + 1) / (df(f) + 0.5)) over P
  passages, df(f) of which hold f. The signs make collisions cancel on average (Weinberger et al.,
  arXiv:0902.2206).
  """

  NAME, VERSION, TABLE = "hashing", 1, "idf.npy"

  def __init__(self, dim: int, idf_F: Float32[np.ndarray, "F"]):
    self.dim, self._idf_F = dim, idf_F
    mixed_F = _mix(np.arange(FEATURES, dtype=np.uint32))
    self._slot_F = ((mixed_F >> 1) % dim).astype(np.int64)
    self._scale_F = np.where(mixed_F & 1, 1.0, -1.0) * idf_F

  @classmethod
  def wanted_spec(cls, dim: int) -> dict[str, Any]:
    """The spec of an encoder of that size, before any corpus was seen."""
    if dim < 1:
      raise CorpusError(f"dim is {dim}, wanted at least 1 (4096 does well)")
    return {"name": cls.NAME, "version": cls.VERSION, "dim": dim}

  @classmethod
  def fit(cls, passages: Iterable[str], dim: int = 4096) -> HashingEncoder:
    """Learns from a corpus how rare each feature is."""
    cls.wanted_spec(dim)
    count, df_F = 0, np.zeros(FEATURES, np.int64)
    for batch in batched(passages, FIT_BATCH):
      keys_M, _ = _count(_with_title_twice(batch))
      df_F += np.bincount(keys_M % FEATURES, minlength=FEATURES)
      count += len(batch)
    return cls(dim, np.log((count + 1) / (df_F + 0.5)).astype(np.float32))

  def encode_queries(self, queries: Sequence[str]) -> Float32[np.ndarray, "Q D"]:
    return self._encode(queries)

  def encode_passages(self, passages: Sequence[str]) -> Float32[np.ndarray, "P D"]:
    return self._encode(_with_title_twice(passages))

  def spec(self) -> dict[str, Any]:
    return self.wanted_spec(self.dim)

  def save(self, folder: Path) -> list[str]:
    np.save(folder / self.TABLE, self._idf_F, allow_pickle=False)
    return [self.TABLE]

  @classmethod
  def from_spec(cls, spec: Mapping[str, Any], folder: Path) -> HashingEncoder:
    """The encoder that `save` left in the folder."""
    if spec != cls.wanted_spec(spec["dim"]):
      raise CorpusError(f"{folder} was built with encoder {dict(spec)}, this version reads "
                        f"{cls.wanted_spec(spec['dim'])}; build the index again with --overwrite")
    try:
      idf_F = np.load(folder / cls.TABLE, allow_pickle=False)
    except (OSError, ValueError, EOFError) as e:
      raise CorpusError(f"{folder / cls.TABLE} can't be read ({e}); build the index again") from e
    if idf_F.shape != (FEATURES,) or idf_F.dtype != np.float32 or not np.isfinite(idf_F).all():
      raise CorpusError(f"{folder / cls.TABLE} is not a table of {FEATURES} finite float32; "
                        "build the index again")
    return cls(spec["dim"], idf_F)

  def _encode(self, texts: Sequence[str]) -> Float32[np.ndarray, "M D"]:
    keys_M, counts_M = _count(texts)
    rows_M, features_M = np.divmod(keys_M, FEATURES)
    values_M = (1.0 + np.log(counts_M)) * self._scale_F[features_M]
    vectors_MD = np.bincount(
        rows_M * self.dim + self._slot_F[features_M], values_M, len(texts) * self.dim,
    ).reshape(len(texts), self.dim)
    norms_M1 = np.sqrt(np.square(vectors_MD).sum(axis=1, keepdims=True))
    return (vectors_MD / np.where(norms_M1 > 0, norms_M1, 1.0)).astype(np.float32)


def _with_title_twice(passages: Sequence[str]) -> list[str]:
  return [f"{p.partition(chr(10))[0]}\n{p}" for p in passages]


def _count(texts: Sequence[str]) -> tuple[Int64[np.ndarray, "M"], Int64[np.ndarray, "M"]]:
  """Each text's features and how often they come: sorted keys `row * FEATURES + feature`."""
  word_lists = [_WORD.findall(unicodedata.normalize("NFKC", t).casefold()) for t in texts]
  words_M = np.fromiter(
      (zlib.crc32(w.encode("utf-8", "surrogatepass")) for ws in word_lists for w in ws), np.int64)
  word_rows_M = np.repeat(np.arange(len(texts)), [len(ws) for ws in word_lists])
  # One space on either side of each text, so that only a trigram with two spaces side by side
  # spans two texts; "o d" inside a text tells "zopo dase" from "dase zopo".
  spaced = [f" {' '.join(ws)} " for ws in word_lists]
  chars_M = np.frombuffer("".join(spaced).encode("utf-32-le", "surrogatepass"), "<u4")
  char_rows_M = np.repeat(np.arange(len(texts)), [len(s) for s in spaced])
  space_M = chars_M == ord(" ")
  inside_M = ~(space_M[1:-1] & (space_M[:-2] | space_M[2:]))
  trigrams_M = _mix(chars_M[:-2], chars_M[1:-1], chars_M[2:])[inside_M].astype(np.int64)
  keys_M = np.concatenate([
      word_rows_M * FEATURES + words_M % HALF,
      char_rows_M[1:-1][inside_M] * FEATURES + HALF + trigrams_M % HALF])
  return np.unique(keys_M, return_counts=True)


def _mix(*parts_M: UInt32[np.ndarray, "M"]) -> UInt32[np.ndarray, "M"]:
  """A hash of unsigned numbers that is the same on every machine (murmur3's last step each)."""
  hash_M = np.full_like(parts_M[0], 0x9E3779B9)
  for part_M in parts_M:
    hash_M = hash_M ^ part_M
    hash_M = (hash_M ^ (hash_M >> 16)) * np.uint32(0x85EBCA6B)
    hash_M = (hash_M ^ (hash_M >> 13)) * np.uint32(0xC2B2AE35)
    hash_M = hash_M ^ (hash_M >> 16)
  return hash_M
