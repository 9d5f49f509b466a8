"""Fetches pages that strangers name: public addresses only, so many bytes, so many seconds.

A page's host is resolved once a hop, every address of it is judged, and the connection goes to an
address that passed: a name that means another machine a moment later changes nothing. Redirects
are followed by hand, each as if it were a new page. Nothing is sent along: no cookies, no
credentials, no referrer; and no proxy of the environment is used, since it would resolve again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import ipaddress
import re
import socket
import ssl
import threading
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import httpx2

T = TypeVar("T")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_BYTES = 2 << 20  # of a body, as sent and as unpacked
SECONDS = 10.0  # for all of a fetch: names, hops, headers and bodies
MAX_REDIRECTS = 5
HEADERS = {"Accept": "text/html, text/plain;q=0.9", "Accept-Encoding": "gzip",
           "User-Agent": "retriever (page reader)"}


class Refused(Exception):
  """A URL that isn't fetched or a reply that isn't taken: says why, in one line."""


@dataclasses.dataclass(frozen=True)
class Reply:
  """What came back; `cut`: there was more of `body`, which was not read."""

  url: str
  status: int
  headers: httpx2.Headers
  body: bytes = dataclasses.field(repr=False)
  cut: bool


def is_public(address: Address) -> bool:
  """Whether an address belongs to the open internet, and so does one that hides within it."""
  if any(address in network for network in _NOT_PUBLIC if network.version == address.version):
    return False
  if isinstance(address, ipaddress.IPv4Address):
    return address.is_global and not address.is_multicast and not address.is_reserved
  if address in _NAT64:
    return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
  if address.sixtofour is not None:
    return is_public(address.sixtofour)
  # The rest of the space is mapped, compatible, local, multicast or nobody's.
  return address in _UNICAST and address.is_global


async def system_resolve(host: str, port: int) -> list[str]:
  """The addresses of a host, as the machine's resolver has them."""
  found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
  return list(dict.fromkeys(str(address[0]) for *_, address in found))


def any_host(host: str) -> bool:
  return True


@dataclasses.dataclass(frozen=True)
class Guard:
  """The rules of a fetch; `host_allowed` is asked at each hop, with a lower-case ASCII name."""

  allowed: Callable[[Address], bool] = is_public
  resolve: Callable[[str, int], Awaitable[Sequence[str]]] = system_resolve
  host_allowed: Callable[[str], bool] = any_host
  max_bytes: int = MAX_BYTES
  seconds: float = SECONDS
  tls: ssl.SSLContext | None = None


async def fetch(url: str, guard: Guard = Guard()) -> Reply:
  """GETs a page under the guard's rules; whatever keeps it from that is a Refused."""
  where = url
  try:
    async with asyncio.timeout(guard.seconds):
      for _ in range(MAX_REDIRECTS + 1):
        target = check_url(where)
        reply = await _get(target, guard)
        if reply.status not in (301, 302, 303, 307, 308) or "location" not in reply.headers:
          return reply
        where = str(target.join(reply.headers["location"]))
      raise Refused(f"{_short(url)} redirects more than {MAX_REDIRECTS} times")
  except TimeoutError:
    raise Refused(f"{_short(where)} sent no whole reply within {guard.seconds:g} s") from None
  except httpx2.HTTPError as e:
    raise Refused(f"{_short(where)} could not be read ({type(e).__name__})") from None
  except (httpx2.InvalidURL, UnicodeError, ValueError) as e:
    raise Refused(f"{_short(where)} is no URL to follow ({type(e).__name__})") from None


def check_url(url: str) -> httpx2.URL:
  """The URL taken apart, once it names a web page in the one form that all readers agree on."""
  try:
    target = httpx2.URL(url)
  except (httpx2.InvalidURL, UnicodeError) as e:
    raise Refused(f"{_short(url)} is no URL ({type(e).__name__})") from None
  if target.scheme not in ("http", "https"):
    raise Refused(f"{_short(url)} has the scheme {target.scheme[:20]!r}, wanted http or https")
  if target.userinfo:
    raise Refused(f"{_short(url)} carries a user name; pages are fetched without")
  host = target.raw_host.decode("ascii")
  if not _HOST.fullmatch(host) and not _is_address(host):
    raise Refused(f"{_short(url)} names no host")
  # 2130706433, 0x7f.1 and 0177.0.0.1 are addresses to some readers and names to others.
  if _NUMERIC.search(host) and not _is_address(host):
    raise Refused(f"{_short(url)} spells an address as no address is spelt")
  return target


