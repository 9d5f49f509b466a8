"""The HTTP client: no fault, lie or delay becomes a passage, or outlives the deadline."""

from __future__ import annotations

import concurrent.futures
import threading
import time

import pytest
from hypothesis import given, strategies as st

from retriever import client as client_lib
from retriever import exchange, replicas, wire
from retriever.app import Serving
from retriever.client import Client
from retriever.protocol import CorpusError, RetrievalError
from tests.search_servers import (FAULTS, FINGERPRINT, LIES, PATIENCE, FaultyServer, Process,
                                  ToyEngine, passages, reset_peak, rss_bytes, running)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  """Waits between tries that suit tests."""
  monkeypatch.setattr(client_lib, "BACKOFF_SECONDS", (0.005, 0.05))
  monkeypatch.setattr(client_lib, "LOOK_SECONDS", 0.01)
  monkeypatch.setattr(replicas, "PROBE_SECONDS", (0.01, 0.1))


def ask_many(client: Client, count: int) -> None:
  """Searches of several queries, each of which must find its own passages and no other."""
  for n in range(count):
    queries = [f"{n}-{i}" for i in range(1 + n % 3)] + [f"{n} last"]
    assert client.search(queries, 2) == [passages(q, 2) for q in queries]


@pytest.mark.parametrize("fault", [*FAULTS, *LIES])
def test_with_faults_now_and_then_answers_are_those_without(fault):
  with FaultyServer(fault, 0.3, seed=5) as server, Client(
      server.url, seconds=PATIENCE, attempt_seconds=0.3) as client:
    ask_many(client, 12)
    # 12 searches, and about 0.3 / 0.7 more tries: at least one fault was committed.
    assert len(server.asked) > 12


@pytest.mark.parametrize("fault", [*FAULTS, *LIES])
def test_with_faults_always_there_is_an_error_by_the_deadline_and_never_a_passage(fault):
  with FaultyServer(fault, 1.0) as server, Client(
      server.url, seconds=0.6, attempt_seconds=0.25) as client:
    began = time.monotonic()
    found = client.search_each(["a", "b"], 3)
    assert time.monotonic() - began < 0.6 + 0.5
    assert [type(f) for f in found] == [RetrievalError, RetrievalError]
    assert "no answer within 0.6 s" in str(found[0]) and server.url in str(found[0])
    with pytest.raises(RetrievalError):
      client.search(["c", "d"], 3)
    assert server.asked.count(("c", "d")) <= 1  # after a deadline in vain: one try


@pytest.mark.parametrize("fault", [f for f in FAULTS if f != "refused"])
def test_a_server_without_proofs_is_held_to_the_form(fault):
  """The published server has no /healthz and sends no proofs; it may be asked all the same."""
  with FaultyServer(fault, 0.3, seed=3, fingerprint=None) as server, Client(
      server.url + "/retrieve", seconds=PATIENCE, attempt_seconds=0.3) as client:
    ask_many(client, 6)
    assert len(server.asked) > 6 and client.fingerprint.startswith("urls-")


@pytest.mark.parametrize("fault", ["huge", "endless"])
def test_a_reply_of_100_mb_takes_no_memory(fault):
  with FaultyServer(fault, 1.0) as server, Client(
      server.url, seconds=3.0, attempt_seconds=2.0) as client:
    client.search_each(["warm"], 1)
    before = rss_bytes()
    reset_peak()
    (found,) = client.search_each(["a"], 1)
    assert isinstance(found, RetrievalError)
    assert rss_bytes(peak=True) - before < 50e6


def test_an_answer_is_one_of_the_server_whatever_is_asked():
  texts = ["", "ünï\u0301 \U0001f600", "\x00", '"}', "x" * 16_384, "a", "a"]
  with running(ToyEngine()) as url, Client(url, seconds=PATIENCE) as client:
    assert client.fingerprint == FINGERPRINT
    for top_k in (1, 100):
      assert client.search(texts, top_k) == [passages(q, top_k) for q in texts]
    assert client.search([], 3) == []
    # Half a surrogate pair is no character that could be sent; a whole one is the character.
    assert client.search(["a\ud800b", "\ud83d\ude00"], 1) == [
        passages("a\ufffdb", 1), passages("\U0001f600", 1)]


