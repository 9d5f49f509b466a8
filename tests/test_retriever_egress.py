"""Pages that strangers name: nothing inside is reached, nothing is read for long or without end."""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import shutil
import ssl
import subprocess
import threading
import time
import tracemalloc

import pytest
from fake_web import Web, reply

from retriever import egress
from retriever.egress import Guard, Refused

OUTSIDE = "127.0.0.2"  # plays the open internet; the canary's 127.0.0.1 stays inside


def allowed(address):
  return str(address) == OUTSIDE or egress.is_public(address)


def naming(**addresses):
  """A resolver that knows these names (dots written as _), and counts how often it is asked."""
  async def resolve(host, port):
    resolve.asked.append(host)
    if (found := addresses.get(host.replace(".", "_"))) is None:
      raise OSError(f"{host} is nobody's name")
    return [next(found)] if hasattr(found, "__next__") else found

  resolve.asked = []
  return resolve


def fetch(url, **rules):
  return asyncio.run(egress.fetch(url, Guard(**{"allowed": allowed, "resolve": naming()} | rules)))


@pytest.fixture
def canary():
  with Web(lambda asked: reply("inside")) as web:
    yield web


@pytest.fixture
def outside():
  pages = {}
  with Web(lambda asked: pages[asked.path](asked), OUTSIDE) as web:
    web.pages = pages
    yield web


# What is reached.


def test_a_page_comes_with_its_headers_and_without_anything_of_ours(outside):
  outside.pages["/a"] = lambda asked: reply(
      gzip.compress("é".encode()), content_encoding="gzip", content_type="text/plain",
      set_cookie="a=b")
  found = fetch(outside.url("/a?q=1#here"))
  assert (found.status, found.body, found.cut) == (200, "é".encode(), False)
  assert found.headers["content-type"] == "text/plain"
  assert outside.asked[0].params == {"q": "1"}
  assert sorted(outside.asked[0].headers) == [
      "accept", "accept-encoding", "connection", "host", "user-agent"]


def test_a_name_is_asked_for_once_and_stands_in_the_host_header(outside):
  outside.pages["/"] = lambda asked: reply("x")
  resolve = naming(page_test=[OUTSIDE])
  fetch(outside.url(host="page.test"), resolve=resolve)
  assert resolve.asked == ["page.test"]
  assert outside.asked[0].headers["host"] == f"page.test:{outside.port}"


def test_a_redirect_is_followed_without_cookies_or_a_referrer(outside):
  outside.pages["/a"] = lambda asked: reply("", 302, location="/b", set_cookie="a=b; Path=/")
  outside.pages["/b"] = lambda asked: reply("there")
  found = fetch(outside.url("/a"))
  assert found.body == b"there" and found.url == outside.url("/b")
  assert not {"cookie", "referer", "authorization"} & outside.asked[1].headers.keys()


@pytest.mark.parametrize("redirects, arrives", [(5, True), (6, False)])
def test_five_redirects_and_no_more(outside, redirects, arrives):
  for n in range(redirects):
    outside.pages[f"/{n}"] = lambda asked, n=n: reply("", 307, location=f"/{n + 1}")
  outside.pages[f"/{redirects}"] = lambda asked: reply("there")
  if arrives:
    assert fetch(outside.url("/0")).body == b"there"
  else:
    with pytest.raises(Refused, match="redirects more than 5 times"):
      fetch(outside.url("/0"))


def test_a_second_address_is_tried_where_the_first_takes_no_connection(outside):
  outside.pages["/"] = lambda asked: reply("x")
  both = lambda address: str(address).startswith("127.0.0.")
  found = fetch(outside.url(host="two.test"), allowed=both,
                resolve=naming(two_test=["127.0.0.9", OUTSIDE]))
  assert found.body == b"x"


def test_proxies_of_the_environment_are_not_used(outside, canary, monkeypatch):
  outside.pages["/"] = lambda asked: reply("x")
  for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
    monkeypatch.setenv(name, canary.url())
  assert fetch(outside.url()).body == b"x" and canary.connections == 0


