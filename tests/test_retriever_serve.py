"""The search server: the published wire form, limits, tokens, overload, and a clean end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from retriever import app as app_lib
from retriever import wire
from retriever.app import Serving
from retriever.client import Client
from retriever.gate import READ_SECONDS, ImpatientProtocol
from retriever.protocol import Passage, RetrievalError
from retriever.sharing import Cached
from tests.search_servers import (FINGERPRINT, PATIENCE, Process, ToyEngine, answers, declared,
                                  document, get, passages, post, raw, received, running,
                                  wait_until)


@pytest.fixture(scope="module")
def url():
  with running(ToyEngine(bad=("bad",))) as address:
    yield address


# The wire form.


def test_the_published_form_with_scores(url):
  # As the published clients write it. Scores of the toy: 1/3, 1/4.
  reply = post(url, {"queries": ["a", "b"], "topk": 2, "return_scores": True})
  assert reply.status_code == 200 and reply.headers["content-type"] == "application/json"
  assert reply.json() == {"result": [
      [{"document": document(q, 0, 2), "score": 1 / 3},
       {"document": document(q, 1, 2), "score": 0.25}] for q in ("a", "b")]}


@pytest.mark.parametrize("scores", [{}, {"return_scores": False}])
@pytest.mark.parametrize("top_k", [{}, {"topk": None}])
def test_without_scores_each_passage_is_the_document_and_three_are_the_default(url, scores, top_k):
  assert post(url, {"queries": ["a"]} | scores | top_k).json() == {
      "result": [[document("a", i, 3) for i in range(3)]]}


def test_no_queries_find_nothing(url):
  assert post(url, {"queries": []}).json() == {"result": []}


def test_a_strict_reply_names_its_index_its_errors_and_its_proofs(url):
  reply = post(url, {"queries": ["bad", "a", "bad"], "topk": 1, "return_scores": True,
                     "strict": True})
  assert reply.status_code == 200
  assert reply.json() == {
      "result": [[], [{"document": document("a", 0, 1), "score": 1 / 3}], []],
      "fingerprint": FINGERPRINT,
      "errors": {"0": "cannot search for bad", "2": "cannot search for bad"},
      "proofs": [None, wire.proof(FINGERPRINT, "a", 1, passages("a", 1)), None]}


@pytest.mark.parametrize("queries", [["bad"], ["a", "bad"]])
def test_who_cannot_hear_of_errors_never_gets_an_empty_list_for_one(url, queries):
  reply = post(url, {"queries": queries, "topk": 1})
  assert reply.status_code == 503 and reply.headers["retry-after"] == "1"
  assert f"1 of {len(queries)} queries failed: cannot search for bad" in reply.json()["detail"]


def test_what_json_cannot_say_is_a_failure_of_its_query_alone():
  wrong = {"nan": Passage("1", "c", float("nan")), "half": Passage("1", "\ud800", 1.0),
           "error": RetrievalError("\ud800")}
  class Broken(ToyEngine):
    def search_each(self, queries, top_k):
      return [passages(q, top_k) if q not in wrong else wrong[q] if q == "error" else [wrong[q]]
              for q in queries]
  with running(Broken()) as address, Client(address, seconds=PATIENCE, attempts=1) as client:
    nan, half, error, good = client.search_each([*wrong, "a"], 1)
    assert "a score that is not a number" in str(nan) and "not Unicode" in str(half)
    assert isinstance(error, RetrievalError) and good == passages("a", 1)


def test_health_tells_index_rows_and_limits(url):
  reply = get(f"{url}/healthz")
  assert reply.json() == {
      "ready": True, "fingerprint": FINGERPRINT, "rows": 7, "authorized": True,
      "limits": {"queries": 512, "top_k": 100, "query_chars": 16384, "body_bytes": 1 << 20}}


def test_what_was_asked_before_is_not_searched_for_again():
  engine = ToyEngine()
  with running(Cached(engine)) as address:
    for _ in range(2):
      post(address, {"queries": ["a", "b", "a"]})
    post(address, {"queries": ["b", "c"]})
    assert engine.batches == [["a", "b"], ["c"]]
    text = get(f"{address}/metrics").text
    assert get(f"{address}/healthz").json()["rows"] == 7  # the engine's own, below what is kept
  assert engine.closed == 1
  # Queries: 3 + 3 + 2. Hits: a and b the second time, b the third.
  assert "retriever_queries_total 8.0" in text and "retriever_cache_hits_total 3.0" in text


def test_metrics_tell_rate_latency_sizes_and_refusals():
  with running(ToyEngine(bad=("bad",)), Serving(cache_bytes=0)) as address:
    post(address, {"queries": ["a", "b", "bad"], "strict": True})
    post(address, {"queries": 3})
    get(f"{address}/nowhere")
    text = get(f"{address}/metrics").text
  for line in ('retriever_replies_total{path="/retrieve",status="200"} 1.0',
               'retriever_replies_total{path="/retrieve",status="422"} 1.0',
               'retriever_replies_total{path="other",status="404"} 1.0',
               'retriever_request_seconds_count{path="/retrieve"} 2.0',
               'retriever_batch_queries_bucket{le="2.0"} 0.0',
               'retriever_batch_queries_bucket{le="4.0"} 1.0', "retriever_batch_queries_sum 3.0",
               "retriever_search_seconds_count 1.0", "retriever_failed_queries_total 1.0",
               "retriever_refused_total 0.0", "retriever_waiting_queries 0.0"):
    assert line in text, line


# What is wrong with a request, and who says so.


@pytest.mark.parametrize("body, field", [
    ({"queries": "a"}, "queries"), ({}, "queries"), ({"queries": None}, "queries"),
    ({"queries": ["a", 1]}, "queries[1]"), ({"queries": [["a"]]}, "queries[0]"),
    ({"queries": ["a"] * 513}, "queries"), ({"queries": ["x" * 16_385]}, "queries[0]"),
    ({"queries": ["a"], "topk": 0}, "topk"), ({"queries": ["a"], "topk": 101}, "topk"),
    ({"queries": ["a"], "topk": -1}, "topk"), ({"queries": ["a"], "topk": 2.5}, "topk"),
    ({"queries": ["a"], "topk": "3"}, "topk"), ({"queries": ["a"], "topk": True}, "topk"),
    ({"queries": ["a"], "topk": 10**30}, "topk"), ({"queries": ["a"], "topk": []}, "topk"),
    ({"queries": ["a"], "return_scores": 1}, "return_scores"),
    ({"queries": ["a"], "return_scores": None}, "return_scores"),
    ({"queries": ["a"], "strict": "yes"}, "strict"), ({"queries": ["a"], "top_k": 3}, "top_k"),
    ([], "body"), ("a", "body"), (None, "body"), (b"", "body"), (b"{", "body"),
    (b'{"queries": ["\\ud800"]}', "body"), (b'{"queries": ["\xff"]}', "body"),
    (b'{"queries": ["a"], "topk": NaN}', "body"), (b'{"queries": ["a"], "topk": 1e400}', "body"),
    (b"[" * 100_000, "body")])
def test_a_wrong_request_is_told_which_field(url, body, field):
  reply = post(url, body)
  assert reply.status_code == 422
  assert reply.json()["field"] == field and reply.json()["detail"].startswith(f"{field}: ")
  assert "wanted" in reply.json()["detail"] or "there are" in reply.json()["detail"]


def test_the_largest_that_is_allowed_is_answered(url):
  assert len(post(url, {"queries": ["a"] * 512, "topk": 1}).json()["result"]) == 512
  assert len(post(url, {"queries": ["x" * 16_384], "topk": 100}).json()["result"][0]) == 100
  body = json.dumps({"queries": ["a"], "topk": 1}).encode()
  assert post(url, body.ljust(1 << 20)).status_code == 200
  assert post(url, body.ljust((1 << 20) + 1)).status_code == 413
  assert post(url, b'{"queries": ["a"], "queries": ["b"], "topk": 1}').json() == {
      "result": [[document("b", 0, 1)]]}  # of two fields with one name the last counts


@pytest.mark.parametrize("headers, field", [
    ({"content_type": "text/plain"}, "content-type"),
    ({"content_encoding": "gzip"}, "content-encoding"),
    ({"x_search_seconds": "0"}, "x-search-seconds"),
    ({"x_search_seconds": "nan"}, "x-search-seconds"),
    ({"x_search_seconds": "soon"}, "x-search-seconds")])
def test_a_wrong_header_is_named(url, headers, field):
  reply = post(url, {"queries": ["a"]}, **headers)
  assert reply.status_code in (415, 422) and reply.json()["field"] == field


def test_what_is_no_route_is_not_found(url):
  assert get(f"{url}/retrieve").status_code == 405
  for path in ("/", "/docs", "/redoc", "/retrieve/", "//retrieve", "/healthz/x"):
    assert get(url + path).status_code == 404, path
  assert "/retrieve" in get(f"{url}/openapi.json").json()["paths"]


# Too large, too slow.


def test_a_body_too_large_is_told_so_however_it_comes(url):
  port = int(url.rpartition(":")[2])
  chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
  chunked = (b"POST /retrieve HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
             + chunk * 40 + b"0\r\n\r\n")
  for request in (declared(10**12, b"x" * 100), declared(2 << 20, b"x" * (2 << 20)), chunked):
    assert raw(port, request).startswith(b"HTTP/1.1 413")
  assert answers(port)


WAITS = {
    "nothing": b"", "half a head": b"POST /retrieve HTTP/1.1\r\nho",
    "a head without its body": declared(100), "half a body": declared(100, b'{"quer'),
    "half of a second request": b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\nGET /hea"}


def test_a_request_that_does_not_come_whole_is_hung_up_on_within_ten_seconds(url):
  """All of them at once, beside one that drips a byte a second into its head."""
  port, began = int(url.rpartition(":")[2]), time.monotonic()

  def dripping() -> float:
    with socket.create_connection(("127.0.0.1", port)) as s, contextlib.suppress(ConnectionError):
      for byte in b"POST /retrieve HTTP/1.1\r\nx-a: " + b"a" * 100:
        s.sendall(bytes([byte]))
        s.settimeout(1.0)
        with contextlib.suppress(TimeoutError):
          if not s.recv(1):
            break
    return time.monotonic() - began

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    replies = {name: pool.submit(lambda data=data: (raw(port, data), time.monotonic() - began))
               for name, data in WAITS.items()}
    drip = pool.submit(dripping)
    assert answers(port)  # meanwhile others are served
    ended = {name: reply.result() for name, reply in replies.items()}
  assert all(READ_SECONDS <= seconds <= 10.0 for _, seconds in ended.values()), ended
  assert drip.result() <= 11.0  # it notices a second late
  for name in ("a head without its body", "half a body"):
    assert ended[name][0].startswith(b"HTTP/1.1 408")
  assert ended["nothing"][0] == ended["half a head"][0] == b""


def test_who_does_not_read_its_reply_is_hung_up_on():
  class Impatient(ImpatientProtocol):
    patience = 0.5
  with running(ToyEngine(), protocol=Impatient) as address:
    port = int(address.rpartition(":")[2])
    body = json.dumps({"queries": ["x" * 1900] * 500, "topk": 20}).encode()  # 20 MB come back
    with socket.create_connection(("127.0.0.1", port)) as s:
      s.sendall(declared(len(body), body))
      time.sleep(2.0)
      assert len(received(s)) < 20e6  # what had been sent by then, and no more
    assert answers(port)


# Tokens.


def spellings(path: str) -> list[str]:
  return [path, path + "/", "/" + path, path.upper(), path + "?a=b", path + "%20", path + ";a",
          "/x/.." + path, "/%2e" + path, path.replace("e", "%65"), path + "%00"]


def test_without_the_token_there_is_only_healthz():
  token = "correct-horse"
  methods = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FOO"]
  routes = {r.path for r in app_lib.create_app(ToyEngine(), token=token).routes}
  assert {"/retrieve", "/metrics", "/openapi.json", "/healthz"} <= routes
  paths = [s for path in sorted(routes) for s in spellings(path)]
  paths += ["/", "/nowhere", "/healthz/retrieve", "/healthz/../retrieve", "/retrieve/healthz"]
  wrong = [None, "", "Bearer", "Bearer ", "Bearer wrong", token, f"bearer {token}",
           f"Bearer {token}x", f"Bearer {token[:-1]}", f"Basic {token}", f"Bearer  {token}"]
  with running(ToyEngine(), token=token) as address:
    port = int(address.rpartition(":")[2])
    with contextlib.closing(socket.create_connection(("127.0.0.1", port))) as s:
      statuses = {}
      for path in paths:
        for method in methods:
          for given in (wrong if method in ("GET", "POST") else [None]) + [f"Bearer {token}"]:
            head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n"
            head += "" if given is None else f"authorization: {given}\r\n"
            statuses[path, method, given] = status_of(s, method, head + "\r\n")
  right = f"Bearer {token}"
  decoded = {path: path.partition("?")[0].replace("%65", "e") for path in paths}
  for (path, method, given), status in statuses.items():
    if given == right or decoded[path] == "/healthz":
      assert status != 401, (path, method, given)
    else:
      assert status == 401, (path, method, given, status)
  assert statuses["/metrics", "GET", right] == statuses["/healthz", "GET", None] == 200
  assert statuses["/retrieve", "POST", right] == 422  # it has no body
  assert len(statuses) > 1000


def status_of(s: socket.socket, method: str, request: str) -> int:
  """One request on a connection that stays open."""
  s.sendall(request.encode())
  reply = b""
  while b"\r\n\r\n" not in reply:
    part = s.recv(65536)
    assert part, (request, reply)
    reply += part
  head, _, body = reply.partition(b"\r\n\r\n")
  length = int(re.search(rb"content-length: (\d+)", head.lower())[1])
  while method != "HEAD" and len(body) < length:
    body += s.recv(65536)
  return int(head[9:12])


def test_health_says_whether_the_token_is_right():
  with running(ToyEngine(), token="t") as address:
    tells = lambda **h: get(f"{address}/healthz", **h).json()["authorized"]
    assert tells(authorization="Bearer t") and not tells() and not tells(authorization="Bearer u")


def test_neither_the_token_nor_a_query_is_written_anywhere(tmp_path):
  code = Process.CODE.replace("app.Serving(**serving)", 'app.Serving(**serving), token="s3cret"')
  with open(tmp_path / "log", "w+b") as log:
    server = subprocess.Popen(
        [sys.executable, "-c", code, "0", '{"bad": ["private"]}', "{}"],
        stdout=subprocess.PIPE, stderr=log)
    port = int(server.stdout.readline())
    server.stdout.close()
    wait_until(lambda: answers(port))
    for authorization in ("Bearer s3cret", "Bearer wr0ng"):
      for queries in (["private"], ["private", 1]):
        post(f"http://127.0.0.1:{port}", {"queries": queries}, authorization=authorization)
    raw(port, b"\x00\x01 s3cret private\r\n\r\n")
    server.send_signal(signal.SIGTERM)
    assert server.wait(PATIENCE) == 0
    log.seek(0)
    text = log.read()
  assert b"s3cret" not in text and b"private" not in text and b"wr0ng" not in text


# Overload.


def test_a_query_nobody_waits_for_any_more_is_not_searched_for():
  engine = ToyEngine(seconds=0.4)
  with running(engine) as address, concurrent.futures.ThreadPoolExecutor(3) as pool:
    first = pool.submit(post, address, {"queries": ["first"]})
    wait_until(lambda: engine.batches)
    began = time.monotonic()
    late = post(address, {"queries": ["late"]}, x_search_seconds="0.1")
    assert late.status_code == 503 and time.monotonic() - began < 0.35
    assert "no answer within 0.1 s" in late.json()["detail"]
    assert first.result().status_code == 200
    assert post(address, {"queries": ["last"]}).status_code == 200
  assert engine.batches == [["first"], ["last"]]


def test_when_too_many_wait_the_others_are_told_when_to_come_again():
  engine = ToyEngine(seconds=0.5)
  with running(engine, Serving(max_waiting=2)) as address:
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
      asked = [pool.submit(post, address, {"queries": ["first"]})]
      wait_until(lambda: engine.batches)
      asked.append(pool.submit(post, address, {"queries": ["a", "b"]}))
      wait_until(lambda: "retriever_waiting_queries 2.0" in get(f"{address}/metrics").text)
      reply = post(address, {"queries": ["c"]})
      assert reply.status_code == 429 and int(reply.headers["retry-after"]) >= 1
      assert "2 queries wait already" in reply.json()["detail"]
      assert [f.result().status_code for f in asked] == [200, 200]
    assert "retriever_refused_total 1.0" in get(f"{address}/metrics").text