def test_a_query_that_fails_takes_no_other_with_it():
  engine = ToyEngine(bad=("bad",))
  with running(engine) as url, Client(url, seconds=PATIENCE, attempts=3) as client:
    good, bad, long_, last = client.search_each(["good", "bad", "x" * 16_385, "last"], 2)
    assert good == passages("good", 2) and last == passages("last", 2)
    assert isinstance(bad, RetrievalError) and str(bad) == "cannot search for bad"
    assert isinstance(long_, RetrievalError) and "16,385 characters" in str(long_)
    # Asked again as often as was allowed, without those that were found.
    assert engine.batches == [["good", "bad", "last"], ["bad"], ["bad"]]
    with pytest.raises(RetrievalError, match="cannot search for bad"):
      client.search(["good", "bad"], 2)


def test_more_queries_than_fit_go_out_in_several_requests():
  engine = ToyEngine()
  queries = [f"q{i}" for i in range(1200)] + ["\u2603" * 16_000] * 30  # 48 kB each as UTF-8
  with running(engine) as url, Client(url, seconds=PATIENCE) as client:
    assert client.search(queries, 1) == [passages(q, 1) for q in queries]
    with pytest.raises(RetrievalError, match="101 passages"):
      client.search(["a"], 101)
    with pytest.raises(ValueError, match="top_k is 0"):
      client.search(["a"], 0)


@given(st.lists(st.text(max_size=40), max_size=30), st.integers(1, 50), st.integers(1, 9))
def test_parts_of_a_batch_cover_it_and_fit(queries, top_k, most):
  limits = wire.Limits(queries=most, body_bytes=600)
  parts = list(wire.split(queries, top_k, limits))
  assert [i for part in parts for i in part] == list(range(len(queries)))
  for part in parts:
    body = wire.write_request([queries[i] for i in part], top_k)
    assert 1 <= len(part) <= most and (len(body) <= 600 or len(part) == 1)
    assert wire.read_request(body, wire.Limits(), 3).queries == tuple(queries[i] for i in part)


@given(st.lists(st.tuples(st.text(max_size=9), st.text(max_size=9), st.floats(
    allow_nan=False, allow_infinity=False)), max_size=4))
def test_a_proof_outlives_the_wire_and_nothing_else(found):
  from retriever.protocol import Passage
  one, asked = [Passage(*p) for p in found], wire.Asked(("q",), 4, True, True)
  read = lambda reply, query="q", top_k=4, index="i": wire.read_reply(
      reply, [query], top_k, fingerprint=index, accept_empty=False)
  reply = wire.write_reply(asked, [one], "i")
  assert read(reply) == [one]
  for wrong in ({"query": "r"}, {"top_k": 5}, {"index": "j"}):
    with pytest.raises(wire.BadReply):
      read(reply, **wrong)


# Servers that come and go.