async def read_body(response: httpx2.Response, max_bytes: int = MAX_BYTES) -> tuple[bytes, bool]:
  """A streamed response's body up to `max_bytes`, unpacked no further; whether there is more."""
  encoding = response.headers.get("content-encoding", "").strip().lower()
  if encoding not in ("", "identity", "gzip", "x-gzip"):
    raise Refused(f"the reply is packed as {encoding[:20]!r}, wanted gzip or nothing")
  unpacker = zlib.decompressobj(wbits=31) if "gzip" in encoding else None
  body, sent = bytearray(), 0
  async for chunk in response.aiter_raw():
    sent += len(chunk)
    room = max_bytes + 1 - len(body)
    try:
      body += chunk[:room] if unpacker is None else unpacker.decompress(chunk, room)
    except zlib.error:
      raise Refused("the reply is no whole gzip file") from None
    if max(sent, len(body)) > max_bytes:
      return bytes(body[:max_bytes]), True
  if unpacker is not None and sent and not unpacker.eof:
    raise Refused("the reply is no whole gzip file")
  return bytes(body), False


class Background:
  """An event loop in a thread of its own: async code behind an interface that isn't."""

  def __init__(self):
    self._loop = asyncio.new_event_loop()
    # A daemon: whoever forgets `close` still gets to the end of the program.
    self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="egress")
    self._thread.start()

  def run(self, work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine; concurrent.futures.CancelledError if `close` came before it."""
    future = asyncio.run_coroutine_threadsafe(work, self._loop)
    try:
      return future.result()
    finally:
      future.cancel()

  def close(self) -> None:
    """Cancels what still runs and ends the thread."""
    if self._loop.is_closed():
      return
    self.run(_cancel_others())
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()


Cancelled = concurrent.futures.CancelledError


async def _get(target: httpx2.URL, guard: Guard) -> Reply:
  """One hop, to the first of the host's addresses that takes the connection."""
  host = target.raw_host.decode("ascii").lower().rstrip(".")
  if not guard.host_allowed(host):
    raise Refused(f"{_short(str(target))} is on a blocked host")
  error = None
  for address in await _addresses(target, guard):
    try:
      return await _get_from(address, target, host, guard)
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as e:
      error = e
  raise error or Refused(f"{_short(str(target))} has no address")


async def _addresses(target: httpx2.URL, guard: Guard) -> list[Address]:
  """The host's addresses; one that isn't allowed makes the host one that isn't."""
  host = target.raw_host.decode("ascii")
  port = target.port or (443 if target.scheme == "https" else 80)
  try:
    names = [host] if _is_address(host) else await guard.resolve(host, port)
    addresses = [ipaddress.ip_address(name) for name in names]
  except (OSError, ValueError):
    raise Refused(f"{_short(str(target))}: the host's name leads nowhere") from None
  for address in addresses:
    if not guard.allowed(address):
      raise Refused(f"{_short(str(target))} lies at {address}, which is not on the open internet")
  return addresses


async def _get_from(address: Address, target: httpx2.URL, host: str, guard: Guard) -> Reply:
  # No connection is kept: one opened for a host is never used for another at the same address.
  async with httpx2.AsyncClient(
      trust_env=False, follow_redirects=False, verify=guard.tls or _tls(),
      timeout=guard.seconds, limits=httpx2.Limits(max_keepalive_connections=0)) as client:
    request = client.build_request(
        "GET", target.copy_with(host=str(address), fragment=None),
        headers=HEADERS | {"Host": target.netloc.decode("ascii"), "Connection": "close"},
        extensions={"sni_hostname": host})
    response = await client.send(request, stream=True)
    try:
      body, cut = await read_body(response, guard.max_bytes)
    finally:
      await response.aclose()
    return Reply(str(target), response.status_code, response.headers, body, cut)


async def _cancel_others() -> None:
  others = asyncio.all_tasks() - {asyncio.current_task()}
  for task in others:
    task.cancel()
  await asyncio.gather(*others, return_exceptions=True)


@functools.cache
def _tls() -> ssl.SSLContext:
  return httpx2.create_ssl_context(trust_env=False)


def _is_address(host: str) -> bool:
  try:
    return "%" not in host and bool(ipaddress.ip_address(host))
  except ValueError:
    return False


def _short(url: str) -> str:
  """A URL fit for a message: no user name, no query, no line breaks, not long."""
  plain = re.sub(r"//[^/]*@", "//", url.partition("?")[0].partition("#")[0])
  return repr(plain if len(plain) <= 100 else f"{plain[:99]}…")


_HOST = re.compile(r"(?=.{1,253}\.?\Z)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_NUMERIC = re.compile(r"(?i)(?:^|\.)(?:\d+|0x[0-9a-f]*)\.?$")
_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# What the standard library's tables call global, or called so in older versions.
_NOT_PUBLIC = tuple(map(ipaddress.ip_network, (
    "168.63.129.16/32",  # the agent of Azure's virtual machines
    "192.88.99.0/24",  # relays of 6to4
    "192.0.0.0/24",  # protocols' own, and a cloud's metadata
    "2001::/32",  # Teredo: any address may hide in it
    "3fff::/20",  # documentation
)))
