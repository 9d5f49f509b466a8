"""Search servers for tests: one in a thread, one in a process of its own, one that misbehaves."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import httpx2
import uvicorn

from retriever import app, serve, wire
from retriever.gate import ImpatientProtocol
from retriever.protocol import Passage, RetrievalError, SearchEngine

FINGERPRINT = "f1" * 32
PATIENCE = 20.0  # seconds after which a test gives up; none ever waits that long


def passages(query: str, top_k: int) -> list[Passage]:
  """What a toy finds: passages that name the query they belong to."""
  return [Passage(f"{query}#{i}", f'"{query}"\nno. {i} of {top_k}', 1.0 / (i + 3))
          for i in range(top_k)]


class ToyEngine(SearchEngine):
  """Answers at once or after `seconds` and `per_query`; fails for queries named in `bad`."""

  fingerprint = FINGERPRINT

  def __init__(self, seconds: float = 0.0, per_query: float = 0.0, bad: tuple[str, ...] = ()):
    self._seconds, self._per_query, self._bad = seconds, per_query, bad
    self.batches: list[list[str]] = []
    self.closed = 0

  def __len__(self) -> int:
    return 7

  def search(self, queries, top_k):
    raise NotImplementedError("servers ask for each query")

  def search_each(self, queries, top_k):
    self.batches.append(list(queries))
    if self._seconds or self._per_query:
      time.sleep(self._seconds + self._per_query * len(queries))
    return [RetrievalError(f"cannot search for {q}") if q in self._bad else passages(q, top_k)
            for q in queries]

  def close(self):
    self.closed += 1


@contextlib.contextmanager
def running(engine: SearchEngine, serving: app.Serving = app.Serving(), *,
            token: str | None = None, protocol: type = ImpatientProtocol) -> Iterator[str]:
  """The real server in a thread; gives its address."""
  listener = serve.bind("127.0.0.1", 0)
  config = serve.config(lambda: app.create_app(engine, serving, token=token))
  config.http = protocol
  server = uvicorn.Server(config)
  thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
  thread.start()
  while not server.started:
    assert thread.is_alive(), "the server did not start"
    time.sleep(0.005)
  try:
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
  finally:
    server.should_exit = True
    thread.join(PATIENCE)
    assert not thread.is_alive(), "the server did not end"


class Process:
  """The real server over a toy in a process of its own, to be killed and started again."""

  CODE = """
