"""A second look: the passages of a first stage, put in order by a scorer that reads both texts."""

from __future__ import annotations

import hashlib
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float32

from retriever import batches, bert, model_files
from retriever.protocol import (CorpusError, Found, Passage, RetrievalError, SearchEngine,
                                all_found, check_top_k)
from retriever.sentences import DTYPES
from retriever.vectors import Encoder

MAX_TOKENS = 512  # of query and passage together


@runtime_checkable
class Scorer(Protocol):
  """Says of each (query, passage's contents) how well the one answers the other: more is better."""

  fingerprint: str

  def scores(self, pairs: Sequence[tuple[str, str]]) -> Float32[np.ndarray, "M"]:
    """One number a pair, whatever the pairs beside it."""


class CrossEncoder:
  """A Scorer that reads both texts at once: BERT with one output, whose logit is the score."""

  def __init__(self, run: batches.Runner, tokenizer: batches.Tokenizer, fingerprint: str):
    self._run, self._tokenizer, self.fingerprint = run, tokenizer, fingerprint

  @classmethod
  def load(cls, name: str | pathlib.Path, *, max_tokens: int | None = None,
           dtype: str = "float32", devices: Sequence[jax.Device] | None = None
           ) -> CrossEncoder:
    """From a Hugging Face folder or hub id such as `cross-encoder/ms-marco-MiniLM-L6-v2`.

    max_tokens: of a pair, of which the longer text is cut first; 512, or as many positions as the
    model has. devices: that share the work, all if None.
    """
    folder = model_files.find(str(name))
    shape = bert.read_shape(folder)
    if shape.type_vocab_size < 2:
      raise CorpusError(f"{folder} has one token type and can't tell a query from a passage; "
                        "choose another model")
    if dtype not in DTYPES:
      raise CorpusError(f"dtype is {dtype!r}, choose one of {', '.join(DTYPES)}")
    limit = shape.max_position_embeddings
    max_tokens = min(MAX_TOKENS, limit) if max_tokens is None else max_tokens
    if not batches.FEWEST <= max_tokens <= limit:
      raise CorpusError(f"max_tokens is {max_tokens}, wanted {batches.FEWEST} to {limit}, the "
                        "model's positions")
    network = bert.BertScorer(shape, DTYPES[dtype])
    run = batches.Runner(network.apply, bert.load(folder, shape, True, DTYPES[dtype]), max_tokens,
                         devices)
    tokenizer = batches.Tokenizer(folder, shape.vocab_size, max_tokens)
    digest = model_files.digest(folder)
    return cls(run, tokenizer, _hash("cross-encoder", digest, max_tokens, dtype))

  def scores(self, pairs: Sequence[tuple[str, str]]) -> Float32[np.ndarray, "M"]:
    return self._run(self._tokenizer(pairs), None)


class EncoderScorer:
  """A Scorer by the inner product of an Encoder's vectors: a dense look at what words found."""

  def __init__(self, encoder: Encoder, fingerprint: str):
    """fingerprint: of the encoder, such as that of an index built with it."""
    self._encoder, self.fingerprint = encoder, _hash("encoder", fingerprint)

  def scores(self, pairs: Sequence[tuple[str, str]]) -> Float32[np.ndarray, "M"]:
    queries, passages = (list(dict.fromkeys(texts)) for texts in zip(*pairs)) if pairs else ([], [])
    queries_QD, passages_PD = (self._encoder.encode_queries(queries),
                               self._encoder.encode_passages(passages))
    query_at, passage_at = ({t: i for i, t in enumerate(ts)} for ts in (queries, passages))
    queries_MD = queries_QD[[query_at[q] for q, _ in pairs]]
    return (queries_MD * passages_PD[[passage_at[p] for _, p in pairs]]).sum(axis=1)


class RerankEngine(SearchEngine):
  """The first `fetch` passages of another engine, by a Scorer; equal scores as they came.

  Each query is scored with its own passages only. A query that the other engine failed stays
  failed, and one whose scores are no numbers fails.
  """

  def __init__(self, engine: SearchEngine, scorer: Scorer, fetch: int):
    check_top_k(fetch)
    self._engine, self._scorer, self._fetch = engine, scorer, fetch
    self.fingerprint = _hash("rerank", engine.fingerprint, scorer.fingerprint, fetch)

  def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    return all_found(self.search_each(queries, top_k))

  def search_each(self, queries: Sequence[str], top_k: int) -> list[Found]:
    check_top_k(top_k)
    first = self._engine.search_each(queries, max(self._fetch, top_k))
    pairs = list(dict.fromkeys(
        (query, passage.contents) for query, found in zip(queries, first, strict=True)
        if not isinstance(found, RetrievalError) for passage in found))
    scores_M = self._scorer.scores(pairs) if pairs else np.zeros(0, np.float32)
    scores = dict(zip(pairs, scores_M.tolist(), strict=True))
    return [found if isinstance(found, RetrievalError) else _ordered(query, found, scores, top_k)
            for query, found in zip(queries, first)]

  def close(self) -> None:
    self._engine.close()


def _ordered(query: str, found: Sequence[Passage], scores: dict[tuple[str, str], float],
             top_k: int) -> Found:
  """The passages of one query, best score first."""
  again = [Passage(p.id, p.contents, scores[query, p.contents]) for p in found]
  if bad := [p for p in again if not math.isfinite(p.score)]:
    return RetrievalError(f"the scorer gave {query!r} and passage {bad[0].id!r} the score "
                          f"{bad[0].score}, wanted a finite number")
  return sorted(again, key=lambda p: -p.score)[:top_k]


def _hash(*parts: str | int) -> str:
  return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
