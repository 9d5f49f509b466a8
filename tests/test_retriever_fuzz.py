"""Bytes and requests of all kinds: none crashes the server, hangs it, or makes it grow."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import warnings
import zlib

import httpx2
import hypothesis
import pytest

from tests.search_servers import PATIENCE, Process, answers, raw, rss_bytes

GROWTH = 64 << 20  # bytes of resident memory that all of it may add


@pytest.fixture(scope="module")
def server():
  """One server in a process of its own, alive and hardly grown after all that was sent to it."""
  with Process(serving={"read_seconds": 2.0}) as process:
    for _ in range(20):  # what any traffic brings in
      fuzzed(process.port, b'{"queries": ["warm"], "topk": 100}')
    before = rss_bytes(process.pid)
    yield process
    assert process.alive() and answers(process.port)
    assert rss_bytes(process.pid) - before <= GROWTH


def request(body: bytes, *headers: bytes, length: bool = True) -> bytes:
  lines = [b"POST /retrieve HTTP/1.1", b"host: x", b"connection: close", *headers]
  if not any(h.lower().startswith(b"content-type") for h in headers):
    lines.append(b"content-type: application/json")
  if length:
    lines.append(b"content-length: %d" % len(body))
  return b"\r\n".join(lines) + b"\r\n\r\n" + body


def fuzzed(port: int, body: bytes) -> tuple[int, bytes]:
  return parsed(raw(port, request(body)))


def parsed(reply: bytes) -> tuple[int, bytes]:
  head, _, body = reply.partition(b"\r\n\r\n")
  return int(head[9:12]), body


ASK = b'{"queries": ["a"], "topk": 1}'
BIG = b'{"queries": ["' + b"x" * (2 << 20) + b'"]}'
BODIES = {
    "nothing": (b"", 422), "space": (b"  \n", 422), "word": (b"hello", 422),
    "null": (b"null", 422), "number": (b"3", 422), "string": (b'"a"', 422), "list": (b"[]", 422),
    "list of it": (b"[" + ASK + b"]", 422), "cut": (ASK[:-1], 422), "cut string": (ASK[:14], 422),
    "twice": (ASK + ASK, 422), "comma": (b'{"queries": ["a"],}', 422),
    "single quotes": (b"{'queries': ['a']}", 422), "comment": (b"/* */" + ASK, 422),
    "BOM": (b"\xef\xbb\xbf" + ASK, 422), "UTF-16": (ASK.decode().encode("utf-16"), 422),
    "UTF-32": (ASK.decode().encode("utf-32"), 422), "latin-1": (b'{"queries": ["\xe9"]}', 422),
    "overlong": (b'{"queries": ["\xc0\x80"]}', 422),
    "CESU": (b'{"queries": ["\xed\xa0\xbd\xed\xb8\x80"]}', 422),
    "beyond Unicode": (b'{"queries": ["\xf4\x90\x80\x80"]}', 422),
    "lone high surrogate": (b'{"queries": ["\\ud800"]}', 422),
    "lone low surrogate": (b'{"queries": ["\\udc00"]}', 422),
    "surrogates the wrong way": (b'{"queries": ["\\ude00\\ud83d"]}', 422),
    "surrogate in a key": (b'{"\\ud800": 1, "queries": ["a"]}', 422),
    "surrogate pair": (b'{"queries": ["\\ud83d\\ude00"]}', 200),
    "escaped NUL": (b'{"queries": ["\\u0000"]}', 200), "raw NUL": (b'{"queries": ["\x00"]}', 422),
    "raw newline": (b'{"queries": ["\n"]}', 422), "bad escape": (b'{"queries": ["\\x41"]}', 422),
    "bidi": ('{"queries": ["\u202eabc\u2066"]}'.encode(), 200),
    "combining": (b'{"queries": ["a' + "\u0301".encode() * 16_000 + b'"]}', 200),
    "NaN": (b'{"queries": ["a"], "topk": NaN}', 422),
    "Infinity": (b'{"queries": ["a"], "topk": Infinity}', 422),
    "1e400": (b'{"queries": ["a"], "topk": 1e400}', 422),
    "-1e400": (b'{"queries": ["a"], "topk": -1e400}', 422),
    "1e-400": (b'{"queries": ["a"], "topk": 1e-400}', 422),
    "1e2": (b'{"queries": ["a"], "topk": 1e2}', 200),
    "-0": (b'{"queries": ["a"], "topk": -0}', 422),
    "0x1": (b'{"queries": ["a"], "topk": 0x1}', 422),
    "+1": (b'{"queries": ["a"], "topk": +1}', 422),
    "01": (b'{"queries": ["a"], "topk": 01}', 422),
    "2**63": (b'{"queries": ["a"], "topk": 9223372036854775808}', 422),
    "2**64": (b'{"queries": ["a"], "topk": 18446744073709551616}', 422),
    "5,000 digits": (b'{"queries": ["a"], "topk": ' + b"1" * 5000 + b"}", 422),
    "deep lists": (b"[" * 100_000, 422), "deep lists, closed": (b"[" * 10**5 + b"]" * 10**5, 422),
    "deep objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 422),
    "deep query": (b'{"queries": ' + b"[" * 1000 + b"]" * 1000 + b"}", 422),
    "a key of 1 MB": (b'{"' + b"k" * 1_000_000 + b'": 1}', 422),
    "100,000 keys": (b"{" + b",".join(b'"%d": 1' % i for i in range(100_000)) + b"}", 413),
    "50,000 keys": (b"{" + b",".join(b'"%d": 1' % i for i in range(50_000)) + b"}", 422),
    "keys that collide": (b'{"queries": ["b"], "queries": ["a"], "topk": 101, "topk": 1}', 200),
    "513 queries": (b'{"queries": [' + b",".join([b'""'] * 513) + b"]}", 422),
    "300,000 queries": (b'{"queries": [' + b",".join([b'""'] * 300_000) + b"]}", 422),
    "too many bytes": (BIG, 413), "zeros": (b"\x00" * 1000, 422), "0xff": (b"\xff" * 1000, 422),
    "gzip": (zlib.compress(b"x" * (64 << 20), wbits=31), 422),
    "form": (b"queries=a&topk=1", 422), "XML": (b'<?xml version="1.0"?><a/>', 422),
    "a class": (b'{"queries": ["a"], "__class__": "os.system"}', 422),
    "a prototype": (b'{"queries": ["a"], "__proto__": {"topk": 1}}', 422)}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_is_answered_or_refused_by_name(server, name):
  body, status = BODIES[name]
  got, reply = fuzzed(server.port, body)
  assert got == status
  if status == 200:
    assert len(json.loads(reply)["result"]) == 1
  else:
    assert json.loads(reply)["field"]


def chunks(*parts: bytes) -> bytes:
  return b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in parts)


CHUNKED = b"transfer-encoding: chunked"
BOMB = zlib.compress(b'{"queries": ["' + b"x" * (256 << 20) + b'"]}', wbits=31)
REQUESTS = {
    "chunked": (request(chunks(ASK[:5], ASK[5:], b""), CHUNKED, length=False), {200}),
    "a chunk too long": (request(b"1ffffffffffffffff\r\n", CHUNKED, length=False), {400, 408}),
    "a chunk of no length": (request(b"zz\r\nhello\r\n0\r\n\r\n", CHUNKED, length=False), {400}),
    "a chunk below 0": (request(b"-5\r\nhello\r\n0\r\n\r\n", CHUNKED, length=False), {400}),
    "a chunk that says less": (request(b"2\r\nhello\r\n0\r\n\r\n", CHUNKED, length=False), {400}),
    "both lengths": (request(chunks(ASK, b""), CHUNKED), {200, 400}),
    "length below 0": (request(ASK, b"content-length: -1", length=False), {400}),
    "length in words": (request(ASK, b"content-length: ten", length=False), {400}),
    "two lengths": (request(ASK, b"content-length: 3"), {400}),
    "length of 30 digits": (request(b"", b"content-length: " + b"9" * 30, length=False),
                            {400, 413}),
    "length of 18 digits": (request(b"", b"content-length: " + b"9" * 18, length=False), {413}),
    "length too short": (request(ASK, b"content-length: 5", length=False), {422}),
    "unknown coding": (request(ASK, b"transfer-encoding: gzip"), {400, 422, 501}),
    "gzip bomb": (request(BOMB, b"content-encoding: gzip"), {415}),
    "other kind": (request(ASK, b"content-type: application/xml"), {415}),
    "kind of 60 kB": (request(ASK, b"content-type: " + b"a" * 60_000), {400, 415}),
    "a head of 1 MB": (request(ASK, b"x-a: " + b"a" * 1_000_000), {400}),
    "10,000 headers": (request(ASK, *[b"x-%d: a" % i for i in range(10_000)]), {200, 400}),
    "a header without a colon": (request(ASK, b"hello"), {400}),
    "NUL in a header": (request(ASK, b"x-a: \x00"), {400}),
    "no host": (b"POST /retrieve HTTP/1.1\r\n\r\n", {400}),
    "HTTP/1.0": (b"GET /healthz HTTP/1.0\r\n\r\n", {200}),
    "HTTP/9.9": (b"GET /healthz HTTP/9.9\r\nhost: x\r\nconnection: close\r\n\r\n", {200, 400}),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 404}),
    "TLS": (bytes.fromhex("16030100a5010000a10303") + b"\x00" * 160, {400}),
    "noise": (bytes(range(256)) * 4, {400}),
    "lines": (b"\r\n" * 1000 + b"\x01", {400}),
    "upgrade": (request(ASK, b"connection: upgrade", b"upgrade: websocket"), {200, 400, 422}),
    "an address of 60 kB": (b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nhost: x\r\nconnection: close"
                            b"\r\n\r\n", {404}),
    "an address with %00": (b"GET /%00 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", {404}),
    "an address in latin-1": (b"GET /\xe9 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
                              {400}),
    "an address elsewhere": (b"GET http://example.org/ HTTP/1.1\r\nhost: x\r\nconnection: close"
                             b"\r\n\r\n", {400, 404}),
    "CONNECT": (b"CONNECT example.org:80 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
                {400, 404, 405})}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_that_is_no_http_is_refused(server, name):
  sent, wanted = REQUESTS[name]
  status, _ = parsed(raw(server.port, sent))
  assert status in wanted


def test_half_sent_requests_do_not_keep_others_out(server):
  with contextlib.ExitStack() as opened:
    for _ in range(200):
      s = opened.enter_context(socket.create_connection(("127.0.0.1", server.port)))
      s.sendall(request(ASK)[:-5])
    assert fuzzed(server.port, ASK)[0] == 200


def schema_cases(server: Process, mode: str, count: int) -> list[int]:
  """Statuses of so many requests made from the server's own schema, right or wrong on purpose."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the libraries that make the requests
    import schemathesis
    from schemathesis import GenerationMode
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    strategy = schema["/retrieve"]["POST"].as_strategy(
        generation_mode=GenerationMode(mode))
    statuses = []

    @hypothesis.settings(max_examples=count, deadline=None, database=None, derandomize=True,
                         suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(strategy)
    def send(case):
      response = case.call(timeout=PATIENCE)
      statuses.append(response.status_code)
      assert response.status_code < 500, (case.body, response.text)
      if mode == "positive":
        assert response.status_code == 200, (case.headers, case.body, response.text)
        assert len(response.json()["result"]) == len(case.body["queries"])
      elif response.status_code in (413, 415, 422):
        assert re.search('"field": ?"', response.text), response.text

    send()
  return statuses


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_what_the_schema_allows_is_answered_and_what_it_forbids_is_refused(server, mode, count):
  statuses = schema_cases(server, mode, count)
  assert len(statuses) >= count
  if mode == "negative":
    # Its negative cases are now and then allowed after all: another order, a default left out.
    assert sum(s >= 400 for s in statuses) > len(statuses) / 2
  assert httpx2.get(f"{server.url}/healthz").status_code == 200
