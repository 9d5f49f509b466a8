"""In front of a server's parsing: who may pass, how much may come, and how long it may take."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import h11
import orjson
from uvicorn.protocols.http.h11_impl import H11Protocol

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATH = "/healthz"  # the one path that needs no token
READ_SECONDS = 8.0  # for a whole body to come
DRAINED_BYTES = 16 << 20  # of a body too large, read and dropped so that its sender hears of it


class Gate:
  """ASGI: lets through whole, small requests of those who hold the token.

  Everything but /healthz needs the token, also what no route answers; it stands here and not in
  the routes so that not a byte of a stranger's body is read. `on_reply` is told of each reply:
  path, status, seconds. The application's `receive` gives the body in one piece.
  """

  def __init__(self, app: App, *, token: str | None, body_bytes: int,
               read_seconds: float = READ_SECONDS,
               on_reply: Callable[[str, int, float], None] = lambda path, status, seconds: None):
    self._app, self._token = app, token
    self._body_bytes, self._read_seconds = body_bytes, read_seconds
    self._on_reply = on_reply

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
      await self._app(scope, receive, send)
    elif scope["type"] == "http":
      await self._handle(scope, receive, self._watched(scope["path"], send))
    else:
      await send({"type": "websocket.close"})

  def _watched(self, path: str, send: Send) -> Send:
    began = time.monotonic()

    async def watched(message: MutableMapping[str, Any]) -> None:
      if message["type"] == "http.response.start":
        self._on_reply(path, message["status"], time.monotonic() - began)
      await send(message)

    return watched

  async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
    headers = {name.lower(): value for name, value in scope["headers"]}
    if scope["path"] != OPEN_PATH and not may_pass(
        headers.get(b"authorization", b""), self._token):
      await refuse(send, 401, "authorization", "is missing or wrong, wanted `Bearer TOKEN`",
                   (b"www-authenticate", b"Bearer"))
      return
    try:
      async with asyncio.timeout(self._read_seconds):
        body = await self._read(headers, receive)
    except TimeoutError:
      await refuse(send, 408, "body", f"has not come whole within {self._read_seconds:g} s",
                   (b"connection", b"close"))
      return
    except ConnectionError:  # nobody is there to reply to
      return
    if body is None:
      await refuse(send, 413, "body", f"is larger than {self._body_bytes:,} bytes; send several "
                                      "requests", (b"connection", b"close"))
      return
    await self._app(scope, _replayed(body, receive), send)

  async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
    """The body, or None if it is too large."""
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and len(declared) < 19 and int(declared) > DRAINED_BYTES:
      return None
    body, size = bytearray(), 0
    while True:
      message = await receive()
      if message["type"] == "http.disconnect":
        raise ConnectionError("the peer left in the middle of its request")
      part = message.get("body", b"")
      size += len(part)
      if size <= self._body_bytes:
        body += part
      if not message.get("more_body", False) or size > DRAINED_BYTES:
        return bytes(body) if size <= self._body_bytes else None


class ImpatientProtocol(H11Protocol):
  """Uvicorn's HTTP/1.1 that hangs up on a peer which keeps it waiting.

  Waiting is: for the rest of a request from its first byte (or from the connection) on, and for
  room to write a reply.
  """

  patience = READ_SECONDS + 1  # after the gate's own reply to a body that doesn't come
  _timer: asyncio.TimerHandle | None = None

  def connection_made(self, transport: Any) -> None:  # uvloop has a class of its own
    super().connection_made(transport)
    self._wait(True)

  def data_received(self, data: bytes) -> None:
    super().data_received(data)
    self._wait(self.conn.their_state in (h11.IDLE, h11.SEND_BODY))

  def on_response_complete(self) -> None:
    super().on_response_complete()
    if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and self.conn.trailing_data[0]:
      self._wait(True)

  def pause_writing(self) -> None:
    super().pause_writing()
    self._wait(True)

  def resume_writing(self) -> None:
    super().resume_writing()
    self._wait(False)

  def connection_lost(self, exc: Exception | None) -> None:
    self._wait(False)
    super().connection_lost(exc)

  def _wait(self, waits: bool) -> None:
    if waits and self._timer is None:
      self._timer = self.loop.call_later(self.patience, self.transport.abort)
    elif not waits and self._timer is not None:
      self._timer.cancel()
      self._timer = None


def may_pass(authorization: bytes, token: str | None) -> bool:
  """Whether a header holds the token, or none is needed; takes as long for any wrong one."""
  return token is None or hmac.compare_digest(authorization, b"Bearer " + token.encode())


async def refuse(send: Send, status: int, field: str, message: str,
                 *headers: tuple[bytes, bytes]) -> None:
  """One whole reply: what was wrong with which part of the request."""
  body = orjson.dumps({"field": field, "detail": f"{field}: {message}"})
  await send({"type": "http.response.start", "status": status, "headers": [
      (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
      *headers]})
  await send({"type": "http.response.body", "body": body})


def _replayed(body: bytes, receive: Receive) -> Receive:
  """`receive` for what comes after: the body whole, then whatever else there is to hear."""
  left = [body]

  async def replayed() -> MutableMapping[str, Any]:
    if left:
      return {"type": "http.request", "body": left.pop(), "more_body": False}
    return await receive()

  return replayed
