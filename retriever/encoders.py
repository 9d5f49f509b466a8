"""Encoders by name: `hashing`, which needs no model, or a Hugging Face folder or hub id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from retriever.hashing import FEATURES, HashingEncoder
from retriever.protocol import CorpusError
from retriever.sentences import RULES, SentenceEncoder
from retriever.vectors import Encoder, batched

__all__ = ["FEATURES", "RULES", "Encoder", "HashingEncoder", "SentenceEncoder", "batched", "fit",
           "from_spec", "identity", "wanted_spec"]

HASHING_DIM = 4096


def wanted_spec(name: str, dim: int | None = None, **options: Any) -> dict[str, Any]:
  """What a manifest says of the encoder of that name, plain JSON, before any passage was seen.

  options: `rule`, `max_tokens`, `dtype` of a SentenceEncoder; None stands for its own choice.
  """
  if name != HashingEncoder.NAME:
    return SentenceEncoder.wanted_spec(name, dim, **options)
  if given := [key for key, value in options.items() if value is not None]:
    raise CorpusError(f"encoder {name!r} has no option {given[0]!r}; leave it out, or name a model")
  return HashingEncoder.wanted_spec(HASHING_DIM if dim is None else dim)


def fit(spec: Mapping[str, Any], passages: Iterable[str]) -> Encoder:
  """The encoder of a spec for these passages; one that learns nothing leaves them unread."""
  if spec["name"] == HashingEncoder.NAME:
    return HashingEncoder.fit(passages, spec["dim"])
  return from_spec(spec, Path())


def from_spec(spec: Mapping[str, Any], folder: Path, model: str | None = None) -> Encoder:
  """The encoder a manifest names, with what it learned from the index folder.

  model: where its weights lie now, if they were moved; other weights are a CorpusError.
  """
  if spec["name"] == HashingEncoder.NAME:
    return HashingEncoder.from_spec(spec, folder)
  if spec["name"] == SentenceEncoder.NAME:
    return SentenceEncoder(spec, model)
  raise CorpusError(f"{folder} was built with encoder {spec['name']!r}, known are "
                    f"{HashingEncoder.NAME}, {SentenceEncoder.NAME}; build the index again with "
                    "--overwrite")


def identity(spec: Mapping[str, Any]) -> dict[str, Any]:
  """The part of a spec that decides vectors: all but where the weights lie."""
  return {key: value for key, value in spec.items() if key != "model"}
