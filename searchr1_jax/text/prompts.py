"""Every word the environment says: prompt templates, observations, notices, and their cleaning."""

from __future__ import annotations

import dataclasses
import re
import unicodedata

from retriever.protocol import Passage
from searchr1_jax.text import actions
from searchr1_jax.types import UserError

SEARCH_PROMPT = """\
Work out the answer to the question at the end, and look up whatever you do not know for certain. \
Whenever something new reaches you, the question included, reason about it first between <think> \
and </think>. If a fact is missing after that, ask the search engine by writing \
<search> query </search>; the best passages it finds come back to you between <information> and \
</information>. Search again as often as it helps. Once nothing is missing, finish with the bare \
answer, a few words and no explanation, between <answer> and </answer>, in the style of \
<answer> Mount Etna </answer>.
Question: {question}
"""

REASONING_PROMPT = """\
Work out the answer to the question at the end from what you know. Reason about it first between \
<think> and </think>. Then finish with the bare answer, a few words and no explanation, between \
<answer> and </answer>, in the style of <answer> Mount Etna </answer>.
Question: {question}
"""

OBSERVATION_HEADER = f"\n\n{actions.INFORMATION_OPEN}"
OBSERVATION_FOOTER = f"{actions.INFORMATION_CLOSE}\n\n"

# The notices name the tags in words: a literal pair here could be read as an action.
INVALID_NOTICE = (
    "\n\nThat turn held no action I can carry out. Write a query inside search tags to look "
    "something up, or the final answer inside answer tags to finish, and close the tag.\n\n")
NO_SEARCH_LEFT_NOTICE = (
    "No search is left, so this query was not run. Give the final answer inside answer tags.\n")

_SLOT = "{question}"


def fill_template(template: str, question: str) -> str:
  """The template with the question in the place of every `{question}`; other braces stay."""
  if _SLOT not in template:
    raise UserError(
        f"the prompt template {template[:60]!r}… has no place for the question; write {_SLOT} "
        "where the question belongs")
  return template.replace(_SLOT, question)


@dataclasses.dataclass(frozen=True)
class PassageLine:
  """One passage as the policy will read it: `head` + `text` + a line break, all of it clean."""

  head: str
  title: str
  text: str
  cut: bool

  def __str__(self) -> str:
    return f"{self.head}{self.text}\n"


def render_passage(number: int, passage: Passage, max_bytes: int) -> PassageLine:
  """The line that shows one passage: `Doc {i}(Title: {title}) {text}` and a line break.

  The title is the first line of the contents as the corpus holds it, quotation marks included:
  that is the form in which the published checkpoints met it.
  """
  title, _, text = passage.contents.partition("\n")
  shown = clean(title, max_bytes)
  return PassageLine(
      head=f"Doc {number}(Title: {shown}) ",
      title=shown,
      text=clean(text, max_bytes),
      cut=_exceeds(title, max_bytes) or _exceeds(text, max_bytes))


# What may be a tag of ours to a hurried reader, or to one that folds widths and skips what is
# invisible. All repetitions are bounded so that no text makes the search quadratic.
_GAP = "[\\s\u00ad\u200c\u200d]{0,4}"
_TAG = re.compile(
    rf"[<＜﹤]{_GAP}([/／]?){_GAP}([^\s<＜﹤>＞﹥/／]{{1,40}}){_GAP}[/／]?{_GAP}[>＞﹥]")
_INVISIBLE = re.compile("[\u00ad\u200c\u200d]")
# Control characters but line feed and tab; invisible and direction-changing ones; no characters.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff"
    "\ufff9-\ufffb\ufffe\uffff]")


def clean(text: str, max_bytes: int) -> str:
  """Foreign text made harmless: cut by bytes, valid, composed, without controls or our tags.

  The cut comes first, so that the cost depends on `max_bytes` and not on the text. A tag turns
  into `[tag]`: removing it could bring the halves of another one together.
  """
  # A character takes at least one byte: the slice keeps the encoder from walking megabytes.
  raw = text[:max_bytes].encode("utf-8", "replace")[:max_bytes]
  visible = _CONTROL.sub("", raw.decode("utf-8", "ignore"))
  return _TAG.sub(_defused, unicodedata.normalize("NFC", visible))


def _defused(match: re.Match[str]) -> str:
  name = unicodedata.normalize("NFKC", _INVISIBLE.sub("", match[2])).lower()
  return f"[{match[1] and '/'}{name}]" if name in actions.TAGS else match[0]


def _exceeds(text: str, max_bytes: int) -> bool:
  return len(text) > max_bytes or len(text.encode("utf-8", "replace")) > max_bytes
