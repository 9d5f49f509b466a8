"""How good an answer is, and how well-formed the writing that led to it: pure text in, numbers out.

Only text that the policy wrote itself can earn anything: neither the prompt's example nor an
`<answer>` inside a retrieved passage is ever looked at.
"""

from __future__ import annotations

import collections
import re
from typing import Iterable, Mapping, Sequence

from retriever.protocol import Passage
from retriever.quality import contains, normalize_answer
from searchr1_jax.types import Role, Score, Trajectory, UserError

REWARDS = ("em", "f1", "subem", "em_format")

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TAG = re.compile(r"(</?(?:think|search|information|answer)>)")

# Where a well-formed episode may go from each state, and by which tag. Between tags, text may stand
# only inside one. The environment alone leads from "searched" to "informed".
_NEXT: Mapping[tuple[str, str], str] = {
    ("start", "<think>"): "in_think",
    ("informed", "<think>"): "in_think",
    ("in_think", "</think>"): "thought",
    ("thought", "<search>"): "in_search",
    ("in_search", "</search>"): "searched",
    ("thought", "<answer>"): "in_answer",
    ("in_answer", "</answer>"): "answered",
}


def exact_match(answer: str | None, golds: Sequence[str]) -> float:
  """1 where the answer equals a gold once both are normalised, else 0."""
  return float(answer is not None and any(_same(answer, gold) for gold in golds))


def f1(answer: str | None, golds: Sequence[str]) -> float:
  """The best token F1 of the answer against a gold: 2 overlap / (tokens there + tokens here)."""
  if answer is None:
    return 0.0
  return max((_f1_of(answer, gold) for gold in golds), default=0.0)


def subem(answer: str | None, golds: Sequence[str]) -> float:
  """1 where the normalised answer contains a gold that normalisation does not empty, else 0."""
  if answer is None:
    return 0.0
  return float(any(_same(answer, g) or contains(answer, g) for g in golds))


def last_answer(policy_texts: Iterable[str]) -> str | None:
  """The content of the last `<answer>` that opens and closes within one text of the policy."""
  found = [content for text in policy_texts for content in _ANSWER.findall(text)]
  return found[-1].strip() if found else None


def format_valid(spans: Iterable[tuple[Role, str]]) -> bool:
  """Whether an episode, cut into spans by writer, thinks before every action and ends in an answer.

  Every tag must come in legal order with nothing but white space between them. An information span
  of the environment is trusted whole, whatever its passages contain; any other notice of the
  environment, and information that the policy wrote itself, make the format invalid.
  """
  state: str | None = "start"
  for role, text in spans:
    if role is Role.POLICY:
      state = _after_policy(state, text)
    else:
      state = "informed" if state == "searched" and _is_information(text) else None
    if state is None:
      return False
  return state == "answered"


def retrieval_hit(golds: Sequence[str], passages: Iterable[Passage]) -> float:
  """1 where a gold stands in some passage, both normalised, else 0."""
  return float(any(contains(p.contents, gold) for p in passages for gold in golds))


def format_reward(
    correct: bool, valid: bool, answered: bool, structure: float, final: float) -> float:
  """The follow-up study's table: what an answer and the form of its episode earn together.

                  valid        invalid
    right         1            1 - structure
    wrong         structure    final
    no answer     structure    0

  Args:
    correct: exact match with a gold.
    valid: `format_valid`.
    answered: whether there is an answer at all.
    structure: s, what form alone is worth (0.2).
    final: f, what an answer alone is worth (0.1).
  Source: Jin et al. 2025, arXiv:2505.15117, section 3, and its published scripts.
  """
  if correct:
    return 1.0 if valid else 1.0 - structure
  if valid:
    return structure
  return final if answered else 0.0


def score(
    trajectory: Trajectory,
    texts: Sequence[str],
    *,
    name: str = "em",
    structure: float = 0.2,
    final: float = 0.1,
    retrieval_bonus: float = 0.0,
    search_cost: float = 0.0,
    no_answer_penalty: float = 0.0,
) -> Score:
  """Scores one episode; `texts` are its segments decoded, one each.

  `name` picks the main term, one of `REWARDS`. Added to it, and logged apart in `parts`:
  `retrieval_bonus` where a gold was shown, minus `search_cost` a search that ran, minus
  `no_answer_penalty` where no answer was given.
  """
  spans = [(s.role, text) for s, text in zip(trajectory.segments, texts, strict=True)]
  golds = trajectory.question.golden_answers
  answer = last_answer(text for role, text in spans if role is Role.POLICY)
  shown = [p for record in trajectory.searches for p in record.passages]
  em, valid = exact_match(answer, golds), format_valid(spans)
  mains = {
      "em": em,
      "f1": f1(answer, golds),
      "subem": subem(answer, golds),
      "em_format": format_reward(em == 1.0, valid, answer is not None, structure, final),
  }
  if name not in mains:
    raise UserError(f"unknown reward {name!r}; choose one of {', '.join(REWARDS)}")
  hit = retrieval_hit(golds, shown)
  parts = {
      "main": mains[name],
      "retrieval": retrieval_bonus * hit,
      "search": -search_cost * len(trajectory.searches),
      "no_answer": -no_answer_penalty if answer is None else 0.0,
  }
  return Score(
      reward=sum(parts.values()),
      em=em,
      f1=mains["f1"],
      subem=mains["subem"],
      format_valid=float(valid),
      retrieval_hit=hit,
      answer=answer,
      parts=parts)


def _same(answer: str, gold: str) -> bool:
  ours, theirs = normalize_answer(answer), normalize_answer(gold)
  if not ours and not theirs:  # "The" must not equal "!": compare what there was to compare
    return answer.strip().lower() == gold.strip().lower()
  return ours == theirs


def _f1_of(answer: str, gold: str) -> float:
  ours, theirs = normalize_answer(answer).split(), normalize_answer(gold).split()
  if not ours and not theirs:
    return float(_same(answer, gold))
  overlap = (collections.Counter(ours) & collections.Counter(theirs)).total()
  return 2.0 * overlap / (len(ours) + len(theirs))


def _is_information(text: str) -> bool:
  text = text.strip()
  return text.startswith("<information>") and text.endswith("</information>")


def _after_policy(state: str, text: str) -> str | None:
  """The state after a span of the policy; None once it is out of order."""
  pieces = _TAG.split(text)
  if len(pieces) > 1 and pieces[-2] in ("</search>", "</answer>"):
    # The token that ends an action may hold more than its `>`, such as `>.`; no word, though.
    if any(c.isalnum() for c in pieces.pop()):
      return None
  for piece in pieces:
    if _TAG.fullmatch(piece):
      state = _NEXT.get((state, piece))
    elif piece.strip() and state not in ("in_think", "in_search", "in_answer"):
      return None
    if state is None:
      return None
  return state
