"""The actions a policy can take, and how they are read from the text of one turn."""

from __future__ import annotations

import dataclasses
import enum

TAGS = ("think", "search", "information", "answer")
STOP_TAGS = ("</search>", "</answer>")
INFORMATION_OPEN = "<information>"
INFORMATION_CLOSE = "</information>"


class ActionKind(enum.Enum):
  """What a turn asks for."""

  SEARCH = "search"
  ANSWER = "answer"
  INVALID = "invalid"


@dataclasses.dataclass(frozen=True)
class Action:
  """A turn's action; `content` is the query or the answer, stripped."""

  kind: ActionKind
  content: str = ""


INVALID = Action(ActionKind.INVALID)


def parse_action(turn_text: str) -> Action:
  """The first complete search or answer in the text of one turn; an empty query is invalid.

  A pair runs from the first opening tag to the first closing tag after it. An empty answer is an
  answer (a wrong one).
  """
  pairs = [p for p in (_first_pair(turn_text, k) for k in _WRITABLE) if p is not None]
  if not pairs:
    return INVALID
  _, action = min(pairs, key=lambda pair: pair[0])
  if action.kind is ActionKind.SEARCH and not action.content:
    return INVALID
  return action


_WRITABLE = (ActionKind.SEARCH, ActionKind.ANSWER)


def _first_pair(text: str, kind: ActionKind) -> tuple[int, Action] | None:
  """Where the first complete pair of `kind` opens, and the action it holds."""
  opening, closing = f"<{kind.value}>", f"</{kind.value}>"
  start = text.find(opening)
  if start < 0:
    return None
  # If nothing closes the first opening tag, nothing closes a later one either: one pass is enough.
  end = text.find(closing, start + len(opening))
  if end < 0:
    return None
  return start, Action(kind, text[start + len(opening):end].strip())
