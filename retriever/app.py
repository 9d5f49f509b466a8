"""The server's routes: /retrieve over any search engine, /healthz, /metrics, /openapi.json."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator, Sized
from typing import Any

import fastapi
import orjson
import prometheus_client
from fastapi import FastAPI, Request, Response
from prometheus_client import multiprocess

from retriever import wire
from retriever.gate import READ_SECONDS, Gate, may_pass
from retriever.protocol import Found, RetrievalError, SearchEngine
from retriever.sharing import Batched, Busy, Cached, Kept

JSON = "application/json"
SECONDS_BUCKETS = (.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclasses.dataclass(frozen=True)
class Serving:
  """How an engine is served.

  top_k: passages of a request that names no number.
  limits: what a request may hold.
  seconds: the longest that a request waits for its answer.
  max_batch, max_waiting: queries in one search; queries that may wait for one.
  cache_bytes: text of searches kept, 0 for none.
  read_seconds: the longest that a request may take to come.
  several_workers: whether other processes write their part of the metrics.
  """

  top_k: int = 3
  limits: wire.Limits = wire.Limits()
  seconds: float = 60.0
  max_batch: int = 512
  max_waiting: int = 4096
  cache_bytes: int = 32 << 20
  read_seconds: float = READ_SECONDS
  several_workers: bool = False

  def __post_init__(self):
    if not 1 <= self.top_k <= self.limits.top_k:
      raise ValueError(f"top_k is {self.top_k}, wanted 1 to {self.limits.top_k}")
    if self.max_batch < 1 or self.max_waiting < 1 or self.cache_bytes < 0:
      raise ValueError("max_batch and max_waiting must be at least 1, the cache at least 0")
    if not 0 < self.seconds <= 1e6:
      raise ValueError(f"seconds is {self.seconds}, wanted above 0")


class Metrics:
  """What /metrics shows, of this process or of all workers together."""

  def __init__(self, several_workers: bool):
    self._several, self._registry = several_workers, prometheus_client.CollectorRegistry()
    kept = {"registry": self._registry, "namespace": "retriever"}
    counter, histogram = prometheus_client.Counter, prometheus_client.Histogram
    self.replies = counter("replies", "Replies sent", ["path", "status"], **kept)
    self.seconds = histogram("request_seconds", "From a request's head to its reply", ["path"],
                             buckets=SECONDS_BUCKETS, **kept)
    self.queries = counter("queries", "Queries asked", **kept)
    self.hits = counter("cache_hits", "Queries answered from the cache", **kept)
    self.failed = counter("failed_queries", "Queries that the engine could not answer", **kept)
    self.refused = counter("refused", "Requests refused because too many wait", **kept)
    self.batch = histogram("batch_queries", "Different queries in a search", buckets=SIZE_BUCKETS,
                           **kept)
    self.search_seconds = histogram("search_seconds", "Of one batch", buckets=SECONDS_BUCKETS,
                                    **kept)
    self.waiting = prometheus_client.Gauge("waiting_queries", "Queries that wait for a search",
                                           multiprocess_mode="livesum", **kept)

  def on_reply(self, path: str, status: int, seconds: float) -> None:
    path = path if path in ("/retrieve", "/healthz", "/metrics") else "other"
    self.replies.labels(path, str(status)).inc()
    self.seconds.labels(path).observe(seconds)

  def on_batch(self, size: int, seconds: float) -> None:
    self.batch.observe(size)
    self.search_seconds.observe(seconds)

  def text(self) -> bytes:
    registry = self._registry
    if self._several:
      registry = prometheus_client.CollectorRegistry()
      multiprocess.MultiProcessCollector(registry)
    return prometheus_client.generate_latest(registry)


class Desk:
  """Answers requests from what was kept, and the rest in batches that all requests share."""

  def __init__(self, engine: SearchEngine, serving: Serving, metrics: Metrics):
    if isinstance(engine, Cached):  # kept searches must not wait in line: they are kept here
      engine = engine.engine
    self.fingerprint = engine.fingerprint
    self.rows = len(engine) if isinstance(engine, Sized) else None
    self._serving, self._metrics, self._kept = serving, metrics, Kept(serving.cache_bytes)
    self._batched = Batched(engine, max_queries=serving.max_batch, seconds=serving.seconds,
                            max_waiting=serving.max_waiting, on_batch=metrics.on_batch)
    self.close = self._batched.close

  async def find(self, asked: wire.Asked, seconds: float) -> list[Found]:
    """What became of each query; Busy, or TimeoutError after `seconds`."""
    found: dict[str, Found | None] = {q: self._kept.get(q, asked.top_k) for q in asked.queries}
    missing = [q for q, one in found.items() if one is None]
    self._metrics.queries.inc(len(asked.queries))
    self._metrics.hits.inc(len(found) - len(missing))
    if missing:
      future = self._batched.submit(missing, asked.top_k, seconds)
      self._metrics.waiting.set(len(self._batched))
      async with asyncio.timeout(seconds):
        answers = await asyncio.wrap_future(future)
      self._metrics.waiting.set(len(self._batched))
      for query, one in zip(missing, map(_checked, answers), strict=True):
        found[query] = one
        if not isinstance(one, RetrievalError):
          self._kept.put(query, asked.top_k, one)
    failed = sum(isinstance(found[q], RetrievalError) for q in asked.queries)
    self._metrics.failed.inc(failed)
    return [found[q] for q in asked.queries]


def create_app(engine: SearchEngine, serving: Serving = Serving(), *,
               token: str | None = None) -> FastAPI:
  """The server of an engine, which it closes when it ends; all but /healthz behind the token."""
  metrics = Metrics(serving.several_workers)
  desk = Desk(engine, serving, metrics)

  @contextlib.asynccontextmanager
  async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    await asyncio.to_thread(desk.close)

  app = FastAPI(title="retriever", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
  app.add_middleware(Gate, token=token, body_bytes=serving.limits.body_bytes,
                     read_seconds=serving.read_seconds, on_reply=metrics.on_reply)
  app.add_exception_handler(wire.Refused, _refused)
  _add_routes(app, desk, serving, metrics, token)
  return app


def _add_routes(app: FastAPI, desk: Desk, serving: Serving, metrics: Metrics,
                token: str | None) -> None:
  @app.post("/retrieve", openapi_extra=_openapi(serving), responses=REPLIES)
  async def retrieve(request: Request) -> Response:
    """The best passages of each query."""
    _check_headers(request)
    asked = wire.read_request(await request.body(), serving.limits, serving.top_k)
    seconds = min(serving.seconds, _seconds(request))
    try:
      found = await desk.find(asked, seconds)
    except Busy as e:
      metrics.refused.inc()
      return _later(429, str(e), e.seconds)
    except TimeoutError:
      return _later(503, f"no answer within {seconds:g} s", seconds)
    except RetrievalError as e:
      return _later(503, str(e), 1.0)
    errors = [f for f in found if isinstance(f, RetrievalError)]
    if errors and not asked.strict:
      # An empty list in its place would be taken for a search that found nothing.
      return _later(503, f"{len(errors)} of {len(found)} queries failed: {errors[0]}; ask with "
                         '"strict": true to get the others', 1.0)
    return Response(wire.write_reply(asked, found, desk.fingerprint), media_type=JSON)

  @app.get("/healthz")
  async def healthz(request: Request) -> Response:
    """Which index answers here, and what a request may hold."""
    header = request.headers.get("authorization", "").encode("latin-1")
    health = wire.Health(desk.fingerprint, desk.rows, serving.limits, may_pass(header, token))
    return Response(wire.write_health(health), media_type=JSON)

  @app.get("/metrics", response_class=fastapi.responses.PlainTextResponse)
  async def show_metrics() -> Response:
    """For Prometheus."""
    return Response(metrics.text(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

  @app.get("/openapi.json", include_in_schema=False)
  async def openapi() -> Response:
    return _json(app.openapi())


async def _refused(request: Request, error: wire.Refused) -> Response:
  return _json({"field": error.field, "detail": str(error)}, error.status)


def _later(status: int, detail: str, seconds: float) -> Response:
  """An answer that may be another one in a while."""
  after = str(max(1, math.ceil(seconds)))
  return _json({"detail": detail}, status, {"retry-after": after})


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
  return Response(orjson.dumps(value), status, headers, media_type=JSON)


def _check_headers(request: Request) -> None:
  kind = request.headers.get("content-type", JSON)
  if kind.partition(";")[0].strip().lower() != JSON:
    raise wire.Refused("content-type", f"is not {JSON}", 415)
  if request.headers.get("content-encoding", "identity") != "identity":
    raise wire.Refused("content-encoding", "is not understood here; send the body as it is", 415)


def _seconds(request: Request) -> float:
  """How long the caller says that it will wait."""
  text = request.headers.get(wire.SECONDS_HEADER, "inf")
  try:
    seconds = float(text)
  except ValueError:
    seconds = -1.0
  if not seconds > 0:
    raise wire.Refused(wire.SECONDS_HEADER, "is not a number above 0")
  return seconds


def _checked(found: Found) -> Found:
  """What JSON cannot say, no number or half a character, is the engine's failure for its query."""
  if isinstance(found, RetrievalError):
    return RetrievalError(wire.sendable(str(found)))
  try:
    for passage in found:
      (passage.id + passage.contents).encode()
  except UnicodeEncodeError:
    return RetrievalError("the engine gave text that is not Unicode")
  if not all(math.isfinite(p.score) for p in found):
    return RetrievalError("the engine gave a score that is not a number")
  return found


