"""An inverted index on the disk: each word's passages and scores, one word after the other.

Built as a stream. In memory are the words with a number each, and 4 bytes a passage; on the disk
for a while 12 bytes for each word of each passage. The arrays are files of the bm25s library.
Axes: P passages, W words, S where words start and the last one ends, N pairs of a word and a
passage that holds it, M of a part of them.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Float32, Float64, Int, Int32, Int64, Shaped, UInt8, UInt64

from retriever.protocol import CorpusError

SCORES, ROWS, STARTS = "data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy"
WORDS, WORD_STARTS = "words.txt", "words.u64"  # one a line in the order of their UTF-8, its offsets
FILES = (SCORES, ROWS, STARTS, WORDS, WORD_STARTS)
COUNTS = ".bm25.counts"  # of a build in progress
COUNT = np.dtype([("row", "<i4"), ("word", "<i4"), ("times", "<i4")])
BATCH = 4096  # passages counted at once
PART = 1 << 22  # pairs put in their place at once, 48 MiB
_WORD = re.compile(r"\w+")


def build(passages: Iterable[str], folder: Path, k1: float, b: float) -> int:
  """Writes the index of passages, read once and in order; returns how many they are."""
  try:
    counted = _count(passages, folder / COUNTS)
    words = sorted(counted.numbers, key=_encoded)
    _write_words(words, folder)
    place_W = np.empty(len(words), np.int32)  # of a word among the sorted, by its first number
    place_W[[counted.numbers[word] for word in words]] = np.arange(len(words), dtype=np.int32)
    _invert(folder, counted, place_W, k1, b)
  finally:
    (folder / COUNTS).unlink(missing_ok=True)
  return len(counted.lengths_P)


class Inverted:
  """A built index, mapped: nothing is loaded, and processes share what they have read."""

  def __init__(self, folder: Path, passages: int):
    try:
      read = lambda name: _plain(np.load(folder / name, mmap_mode="r", allow_pickle=False))
      self._scores_N, self._rows_N, self._starts_S = read(SCORES), read(ROWS), read(STARTS)
      self._words = _Words.open(folder)
    except (OSError, ValueError, EOFError, OverflowError) as e:
      raise CorpusError(f"{folder} holds no whole index of words ({type(e).__name__}: {e}); build "
                        "it again") from e
    self.passages, self._folder = passages, folder
    wrong = _what_is_wrong(self._scores_N, self._rows_N, self._starts_S, len(self._words))
    if wrong:
      raise CorpusError(f"{folder} is damaged: {wrong}; build the index again")

  def scores(self, asked: Mapping[str, int]) -> Float32[np.ndarray, "P"]:
    """Each passage's score; a word that is asked twice counts twice, one that is nowhere not."""
    scores_P = np.zeros(self.passages, np.float32)
    for word, times in asked.items():
      number = self._words.find(word)
      if number is not None:
        part = slice(int(self._starts_S[number]), int(self._starts_S[number + 1]))
        rows_M = self._rows_N[part]  # they ascend
        if rows_M[0] < 0 or rows_M[-1] >= self.passages:
          raise CorpusError(f"{self._folder / ROWS} names rows beyond {self.passages} passages; "
                            "build the index again")
        np.add.at(scores_P, rows_M, np.float32(times) * self._scores_N[part])
    return scores_P


def split(text: str) -> list[str]:
  """The words of a text: runs of letters, digits and underscores, whatever their case and form."""
  return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def lucene_scores(times_M: Int[np.ndarray, "M"], idf_M: Float[np.ndarray, "M"],
                  lengths_M: Int[np.ndarray, "M"], mean_length: float, k1: float,
                  b: float) -> Float64[np.ndarray, "M"]:
  r"""BM25 as Lucene computes it, of a word in a passage.

  s = idf tf / (tf + k_1 (1 - b + b L / \bar L))

  times: tf, how often the word stands in the passage. idf: see `lucene_idf`. lengths: L, words of
  the passage. mean_length: of all passages. Source: Robertson and Zaragoza, "The Probabilistic
  Relevance Framework: BM25 and Beyond" (2009), without the factor k_1 + 1, which changes no rank;
  variants in Kamphuis et al., ECIR 2020.
  """
  return idf_M * times_M / (times_M + k1 * (1 - b + b * lengths_M / mean_length))


def lucene_idf(passages_W: Int[np.ndarray, "W"], passages: int) -> Float64[np.ndarray, "W"]:
  r"""How rare a word is: idf = ln(1 + (P - df + 1/2) / (df + 1/2)), above 0 for every word.

  passages_W: df, in how many passages the word stands. passages: P, of them all. Source: as above.
  """
  return np.log1p((passages - passages_W + 0.5) / (passages_W + 0.5))


class _Words:
  """The words of an index, sorted, looked up in their mapped file."""

  def __init__(self, letters_M: UInt8[np.ndarray, "M"], starts_S: UInt64[np.ndarray, "S"]):
    self._letters_M, self._starts_S = letters_M, starts_S

  @classmethod
  def open(cls, folder: Path) -> _Words:
    letters_M = _plain(np.memmap(folder / WORDS, np.uint8, "r"))
    starts_S = _plain(np.memmap(folder / WORD_STARTS, "<u8", "r"))
    if (starts_S[0] != 0 or starts_S[-1] != len(letters_M)
        or (starts_S[1:] <= starts_S[:-1] + np.uint64(1)).any()):
      raise ValueError(f"{WORD_STARTS} was made for another {WORDS}")
    return cls(letters_M, starts_S)

  def __len__(self) -> int:
    return len(self._starts_S) - 1

  def __getitem__(self, number: int) -> bytes:
    start, end = self._starts_S[number : number + 2]
    return self._letters_M[int(start) : int(end) - 1].tobytes()

  def find(self, word: str) -> int | None:
    """The number of a word; None where no passage has it."""
    wanted = _encoded(word)
    number = bisect.bisect_left(range(len(self)), wanted, key=self.__getitem__)
    return number if number < len(self) and self[number] == wanted else None