def test_the_certificate_is_that_of_the_name_not_of_the_address(tmp_path):
  if shutil.which("openssl") is None:
    pytest.skip("openssl, which makes the certificate, is not installed")
  subprocess.run(
      ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=x",
       "-addext", "subjectAltName=DNS:page.test", "-keyout", tmp_path / "key", "-out",
       tmp_path / "cert"], check=True, capture_output=True)
  ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
  ours.load_cert_chain(tmp_path / "cert", tmp_path / "key")
  named = []
  ours.sni_callback = lambda socket, name, context: named.append(name)
  trusting = ssl.create_default_context(cafile=tmp_path / "cert")
  resolve = naming(page_test=[OUTSIDE], other_test=[OUTSIDE])
  with Web(lambda asked: reply("secret"), OUTSIDE, ours) as web:
    rules = {"tls": trusting, "resolve": resolve}
    assert fetch(web.url(host="page.test", scheme="https"), **rules).body == b"secret"
    with pytest.raises(Refused, match="ConnectError"):
      fetch(web.url(host="other.test", scheme="https"), **rules)
    with pytest.raises(Refused, match="ConnectError"):
      fetch(web.url(host="page.test", scheme="https"), resolve=resolve)  # nobody vouches for it
  assert named == ["page.test", "other.test", "page.test"]


# What is not.


INWARDS = {
    "loopback": "http://127.0.0.1:{port}/", "any": "http://0.0.0.0:{port}/",
    "IPv6": "http://[::1]:{port}/", "mapped": "http://[::ffff:127.0.0.1]:{port}/",
    "mapped in hex": "http://[::ffff:7f00:1]:{port}/",
    "compatible": "http://[::127.0.0.1]:{port}/", "NAT64": "http://[64:ff9b::127.0.0.1]:{port}/",
    "6to4": "http://[2002:7f00:1::]:{port}/", "IPv6 any": "http://[::]:{port}/",
    "zone": "http://[fe80::1%25lo]:{port}/",
    "decimal": "http://2130706433:{port}/", "octal": "http://0177.0.0.1:{port}/",
    "hex": "http://0x7f.0.0.1:{port}/", "hex whole": "http://0x7f000001:{port}/",
    "short": "http://127.1:{port}/", "trailing dot": "http://127.0.0.1.:{port}/",
    "full width": "http://１２７.0.0.1:{port}/", "enclosed": "http://①②⑦.0.0.1:{port}/",
    "ideographic dots": "http://127。0。0。1:{port}/",
    "user name": "http://example.com@127.0.0.1:{port}/",
    "backslash": "http://127.0.0.1:{port}\\@example.com/", "localhost": "http://localhost:{port}/",
    "name": "http://inside.test:{port}/", "one of two": "http://mixed.test:{port}/",
    "metadata": "http://169.254.169.254/latest/meta-data/", "private": "http://10.0.0.1:{port}/",
    "file": "file:///etc/passwd", "gopher": "gopher://127.0.0.1:{port}/_x",
    "no scheme": "//127.0.0.1:{port}/", "line break": "http://127.0.0.1:{port}/\r\nHost: x",
    "redirect": "{outside}/inwards", "redirect to a file": "{outside}/file",
    "redirect by name": "{outside}/by-name", "second of three": "{outside}/hop",
    "rebinding": "http://rebinds.test:{port}/"}


@pytest.mark.parametrize("kind", INWARDS)
def test_nothing_inside_is_reached(kind, canary, outside):
  inwards = canary.url()
  outside.pages.update({
      "/inwards": lambda asked: reply("", 302, location=inwards),
      "/file": lambda asked: reply("", 301, location="file:///etc/passwd"),
      "/by-name": lambda asked: reply("", 303, location=f"//inside.test:{canary.port}/"),
      "/hop": lambda asked: reply("", 308, location="/inwards")})
  # The rebinding name means the outside when it is judged, and the inside from then on.
  resolve = naming(inside_test=["127.0.0.1"], mixed_test=[OUTSIDE, "127.0.0.1"],
                   rebinds_test=iter([OUTSIDE, *["127.0.0.1"] * 9]), localhost=["127.0.0.1"])
  url = INWARDS[kind].format(port=canary.port, outside=outside.url("").rstrip("/"))
  with pytest.raises(Refused) as caught:
    fetch(url, resolve=resolve, seconds=3.0)
  assert canary.connections == 0
  assert "\n" not in str(caught.value) and len(str(caught.value)) < 250
  if kind == "rebinding":
    assert resolve.asked == ["rebinds.test"]  # it went where it had looked: nobody listens there


