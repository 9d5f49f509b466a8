"""The readable text of a web page, in time proportional to its length whatever it holds."""

from __future__ import annotations

import html
import re

# The text encodings that pages are written in. Python knows others that are slow on purpose-made
# input, or that are no encodings of pages at all.
_CHARSETS = frozenset((
    "utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin1", "iso-8859-2", "iso-8859-5",
    "iso-8859-7", "iso-8859-8", "iso-8859-9", "iso-8859-15", "windows-1250", "windows-1251",
    "windows-1252", "windows-1253", "windows-1254", "windows-1255", "windows-1256",
    "windows-1257", "windows-1258", "koi8-r", "koi8-u", "shift_jis", "euc-jp", "euc-kr", "big5",
    "gb2312", "gbk", "gb18030", "utf-16", "utf-16le", "utf-16be"))
_CHARSET = re.compile(r"""charset\s{0,4}=\s{0,4}["']?([\w-]{1,20})""", re.IGNORECASE)

# No branch can fail once it has begun, so no character is looked at twice: an unclosed comment,
# script or tag reaches to the end of the page.
_MARKUP = re.compile(
    r"<!--.*?(?:-->|\Z)"
    r"|<(script|style|noscript|template|svg|title|iframe|textarea|select)\b[^>]*"
    r".*?(?:</\1\b[^>]*>?|\Z)"
    r"|<(/?[a-z][a-z0-9]*)[^>]*>?"
    r"|<[!?/][^>]*>?", re.IGNORECASE | re.DOTALL)
_INLINE = frozenset((
    "a", "abbr", "b", "bdi", "bdo", "cite", "code", "em", "font", "i", "kbd", "mark", "q", "s",
    "small", "span", "strong", "sub", "sup", "u", "var", "wbr"))
_SPACES = re.compile(r"\s+")
_LONG_NUMBER = re.compile(r"&#(?:\d{8,}|x[0-9a-f]{7,});?", re.IGNORECASE)


def page_text(body: bytes, content_type: str, max_chars: int) -> str:
  """The first `max_chars` characters that a reader sees, one line a block; "" where it isn't text.

  `content_type`: the header's value; without one the body is taken for HTML.
  """
  kind = content_type.partition(";")[0].strip().lower() or "text/html"
  if kind not in ("text/html", "application/xhtml+xml", "text/plain"):
    return ""
  text = body.decode(_charset(body, content_type), "replace")
  return _tidy(text if kind == "text/plain" else _visible(text, 4 * max_chars), max_chars)


def _charset(body: bytes, content_type: str) -> str:
  declared = [content_type, body[:1024].decode("latin-1")]
  names = [m[1].lower() for m in map(_CHARSET.search, declared) if m]
  return next((name for name in names if name in _CHARSETS), "utf-8")


def _visible(page: str, enough: int) -> str:
  """The text between the tags, a line break for each that isn't inline, until it is enough."""
  pieces, size, at = [], 0, 0
  for match in _MARKUP.finditer(page):
    piece = _SPACES.sub(" ", page[at:match.start()])
    tag = (match[2] or "").removeprefix("/").lower()
    pieces += (piece, "" if tag in _INLINE or match[0].startswith("<!") else "\n")
    at, size = match.end(), size + len(piece.strip())
    if size > enough:
      break
  else:
    pieces.append(_SPACES.sub(" ", page[at:]))
  # A number too long for any character would be too long for int() as well.
  return html.unescape(_LONG_NUMBER.sub("\ufffd", "".join(pieces)))


def _tidy(text: str, max_chars: int) -> str:
  lines = (" ".join(line.split()) for line in text.splitlines())
  return "\n".join(line for line in lines if line)[:max_chars].rstrip()
