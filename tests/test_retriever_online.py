"""Search APIs of the web, each played by a server that speaks its documented form."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import threading
import time

import pytest
from fake_web import Web, reply

from retriever import egress, online
from retriever.online import OnlineEngine
from retriever.page_text import page_text
from retriever.protocol import CorpusError, Passage, RetrievalError
from retriever.search_apis import APIS

SECRET = "canary+Key/1"
KEYS = {name: f"{SECRET}-{name[:4]}" for name in (
    "SERPER_API_KEY", "SERPAPI_API_KEY", "GOOGLE_API_KEY", "BING_API_KEY", "TAVILY_API_KEY")}
KEYS["GOOGLE_CSE_ID"] = "engine:1"

HITS = [("Ada Lovelace", "An English mathematician.", "https://en.example.org/Ada"),
        ("Ada (computer\n language)", None, "https://example.com/ada?v=1"),
        ("Zuse", "Builder of the Z3.", "http://zuse.example.net/")]


def organic(hits, title="title", snippet="snippet", url="link"):
  return [{title: t, **({} if s is None else {snippet: s}), url: u, "position": n, "more": [1]}
          for n, (t, s, u) in enumerate(hits, 1)]


# What each API replies to a search that found these hits, and to one that found none.
REPLIES = {
    "serper": lambda hits: {
        "searchParameters": {"q": "q", "type": "search"}, "organic": organic(hits), "credits": 1},
    "serpapi": lambda hits: {
        "search_metadata": {"id": "6", "status": "Success"},
        "search_information": {"organic_results_state": (
            "Results for exact spelling" if hits else "Fully empty")},
        **({"organic_results": organic(hits)} if hits else
           {"error": "Google hasn't returned any results for this query."})},
    "google": lambda hits: {
        "kind": "customsearch#search", "queries": {"request": [{}]},
        "searchInformation": {"totalResults": str(len(hits)), "searchTime": 0.2},
        **({"items": organic(hits)} if hits else {})},
    "bing": lambda hits: {
        "_type": "SearchResponse", "queryContext": {"originalQuery": "q"},
        **({"webPages": {"totalEstimatedMatches": 9, "value": organic(hits, "name", url="url")}}
           if hits else {})},
    "tavily": lambda hits: {
        "query": "q", "results": [
            hit | {"score": 0.9} for hit in organic(hits, snippet="content", url="url")],
        "response_time": "1.67"},
}
assert REPLIES.keys() == APIS.keys()
every_api = pytest.mark.parametrize("name", REPLIES)


def asked_for(name, asked):
  """The query of a request and how many hits it wants, which is None where that can't be said."""
  if name in ("serper", "tavily"):
    body = asked.json()
    query, count = ("q", "num") if name == "serper" else ("query", "max_results")
    assert body.keys() == {query, count} and asked.headers["content-type"] == "application/json"
    return body[query], body[count]
  count = asked.params.get("count" if name == "bing" else "num")
  return asked.params["q"], None if count is None else int(count)


def engine_at(web, name="serper", **settings):
  return OnlineEngine(name, environ=KEYS, base_url=web.url("").rstrip("/"),
                      **{"first_wait": 0.01} | settings)


def replying(name, hits=HITS):
  return lambda asked: reply(REPLIES[name](hits))


# Each API's own form.


@every_api
def test_what_is_asked_and_where_the_key_goes(name):
  with Web(replying(name)) as web, engine_at(web, name) as engine:
    engine.search(["who was Ada & co?"], 3)
  (asked,) = web.asked
  assert (asked.method, asked.path) == {
      "serper": ("POST", "/search"), "serpapi": ("GET", "/search.json"),
      "google": ("GET", "/customsearch/v1"), "bing": ("GET", "/v7.0/search"),
      "tavily": ("POST", "/search")}[name]
  assert asked_for(name, asked) == ("who was Ada & co?", None if name == "serpapi" else 3)
  places = {**asked.headers, **asked.params}
  keys = {"serper": {"x-api-key": KEYS["SERPER_API_KEY"]},
          "serpapi": {"api_key": KEYS["SERPAPI_API_KEY"], "engine": "google"},
          "google": {"key": KEYS["GOOGLE_API_KEY"], "cx": "engine:1"},
          "bing": {"ocp-apim-subscription-key": KEYS["BING_API_KEY"]},
          "tavily": {"authorization": f"Bearer {KEYS['TAVILY_API_KEY']}"}}[name]
  assert keys.items() <= places.items()
  assert sum(SECRET in value for value in places.values()) == 1  # there and nowhere else
  assert SECRET not in asked.path and SECRET.encode() not in asked.body


