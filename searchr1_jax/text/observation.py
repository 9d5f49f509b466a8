"""What a search shows the policy, as ids: header, cleaned passages, footer, within a budget."""

from __future__ import annotations

import dataclasses
from typing import Callable, Sequence

from retriever.protocol import Passage
from searchr1_jax.text import prompts

MIN_PASSAGE_TOKENS = 32
"""A shortened passage keeps about this much; where not all can, the last ones are left out."""

BYTES_PER_TOKEN = 16
"""Passages are cut to this many bytes a token of space before encoding: English takes 4 to 5."""

Ids = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Frame:
  """The tokenizer's two functions, and the pieces that every observation has."""

  encode_plain: Callable[[str], Sequence[int]]
  decode_bytes: Callable[[Sequence[int]], bytes]
  header: Ids
  footer: Ids
  line_break: Ids

  @property
  def shortest(self) -> int:
    """Tokens of the shortest observation worth a search: one passage of `MIN_PASSAGE_TOKENS`."""
    return len(self.header) + MIN_PASSAGE_TOKENS + len(self.footer)


@dataclasses.dataclass(frozen=True)
class Observation:
  """The ids to insert; the passages as shown, cleaned and shortened; whether any text was lost."""

  ids: Ids
  passages: tuple[Passage, ...]
  truncated: bool


def make_frame(
    encode_plain: Callable[[str], Sequence[int]],
    decode_bytes: Callable[[Sequence[int]], bytes]) -> Frame:
  """The fixed pieces, encoded once."""
  header, footer, line_break = (
      tuple(encode_plain(piece))
      for piece in (prompts.OBSERVATION_HEADER, prompts.OBSERVATION_FOOTER, "\n"))
  return Frame(encode_plain, decode_bytes, header, footer, line_break)


def observe(frame: Frame, passages: Sequence[Passage], budget: int) -> Observation:
  """The observation of these passages in at most `budget` tokens, its tags always whole.

  Where they don't fit, the longest passages are shortened first, each between two characters.
  `budget` is at least `frame.shortest`.
  """
  space = budget - len(frame.header) - len(frame.footer)
  lines = [
      prompts.render_passage(number, passage, BYTES_PER_TOKEN * space)
      for number, passage in enumerate(passages, 1)]
  encoded = [tuple(frame.encode_plain(str(line))) for line in lines]
  count, cap = _share([len(ids) for ids in encoded], space)
  ids, shown = frame.header, []
  truncated = count < len(passages) or any(line.cut for line in lines)
  for passage, line, whole in zip(passages[:count], lines, encoded):
    kept = whole
    if len(whole) > cap:
      kept, truncated = _shorten(frame, whole, cap), True
      line = _as_read(line, frame.decode_bytes(kept).decode("utf-8", "replace"))
    ids += kept
    shown.append(Passage(passage.id, f"{line.title}\n{line.text}", passage.score))
  return Observation(ids + frame.footer, tuple(shown), truncated)


def _share(lengths: Sequence[int], space: int) -> tuple[int, int]:
  """How many passages are shown, and the most tokens that one of them may take.

  The cap is the largest with sum(min(length, cap)) <= space: it takes from the longest alone.
  """
  count = len(lengths)
  while sum(min(n, MIN_PASSAGE_TOKENS) for n in lengths[:count]) > space:
    count -= 1
  cap = space
  for left, length in zip(range(count, 0, -1), sorted(lengths[:count])):
    cap = space // left
    if length > cap:
      break
    space -= length
  else:
    cap = max(lengths[:count], default=0)
  return count, cap


def _shorten(frame: Frame, ids: Ids, cap: int) -> Ids:
  """At most `cap` tokens of a longer line: a prefix that ends between characters, a line break."""
  end = cap - len(frame.line_break)
  # A byte 10xxxxxx goes on with a character, so a cut before it would split one.
  while end > 0 and frame.decode_bytes(ids[end:end + 1])[:1] in _CONTINUATION:
    end -= 1
  return ids[:end] + frame.line_break


_CONTINUATION = frozenset(bytes([b]) for b in range(0x80, 0xC0))


def _as_read(line: prompts.PassageLine, read: str) -> prompts.PassageLine:
  """The line of which the policy reads no more than `read`."""
  read = read.removesuffix("\n")
  if read.startswith(line.head):
    return dataclasses.replace(line, text=read[len(line.head):])
  opening = line.head[:len(line.head) - len(f"{line.title}) ")]
  return dataclasses.replace(line, title=read.removeprefix(opening), text="")
