"""Web servers for tests, as honest or as hostile as the function that answers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socketserver
import ssl
import threading
import urllib.parse
from typing import Any


@dataclasses.dataclass(frozen=True)
class Asked:
  """One request as it came in; header names in lower case."""

  method: str
  path: str
  params: dict[str, str]
  headers: dict[str, str]
  body: bytes

  def json(self) -> Any:
    return json.loads(self.body)


def reply(body: bytes | str | dict | list = b"", status: int = 200, **headers) -> bytes:
  """A whole reply; objects go as JSON. `content_type="text/plain"` makes a header."""
  if isinstance(body, (dict, list)):
    body = json.dumps(body)
    headers = {"content_type": "application/json"} | headers
  body = body.encode() if isinstance(body, str) else body
  headers = {"content-length": len(body), "connection": "close"} | {
      k.replace("_", "-"): v for k, v in headers.items()}
  lines = [f"HTTP/1.1 {status} Whatever", *(f"{k}: {v}" for k, v in headers.items()), "", ""]
  return "\r\n".join(lines).encode() + body


class Web:
  """`answer(asked)` gives the bytes of a reply, or a series of pieces, sent one by one."""

  def __init__(self, answer, host="127.0.0.1", tls: ssl.SSLContext | None = None):
    self.asked: list[Asked] = []
    self.connections = 0
    web = self

    class Handler(socketserver.StreamRequestHandler):
      def handle(self):
        web.connections += 1
        with contextlib.suppress(OSError):  # a client that had enough
          if tls is None:
            self.answer_on(self.rfile, self.wfile)
            return
          with (tls.wrap_socket(self.request, server_side=True) as safe,
                safe.makefile("rb") as rfile, safe.makefile("wb", 0) as wfile):
            self.answer_on(rfile, wfile)

      def answer_on(self, rfile, wfile):
        asked = read(rfile)
        if asked is None:
          return
        web.asked.append(asked)
        answered = answer(asked)
        for piece in [answered] if isinstance(answered, bytes) else answered:
          wfile.write(piece)

    class Server(socketserver.ThreadingTCPServer):
      allow_reuse_address = daemon_threads = True
      block_on_close = False
      request_queue_size = 128

      def handle_error(self, request, client_address):
        raise

    self._server = Server((host, 0), Handler)
    self.host, self.port = self._server.server_address
    threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

  def url(self, path: str = "/", host: str | None = None, scheme: str = "http") -> str:
    return f"{scheme}://{host or self.host}:{self.port}{path}"

  def close(self):
    self._server.shutdown()
    self._server.server_close()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()


def read(stream) -> Asked | None:
  first = stream.readline().decode("latin-1").split()
  if len(first) != 3:
    return None
  headers = {}
  while (line := stream.readline().decode("latin-1").strip()):
    name, _, value = line.partition(":")
    headers[name.strip().lower()] = value.strip()
  path, _, query = first[1].partition("?")
  return Asked(first[0], path, dict(urllib.parse.parse_qsl(query, keep_blank_values=True)),
               headers, stream.read(int(headers.get("content-length", 0))))
