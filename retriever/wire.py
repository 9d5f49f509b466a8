"""What travels between a search client and a search server, written and read: bytes in, values out.

A request is `{"queries": [...], "topk": k, "return_scores": true}`, a reply `{"result":
[[{"document": {"id", "contents"}, "score"}, ...], ...]}`. With `"strict": true` the reply also says which index
answered, which queries failed and why, and for each answered query a proof: a hash over the index,
the query and its passages, so that no answer can be cut, swapped or damaged without being noticed.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from retriever.protocol import Found, Passage, RetrievalError

FIELDS = ("queries", "topk", "return_scores", "strict")
SECONDS_HEADER = "x-search-seconds"  # how long the caller will wait for this reply
PASSAGES_A_REPLY = 8192  # a client asks for at most about so many at once
ENVELOPE_BYTES = 256  # of a request, around its queries


@dataclasses.dataclass(frozen=True)
class Limits:
  """What one request may hold: counts, characters of a query, bytes of the whole body."""

  queries: int = 512
  top_k: int = 100
  query_chars: int = 16_384
  body_bytes: int = 1 << 20


@dataclasses.dataclass(frozen=True)
class Asked:
  """One request, checked."""

  queries: tuple[str, ...]
  top_k: int
  return_scores: bool = False
  strict: bool = False


@dataclasses.dataclass(frozen=True)
class Health:
  """What a server says of itself: its index, how many passages (None: unknown), its limits."""

  fingerprint: str
  rows: int | None
  limits: Limits
  authorized: bool  # whether whoever asked may search


class Refused(Exception):
  """A request that is wrong in itself: which field, what came and what was wanted."""

  def __init__(self, field: str, message: str, status: int = 422):
    super().__init__(f"{field}: {message}")
    self.field, self.status = field, status


class BadReply(Exception):
  """A reply that is not what was asked for."""


def write_request(queries: Sequence[str], top_k: int) -> bytes:
  """The body of a strict request; no query may hold half a surrogate pair."""
  return orjson.dumps({"queries": list(queries), "topk": top_k, "return_scores": True,
                       "strict": True})


def read_request(body: bytes, limits: Limits, top_k: int) -> Asked:
  """Checks a request's body; `top_k` is for those that name none. A wrong one is Refused."""
  try:
    record = orjson.loads(body)
  except orjson.JSONDecodeError as e:
    raise Refused("body", f"is not JSON ({e}); wanted an object with {', '.join(FIELDS)}") from e
  if not isinstance(record, dict):
    raise Refused("body", f"is {_kind(record)}, wanted an object with {', '.join(FIELDS)}")
  for field in record:
    if field not in FIELDS:
      raise Refused(field[:80], f"is no field of a request; there are {', '.join(FIELDS)}")
  for field in ("return_scores", "strict"):
    if not isinstance(record.get(field, False), bool):
      raise Refused(field, f"is {_kind(record[field])}, wanted true or false")
  return Asked(_queries(record.get("queries"), limits),
               _top_k(record.get("topk"), limits, top_k), record.get("return_scores", False),
               record.get("strict", False))


def is_token(text: str) -> bool:
  """Whether it can travel as a bearer token: printable ASCII, no spaces around it."""
  return text.isascii() and text.isprintable() and text == text.strip() != ""


def write_reply(asked: Asked, found: Sequence[Found], fingerprint: str) -> bytes:
  """The body of a reply: a failed query's list is empty, its reason stands in `errors` (strict)."""
  passages = [[] if isinstance(f, RetrievalError) else f for f in found]
  write = _scored if asked.return_scores else _document
  reply: dict[str, Any] = {"result": [[write(p) for p in ps] for ps in passages]}
  if asked.strict:
    reply["fingerprint"] = fingerprint
    reply["errors"] = {str(i): str(f) for i, f in enumerate(found) if isinstance(f, RetrievalError)}
    reply["proofs"] = [None if isinstance(f, RetrievalError)
                       else proof(fingerprint, query, asked.top_k, f)
                       for query, f in zip(asked.queries, found, strict=True)]
  return orjson.dumps(reply)


def read_reply(body: bytes | bytearray, queries: Sequence[str], top_k: int, *,
               fingerprint: str | None, accept_empty: bool) -> list[Found]:
  """What became of each query; anything else than that is a BadReply.

  With a `fingerprint` the reply must be of that index and prove each answer. Without, its form is
  all that can be checked, and an empty answer is only taken for one if `accept_empty`.
  """
  try:
    reply = orjson.loads(body)
  except orjson.JSONDecodeError as e:
    raise BadReply(f"not JSON ({e})") from e
  result = reply.get("result") if isinstance(reply, dict) else None
  if not isinstance(result, list):
    raise BadReply(f"{_kind(reply)} without a list named 'result'")
  if len(result) != len(queries):
    raise BadReply(f"{len(result)} results for {len(queries)} queries")
  found: list[Found] = [_read_passages(items, top_k) for items in result]
  if fingerprint is None and "proofs" in reply:
    raise BadReply("with proofs, of a server that did not tell its index before; open it anew")
  if fingerprint is not None:
    return _proven(reply, found, queries, top_k, fingerprint)
  if not accept_empty and not all(found):
    raise BadReply("no passages for a query, and no proof that there are none")
  return found