import json, sys
from retriever import app, serve, wire
from tests.search_servers import ToyEngine
port, engine, serving = int(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
listener = serve.bind("127.0.0.1", port)
print(listener.getsockname()[1], flush=True)
serve.serve(lambda: app.create_app(ToyEngine(**engine), app.Serving(**serving)), listener)
"""

  def __init__(self, engine: dict | None = None, serving: dict | None = None):
    self._settings = [json.dumps(engine or {}), json.dumps(serving or {})]
    self.port = 0
    self.start()

  @property
  def url(self) -> str:
    return f"http://127.0.0.1:{self.port}"

  @property
  def pid(self) -> int:
    return self._process.pid

  def start(self) -> None:
    self._process = subprocess.Popen(
        [sys.executable, "-c", self.CODE, str(self.port), *self._settings],
        stdout=subprocess.PIPE, text=True)
    self.port = int(self._process.stdout.readline())
    self._process.stdout.close()
    wait_until(lambda: answers(self.port))

  def kill(self) -> None:
    self._process.send_signal(signal.SIGKILL)
    self._process.wait(PATIENCE)

  def alive(self) -> bool:
    return self._process.poll() is None

  def __enter__(self) -> Process:
    return self

  def __exit__(self, *_) -> None:
    if self.alive():
      self.kill()


def answers(port: int) -> bool:
  try:
    return raw(port, b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").startswith(
        b"HTTP/1.1 200")
  except OSError:
    return False


def wait_until(true: Callable[[], bool]) -> None:
  end = time.monotonic() + PATIENCE
  while not true():
    assert time.monotonic() < end, "it never came true"
    time.sleep(0.01)


def raw(port: int, data: bytes, timeout: float = PATIENCE) -> bytes:
  """Sends bytes as they are, and gives all that comes back until the other side closes."""
  with socket.create_connection(("127.0.0.1", port), timeout) as s:
    s.settimeout(timeout)
    with contextlib.suppress(ConnectionError):
      s.sendall(data)
    return received(s)


def received(s: socket.socket) -> bytes:
  read = b""
  with contextlib.suppress(ConnectionError):
    while part := s.recv(65536):
      read += part
  return read


def post(url: str, body, **headers: str) -> httpx2.Response:
  content = body if isinstance(body, bytes) else json.dumps(body).encode()
  headers = {"content-type": "application/json"} | {k.replace("_", "-"): v
                                                    for k, v in headers.items()}
  return httpx2.post(f"{url}/retrieve", content=content, headers=headers, timeout=PATIENCE)


def get(url: str, **headers: str) -> httpx2.Response:
  return httpx2.get(url, headers=headers, timeout=PATIENCE)


def document(query: str, number: int, top_k: int) -> dict[str, str]:
  return {"id": f"{query}#{number}", "contents": f'"{query}"\nno. {number} of {top_k}'}


def declared(length: int, body: bytes = b"") -> bytes:
  return (b"POST /retrieve HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
          b"content-length: %d\r\n\r\n" % length) + body


def rss_bytes(pid: int | str = "self", peak: bool = False) -> int:
  """Resident memory, or the most of it since `reset_peak`."""
  with open(f"/proc/{pid}/status", encoding="ascii") as f:
    fields = dict(line.split(":", 1) for line in f)
  return int(fields["VmHWM" if peak else "VmRSS"].split()[0]) * 1024


def reset_peak() -> None:
  with open("/proc/self/clear_refs", "w", encoding="ascii") as f:
    f.write("5")


class FaultyServer:
  """A search server by hand that commits one fault with probability p, drawn in order of requests.

  `/healthz` is well unless the fault is about it. `asked` has the queries of each request to
  /retrieve; one that its sender has given up may still be on its way here.
  """

  def __init__(self, fault: str, p: float, seed: int = 0, fingerprint: str | None = FINGERPRINT):
    self._fault, self._p, self._random = fault, p, random.Random(seed)
    self._fingerprint = fingerprint
    self.asked: list[tuple[str, ...]] = []
    self.headers: list[dict[str, str]] = []
    self._closed, self._lock = threading.Event(), threading.Lock()
    self._listener = serve.bind("127.0.0.1", 0)
    self.port = self._listener.getsockname()[1]
    self._listener.listen(64)
    self._thread = threading.Thread(target=self._accept, daemon=True)
    self._thread.start()

  @property
  def url(self) -> str:
    return f"http://127.0.0.1:{self.port}"

  def close(self) -> None:
    self._closed.set()
    with contextlib.suppress(OSError):
      self._listener.shutdown(socket.SHUT_RDWR)
    self._listener.close()
    self._thread.join(PATIENCE)

  def __enter__(self) -> FaultyServer:
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def _accept(self) -> None:
    while not self._closed.is_set():
      try:
        connection, _ = self._listener.accept()
      except OSError:
        if self._closed.wait(0.05):
          return
        self._listener = serve.bind("127.0.0.1", self.port)  # open again after "refused"
        self._listener.listen(64)
        continue
      threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

  def _serve(self, connection: socket.socket) -> None:
    with connection, contextlib.suppress(ConnectionError):
      while True:
        request = self._read(connection)
        if request is None or not self._answer(connection, *request):
          return

  def _read(self, connection: socket.socket) -> tuple[str, bytes] | None:
    data = b""
    while b"\r\n\r\n" not in data:
      if not (part := connection.recv(65536)):
        return None
      data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    self.headers.append(headers)
    while len(body) < int(headers.get("content-length", 0)):
      body += connection.recv(65536)
    return lines[0], body

  def _answer(self, connection: socket.socket, line: str, body: bytes) -> bool:
    """Whether the connection stays open."""
    if line.startswith("GET"):
      if self._fingerprint is None:
        return _send(connection, 404, b"Not Found")
      limits = wire.Limits()
      return _send(connection, 200, wire.write_health(
          wire.Health(self._fingerprint, 7, limits, True)))
    asked = wire.read_request(body, wire.Limits(), 3)
    found = [passages(q, asked.top_k) for q in asked.queries]
    if self._fingerprint is None:  # as the published server, which knows of no proofs
      asked = wire.Asked(asked.queries, asked.top_k, asked.return_scores)
    reply = wire.write_reply(asked, found, self._fingerprint or "")
    with self._lock:
      self.asked.append(tuple(asked.queries))
      faulty = self._random.random() < self._p
    return getattr(self, f"_{self._fault}")(connection, reply) if faulty else _send(
        connection, 200, reply)

  # One fault each: whether the connection stays open.

  def _refused(self, connection, reply):
    self._listener.shutdown(socket.SHUT_RDWR)
    self._listener.close()
    return False

  def _reset(self, connection, reply):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False

  def _killed(self, connection, reply):
    connection.sendall(_head(200, len(reply)) + reply[:len(reply) // 2])
    return False

  def _status_500(self, connection, reply):
    return _send(connection, 500, b"Internal Server Error")

  def _status_502(self, connection, reply):
    return _send(connection, 502, b"<html>Bad Gateway</html>")

  def _status_503(self, connection, reply):
    return _send(connection, 503, b'{"detail": "no healthy upstream"}')

  def _busy(self, connection, reply):
    return _send(connection, 429, b'{"detail": "busy"}', "retry-after: 0\r\n")

  def _html(self, connection, reply):
    return _send(connection, 200, b"<html><body>Please log in</body></html>")

  def _truncated(self, connection, reply):
    return _send(connection, 200, reply[:-20])

  def _huge(self, connection, reply):
    connection.sendall(_head(200, 100_000_000))
    return self._pour(connection)

  def _endless(self, connection, reply):
    connection.sendall(_head(200, None))
    return self._pour(connection)

  def _pour(self, connection):
    start, more = b'{"result": [["', b"x" * 1_000_000
    connection.sendall(start)
    for _ in range(100):
      connection.sendall(more)
    return False

  def _deep(self, connection, reply):
    return _send(connection, 200, b'{"result": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")

  def _changed(self, connection, change, reply):
    record = json.loads(reply)
    change(record)
    return _send(connection, 200, json.dumps(record).encode())

  def _too_few(self, connection, reply):
    return self._changed(connection, lambda r: r["result"].pop(), reply)

  def _permuted(self, connection, reply):
    return self._changed(connection, lambda r: r["result"].reverse(), reply)

  def _reordered(self, connection, reply):
    return self._changed(connection, lambda r: [x.reverse() for x in r["result"]], reply)

  def _all_permuted(self, connection, reply):
    return self._changed(connection, lambda r: (r["result"].reverse(), r["proofs"].reverse()),
                         reply)

  def _unproven(self, connection, reply):
    return self._changed(connection, lambda r: r.pop("proofs"), reply)

  def _empty(self, connection, reply):
    return self._changed(connection, lambda r: [x.clear() for x in r["result"]], reply)

  def _no_results(self, connection, reply):
    return self._changed(connection, lambda r: r["result"].clear(), reply)

  def _cut_passage(self, connection, reply):
    def change(r):
      document = r["result"][0][0]["document"]
      document["contents"] = document["contents"][:-1]
    return self._changed(connection, change, reply)

  def _strings(self, connection, reply):
    def change(r):
      r["result"] = [[p["document"]["contents"] for p in x] for x in r["result"]]
    return self._changed(connection, change, reply)

  def _nan_scores(self, connection, reply):
    return self._changed(connection, lambda r: r["result"][0][0].update(score=float("nan")), reply)

  def _drip(self, connection, reply):
    for byte in _head(200, len(reply)) + reply:
      connection.sendall(bytes([byte]))
      if self._closed.wait(0.1):
        break
    return False

  def _half_open(self, connection, reply):
    self._closed.wait(PATIENCE)
    return False

  def _foreign(self, connection, reply):
    return self._changed(connection, lambda r: r.update(fingerprint="0" * 64), reply)


# Every fault that a FaultyServer can commit; those below need proofs to be noticed.
FAULTS = ("refused", "reset", "killed", "status_500", "status_502", "status_503", "busy", "html",
          "truncated", "huge", "endless", "deep", "too_few", "empty", "no_results", "strings",
          "nan_scores", "drip", "half_open")
LIES = ("permuted", "reordered", "all_permuted", "unproven", "cut_passage", "foreign")


def _head(status: int, length: int | None, more: str = "") -> bytes:
  size = "connection: close" if length is None else f"content-length: {length}"
  return f"HTTP/1.1 {status} X\r\ncontent-type: text/plain\r\n{size}\r\n{more}\r\n".encode()


def _send(connection: socket.socket, status: int, body: bytes, more: str = "") -> bool:
  connection.sendall(_head(status, len(body), more) + body)
  return True