@every_api
def test_the_addresses_are_the_documented_ones(name):
  host = {"serper": "google.serper.dev", "serpapi": "serpapi.com", "google": "www.googleapis.com",
          "bing": "api.bing.microsoft.com", "tavily": "api.tavily.com"}[name]
  assert APIS[name].base_url == f"https://{host}"


@every_api
def test_passages_have_the_one_form(name):
  with Web(replying(name)) as web, engine_at(web, name) as engine:
    (found,) = engine.search(["q"], 3)
  assert found == [
      Passage("https://en.example.org/Ada", '"Ada Lovelace"\nAn English mathematician.', 1.0),
      Passage("https://example.com/ada?v=1", '"Ada (computer language)"\n', 1 / 2),
      Passage("http://zuse.example.net/", '"Zuse"\nBuilder of the Z3.', 1 / 3)]
  assert found[1].title == "Ada (computer language)"


@every_api
def test_nothing_found_is_empty_and_no_error(name):
  with Web(replying(name, [])) as web, engine_at(web, name) as engine:
    assert engine.search(["q"], 3) == [[]]
  assert len(web.asked) == 1


def without(reply, *path):
  reply = json.loads(json.dumps(reply))
  *before, last = path
  inner = reply
  for key in before:
    inner = inner[key]
  del inner[last]
  return reply


ODD = {
    "serper": [without(REPLIES["serper"](HITS), "organic"), {"message": "Unauthorized."},
               {"organic": {"0": {}}}, {"organic": [None]}, {"organic": [{"title": "x"}]},
               {"organic": [{"title": "x", "link": ""}]}, {"organic": [{"title": 1, "link": "x"}]},
               {"organic": [{"title": "x", "snippet": 2, "link": "x"}]}],
    "serpapi": [{"search_metadata": {"status": "Error"}, "organic_results": []},
                {"search_metadata": {"status": "Processing"}}, {"organic_results": []},
                {"search_metadata": {"status": "Success"}},
                {"search_metadata": {"status": "Success"}, "search_information": 7},
                {"error": "Invalid API key."}],
    "google": [without(REPLIES["google"](HITS), "items"), {"error": {"code": 400}},
               {"kind": "customsearch#search"}, without(REPLIES["google"](HITS), "kind"),
               without(REPLIES["google"](HITS), "items", 0, "link")],
    "bing": [{"_type": "ErrorResponse", "errors": []}, {"webPages": {"value": []}},
             {"_type": "SearchResponse", "webPages": {}}],
    "tavily": [{"query": "q"}, {"detail": {"error": "no"}}, {"results": None}],
}


@pytest.mark.parametrize("name, answer", [
    *((name, answer) for name, answers in ODD.items() for answer in answers),
    *((name, answer) for name in REPLIES for answer in [[], [{}], "text", "<html>", '{"a": NaN}',
                                                        '{"results": [', "", '"\ud800"', "null"])])
def test_an_odd_reply_is_an_error_and_never_an_empty_result(name, answer):
  if isinstance(answer, str):
    answer = answer.encode("utf-8", "surrogatepass")
  with Web(lambda asked: reply(answer)) as web, engine_at(web, name, attempts=1) as engine:
    (found,) = engine.search_each(["q"], 3)
  assert isinstance(found, RetrievalError) and name in str(found)
  assert "does not document" in str(found) or "other than JSON" in str(found)


# Faults, retries, deadlines.


@pytest.mark.parametrize("name, status, says, tries", [
    ("serper", 401, "refuses the key .*SERPER_API_KEY", 1),
    ("google", 403, "GOOGLE_API_KEY and GOOGLE_CSE_ID", 1),
    ("tavily", 432, "account is used up", 1), ("serper", 400, "refuses the request", 1),
    ("serper", 302, "refuses the request", 1), ("bing", 429, "busy or down", 3),
    ("bing", 500, "busy or down", 3), ("bing", 503, "busy or down", 3)])
def test_only_what_may_pass_is_tried_again(name, status, says, tries):
  with Web(lambda asked: reply({"error": "no"}, status, location="/elsewhere")) as web:
    with engine_at(web, name, attempts=3) as engine:
      with pytest.raises(RetrievalError, match=says):
        engine.search(["q"], 1)
  assert len(web.asked) == tries  # and no redirect was followed with a key in hand