def test_a_server_that_is_killed_and_comes_back_loses_nothing():
  with Process(engine={"seconds": 0.01}) as server, Client(
      server.url, seconds=PATIENCE, attempt_seconds=2.0) as client:
    ask = lambda n: client.search([f"q{n}"], 3) == [passages(f"q{n}", 3)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      asked = [pool.submit(ask, n) for n in range(150)]
      time.sleep(0.1)
      server.kill()
      time.sleep(0.2)
      server.start()
      assert all(f.result() for f in asked)


def test_an_unreachable_server_costs_one_deadline_and_then_none():
  with Process() as server:
    client = Client(server.url, seconds=0.8)
    server.kill()
    began = time.monotonic()
    with pytest.raises(RetrievalError, match="no answer within 0.8 s"):
      client.search(["a"], 1)
    assert 0.8 <= time.monotonic() - began < 1.3
    began = time.monotonic()
    for _ in range(5):
      with pytest.raises(RetrievalError, match="no server is up"):
        client.search(["a"], 1)
    assert time.monotonic() - began < 0.8
    server.start()
    assert client.search(["a"], 1) == [passages("a", 1)]
    server.kill()  # it has answered: there is a whole deadline again, in which it may come back
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      client._seconds = PATIENCE
      waiting = pool.submit(client.search, ["b"], 1)
      time.sleep(0.3)
      server.start()
      assert waiting.result(PATIENCE) == [passages("b", 1)]
    client.close()


def test_a_client_waits_for_its_first_server_and_says_what_it_waited_for():
  server = FaultyServer("half_open", 0.0)
  url = server.url
  server.close()
  began = time.monotonic()
  with pytest.raises(RetrievalError, match=f"no server within 0.3 s .*{url}.*ConnectError"):
    Client(url, seconds=0.3)
  assert time.monotonic() - began < 1.0


def test_replicas_take_turns_and_a_dead_one_is_left_out():
  engines = [ToyEngine(), ToyEngine()]
  with running(engines[0], Serving(cache_bytes=0)) as first:
    with running(engines[1], Serving(cache_bytes=0)) as second:
      client = Client([first, second], seconds=PATIENCE)
      ask_many(client, 10)
      assert [len(e.batches) for e in engines] == [5, 5]
    began = time.monotonic()
    ask_many(client, 20)
    assert len(engines[0].batches) == 25 and time.monotonic() - began < 2.0
    states = {r.url: r.healthy for r in client._replicas.all}
    assert states == {first: True, second: False}
    client.close()


def test_the_breaker_opens_after_three_failures_and_closes_on_trial():
  replica = replicas.Replica("http://x")
  replica.healthy = True
  assert [replica.failed("a"), replica.failed("b")] == [False, False]
  replica.answered()
  assert [replica.failed("a"), replica.failed("b"), replica.failed("c")] == [False, False, True]
  assert not replica.healthy and replica.reason == "c"
  replica.revived()
  assert replica.healthy and replica.failed("d")  # on trial, one failure is enough


def test_a_server_that_comes_back_with_another_index_is_not_asked():
  with FaultyServer("busy", 0.0) as server, Client(server.url, seconds=0.6) as client:
    ask_many(client, 1)
    server._fingerprint = "0" * 64
    with pytest.raises(RetrievalError, match="another index .000000000000, wanted f1f1f1f1f1f1"):
      client.search(["a"], 1)
    assert ("a",) in server.asked  # it was asked until it was found out, its answers never taken
    with pytest.raises(RetrievalError, match="serves index 000000000000, wanted index f1f1f1"):
      client.search(["b"], 1)
    assert ("b",) not in server.asked


@pytest.mark.parametrize("given_, served, says", [
    ("a" * 64, "b" * 64, "serves index bbbbbbbbbbbb, wanted index aaaaaaaaaaaa"),
    ("a" * 64, None, "serves an index that it does not name, wanted index aaaaaaaaaaaa")])
def test_the_wrong_index_is_refused_at_the_start(given_, served, says):
  with FaultyServer("busy", 0.0, fingerprint=served) as server:
    with pytest.raises(CorpusError, match=says):
      Client(server.url, seconds=PATIENCE, fingerprint=given_)


def test_replicas_of_different_indexes_are_refused_at_the_start():
  with FaultyServer("busy", 0.0) as one, FaultyServer("busy", 0.0, fingerprint="0" * 64) as other:
    with pytest.raises(CorpusError, match="serves index .*, wanted index"):
      Client([one.url, other.url], seconds=PATIENCE)


# What is not tried again, and what is never sent on.


def test_a_request_that_is_wrong_is_not_sent_again():
  with running(ToyEngine(), token="secret-token") as url:
    with pytest.raises(CorpusError, match="does not take this client's token"):
      Client(url, seconds=PATIENCE, token="wrong")
    with Client(url, seconds=PATIENCE, token="secret-token") as client:
      assert client.search(["a"], 1) == [passages("a", 1)]
      client._exchange._http.headers["authorization"] = "Bearer wrong"
      began = time.monotonic()
      with pytest.raises(RetrievalError, match="status 401") as e:
        client.search(["a"], 1)
      assert time.monotonic() - began < 2.0 and "secret" not in str(e.value)
      client._exchange._http.headers["authorization"] = "Bearer secret-token"
      assert client.search(["a"], 1) == [passages("a", 1)]


def test_the_token_follows_no_redirect():
  with FaultyServer("busy", 0.0) as canary, FaultyServer("redirect", 1.0) as server:
    server._redirect = lambda connection, reply: (connection.sendall(
        f"HTTP/1.1 307 X\r\nlocation: {canary.url}/retrieve\r\ncontent-length: 0\r\n\r\n".encode()))
    with Client(server.url, seconds=PATIENCE, token="secret-token") as client:
      with pytest.raises(RetrievalError, match=f"a redirect to {canary.url}"):
        client.search(["a"], 1)
    assert server.headers[-1]["authorization"] == "bearer secret-token"
    assert canary.asked == canary.headers == []


@pytest.mark.parametrize("after, least", [("1", 1.0), ("0", 0.0)])
def test_a_busy_server_is_left_alone_for_as_long_as_it_says(after, least):
  with FaultyServer("later", 1.0) as server:
    def later(connection, reply):
      server._p = 0.0
      connection.sendall(f"HTTP/1.1 429 X\r\nretry-after: {after}\r\ncontent-length: 0\r\n\r\n"
                         .encode())
      return True
    server._later = later
    with Client(server.url, seconds=PATIENCE) as client:
      began = time.monotonic()
      assert client.search(["a"], 1) == [passages("a", 1)]
      assert least <= time.monotonic() - began < least + 1.0


@pytest.mark.parametrize("url", ["", "ftp://x", "127.0.0.1:8000", "http://", "http://x:99999",
                                 "http://x?a=b", "http://x#a"])
def test_an_address_that_cannot_be_is_refused(url):
  with pytest.raises(ValueError, match="is no address of a search server"):
    Client(url)


@pytest.mark.parametrize("wrong", [
    {"seconds": 0.0}, {"seconds": float("nan")}, {"attempt_seconds": -1.0}, {"attempts": 0}])
def test_settings_that_cannot_be_are_refused(wrong):
  with pytest.raises(ValueError, match="wanted"):
    Client("http://127.0.0.1:1", **wrong)


def test_a_password_in_an_address_is_refused_and_not_repeated():
  with pytest.raises(ValueError, match="give a token instead") as e:
    Client("http://user:hunter2@127.0.0.1:8000")
  assert "hunter2" not in str(e.value)


# Threads.


def test_closing_ends_what_waits_and_leaves_no_thread():
  with FaultyServer("half_open", 1.0) as server:
    before = threading.active_count()
    client = Client(server.url, seconds=PATIENCE)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      waiting = pool.submit(client.search_each, ["a"], 1)
      time.sleep(0.1)
      client.close()
      (found,) = waiting.result(5.0)
    assert isinstance(found, RetrievalError) and "was closed" in str(found)
    client.close()
    with pytest.raises(RetrievalError, match="was closed"):
      client.search(["a"], 1)
    assert not any(t.name == "search-client" and t is client._thread
                   for t in threading.enumerate())
    assert before


def test_many_threads_share_a_client_and_nothing_is_mixed_up():
  engine = ToyEngine(seconds=0.002)
  with running(engine, Serving(cache_bytes=0)) as url, Client(url, seconds=PATIENCE) as client:
    ask = lambda n: client.search([f"q{n}", f"r{n}"], 2) == [
        passages(f"q{n}", 2), passages(f"r{n}", 2)]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
      assert all(pool.map(ask, range(300)))
    assert len(engine.batches) < 300  # they shared searches


@pytest.mark.parametrize("token", ["secret\n", " secret", "", "geheimnüs"])
def test_a_token_that_can_not_be_sent_is_refused_and_not_told(token):
  with pytest.raises(ValueError) as caught:
    Client("http://127.0.0.1:9", token=token)
  assert "ecret" not in str(caught.value)


@pytest.mark.parametrize("after", ["²", "-1", "soon", "9" * 30])
def test_a_retry_after_that_is_no_number_is_no_crash(after):
  reply = exchange.Reply(429, {"retry-after": after}, b"{}")
  with pytest.raises(exchange.Fault) as caught:
    exchange.check_status(reply)
  assert caught.value.again and caught.value.after == 1.0


def test_proofs_of_an_index_that_nobody_knew_of_are_no_answer():
  """A server that told nothing when the client was made, and now proves what it says."""
  asked = wire.read_request(wire.write_request(["q"], 2), wire.Limits(), 3)  # a client's own form
  reply = wire.write_reply(asked, [passages("q", 2)], FINGERPRINT)
  read = wire.read_reply(reply, ["q"], 2, fingerprint=FINGERPRINT, accept_empty=False)
  assert read == [passages("q", 2)]
  with pytest.raises(wire.BadReply, match="did not tell its index"):
    wire.read_reply(reply, ["q"], 2, fingerprint=None, accept_empty=False)