@pytest.mark.parametrize("url, says", [
    *((INWARDS[kind], "spells an address|no URL") for kind in ("decimal", "octal", "hex", "short")),
    ("http://1.2.3:{port}/", "spells an address"), ("http://a.0x1.:{port}/", "spells an address"),
    ("http://user:pw@127.0.0.2:{port}/", "user name"), ("http://@127.0.0.2:{port}/", None),
    ("http://a%2eb:{port}/", "names no host"), ("http://:{port}/", "names no host"),
    ("http://[127.0.0.2]:{port}/", "no URL"), ("ws://127.0.0.2:{port}/", "scheme 'ws'")])
def test_what_two_readers_would_read_differently_is_not_read_at_all(url, says, outside):
  """Whatever the resolver makes of it."""
  async def anywhere(host, port):
    return [OUTSIDE]

  outside.pages["/"] = lambda asked: reply("x")
  if says is None:
    assert fetch(url.format(port=outside.port)).body == b"x"
    return
  with pytest.raises(Refused, match=says):
    fetch(url.format(port=outside.port), resolve=anywhere)
  assert outside.connections == 0


def test_the_canary_hears_whoever_does_not_look(canary):
  """Else a canary that is deaf would prove all of the above."""
  assert fetch(canary.url(), allowed=lambda address: True).body == b"inside"
  assert canary.connections == 1


@pytest.mark.parametrize("address, public", [
    ("8.8.8.8", True), ("2606:4700::1111", True), ("64:ff9b::8.8.8.8", True),
    ("2002:808:808::1", True), ("127.0.0.1", False), ("10.1.2.3", False), ("172.16.0.1", False),
    ("192.168.1.1", False), ("100.64.0.1", False), ("169.254.169.254", False),
    ("168.63.129.16", False), ("0.0.0.0", False), ("255.255.255.255", False),
    ("224.0.0.1", False), ("240.0.0.1", False), ("192.0.2.1", False), ("198.18.0.1", False),
    ("192.88.99.1", False), ("::", False), ("::1", False), ("::8.8.8.8", False),
    ("::ffff:8.8.8.8", False), ("64:ff9b::10.0.0.1", False), ("64:ff9b:1::8.8.8.8", False),
    ("2002:a00:1::1", False), ("2001::1", False), ("2001:db8::1", False), ("3fff::1", False),
    ("fe80::1", False), ("fec0::1", False), ("fc00::1", False), ("fd00:ec2::254", False),
    ("ff02::1", False), ("ff0e::1", False), ("4000::1", False), ("100::1", False)])
def test_what_is_public(address, public):
  assert egress.is_public(ipaddress.ip_address(address)) == public


def test_a_blocked_host_is_refused_wherever_a_redirect_leads(outside):
  outside.pages["/"] = lambda asked: reply("", 302, location=outside.url("/b", "BAD.test."))
  outside.pages["/b"] = lambda asked: reply("blocked")
  with pytest.raises(Refused, match="blocked host"):
    fetch(outside.url(host="good.test"), host_allowed=lambda host: host != "bad.test",
          resolve=naming(good_test=[OUTSIDE], bad_test=[OUTSIDE]))
  assert len(outside.asked) == 1


# How much and how long.