def test_a_fault_that_passes_is_not_seen():
  answers = iter([reply("", 503), b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx",
                  reply("<html>"), replying("serper")(None)])
  with Web(lambda asked: next(answers)) as web, engine_at(web, attempts=5) as engine:
    assert len(engine.search(["q"], 3)[0]) == 3
  assert len(web.asked) == 5


def test_retry_after_is_kept():
  times = []

  def answer(asked):
    times.append(time.monotonic())
    return reply("", 429, retry_after="1") if len(times) == 1 else replying("serper")(None)

  with Web(answer) as web, engine_at(web) as engine:
    engine.search(["q"], 1)
  assert 1.0 <= times[1] - times[0] < 2


def test_one_querys_failure_is_its_own():
  def answer(asked):
    query, _ = asked_for("serper", asked)
    return reply("", 400) if query == "bad" else reply(
        REPLIES["serper"]([(query, "s", "https://a.test/")]))

  with Web(answer) as web, engine_at(web) as engine:
    found = engine.search_each(["a", "bad", "b", "a", " "], 1)
    assert [x if isinstance(x, RetrievalError) else [p.title for p in x] for x in found] == [
        ["a"], found[1], ["b"], ["a"], []]
    assert isinstance(found[1], RetrievalError) and len(web.asked) == 3
    assert found[0] is not found[3]  # what a caller does to its list stays with it
    with pytest.raises(RetrievalError, match="HTTP 400"):
      engine.search(["a", "bad"], 1)


def test_a_drip_ends_at_the_deadline(monkeypatch):
  def drip(asked):
    yield b"HTTP/1.1 200 OK\r\n\r\n"
    for _ in range(100):
      time.sleep(0.05)
      yield b" "

  with Web(drip) as web, engine_at(web, seconds=0.5) as engine:
    begin = time.monotonic()
    with pytest.raises(RetrievalError, match="no answer within 0.5 s"):
      engine.search(["q"], 1)
    assert time.monotonic() - begin < 2
  monkeypatch.setattr(online, "ATTEMPT_SECONDS", 0.3)
  with Web(drip) as web, engine_at(web, attempts=2) as engine:
    with pytest.raises(RetrievalError, match="no whole reply within 0.3 s"):
      engine.search(["q"], 1)
  assert len(web.asked) == 2


def test_a_reply_is_read_to_two_megabytes():
  big = REPLIES["serper"]([("t", "x" * (2 << 20), "https://a.test/")])
  with Web(lambda asked: reply(big)) as web, engine_at(web, attempts=1) as engine:
    with pytest.raises(RetrievalError, match="more than 2,097,152 bytes"):
      engine.search(["q"], 1)


def test_nobody_there_is_an_error_of_each_query():
  with Web(replying("serper")) as web:
    pass
  with engine_at(web, attempts=2) as engine:
    found = engine.search_each(["a", "b"], 1)
  assert all(isinstance(x, RetrievalError) and "ConnectError" in str(x) for x in found)


def test_no_more_queries_fly_than_may():
  lock, now, most = threading.Lock(), [0], [0]

  def answer(asked):
    with lock:
      now[0] += 1
      most[0] = max(most[0], now[0])
    time.sleep(0.05)
    with lock:
      now[0] -= 1
    return replying("serper")(asked)

  with Web(answer) as web, engine_at(web, in_flight=3) as engine:
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
      found = list(pool.map(lambda i: engine.search([f"{i}{j}" for j in range(6)], 1), range(3)))
  assert [len(x) for x in found] == [6, 6, 6] and most[0] == 3


def test_long_queries_are_cut_and_strange_ones_sent():
  with Web(replying("tavily")) as web, engine_at(web, "tavily") as engine:
    engine.search(["word " * 1000, "half \ud800 pair \0"], 1)
  assert sorted(len(a.json()["query"]) for a in web.asked) == [13, 400]
  assert "half ? pair \0" in [a.json()["query"] for a in web.asked]


def test_what_cannot_be_is_refused_at_once():
  with pytest.raises(CorpusError, match="'ask' is not known, choose one of serper, serpapi"):
    OnlineEngine("ask", environ=KEYS)
  for environ in ({}, {"GOOGLE_API_KEY": "x"}, KEYS | {"GOOGLE_CSE_ID": " "}):
    with pytest.raises(CorpusError, match="set the environment variable GOOGLE_"):
      OnlineEngine("google", environ=environ)
  with pytest.raises(CorpusError, match="unencrypted; use https"):
    OnlineEngine("serper", environ=KEYS, base_url="http://gateway.example")
  with pytest.raises(CorpusError, match="no domain to block"):
    OnlineEngine("serper", environ=KEYS, blocked=["https://a.test/x"])
  with pytest.raises(ValueError, match="at least 1"):
    OnlineEngine("serper", environ=KEYS, in_flight=0)
  with OnlineEngine("google", environ=KEYS) as engine:
    with pytest.raises(ValueError, match="google gives at most 10"):
      engine.search(["q"], 11)
    with pytest.raises(ValueError, match="top_k is 0"):
      engine.search(["q"], 0)


