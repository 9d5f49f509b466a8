"""Texts through a network in few shapes: sorted by length, in batches, spread over devices."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
import tokenizers
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float32, Int32, Int64

from retriever import model_files
from retriever.protocol import CorpusError

# A batch is as long as the first of these that its longest text fits into: near together where
# passages of 100 words are, so that little is computed for padding.
LENGTHS = (12, 16, 20, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256, 320, 384, 512)
# Tokens of a device at once. Of a CPU: what its cores' caches hold (4,096 cost a third more).
TOKENS = {"cpu": 512 * len(os.sched_getaffinity(0))}
TOKENS_ELSEWHERE = 32_768  # what keeps an accelerator busy
FEWEST = 8  # tokens that a text may have, special ones included
IN_FLIGHT = 2  # batches given to the devices before the first one's result is fetched
CHARS_A_TOKEN = 64  # of a text, so many characters for each token that it may have are read at all

Forward = Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]
"""`forward(params, ids_BL, lengths_B, seconds_B)`: one vector or number a row."""


@dataclasses.dataclass(frozen=True)
class Tokens:
  """Tokenized texts end to end: text i is `ids_L[starts[i] : starts[i] + lengths[i]]`.

  `seconds_M`: how many of a text's tokens come before its second part (all, if it is one text).
  """

  ids_L: Int32[np.ndarray, "L"]
  starts_M: Int64[np.ndarray, "M"]
  lengths_M: Int64[np.ndarray, "M"]
  seconds_M: Int64[np.ndarray, "M"]


class Tokenizer:
  """A folder's tokenizer.json, cut to `max_tokens` with its special tokens kept, never padded."""

  def __init__(self, folder: pathlib.Path, vocab_size: int, max_tokens: int):
    path = folder / model_files.TOKENIZER
    if not path.is_file():
      raise CorpusError(f"{path} is missing; save the model's fast tokenizer there (transformers' "
                        "AutoTokenizer writes one)")
    with futures.ThreadPoolExecutor(1) as thread:  # the library raises bare Exceptions only
      read = thread.submit(tokenizers.Tokenizer.from_file, str(path))
    if (reason := read.exception()) is not None:
      raise CorpusError(f"{path} is no tokenizer ({reason}); download it again") from reason
    self._tokenizer = read.result()
    if (size := self._tokenizer.get_vocab_size()) > vocab_size:
      raise CorpusError(f"{path} has {size} tokens, the model {vocab_size}; put the model's own "
                        "tokenizer there")
    self._tokenizer.no_padding()
    self._tokenizer.enable_truncation(max_tokens)
    self._chars = max_tokens * CHARS_A_TOKEN

  def __call__(self, texts: Sequence[str] | Sequence[tuple[str, str]]) -> Tokens:
    """Texts, or pairs of texts of which the longer one is cut first."""
    read = [self._readable(t) if isinstance(t, str) else tuple(map(self._readable, t))
            for t in texts]
    encoded = self._tokenizer.encode_batch_fast(read)
    lengths_M = np.fromiter((len(e) for e in encoded), np.int64, len(encoded))
    ids_L = np.fromiter((i for e in encoded for i in e.ids), np.int32, int(lengths_M.sum()))
    seconds_M = lengths_M.copy()
    if read and not isinstance(read[0], str):
      seconds_M -= np.fromiter((sum(e.type_ids) for e in encoded), np.int64, len(encoded))
    return Tokens(ids_L, np.cumsum(lengths_M) - lengths_M, lengths_M, seconds_M)

  def _readable(self, text: str) -> str:
    """The text without lone surrogates, which UTF-8 lacks, cut where no token is looked for."""
    return text[:self._chars].encode("utf-8", "replace").decode("utf-8")


class Runner:
  """A network over all devices: parameters on each, a batch's rows dealt out among them."""

  def __init__(self, forward: Forward, params: Any, max_tokens: int,
               devices: Sequence[jax.Device] | None = None, tokens: int | None = None):
    self.devices = tuple(devices or jax.local_devices())
    mesh = Mesh(np.array(self.devices), ("rows",))
    self._rows = NamedSharding(mesh, PartitionSpec("rows"))
    self._params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    self._forward = jax.jit(forward, out_shardings=self._rows)
    self._lengths = (*(n for n in LENGTHS if n < max_tokens), max_tokens)
    self._tokens = tokens or TOKENS.get(self.devices[0].platform, TOKENS_ELSEWHERE)

  @property
  def shapes(self) -> set[tuple[int, int]]:
    """Every (rows, length) that a batch can have: no more programs are ever compiled."""
    return {(rows, length) for length in self._lengths
            for rows in row_counts(length, self._tokens, len(self.devices))}

  def __call__(self, tokens: Tokens, width: int | None) -> Float32[np.ndarray, "..."]:
    """What the network says of every text, in their order: [M, width], or [M] if width is None."""
    results = np.empty((len(tokens.lengths_M), *([] if width is None else [width])), np.float32)
    waiting: collections.deque = collections.deque()
    for rows, length, members_M in plan(
        tokens.lengths_M, self._lengths, self._tokens, len(self.devices)):
      batch = jax.device_put(fill(tokens, members_M, rows, length), self._rows)
      waiting.append((members_M, self._forward(self._params, *batch)))
      if len(waiting) > IN_FLIGHT:
        _fetch(results, *waiting.popleft())
    while waiting:
      _fetch(results, *waiting.popleft())
    return results


def row_counts(length: int, tokens: int, devices: int) -> list[int]:
  """The rows that a batch of that length may have: as many as `tokens` a device allow, or, when
  there are no more texts, 1, 4, 16, … a device."""
  full = max(1, tokens // length)
  return [devices * n for n in (1, 4, 16, 64, 256, 1024, 4096) if n < full] + [devices * full]


def plan(lengths_M: Int64[np.ndarray, "M"], sizes: Sequence[int], tokens: int,
         devices: int) -> list[tuple[int, int, Int64[np.ndarray, "..."]]]:
  """Batches (rows, length, which texts), long texts first, each text in exactly one.

  sizes: the lengths allowed, increasing, the last one at least that of the longest text.
  """
  order_M, batches = np.argsort(-lengths_M, kind="stable"), []
  while len(order_M):
    length = sizes[bisect.bisect_left(sizes, lengths_M[order_M[0]])]
    counts, left = row_counts(length, tokens, devices), len(order_M)
    above = bisect.bisect_left(counts, left)
    # Rows without a text cost as much as others: at most half of a batch, if there is a choice.
    fits = above < len(counts) and counts[above] <= 2 * left
    rows = counts[above if fits or above == 0 else above - 1]
    batches.append((rows, length, order_M[:rows]))
    order_M = order_M[rows:]
  return batches


def fill(tokens: Tokens, members_M: Int64[np.ndarray, "M"], rows: int, length: int,
         ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(ids_BL, lengths_B, seconds_B) of those texts; rows that are over hold one token 0."""
  ids_BL = np.zeros((rows, length), np.int32)
  lengths_B, seconds_B = np.ones(rows, np.int32), np.ones(rows, np.int32)
  for row, i in enumerate(members_M):
    start, n = tokens.starts_M[i], tokens.lengths_M[i]
    ids_BL[row, :n] = tokens.ids_L[start:start + n]
  lengths_B[:len(members_M)] = tokens.lengths_M[members_M]
  seconds_B[:len(members_M)] = tokens.seconds_M[members_M]
  return ids_BL, lengths_B, seconds_B


def _fetch(results: np.ndarray, members_M: Int64[np.ndarray, "M"], out: jax.Array) -> None:
  results[members_M] = np.asarray(out)[:len(members_M)]
