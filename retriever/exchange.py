"""One HTTP exchange with a search server: a reply bounded in bytes and seconds, or a fault."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping

import httpx2
import orjson

REPLY_BYTES = 32 << 20  # a longer reply is not read to its end
ERROR_BYTES = 64 << 10  # the same for what is no answer
CONNECT_SECONDS, KEEP_ALIVE_SECONDS = 5.0, 30.0
AGAIN = {408, 425, 429}  # of the statuses below 500: the request may be right another time


@dataclasses.dataclass(frozen=True)
class Reply:
  """A whole reply, as it came."""

  status: int
  headers: Mapping[str, str]
  body: bytes


class Fault(Exception):
  """One try that failed: whether another may do better, and after how many seconds (None: ours)."""

  def __init__(self, reason: str, *, again: bool = True, after: float | None = None):
    super().__init__(reason)
    self.again, self.after = again, after


class Exchange:
  """Connections that are kept. No redirect is followed, no proxy is taken from the environment."""

  def __init__(self, token: str | None):
    headers = {"accept-encoding": "identity", "content-type": "application/json"}
    if token is not None:
      headers["authorization"] = f"Bearer {token}"
    self._http = httpx2.AsyncClient(
        timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS), trust_env=False,
        follow_redirects=False, headers=headers,
        limits=httpx2.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_SECONDS))

  async def ask(self, method: str, url: str, seconds: float, body: bytes = b"",
                headers: Mapping[str, str] | None = None) -> Reply:
    """The reply, whatever its status, if all of it comes within `seconds`; else a Fault."""
    try:
      async with asyncio.timeout(seconds):
        return await self._ask(method, url, body, headers)
    except TimeoutError as e:
      raise Fault(f"no answer within {seconds:g} s") from e
    except httpx2.LocalProtocolError as e:  # which quotes what was to be sent
      raise Fault("the request could not be written") from e
    except (httpx2.HTTPError, httpx2.InvalidURL) as e:
      raise Fault(f"{type(e).__name__}: {e}" if str(e) else type(e).__name__) from e

  async def close(self) -> None:
    await self._http.aclose()

  async def _ask(self, method: str, url: str, body: bytes,
                 headers: Mapping[str, str] | None) -> Reply:
    async with self._http.stream(method, url, content=body, headers=headers) as response:
      most = REPLY_BYTES if response.status_code == 200 else ERROR_BYTES
      if response.headers.get("content-encoding", "identity") != "identity":
        raise Fault("a compressed reply, which was not asked for")
      declared, parts, size = response.headers.get("content-length", ""), [], 0
      if not _is_number(declared) or int(declared) <= most:
        async for part in response.aiter_raw():
          parts.append(part)  # joined once: growing bytes would be copied, and held twice
          size += len(part)
          if size > most:
            break
        else:
          return Reply(response.status_code, response.headers, b"".join(parts))
      raise Fault(f"status {response.status_code} with more than {most:,} bytes")


def check_status(reply: Reply) -> None:
  """Anything but 200 is a Fault."""
  status = reply.status
  if status == 200:
    return
  said = f"status {status}{_detail(reply.body)}"
  if 300 <= status < 400:
    raise Fault(f"{said}: a redirect to {reply.headers.get('location', '?')[:200]}, which is not "
                "followed; name that address if it is the right one", again=False)
  if 400 <= status < 500 and status not in AGAIN:
    raise Fault(said, again=False)
  after = reply.headers.get("retry-after", "")
  if status in (429, 503) and _is_number(after) and len(after) < 7:
    raise Fault(said, after=float(after))
  raise Fault(said, after=1.0 if status == 429 else None)


def _is_number(text: str) -> bool:
  return text.isascii() and text.isdigit()


def _detail(body: bytes) -> str:
  """What a server says of its refusal, on one line."""
  try:
    detail = orjson.loads(body)["detail"]
  except (orjson.JSONDecodeError, KeyError, TypeError):
    return ""
  return " (" + "".join(c if c.isprintable() else " " for c in str(detail)[:200]) + ")"