@dataclasses.dataclass(frozen=True)
class _Counted:
  """What one reading found out: each word's number and passages, each passage's length in words."""

  numbers: Mapping[str, int]
  passages_W: Int64[np.ndarray, "W"]
  lengths_P: Int32[np.ndarray, "P"]


def _count(passages: Iterable[str], path: Path) -> _Counted:
  """Reads the passages and writes how often each has each of its words, in their order."""
  numbers: dict[str, int] = {}
  passages_W, lengths, row = np.zeros(0, np.int64), [], 0
  with path.open("wb") as out:
    for batch in _batched(passages):
      lists = [split(text) for text in batch]
      words_M = np.fromiter((numbers.setdefault(w, len(numbers)) for ws in lists for w in ws),
                            np.int64)
      lengths.append(np.array([len(ws) for ws in lists], np.int32))
      keys_M, times_M = np.unique(
          np.repeat(np.arange(len(lists)) << 32, lengths[-1]) | words_M, return_counts=True)
      found_M = np.empty(len(keys_M), COUNT)
      found_M["row"], found_M["word"] = row + (keys_M >> 32), keys_M & 0xFFFFFFFF
      found_M["times"] = times_M
      out.write(found_M.tobytes())
      seen_W = np.bincount(found_M["word"], minlength=len(numbers))
      seen_W[: len(passages_W)] += passages_W
      passages_W, row = seen_W, row + len(batch)
  if not numbers:
    raise CorpusError("no passage has a word; check the corpus")
  return _Counted(numbers, passages_W, np.concatenate(lengths))


def _invert(folder: Path, counted: _Counted, place_W: Int32[np.ndarray, "W"], k1: float,
            b: float) -> None:
  """Writes each word's passages and scores one after the other, from the passages' words."""
  passages_W = np.empty_like(counted.passages_W)
  passages_W[place_W] = counted.passages_W
  lengths_P = counted.lengths_P
  idf_W = lucene_idf(passages_W, len(lengths_P)).astype(np.float32)
  starts_S = np.concatenate([[0], np.cumsum(passages_W)])
  np.save(folder / STARTS, starts_S, allow_pickle=False)
  pairs = (int(starts_S[-1]),)
  scores_N = np.lib.format.open_memmap(folder / SCORES, "w+", np.float32, pairs)
  rows_N = np.lib.format.open_memmap(folder / ROWS, "w+", np.int32, pairs)
  mean_length = float(lengths_P.mean())
  free_W = starts_S[:-1].copy()  # where the next passage of a word goes
  for part_M in _parts(folder / COUNTS):
    words_M = place_W[part_M["word"]]
    order_M = np.argsort(words_M, kind="stable")
    words_M, part_M = words_M[order_M], part_M[order_M]
    distinct_M, first_M, many_M = np.unique(words_M, return_index=True, return_counts=True)
    places_M = free_W[words_M] + np.arange(len(words_M)) - np.repeat(first_M, many_M)
    rows_N[places_M] = part_M["row"]
    scores_N[places_M] = lucene_scores(part_M["times"], idf_W[words_M], lengths_P[part_M["row"]],
                                       mean_length, k1, b)
    free_W[distinct_M] += many_M
  scores_N.flush()
  rows_N.flush()


def _write_words(words: Sequence[str], folder: Path) -> None:
  with (folder / WORDS).open("wb") as out, (folder / WORD_STARTS).open("wb") as starts:
    starts.write(np.zeros(1, "<u8").tobytes())
    for batch in _batched(words):
      lines = [_encoded(word) + b"\n" for word in batch]
      starts.write((np.cumsum([len(x) for x in lines]) + out.tell()).astype("<u8").tobytes())
      out.write(b"".join(lines))


def _what_is_wrong(scores_N: np.ndarray, rows_N: np.ndarray, starts_S: np.ndarray,
                   words: int) -> str:
  """Of arrays that do not belong together; their contents are the manifest's to verify."""
  kinds = [(a.dtype.str, a.ndim) for a in (scores_N, rows_N, starts_S)]
  if kinds != [("<f4", 1), ("<i4", 1), ("<i8", 1)]:
    return f"its arrays are of {kinds}"
  if len(starts_S) != words + 1:
    return f"{STARTS} is of {len(starts_S) - 1} words, {WORDS} has {words}"
  if starts_S[0] != 0 or (np.diff(starts_S) < 1).any():
    return f"{STARTS} does not ascend"
  if not starts_S[-1] == len(scores_N) == len(rows_N):
    return f"{SCORES} and {ROWS} have {len(scores_N)} and {len(rows_N)}, wanted {starts_S[-1]}"
  return ""


def _parts(path: Path) -> Iterator[Shaped[np.ndarray, "M"]]:
  with path.open("rb") as f:
    while len(part_M := np.fromfile(f, COUNT, PART)):
      yield part_M


def _batched(items: Iterable[str]) -> Iterator[list[str]]:
  left = iter(items)
  while batch := list(itertools.islice(left, BATCH)):
    yield batch


def _plain(mapped: np.ndarray) -> np.ndarray:
  """The same bytes, still mapped, without what NumPy does at every slice of a memmap."""
  return mapped.view(np.ndarray)


def _encoded(word: str) -> bytes:
  return word.encode("utf-8", "surrogatepass")