def _openapi(serving: Serving) -> dict[str, Any]:
  limits = serving.limits
  properties = {
      "queries": {"type": "array", "maxItems": limits.queries,
                  "items": {"type": "string", "maxLength": limits.query_chars}},
      "topk": {"type": ["integer", "null"], "minimum": 1, "maximum": limits.top_k,
               "description": f"passages of each query; {serving.top_k} if there is none"},
      "return_scores": {"type": "boolean", "default": False,
                        "description": "false: each passage is the document itself"},
      "strict": {"type": "boolean", "default": False,
                 "description": "also which index answered, errors by query, and proofs"}}
  schema = {"type": "object", "properties": properties, "required": ["queries"],
            "additionalProperties": False}
  seconds = {"name": wire.SECONDS_HEADER, "in": "header", "required": False,
             "schema": {"type": "number", "minimum": 1},
             "description": "how long the caller waits; in less than 1 few will have an answer"}
  return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}},
          "parameters": [seconds]}


REPLIES: dict[int | str, dict[str, Any]] = {
    401: {"description": "the token is missing or wrong"},
    408: {"description": "the request did not come whole in time"},
    413: {"description": "the body is too large"},
    415: {"description": "the body is no plain JSON"},
    422: {"description": "a field is wrong: `field` names it"},
    429: {"description": "too many queries wait: ask again after Retry-After seconds"},
    503: {"description": "the engine failed or was too slow"}}
