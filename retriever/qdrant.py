"""The same interface over a Qdrant cluster, for corpora that one machine cannot hold.

Qdrant rather than Milvus: its client runs the whole engine in process, in Python, over a folder or
in memory, so that what is tested here is what a cluster is asked; Milvus' embedded mode is a binary
of its own for some platforms. Needs the extra `qdrant`.

A collection holds one point a row: the row as its id, the passage's vector, and `id` and `contents`
as its payload. Its metadata (servers from 1.16 on) say which corpus and encoder it was filled
with, so that no other encoder ever asks it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import stamina

from retriever import encoders
from retriever import manifest as manifest_lib
from retriever.corpus import Corpus
from retriever.protocol import (
    CorpusError, Found, Passage, RetrievalError, SearchEngine, UserError, all_found, check_top_k)

if TYPE_CHECKING:
  import qdrant_client

VERSION = 1  # of what a collection holds
SPARE = 8  # more are fetched than wanted, then put in order: a cluster merges equals as they come
QUERIES = 64  # a request
FOREIGN = 0.03  # of a vector's length: bfloat16 and float32 lie closer, other weights further off


class QdrantEngine(SearchEngine):
  """Searches a collection that `fill` has filled; opening another one is a CorpusError.

  `exact` compares every vector; `ef` is how many candidates HNSW keeps (the server's own number
  where it is None); both work on a server only. A request that fails is repeated for `seconds`
  and then the error of its queries. `close` closes the client.
  """

  def __init__(self, client: qdrant_client.QdrantClient, collection: str,
               encoder: encoders.Encoder, *, exact: bool = False, ef: int | None = None,
               seconds: float = 30.0):
    if not (math.isfinite(seconds) and seconds > 0):
      raise ValueError(f"seconds is {seconds}, wanted a number above 0")
    self._client, self._collection, self._encoder = client, collection, encoder
    self._exact, self._ef, self._seconds = exact, ef, seconds
    try:
      about = _about(client, collection)
      held = client.count(collection, exact=True).count if about is not None else 0
      self._rows = _check(collection, about, held, encoder)
      _check_weights(client, collection, self._rows, encoder)
    except _faults() as e:
      raise CorpusError(f"Qdrant could not be asked for {collection!r} ({_first_line(e)}); is it "
                        "up, and is the token right?") from e
    parts = [about["fingerprint"], exact, ef]
    self.fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()

  def __len__(self) -> int:
    return self._rows

  def passage(self, row: int, score: float) -> Passage:
    """The passage of a row; a RetrievalError where the collection has lost it."""
    points = self._asking(self._client.retrieve, self._collection, [row], with_payload=True)
    if len(points) != 1:
      raise RetrievalError(f"{self._collection!r} has lost row {row}; fill it again")
    return _passage(points[0].payload, score, self._collection)

  def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    return all_found(self.search_each(queries, top_k))

  def search_each(self, queries: Sequence[str], top_k: int) -> list[Found]:
    check_top_k(top_k)
    found: list[Found] = []
    for some in encoders.batched(queries, QUERIES):
      try:
        found += self._search(some, top_k)
      except RetrievalError as e:
        found += [e] * len(some)
    return found

  def close(self) -> None:
    self._client.close()

  def _search(self, queries: Sequence[str], top_k: int) -> list[Found]:
    from qdrant_client import models
    default = not self._exact and self._ef is None
    params = None if default else models.SearchParams(exact=self._exact, hnsw_ef=self._ef)
    requests = [
        models.QueryRequest(query=vector_D.tolist(), limit=top_k + SPARE, with_payload=True,
                            params=params)
        for vector_D in self._encoder.encode_queries(queries)]
    replies = self._asking(self._client.query_batch_points, self._collection, requests)
    if len(replies) != len(queries):
      raise RetrievalError(f"Qdrant answered {len(replies)} queries of {len(queries)}")
    return [self._best(reply.points, top_k) for reply in replies]

  def _best(self, points: Sequence[Any], top_k: int) -> Found:
    """Best first, equal scores by row; one query's damaged point is its own failure."""
    points = sorted(points, key=lambda p: (-p.score, p.id))[:top_k]
    try:
      return [_passage(p.payload, float(p.score), self._collection) for p in points]
    except RetrievalError as e:
      return e

  def _asking(self, request: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
      return _retried(self._seconds, request, *args, **options)
    except _faults() as e:
      raise RetrievalError(f"Qdrant did not answer ({_first_line(e)})") from e


def connect(location: str, *, token: str | None = None,
            seconds: float = 30.0) -> qdrant_client.QdrantClient:
  """A client of a server (`http://host:6333`), or of the embedded engine: a folder, `:memory:`."""
  try:
    from qdrant_client import QdrantClient
  except ImportError as e:
    raise CorpusError("Qdrant needs its client: install the extra, `searchr1-jax[qdrant]`") from e
  if location == ":memory:":
    return QdrantClient(location)
  if re.fullmatch(r"[^/\\]+:\d+/?", location):
    raise CorpusError(f"{location!r} is neither an address nor a folder; did you mean "
                      f"http://{location}?")
  if urllib.parse.urlsplit(location).scheme in ("http", "https"):
    return QdrantClient(url=location, api_key=token, timeout=math.ceil(seconds),
                        check_compatibility=False)
  return QdrantClient(path=location, force_disable_check_same_thread=True)


def open_collection(location: str, collection: str, encoder: encoders.Encoder, *,
                    token: str | None = None, exact: bool = False, ef: int | None = None,
                    seconds: float = 30.0) -> QdrantEngine:
  """The engine of a collection, with a client of its own."""
  client = connect(location, token=token, seconds=seconds)
  try:
    return QdrantEngine(client, collection, encoder, exact=exact, ef=ef, seconds=seconds)
  except (UserError, RetrievalError):
    client.close()
    raise


def fill(client: qdrant_client.QdrantClient, collection: str, corpus: Corpus,
         encoder: encoders.Encoder, *, batch: int = 256, on_disk: bool = False,
         seconds: float = 60.0, on_rows: Callable[[int], None] = lambda done: None) -> int:
  """Encodes and uploads the passages that the collection lacks, batch by batch; says how many.

  Killed and started again, it goes on where it was. `on_disk`: the cluster keeps vectors in
  files, not in memory. `on_rows` hears how many rows are done.
  """
  from qdrant_client import models
  wanted = _describe(corpus, encoder)
  if not client.collection_exists(collection):
    vectors = models.VectorParams(size=encoder.dim, distance=models.Distance.DOT, on_disk=on_disk)
    client.create_collection(collection, vectors_config=vectors, metadata=wanted)
  about = _about(client, collection)
  if about is None or about["fingerprint"] != wanted["fingerprint"]:
    raise CorpusError(f"the collection {collection!r} holds something else than this corpus and "
                      "encoder; choose another name, or delete it")
  added = 0
  for rows in encoders.batched(range(len(corpus)), batch):
    there = {p.id for p in _retried(seconds, client.retrieve, collection, rows,
                                    with_payload=False, with_vectors=False)}
    lacking = [row for row in rows if row not in there]
    if lacking:
      _upload(client, collection, corpus, encoder, lacking, seconds)
    added += len(lacking)
    on_rows(rows[-1] + 1)
  return added


def _upload(client: qdrant_client.QdrantClient, collection: str, corpus: Corpus,
            encoder: encoders.Encoder, rows: Sequence[int], seconds: float) -> None:
  from qdrant_client import models
  passages = [corpus[row] for row in rows]
  vectors_PD = encoder.encode_passages([contents for _, contents in passages])
  payloads = [{"id": id_, "contents": contents} for id_, contents in passages]
  points = models.Batch(ids=list(rows), vectors=vectors_PD.tolist(), payloads=payloads)
  _retried(seconds, client.upsert, collection, points, wait=True)


def _retried(seconds: float, request: Callable[..., Any], *args: Any, **options: Any) -> Any:
  for attempt in stamina.retry_context(on=_may_pass, attempts=None, timeout=seconds,
                                       wait_initial=0.2, wait_max=5.0):
    with attempt:
      return request(*args, **options)
  raise AssertionError("an attempt returns or raises")


def _may_pass(error: BaseException) -> bool:
  from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
  from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse
  if isinstance(error, UnexpectedResponse):
    return error.status_code is None or error.status_code >= 500
  return isinstance(error, (ResponseHandlingException, ResourceExhaustedResponse))


def _faults() -> tuple[type[Exception], ...]:
  """What the client raises; ValueError and RuntimeError are how its embedded engine fails."""
  from qdrant_client.common.client_exceptions import QdrantException
  from qdrant_client.http.exceptions import ApiException
  return ApiException, QdrantException, ValueError, RuntimeError


def _about(client: qdrant_client.QdrantClient, collection: str) -> Mapping[str, Any] | None:
  """What `fill` wrote of a collection; None where there is none, or another's."""
  if not client.collection_exists(collection):
    return None
  about = client.get_collection(collection).config.metadata or {}
  return about if about.get("version") == VERSION else None


def _describe(corpus: Corpus, encoder: encoders.Encoder) -> dict[str, Any]:
  about = {"version": VERSION, "rows": len(corpus),
           "corpus": manifest_lib.Fingerprint.of(corpus.path).sha256,
           "encoder": encoders.identity(encoder.spec())}
  digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
  return about | {"fingerprint": digest}


def _check(collection: str, about: Mapping[str, Any] | None, held: int,
           encoder: encoders.Encoder) -> int:
  """How many rows the collection has, once it is whole and the encoder's."""
  if about is None:
    raise CorpusError(f"Qdrant has no collection {collection!r} that retriever.qdrant filled; fill "
                      "it first (its server must be 1.16 or newer)")
  ours = encoders.identity(encoder.spec())
  if about["encoder"] != ours:
    raise CorpusError(f"the collection {collection!r} was filled with the encoder "
                      f"{about['encoder']}, this one is {ours}")
  if held != about["rows"]:
    raise CorpusError(f"the collection {collection!r} holds {held:,} of {about['rows']:,} "
                      "passages; go on filling it")
  return held


def _check_weights(client: qdrant_client.QdrantClient, collection: str, rows: int,
                   encoder: encoders.Encoder) -> None:
  """Encodes a few passages again: other weights of the same name give other vectors."""
  points = client.retrieve(collection, sorted({0, rows // 2, rows - 1}), with_payload=True,
                           with_vectors=True)
  texts = [_passage(p.payload, 0.0, collection).contents for p in points]
  ours_MD = encoder.encode_passages(texts)
  theirs_MD = np.asarray([p.vector for p in points], np.float32)
  if (theirs_MD.shape != ours_MD.shape
      or (np.linalg.norm(ours_MD - theirs_MD, axis=1)
          > FOREIGN * np.linalg.norm(theirs_MD, axis=1)).any()):
    raise CorpusError(f"the collection {collection!r} was filled with other weights of this "
                      "encoder")


def _passage(payload: Mapping[str, Any] | None, score: float, collection: str) -> Passage:
  id_, contents = ((payload or {}).get(key) for key in ("id", "contents"))
  if not (isinstance(id_, str) and isinstance(contents, str) and math.isfinite(score)):
    raise RetrievalError(f"{collection!r} holds a point without id or contents, or without score; "
                         "fill it again")
  return Passage(id_, contents, score)


def _first_line(error: BaseException) -> str:
  return (str(error).strip().partition("\n")[0] or type(error).__name__)[:200]