def proof(fingerprint: str, query: str, top_k: int, passages: Sequence[Passage]) -> str:
  """A hash over one query, its passages as they were found, and the index they were found in."""
  parts = [fingerprint, query, top_k, [[p.id, p.contents, p.score] for p in passages]]
  return hashlib.blake2b(orjson.dumps(parts), digest_size=16).hexdigest()


def write_health(health: Health) -> bytes:
  return orjson.dumps({"ready": True} | dataclasses.asdict(health))


def read_health(body: bytes) -> Health | None:
  """None of a server that says nothing of the kind."""
  try:
    said = orjson.loads(body)
    health = Health(said["fingerprint"], None, Limits(**said["limits"]), said["authorized"])
  except (orjson.JSONDecodeError, KeyError, TypeError):
    return None
  sound = (isinstance(health.fingerprint, str) and isinstance(health.authorized, bool)
           and all(type(n) is int and n > 0 for n in dataclasses.astuple(health.limits)))
  return health if sound else None


def stricter(one: Limits, other: Limits) -> Limits:
  """The smaller of each."""
  return Limits(*map(min, dataclasses.astuple(one), dataclasses.astuple(other)))


def split(queries: Sequence[str], top_k: int, limits: Limits) -> Iterator[range]:
  """Runs of queries that each fit into one request."""
  most = max(1, min(limits.queries, PASSAGES_A_REPLY // top_k))
  start, size = 0, ENVELOPE_BYTES
  for i, query in enumerate(queries):
    more = len(orjson.dumps(query)) + 1
    if i > start and (i - start >= most or size + more > limits.body_bytes):
      yield range(start, i)
      start, size = i, ENVELOPE_BYTES
    size += more
  if start < len(queries):
    yield range(start, len(queries))


def sendable(text: str) -> str:
  """The text in whole characters: half a surrogate pair, which is none, becomes U+FFFD."""
  return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _queries(queries: Any, limits: Limits) -> tuple[str, ...]:
  if not isinstance(queries, list):
    raise Refused("queries", f"is {_kind(queries)}, wanted a list of strings")
  if len(queries) > limits.queries:
    raise Refused("queries", f"holds {len(queries):,}, wanted up to {limits.queries}; send several "
                             "requests")
  for i, query in enumerate(queries):
    if not isinstance(query, str):
      raise Refused(f"queries[{i}]", f"is {_kind(query)}, wanted a string")
    if len(query) > limits.query_chars:
      raise Refused(f"queries[{i}]", f"has {len(query):,} characters, wanted up to "
                                     f"{limits.query_chars:,}")
  return tuple(queries)


def _top_k(asked: Any, limits: Limits, default: int) -> int:
  if asked is None:
    return default
  number = isinstance(asked, (int, float)) and not isinstance(asked, bool)
  if not number or asked != int(asked) or not 1 <= asked <= limits.top_k:
    raise Refused("topk", f"is {asked if number else _kind(asked)}, wanted a whole number from 1 to "
                          f"{limits.top_k}, or null")
  return int(asked)  # 3.0 is one as well


def _document(passage: Passage) -> dict[str, Any]:
  return {"id": passage.id, "contents": passage.contents}


def _scored(passage: Passage) -> dict[str, Any]:
  return {"document": _document(passage), "score": passage.score}


def _read_passages(items: Any, top_k: int) -> list[Passage]:
  if not isinstance(items, list):
    raise BadReply(f"a query's result is {_kind(items)}, not a list")
  if len(items) > top_k:
    raise BadReply(f"{len(items)} passages where {top_k} were asked for")
  return [_read_passage(item) for item in items]


def _read_passage(item: Any) -> Passage:
  document = item.get("document") if isinstance(item, dict) else None
  if not isinstance(document, dict):
    raise BadReply(f"a passage is {_kind(item)} without an object named 'document'")
  id_, contents, score = document.get("id"), document.get("contents"), item.get("score")
  if not isinstance(id_, str) or not isinstance(contents, str):
    raise BadReply("a document without strings named 'id' and 'contents'")
  if isinstance(score, bool) or not isinstance(score, (int, float)):  # orjson takes no NaN or inf
    raise BadReply(f"a score that is {_kind(score)}")
  return Passage(id_, contents, float(score))


def _proven(reply: dict[str, Any], found: list[Found], queries: Sequence[str], top_k: int,
            fingerprint: str) -> list[Found]:
  if reply.get("fingerprint") != fingerprint:
    raise BadReply(f"from another index ({str(reply.get('fingerprint'))[:12]}, wanted "
                   f"{fingerprint[:12]})")
  errors, proofs = reply.get("errors"), reply.get("proofs")
  if not isinstance(errors, dict) or not isinstance(proofs, list) or len(proofs) != len(found):
    raise BadReply("no proof of each answer")
  proven: list[Found] = []
  for i, (query, passages, given) in enumerate(zip(queries, found, proofs)):
    reason = errors.get(str(i))
    if isinstance(reason, str):
      proven.append(RetrievalError(reason))
    elif given == proof(fingerprint, query, top_k, passages):
      proven.append(passages)
    else:
      raise BadReply(f"the answer of query {i} is not the one that the server proved")
  return proven


def _kind(value: Any) -> str:
  """What a value of JSON is, in words."""
  kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false",
           int: "a number", float: "a number", type(None): "nothing"}
  return kinds[type(value)]