def endless(first, piece, stop):
  """Goes on for 10 GB, or until the other side has gone."""
  yield first
  for _ in range(10_000_000_000 // len(piece)):
    if stop.is_set():
      return
    yield piece


def head(**headers):
  return "\r\n".join(["HTTP/1.1 200 OK", *(f"{k.replace('_', '-')}: {v}"
                                          for k, v in headers.items()), "", ""]).encode()


@pytest.mark.parametrize("headers", [{}, {"content_length": 10_000_000_000}])
def test_ten_gigabytes_are_cut_at_two_megabytes(outside, headers):
  stop = threading.Event()
  outside.pages["/"] = lambda asked: endless(head(**headers), bytes(65_536), stop)
  begin = time.monotonic()
  found = fetch(outside.url())
  stop.set()
  assert found.cut and len(found.body) == egress.MAX_BYTES == 2 << 20
  assert time.monotonic() - begin < 10


def test_a_gzip_bomb_is_stopped_while_it_inflates(outside):
  packed = gzip.compress(bytes(200 << 20), 9)
  assert len(packed) < 1 << 20  # 1,000 to 1: all of it is sent
  outside.pages["/"] = lambda asked: reply(packed, content_encoding="gzip")
  outside.pages["/small"] = lambda asked: reply("x")
  fetch(outside.url("/small"))  # what the first fetch of a process loads is not the bomb's
  tracemalloc.start()
  found = fetch(outside.url())
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert found.cut and len(found.body) == 2 << 20
  assert peak < 8 << 20


def test_a_gzip_file_that_unpacks_to_nothing_ends_too(outside):
  # Stored blocks without content, for ever: 5 bytes each, none of them a byte of text.
  blocks = b"\x00\x00\x00\xff\xff" * 10_000
  stop = threading.Event()
  outside.pages["/"] = lambda asked: endless(
      head(content_encoding="gzip") + gzip.compress(b"")[:10], blocks, stop)
  found = fetch(outside.url())
  stop.set()
  assert found.cut and found.body == b""


@pytest.mark.parametrize("where", ["headers", "body", "silence", "redirects", "name"])
def test_a_drip_ends_at_the_deadline(outside, where):
  stop = threading.Event()

  def drip(first, piece):
    yield first
    while not stop.wait(0.05):
      yield piece

  def slow_redirect(asked):
    time.sleep(0.25)
    return reply("", 302, location=asked.path + "x")

  async def slow_name(host, port):
    await asyncio.sleep(60)

  for n in range(7):
    outside.pages["/" + "x" * n] = {
        "headers": lambda asked: drip(b"HTTP/1.1 200 OK\r\nA: ", b"x"),
        "body": lambda asked: drip(head(), b"x"), "silence": lambda asked: drip(b"", b""),
        "redirects": slow_redirect, "name": None}[where]
  begin = time.monotonic()
  url = outside.url(host="slow.test" if where == "name" else None)
  with pytest.raises(Refused, match="no whole reply within 0.6 s"):
    fetch(url, seconds=0.6, resolve=slow_name)
  stop.set()
  assert 0.5 < time.monotonic() - begin < 2


@pytest.mark.parametrize("answer, says", [
    (reply("x", content_encoding="br"), "packed as 'br'"),
    (reply("x", content_encoding="gzip, gzip"), "packed as 'gzip, gzip'"),
    (reply("no gzip", content_encoding="gzip"), "no whole gzip file"),
    (reply(gzip.compress(b"x" * 99)[:-9], content_encoding="gzip"), "no whole gzip file"),
    (reply("x", content_length=9), "RemoteProtocolError"), (b"junk\r\n\r\n", "RemoteProtocolError"),
    (b"", "RemoteProtocolError"), (reply("", 302, location="http://[::"), "is no URL"),
    (reply("", 302, location="http://a..b/"), "names no host"),
    (reply("", 302, location="http://a" + "a" * 70_000), "RemoteProtocolError|no URL")])
def test_a_broken_reply_is_refused_with_its_reason(outside, answer, says):
  outside.pages["/"] = lambda asked: answer
  with pytest.raises(Refused, match=says):
    fetch(outside.url())


def test_a_message_holds_no_secret_of_a_url():
  with pytest.raises(Refused) as caught:
    fetch("http://user:canary@127.0.0.1/?token=canary#canary")
  assert "canary" not in str(caught.value)


# The thread behind the engines.


def test_closing_ends_what_still_runs():
  background = egress.Background()
  results = []

  def wait():
    try:
      background.run(asyncio.sleep(60))
    except egress.Cancelled:
      results.append("cancelled")

  waiter = threading.Thread(target=wait)
  waiter.start()
  time.sleep(0.1)
  background.close()
  waiter.join(5)
  assert results == ["cancelled"] and not waiter.is_alive()
  background.close()  # once is enough, twice is no error
