"""From a spec, such as a folder or a URL, to the one interface: whatever finds the passages.

A spec is an index folder, `http://host:port` (several replicas with commas), `online:NAME`,
`empty`, or a mapping (also as JSON text) of one of the names below to what it works on, beside
the options of the function that it names here: `{"rerank": {"index": "wiki", "probes": 64},
"model": "cross-encoder", "fetch": 50}`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from retriever import (client, controls, encoders, engine, fusion, online, rerank, sharing, tape,
                       wire)
from retriever.protocol import CorpusError, SearchEngine

Spec = str | Path | Mapping[str, Any]
Number = float | int  # as JSON has them


def open_engine(spec: Spec) -> SearchEngine:
  """Opens the engine that a spec describes.

  A CorpusError says what is wrong with it, a plain UserError with a model's folder.
  """
  spec = as_mapping(spec)
  names = [name for name in OPENERS if name in spec]
  if "qdrant" in names and "url" in names:  # there, an option
    names.remove("url")
  if len(names) != 1:
    raise CorpusError(f"{dict(spec)!r} names {len(names)} engines, wanted exactly one of "
                      f"{', '.join(OPENERS)}")
  opener = OPENERS[names[0]]
  options = {k: v for k, v in spec.items() if k != names[0]}
  known = list(inspect.signature(opener).parameters)[1:]
  for name in options:
    if name not in known:
      raise CorpusError(f"{names[0]!r} has no option {name!r}, choose from "
                        f"{', '.join(known) or 'none'}")
  try:
    return opener(spec[names[0]], **options)
  except (ValueError, TypeError, AttributeError) as e:  # the right name, and a wrong value
    raise CorpusError(f"{dict(spec)!r}: {str(e).splitlines()[0]}") from e


def as_mapping(spec: Spec) -> Mapping[str, Any]:
  """A spec with its kind spelt out."""
  if isinstance(spec, Mapping):
    return spec
  text = str(spec)
  if text == "empty":
    return {"empty": True}
  if text.lstrip().startswith("{"):
    try:
      return json.loads(text)
    except ValueError as e:
      raise CorpusError(f"{text!r} is not JSON ({e}); mend it, or name an index folder") from e
  if text.startswith(("http://", "https://")):
    return {"url": text}
  if text.startswith("online:"):
    return {"online": text.removeprefix("online:")}
  return {"index": text}


@functools.wraps(engine.open_index)  # and its options
def _open_index(folder: str, **options: Any) -> SearchEngine:
  return sharing.Cached(engine.open_index(folder, **options))


def _open_url(urls: str | Sequence[str], *, seconds: Number = 120.0, token_env: str = "",
              fingerprint: str | None = None) -> SearchEngine:
  """Replicas of a server. `token_env`: the environment's name for its bearer token."""
  urls = urls.split(",") if isinstance(urls, str) else list(urls)
  return client.Client(urls, seconds=float(seconds), token=_secret(token_env),
                       fingerprint=fingerprint)


def _open_online(name: str, *, blocked: Sequence[str] = (), read_pages: bool = False,
                 seconds: Number = 30.0) -> SearchEngine:
  """A web search; its key comes from the environment."""
  if isinstance(blocked, str):
    raise CorpusError(f"blocked is {blocked!r}; wanted a list of domains")
  return online.OnlineEngine(name, environ=os.environ, blocked=tuple(blocked),
                             read_pages=read_pages, seconds=float(seconds))


def _open_qdrant(collection: str, *, url: str, encoder: str, rule: str | None = None,
                 token_env: str = "", exact: bool = False, ef: int | None = None,
                 seconds: Number = 30.0) -> SearchEngine:
  """A collection of a Qdrant server, which `qdrant.fill` has filled with the same encoder."""
  from retriever import qdrant  # an extra
  made = encoders.from_spec(encoders.wanted_spec(encoder, rule=rule), Path())
  return qdrant.open_collection(url, collection, made, token=_secret(token_env), exact=exact, ef=ef,
                                seconds=float(seconds))


