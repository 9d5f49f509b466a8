"""The search server under more than it can do, killed, restarted, and told to end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time

import pytest

from retriever import serve, wire
from retriever.client import Client
from tests.search_servers import (FINGERPRINT, PATIENCE, Process, answers, declared, document, get,
                                  passages, post, wait_until)


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
      body = wire.write_request([query], 1)
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
  return subprocess.Popen(
      [sys.executable, "-m", "retriever.serve", *argv], text=True, stdout=subprocess.PIPE,
      stderr=subprocess.PIPE, env=os.environ | (env or {}))


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
    (["--host", "::"], "lets other machines in"),
    (["--host", "example.org"], "lets other machines in"),
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
