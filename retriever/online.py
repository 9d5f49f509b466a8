"""Search engines of the web behind the one interface: Serper, SerpAPI, Google, Bing, Tavily.

Answers change from day to day: to run a step again bit for bit, put a Recorder around the engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence

import httpx2
import orjson
import stamina

from retriever import egress
from retriever.page_text import page_text
from retriever.protocol import (
    CorpusError, Found, Passage, RetrievalError, SearchEngine, all_found, check_top_k)
from retriever.search_apis import APIS, Api, Hit, Odd, Request, object_of

VERSION = 1  # of what the adapters below make of a reply
ATTEMPT_SECONDS = 10.0
LONGEST_WAIT = 30.0  # seconds that a Retry-After is believed
SPARE = 7  # hits asked for beyond top_k where some may be blocked: three make one page of ten


class OnlineEngine(SearchEngine):
  """Asks one search API, `in_flight` queries at a time; a query's failure is its own.

  A passage is `"Title"`, a line break and the snippet; its id is the URL, its score 1 / rank.
  `blocked` domains, with all below them, never come up. `read_pages` puts the text of each page,
  cut to `page_chars`, in the place of its snippet, wherever the page can be read under `guard`.
  A query takes at most `seconds` from when it is sent, retries included, and then 10 more for its
  pages. Keys come from `environ`, by the names that the API's row gives.
  """

  def __init__(
      self, name: str, *, environ: Mapping[str, str], base_url: str | None = None,
      blocked: Sequence[str] = (), read_pages: bool = False, page_chars: int = 4_000,
      in_flight: int = 8, seconds: float = 60.0, attempts: int = 4, first_wait: float = 0.5,
      guard: egress.Guard = egress.Guard()):
    if name not in APIS:
      raise CorpusError(f"online engine {name!r} is not known, choose one of {', '.join(APIS)}")
    if min(in_flight, attempts, page_chars) < 1 or not seconds > 0:
      raise ValueError("in_flight, attempts and page_chars are at least 1, seconds above 0")
    self._name, self._api = name, APIS[name]
    self.most = self._api.most
    self._blocked = frozenset(map(domain, blocked))
    self._read_pages, self._page_chars = read_pages, page_chars
    self._seconds, self._attempts, self._first_wait = seconds, attempts, first_wait
    self._guard = dataclasses.replace(guard, host_allowed=self._may_show)
    base_url = _checked_base(base_url or self._api.base_url)
    headers, params, public = _keys(name, self._api, environ)
    about = [VERSION, name, base_url, sorted(self._blocked), read_pages and page_chars, public]
    digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()
    self.fingerprint = f"online-{name}-{digest[:16]}"
    # The key is added below the client, which logs and quotes the URLs that it is asked for.
    self._client = httpx2.AsyncClient(
        base_url=base_url, follow_redirects=False, trust_env=False, timeout=ATTEMPT_SECONDS,
        headers={"Accept": "application/json", "Accept-Encoding": "gzip"},
        transport=_Keyed(httpx2.AsyncHTTPTransport(trust_env=False), headers, params))
    self._free = asyncio.Semaphore(in_flight)
    self._background = egress.Background()

  def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    return all_found(self.search_each(queries, top_k))

  def search_each(self, queries: Sequence[str], top_k: int) -> list[Found]:
    check_top_k(top_k)
    if top_k > self._api.most:
      raise ValueError(f"top_k is {top_k}, {self._name} gives at most {self._api.most}")
    unlike = list(dict.fromkeys(queries))
    try:
      found = dict(zip(unlike, self._background.run(self._find_all(unlike, top_k)), strict=True))
    except egress.Cancelled:
      raise RetrievalError(f"{self._name} was closed during a search") from None
    return [_copied(found[q]) for q in queries]

  def close(self) -> None:
    if not self._client.is_closed:
      self._background.run(self._client.aclose())
    self._background.close()

  async def _find_all(self, queries: Sequence[str], top_k: int) -> list[Found]:
    return await asyncio.gather(*(self._find(q, top_k) for q in queries))

  async def _find(self, query: str, top_k: int) -> Found:
    asked = query.encode("utf-8", "replace").decode().strip()[:self._api.longest]
    if not asked:
      return []
    async with self._free:
      try:
        async with asyncio.timeout(self._seconds):
          hits = await self._ask(asked, top_k)
      except TimeoutError:
        return RetrievalError(f"{self._name} gave no answer within {self._seconds:g} s")
      except RetrievalError as e:
        return RetrievalError(str(e))
      kept = [hit for hit in _unlike(hits) if self._may_show(_host(hit.url))][:top_k]
      texts = await asyncio.gather(*map(self._text, kept))
    return [Passage(hit.url, f'"{" ".join(hit.title.split())}"\n{text}', 1.0 / rank)
            for rank, (hit, text) in enumerate(zip(kept, texts), 1)]

  async def _ask(self, query: str, top_k: int) -> list[Hit]:
    """The API's hits, after as many attempts as it takes and may take."""
    count = min(self._api.most, top_k + (SPARE if self._blocked else 0))
    request = self._api.request(query, count)
    async for attempt in stamina.retry_context(
        on=_wait, attempts=self._attempts, timeout=None, wait_initial=self._first_wait,
        wait_jitter=self._first_wait, wait_max=LONGEST_WAIT):
      with attempt:
        return await self._ask_once(request)
    raise AssertionError("an attempt returns or raises")

  async def _ask_once(self, request: Request) -> list[Hit]:
    """One attempt; no message quotes what came, which may quote the key."""
    try:
      async with (asyncio.timeout(ATTEMPT_SECONDS), self._client.stream(
          request.method, request.path, params=request.params, json=request.body) as response):
        body, cut = await egress.read_body(response)
    except TimeoutError:
      raise _Again(f"{self._name} sent no whole reply within {ATTEMPT_SECONDS:g} s") from None
    except httpx2.HTTPError as e:
      raise _Again(f"{self._name} could not be reached ({type(e).__name__})") from None
    except egress.Refused as e:
      raise _Again(f"{self._name}: {e}") from None
    if response.status_code != 200:
      raise _refusal(self._name, self._api, response)
    try:
      if cut:
        raise Odd(f"more than {egress.MAX_BYTES:,} bytes")
      return self._api.hits(object_of(orjson.loads(body), "the reply"))
    except orjson.JSONDecodeError:
      raise _Again(f"{self._name} answered with something other than JSON") from None
    except Odd as e:
      raise _Again(f"{self._name} answered in a form it does not document: {e}") from None

  def _may_show(self, host: str) -> bool:
    parts = host.split(".")
    return bool(host) and self._blocked.isdisjoint(
        ".".join(parts[i:]) for i in range(len(parts)))

  async def _text(self, hit: Hit) -> str:
    """The page's text, or the snippet of a page that can't be read or holds none."""
    snippet = hit.snippet.strip()
    if not self._read_pages:
      return snippet
    try:
      reply = await egress.fetch(hit.url, self._guard)
    except egress.Refused:
      return snippet
    if reply.status != 200:
      return snippet
    kind = reply.headers.get("content-type", "")
    return await asyncio.to_thread(page_text, reply.body, kind, self._page_chars) or snippet