def _fuse(specs: Sequence[Spec], *, fetch: int = fusion.FETCH, k: Number = fusion.K,
          weights: Sequence[Number] | None = None) -> SearchEngine:
  """Several engines over one corpus, by reciprocal rank."""
  with contextlib.ExitStack() as held:
    engines = [held.enter_context(_able(open_engine(s), fetch)) for s in specs]
    made = fusion.FusionEngine(engines, fetch, k, weights)
    held.pop_all()
  return made


def _rerank(spec: Spec, *, model: str = "", encoder: str = "", rule: str | None = None,
            fetch: int = 50, dtype: str = "float32") -> SearchEngine:
  """The passages of an engine, ranked again by a cross-encoder (`model`) or a sentence encoder."""
  if bool(model) == bool(encoder):
    raise CorpusError("'rerank' wants a model (a cross-encoder) or an encoder, one of the two")
  if model:
    scorer = rerank.CrossEncoder.load(model, dtype=dtype)
  else:
    about = encoders.wanted_spec(encoder, rule=rule, dtype=dtype)
    digest = hashlib.sha256(json.dumps(encoders.identity(about), sort_keys=True).encode())
    scorer = rerank.EncoderScorer(encoders.from_spec(about, Path()), digest.hexdigest())
  return _over(spec, lambda e: rerank.RerankEngine(_able(e, fetch), scorer, fetch))


def _random(spec: Spec, *, seed: int = 0) -> SearchEngine:
  """A control: passages that have nothing to do with the query."""
  return _over(spec, lambda e: controls.RandomEngine(_local(e), seed))


def _noisy(spec: Spec, *, p: Number, seed: int = 0) -> SearchEngine:
  """A control: with probability p, random passages."""
  return _over(spec, lambda e: controls.NoisyEngine(_local(e), float(p), seed))


def _record(spec: Spec, *, file: str) -> SearchEngine:
  """Answers are written to a file; those that it has are not asked for again."""
  return _over(spec, lambda e: tape.Recorder(e, file))


def _empty(_: object) -> SearchEngine:
  """A control: finds nothing."""
  return controls.EmptyEngine()


def _replay(file: str, *, fingerprint: str | None = None) -> SearchEngine:
  """What was recorded, and nothing else."""
  return tape.Replay(file, fingerprint)


def _over(spec: Spec, wrap: Callable[[SearchEngine], SearchEngine]) -> SearchEngine:
  """An engine over another one, which is closed where that can't be."""
  with contextlib.ExitStack() as held:
    made = wrap(held.enter_context(open_engine(spec)))
    held.pop_all()
  return made


def _able(engine: SearchEngine, fetch: int) -> SearchEngine:
  """The engine, where it gives as many passages as will be fetched."""
  if engine.most is not None and fetch > engine.most:
    raise CorpusError(f"fetch is {fetch}, {engine.fingerprint[:20]} gives at most {engine.most} "
                      "passages; lower fetch")
  return engine


def _local(engine: SearchEngine) -> controls.Local:
  """An engine whose passages can be read by row, and so be drawn from."""
  found = engine.engine if isinstance(engine, sharing.Cached) else engine
  if not isinstance(found, controls.Local):
    raise CorpusError(f"{found.fingerprint!r} has no corpus to draw from; wanted an index folder")
  return found


def _secret(name: str) -> str | None:
  if not name:
    return None
  token = os.environ.get(name, "")
  if not wire.is_token(token):
    raise CorpusError(f"{name} holds no token in the environment; put the server's there, in "
                      "printable ASCII without spaces around it")
  return token


OPENERS: Mapping[str, Callable[..., SearchEngine]] = {
    "index": _open_index, "empty": _empty, "url": _open_url, "online": _open_online,
    "qdrant": _open_qdrant, "fuse": _fuse, "rerank": _rerank, "random": _random, "noisy": _noisy,
    "record": _record, "replay": _replay}
