"""The search server: the published wire form, limits, tokens, overload, and a clean end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time

import httpx2
import pytest

from retriever import app as app_lib
from retriever import serve, wire
from retriever.app import Serving
from retriever.client import Client
from retriever.gate import READ_SECONDS, ImpatientProtocol
from retriever.protocol import Passage, RetrievalError
from retriever.sharing import Cached
from tests.search_servers import (FINGERPRINT, PATIENCE, Process, ToyEngine, answers, passages, raw,
                                  received, running, wait_until)


def post(url: str, body, **headers: str) -> httpx2.Response:
  content = body if isinstance(body, bytes) else json.dumps(body).encode()
  headers = {"content-type": "application/json"} | {k.replace("_", "-"): v
                                                    for k, v in headers.items()}
  return httpx2.post(f"{url}/retrieve", content=content, headers=headers, timeout=PATIENCE)


def get(url: str, **headers: str) -> httpx2.Response:
  return httpx2.get(url, headers=headers, timeout=PATIENCE)


def document(query: str, number: int, top_k: int) -> dict[str, str]:
  return {"id": f"{query}#{number}", "contents": f'"{query}"\nno. {number} of {top_k}'}


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
      [{"document": document(q, 0, 2), "score": 1 / 3}, {"document": document(q, 1, 2), "score": .25}]
      for q in ("a", "b")]}


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


def declared(length: int, body: bytes = b"") -> bytes:
  return (b"POST /retrieve HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
          b"content-length: %d\r\n\r\n" % length) + body


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


async def paced(port: int, clients: int, rate: float, seconds: float) -> list[tuple]:
  """(query, head, body, seconds) of requests that `clients` connections send at `rate` a second."""
  replies: list[tuple] = []

  async def one(client: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    end, number = time.monotonic() + seconds, 0
    due = time.monotonic() + client / rate
    while due < end:
      await asyncio.sleep(max(0.0, due - time.monotonic()))
      query = f"{client}-{number}"
      body = b'{"queries": ["%s"], "topk": 1, "return_scores": true, "strict": true}' % query.encode()
      began = time.monotonic()
      writer.write(declared(len(body), body))
      head = await reader.readuntil(b"\r\n\r\n")
      reply = await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))
      replies.append((query, head, reply, time.monotonic() - began))
      number, due = number + 1, max(due + clients / rate, time.monotonic())
    writer.close()

  await asyncio.gather(*map(one, range(clients)))
  return replies


def judged(replies: list[tuple]) -> dict[int, list[float]]:
  """Seconds by status, once every answer is the right one and every refusal says when to return."""
  seconds = {200: [], 429: []}
  for query, head, reply, took in replies:
    status = int(head[9:12])
    seconds[status].append(took)
    if status == 429:
      assert b"retry-after: " in head
    else:
      assert wire.read_reply(reply, [query], 1, fingerprint=FINGERPRINT, accept_empty=False) == [
          passages(query, 1)]
  return {status: sorted(took) for status, took in seconds.items()}


def overload(seconds: float) -> None:
  """64 clients at three times what the server can do.

  It searches 8 queries in 80 ms, that is 100 a second, and lets 16 wait. Then: an accepted query
  waits for the search under way and at most two more, 0.24 s, and all others hear so at once.
  """
  deadline = 1.0
  engine = {"seconds": 0.08}
  serving = {"max_batch": 8, "max_waiting": 16, "cache_bytes": 0, "seconds": deadline}
  with Process(engine, serving) as server:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      load = pool.submit(asyncio.run, paced(server.port, 64, 300.0, seconds))
      waiting = []
      while not load.done():
        text = get(f"{server.url}/metrics").text
        waiting.append(float(re.search(r"(?m)^retriever_waiting_queries (\S+)", text)[1]))
        time.sleep(0.3)
    seconds_by_status = judged(load.result())
    accepted, refused = seconds_by_status[200], seconds_by_status[429]
    # At least two thirds of what it can do, and about two of three refused.
    assert len(accepted) >= seconds * 100 * 2 / 3 and len(refused) >= len(accepted) / 2
    assert accepted[int(0.99 * len(accepted))] <= deadline
    assert refused[int(0.95 * len(refused))] <= 0.05
    assert 0 < max(waiting) <= 16
    time.sleep(1.5)
    calm = judged(asyncio.run(paced(server.port, 4, 20.0, 0.5)))
    assert not calm[429] and statistics.median(calm[200]) <= 0.25  # one search, or two


def test_overload_is_refused_at_once_and_nobody_else_notices():
  overload(3.0)


@pytest.mark.slow
def test_overload_of_twenty_seconds():
  overload(20.0)


def through_death(seconds: float, clients: int) -> None:
  """The same overload through our client, the server killed and started again in the middle."""
  answered, stop = [], threading.Event()

  with Process({"seconds": 0.08}, {"max_batch": 8, "max_waiting": 16, "cache_bytes": 0}) as server:
    with Client(server.url, seconds=60.0, attempt_seconds=5.0) as client:

      def ask(n: int) -> int:
        done = 0
        while not stop.is_set():
          query = f"{n}-{done}"
          assert client.search([query], 2) == [passages(query, 2)]
          done += 1
        return done

      with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        asking = [pool.submit(ask, n) for n in range(clients)]
        time.sleep(seconds / 2)
        server.kill()
        time.sleep(0.3)
        server.start()
        time.sleep(seconds / 2)
        stop.set()
        answered = [f.result() for f in asking]  # raises what was not answered, or not rightly
  assert min(answered) >= 1 and sum(answered) > clients


def test_a_server_killed_in_the_middle_of_an_overload_loses_no_query():
  through_death(3.0, 64)


@pytest.mark.slow
def test_a_server_killed_in_the_middle_of_twenty_seconds_loses_no_query():
  through_death(20.0, 64)


# The program.


def program(*argv: str, env: dict[str, str] | None = None) -> subprocess.Popen:
  return subprocess.Popen([sys.executable, "-m", "retriever.serve", *argv], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | (env or {}))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end_it_answers_what_was_asked_and_takes_no_more(number):
  with Process({"seconds": 1.0}) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
    asked = pool.submit(post, server.url, {"queries": ["a"], "topk": 1})
    time.sleep(0.4)
    server._process.send_signal(number)
    time.sleep(0.3)
    with pytest.raises(ConnectionRefusedError):
      socket.create_connection(("127.0.0.1", server.port))
    assert asked.result().json() == {"result": [[document("a", 0, 1)]]}
    assert server._process.wait(PATIENCE) == 0


def test_a_search_that_hangs_does_not_hold_up_the_end(monkeypatch):
  with Process({"seconds": 60.0}) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
    asked = pool.submit(post, server.url, {"queries": ["a"]})
    time.sleep(0.4)
    began = time.monotonic()
    server._process.send_signal(signal.SIGTERM)
    assert server._process.wait(PATIENCE) == 0
    # Grace for replies, then for the search.
    assert time.monotonic() - began < 12.0
    assert asked.exception() is not None or asked.result().status_code >= 500


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_program_serves_and_ends_with_code_0(workers):
  server = program("--index", "empty", "--port", "0", "--workers", workers, "--token_env", "TOKEN",
                   env={"TOKEN": "t"})
  try:
    line = server.stdout.readline()
    assert "empty" in line and "127.0.0.1" in line
    port = int(line.strip().rpartition(":")[2])
    wait_until(lambda: answers(port))
    address, auth = f"http://127.0.0.1:{port}", {"authorization": "Bearer t"}
    for _ in range(12):
      assert post(address, {"queries": ["a"]}, **auth).json() == {"result": [[]]}
    text = get(f"{address}/metrics", **auth).text
    assert 'retriever_replies_total{path="/retrieve",status="200"} 12.0' in text
    assert get(f"{address}/healthz").json()["fingerprint"] == "empty"
    server.send_signal(signal.SIGTERM)
    assert server.wait(PATIENCE) == 0
  finally:
    server.kill()
    server.communicate()


@pytest.mark.parametrize("argv, says", [
    (["--host", "0.0.0.0"], "lets other machines in; put a secret"),
    (["--host", "::"], "lets other machines in"), (["--host", "example.org"], "lets other machines"),
    (["--token_env", "SEARCHR1_NO_SUCH"], "names SEARCHR1_NO_SUCH, which holds no token"),
    (["--top_k", "0"], "top_k is 0, wanted 1 to 100"), (["--top_k", "101"], "wanted 1 to 100"),
    (["--workers", "0"], "--workers is 0"), (["--seconds", "nan"], "seconds is nan"),
    (["--max_waiting", "0"], "at least 1"), (["--cache_mb", "-1"], "at least 0"),
    (["--port", "99999"], "--port is 99999"),
    (["--index", "/nowhere/at/all"], "/nowhere/at/all")])
def test_what_cannot_be_served_is_said_in_a_line_with_code_2(argv, says, capsys):
  handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    assert serve.main(["--index", "empty", *argv]) == 2
  finally:
    for number, handler in handlers.items():
      signal.signal(number, handler)
  error = capsys.readouterr().err
  assert says in error and len(error.splitlines()) == 1 and error.startswith("retriever.serve: ")


def test_an_address_that_is_taken_is_said_so(capsys):
  listener = serve.bind("127.0.0.1", 0)
  listener.listen()
  with listener, pytest.raises(OSError, match="can't be listened on .*choose another --port"):
    serve.bind("127.0.0.1", listener.getsockname()[1])


def test_several_workers_that_cannot_open_their_index_end_with_code_2():
  server = program("--index", "/nowhere/at/all", "--port", "0", "--workers", "2")
  _, error = server.communicate(timeout=PATIENCE * 2)
  assert server.returncode == 2 and "/nowhere/at/all" in error and "Traceback" not in error
