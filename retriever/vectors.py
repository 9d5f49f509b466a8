"""What turns text into vectors is an Encoder; the encoders themselves are in files of their own."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float32

T = TypeVar("T")


class Encoder(abc.ABC):
  """What an index is built and asked with; `spec()` and what `save` wrote make it again.

  The inner product of a query's and a passage's vector says how well the passage answers.
  """

  dim: int

  @abc.abstractmethod
  def encode_queries(self, queries: Sequence[str]) -> Float32[np.ndarray, "Q D"]:
    """One vector a query."""

  @abc.abstractmethod
  def encode_passages(self, passages: Sequence[str]) -> Float32[np.ndarray, "P D"]:
    """One vector a passage's `contents`."""

  def encode_stream(
      self, stream: Iterable[Sequence[str]]) -> Iterator[Float32[np.ndarray, "P D"]]:
    """`encode_passages` of each batch in turn; overridden where the next one can be got ready."""
    return map(self.encode_passages, stream)

  @abc.abstractmethod
  def spec(self) -> dict[str, Any]:
    """What a manifest says of it, plain JSON."""

  @abc.abstractmethod
  def save(self, folder: Path) -> list[str]:
    """Writes what it learned from the corpus and says which files it wrote."""


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
  """Lists of `size` items, the last one shorter."""
  batch: list[T] = []
  for item in items:
    batch.append(item)
    if len(batch) == size:
      yield batch
      batch = []
  if batch:
    yield batch