class _Keyed(httpx2.AsyncBaseTransport):
  """Adds headers and parameters to what is really sent."""

  def __init__(self, inner: httpx2.AsyncBaseTransport, headers: Mapping[str, str],
               params: Mapping[str, str]):
    self._inner, self._headers, self._params = inner, headers, params

  async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
    added = [(k.encode(), v.encode()) for k, v in self._headers.items()]
    return await self._inner.handle_async_request(httpx2.Request(
        request.method, request.url.copy_merge_params(self._params),
        headers=[*request.headers.raw, *added], stream=request.stream,
        extensions=request.extensions))

  async def aclose(self) -> None:
    await self._inner.aclose()


class _Again(RetrievalError):
  """A failure that another attempt may mend, `after` so many seconds if the API said so."""

  def __init__(self, message: str, after: float | None = None):
    super().__init__(message)
    self.after = after


def domain(name: str) -> str:
  """A block-list's entry as hosts are compared: ASCII, lower case, no dot at either end."""
  bare = name.strip().removeprefix("*.").strip(".")
  host = _host(f"https://{bare}")
  if not host or any(c in bare for c in "/@:?#"):
    raise CorpusError(f"{name!r} is no domain to block; wanted one such as 'example.com'")
  return host


def _host(url: str) -> str:
  """The host of a page as hosts are compared; "" for what isn't a page."""
  try:
    return egress.check_url(url).raw_host.decode("ascii").lower().rstrip(".")
  except egress.Refused:
    return ""


def _keys(name: str, api: Api, environ: Mapping[str, str],
          ) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
  """The headers and the parameters that carry keys; those that are no secret once more."""
  headers, params, public = {}, {}, {}
  for key in api.keys:
    value = environ.get(key.variable, "").strip()
    if not value:
      raise CorpusError(f"{name} needs a key: set the environment variable {key.variable}")
    if not (value.isascii() and value.isprintable()):
      raise CorpusError(f"the key in {key.variable} holds characters that no key has")
    if key.header:
      headers[key.header] = key.form.format(value)
    else:
      params[key.param] = value
    if not key.secret:
      public[key.param] = value
  return headers, params, public


def _checked_base(url: str) -> str:
  """A key goes in the clear to this machine only."""
  try:
    parsed = egress.check_url(url)
  except egress.Refused as e:
    raise CorpusError(f"base_url: {e}") from None
  if parsed.scheme != "https" and parsed.host not in ("localhost", "127.0.0.1", "::1"):
    raise CorpusError(f"base_url {url!r} would carry the key unencrypted; use https")
  return url.rstrip("/")


def _wait(error: BaseException) -> bool | float:
  """Whether to ask again, and after how long where the API said so."""
  if not isinstance(error, _Again):
    return False
  return True if error.after is None else min(error.after, LONGEST_WAIT)


def _refusal(name: str, api: Api, response: httpx2.Response) -> RetrievalError:
  status = response.status_code
  if status in (401, 403):
    variables = " and ".join(key.variable for key in api.keys)
    return RetrievalError(f"{name} refuses the key (HTTP {status}); look at {variables}, and at "
                          "what the account may do")
  if status in (402, 432, 433):
    return RetrievalError(f"{name} says that the account is used up (HTTP {status})")
  if status == 429 or status >= 500:
    after = response.headers.get("retry-after", "")
    return _Again(f"{name} is busy or down (HTTP {status})",
                  float(after) if after.isascii() and after.isdigit() else None)
  return RetrievalError(f"{name} refuses the request (HTTP {status})")


def _unlike(hits: Sequence[Hit]) -> list[Hit]:
  return list({hit.url: hit for hit in reversed(hits)}.values())[::-1]


def _copied(found: Found) -> Found:
  return found if isinstance(found, RetrievalError) else list(found)
