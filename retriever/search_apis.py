"""The search APIs of the web, one row each: how it is asked, and where its reply keeps what it has.

Pure: what is here builds requests and reads replies; `retriever.online` sends them.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any

Reply = Mapping[str, Any]


class Odd(Exception):
  """A reply that isn't what the API documents; the message quotes nothing of it."""


@dataclasses.dataclass(frozen=True)
class Hit:
  """One result as the API has it."""

  title: str
  snippet: str
  url: str


@dataclasses.dataclass(frozen=True)
class Request:
  """What is asked for, all but the keys."""

  method: str
  path: str
  params: Mapping[str, str] | None = None
  body: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Key:
  """An environment variable, and the header (in this form) or parameter that carries it."""

  variable: str
  header: str = ""
  param: str = ""
  form: str = "{}"
  secret: bool = True


@dataclasses.dataclass(frozen=True)
class Api:
  """One search API: at most `most` hits a request, `longest` characters a query."""

  base_url: str
  keys: tuple[Key, ...]
  most: int
  longest: int
  request: Callable[[str, int], Request]
  hits: Callable[[Reply], list[Hit]]


def object_of(value: Any, what: str) -> Reply:
  """A JSON object, or Odd."""
  if not isinstance(value, dict):
    raise Odd(f"{what} is no object")
  return value


def _listed(value: Any, what: str, title: str, snippet: str, url: str) -> list[Hit]:
  """The hits of a list whose objects name their parts so; a snippet alone may be missing."""
  if not isinstance(value, list):
    raise Odd(f"{what} is no list")
  hits = []
  for item in value:
    parts = [object_of(item, f"an item of {what}").get(k) for k in (title, snippet, url)]
    parts[1] = "" if parts[1] is None else parts[1]
    if not all(isinstance(part, str) for part in parts) or not parts[2]:
      raise Odd(f"an item of {what} lacks a text")
    hits.append(Hit(*parts))
  return hits


def _serper(query: str, count: int) -> Request:
  return Request("POST", "/search", body={"q": query, "num": count})


def _serper_hits(reply: Reply) -> list[Hit]:
  return _listed(reply.get("organic"), "organic", "title", "snippet", "link")


def _serpapi(query: str, count: int) -> Request:
  return Request("GET", "/search.json", {"engine": "google", "q": query})


def _serpapi_hits(reply: Reply) -> list[Hit]:
  if object_of(reply.get("search_metadata"), "search_metadata").get("status") != "Success":
    raise Odd("search_metadata.status is not Success")
  about = object_of(reply.get("search_information", {}), "search_information")
  if "organic_results" not in reply and about.get("organic_results_state") == "Fully empty":
    return []
  return _listed(reply.get("organic_results"), "organic_results", "title", "snippet", "link")


def _google(query: str, count: int) -> Request:
  return Request("GET", "/customsearch/v1", {"q": query, "num": str(count)})


def _google_hits(reply: Reply) -> list[Hit]:
  if reply.get("kind") != "customsearch#search":
    raise Odd("kind is not customsearch#search")
  about = object_of(reply.get("searchInformation"), "searchInformation")
  if "items" not in reply and about.get("totalResults") == "0":
    return []
  return _listed(reply.get("items"), "items", "title", "snippet", "link")


def _bing(query: str, count: int) -> Request:
  return Request("GET", "/v7.0/search",
                 {"q": query, "count": str(count), "responseFilter": "Webpages"})


def _bing_hits(reply: Reply) -> list[Hit]:
  if reply.get("_type") != "SearchResponse":
    raise Odd("_type is not SearchResponse")
  if "webPages" not in reply:  # that is how it says that there is none
    return []
  pages = object_of(reply["webPages"], "webPages")
  return _listed(pages.get("value"), "webPages.value", "name", "snippet", "url")


def _tavily(query: str, count: int) -> Request:
  return Request("POST", "/search", body={"query": query, "max_results": count})


def _tavily_hits(reply: Reply) -> list[Hit]:
  return _listed(reply.get("results"), "results", "title", "content", "url")


# Google gives its results ten a page, SerpAPI passes on one page. Microsoft closed Bing's public
# API in August 2025; gateways of the same form are reached by another base_url.
APIS: Mapping[str, Api] = types.MappingProxyType({
    "serper": Api(
        "https://google.serper.dev", (Key("SERPER_API_KEY", header="X-API-KEY"),),
        100, 2048, _serper, _serper_hits),
    "serpapi": Api(
        "https://serpapi.com", (Key("SERPAPI_API_KEY", param="api_key"),),
        10, 2048, _serpapi, _serpapi_hits),
    "google": Api(
        "https://www.googleapis.com",
        (Key("GOOGLE_API_KEY", param="key"), Key("GOOGLE_CSE_ID", param="cx", secret=False)),
        10, 1024, _google, _google_hits),
    "bing": Api(
        "https://api.bing.microsoft.com",
        (Key("BING_API_KEY", header="Ocp-Apim-Subscription-Key"),),
        50, 1500, _bing, _bing_hits),
    "tavily": Api(
        "https://api.tavily.com",
        (Key("TAVILY_API_KEY", header="Authorization", form="Bearer {}"),),
        20, 400, _tavily, _tavily_hits),
})