def test_the_fingerprint_says_what_may_change_the_answers():
  def of(name="google", **settings):
    with OnlineEngine(name, **{"environ": KEYS} | settings) as engine:
      return engine.fingerprint

  alike = [of(), of(environ=KEYS | {"GOOGLE_API_KEY": "another"}), of(in_flight=2)]
  unlike = [of(), of("serper"), of(environ=KEYS | {"GOOGLE_CSE_ID": "other"}),
            of(blocked=["a.test"]), of(read_pages=True), of(read_pages=True, page_chars=9),
            of(base_url="https://gateway.example")]
  assert len(set(alike)) == 1 and len(set(unlike)) == len(unlike)
  assert of(blocked=["B.test.", "*.a.test"]) == of(blocked=["a.test", "b.test"])


# Secrets.


@every_api
def test_the_key_is_in_nothing_but_the_request(name, caplog):
  """Not in errors, their causes, logs at any level, reprs or fingerprints, whatever is answered."""
  echo = lambda asked: json.dumps({**asked.headers, **asked.params})
  answers = [
      lambda asked: reply(echo(asked), 401), lambda asked: reply(echo(asked), 400),
      lambda asked: reply(echo(asked), 500), lambda asked: reply(echo(asked)),
      lambda asked: reply(echo(asked) + "x"), lambda asked: reply("", 302, location=echo(asked)),
      lambda asked: echo(asked).encode(), replying(name)]
  said = []
  caplog.set_level(logging.DEBUG)
  logging.getLogger("httpcore2").setLevel(logging.INFO)  # at DEBUG it lists the reply's headers
  for answer in answers:
    with Web(answer) as web, engine_at(web, name, attempts=2) as engine:
      (found,) = engine.search_each(["q"], 1)
      said += [repr(engine), engine.fingerprint, repr(engine._client), repr(vars(engine))]
    said += [str(found), repr(found)]
    error = found if isinstance(found, BaseException) else None
    while error is not None:
      said.append(repr(error))
      error = error.__cause__ or error.__context__
    assert web.asked
  said += [json.dumps(vars(record), default=repr) for record in caplog.records]
  assert any("HTTP Request" in line for line in said)  # the log of requests was looked at
  quoted = "canary%2BKey%2F1"
  assert not [line for line in said if SECRET in line or quoted in line or "canary" in line]


def test_a_key_that_cannot_be_sent_is_refused_without_showing_it():
  with pytest.raises(CorpusError) as caught:
    OnlineEngine("serper", environ={"SERPER_API_KEY": f"{SECRET}\r\nX: y"})
  assert "SERPER_API_KEY" in str(caught.value) and SECRET not in str(caught.value)


# The block-list.


@pytest.mark.parametrize("url, shown", [
    ("https://wiki.test/a", False), ("https://en.wiki.test/a", False),
    ("https://EN.Wiki.TEST./a", False), ("http://wiki.test:8080/a", False),
    ("https://bücher.test/", False), ("https://xn--bcher-kva.test/", False),
    ("https://a.BÜCHER.test/", False), ("https://wiki。test/", False),
    ("https://notwiki.test/a", True), ("https://wiki.test.com/", True), ("https://test/", True),
    ("https://a.test/?q=wiki.test", True), ("https://a.test/#wiki.test", True),
    # What can't be told from a blocked page, or is none, doesn't come up either.
    ("https://a.test@wiki.test/", False), ("https://wiki.test@a.test/", False),
    ("ftp://a.test/", False), ("javascript:alert(1)", False), ("https:///x", False),
    ("https://a%2etest/", False), ("https://ⓦiki.test/", False)])
def test_a_blocked_domain_never_comes_up(url, shown):
  hits = [("t", "s", url), ("other", "s", "https://other.example/")]
  with Web(replying("serper", hits)) as web:
    with engine_at(web, blocked=["*.wiki.test", "Bücher.test."]) as engine:
      (found,) = engine.search(["q"], 2)
  assert [p.id for p in found] == [url] * shown + ["https://other.example/"]
  assert found[0].score == 1.0


def test_more_is_asked_for_so_that_top_k_are_left():
  hits = [("t", "s", f"https://wiki.test/{n}") for n in range(7)] + [
      ("t", "s", f"https://ok.test/{n}") for n in (0, 1, 1, 2)]
  with Web(replying("serper", hits)) as web, engine_at(web, blocked=["wiki.test"]) as engine:
    (found,) = engine.search(["q"], 2)
  assert asked_for("serper", web.asked[0])[1] == 9
  assert [p.id for p in found] == ["https://ok.test/0", "https://ok.test/1"]
  assert len({p.id for p in found}) == 2


# Pages.


OUTSIDE = "127.0.0.2"
GUARD = egress.Guard(allowed=lambda address: str(address) == OUTSIDE, seconds=1.0)


def test_pages_take_the_place_of_their_snippets_where_they_can_be_read():
  def page(asked):
    if asked.path == "/slow":
      time.sleep(1.5)
    if asked.path == "/away":
      return reply("", 302, location=f"http://blocked.test:{pages.port}/")
    if asked.path == "/image":
      return reply(b"\x89PNG", content_type="image/png")
    status = 404 if asked.path == "/gone" else 200
    return reply(f"<title>T</title><p>Text of <b>{asked.path}</b></p>" + "<p>x" * 99, status,
                 content_type="text/html")

  async def resolve(host, port):
    return [OUTSIDE]

  with Web(page, OUTSIDE) as pages, Web(lambda asked: reply("inside")) as canary:
    urls = [pages.url(path) for path in ("/a", "/gone", "/slow", "/image", "/away")]
    hits = [("t", f"snippet {n}", url) for n, url in enumerate([*urls, canary.url()])]
    with Web(replying("serper", hits)) as web:
      guard = egress.Guard(GUARD.allowed, resolve, seconds=1.0)
      with engine_at(web, read_pages=True, page_chars=18, guard=guard,
                     blocked=["blocked.test"]) as engine:
        (found,) = engine.search(["q"], 6)
    assert canary.connections == 0
    assert all("serper" not in str(a.headers) and SECRET not in str(a) for a in pages.asked)
  assert [p.text for p in found] == [
      "Text of /a\nx\nx\nx\nx", *(f"snippet {n}" for n in range(1, 6))]


@pytest.mark.parametrize("body, kind, text", [
    (b"<html><head><title>T</title><style>p{}</style></head><body><h1>A &amp; B</h1><p>one <b>two"
     b"</b>\n three<br>four<script>'<p>'</script><!-- c > --><div>five</div>", "text/html",
     "A & B\none two three\nfour\nfive"),
    (b"a < b and c<d", "text/html", "a < b and c"), (b"<p>open", "", "open"),
    (b"<p>shown<script>hidden", "text/html", "shown"), (b"<p>a<!-- b", "text/html", "a"),
    (b"  plain <b>\n\n text ", "text/plain", "plain <b>\ntext"),
    ("é".encode("latin-1"), "text/html; charset=ISO-8859-1", "é"),
    (b"<meta charset='windows-1251'>" + "Да".encode("cp1251"), "text/html", "Да"),
    (b"+AGE-", "text/html; charset=utf-7", "+AGE-"), (b"\xff\xfe", "text/html", "\ufffd\ufffd"),
    (b"xn--a", "text/html; charset=punycode", "xn--a"),
    (b"%PDF", "application/pdf", ""), (b"&#" + b"9" * 5000 + b";&lt;", "text/html", "\ufffd<")])
def test_the_text_of_a_page(body, kind, text):
  assert page_text(body, kind, 1000) == text


@pytest.mark.parametrize("unit", [
    "<", "<!", "<!--", "<script", "<script>", "</script", "<script></script", "<a x='", "<b>",
    "<title", "&", "&#9", "&amp;", " ", "\n", "x", "<p>\0"])
def test_two_megabytes_of_anything_are_read_in_proportion(unit):
  """Nested or unclosed markup must not make it quadratic: twice as much takes twice as long."""
  took = []
  for size in (500_000, 2_000_000):
    body = (unit * (size // len(unit))).encode()
    begin = time.process_time()
    page_text(b"<p>x<script>" + body, "text/html", 4000)
    page_text(body, "text/html", 4000)
    took.append(time.process_time() - begin)
  assert took[1] < 8 * took[0] + 0.05 and took[1] < 3
