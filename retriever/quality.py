"""Does what was found hold the answer? Pure text and numbers."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence

import numpy as np

from retriever.protocol import Passage

RESAMPLES = 2000
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
  """Lower-cases, drops ASCII punctuation, then a, an, the as whole words, and collapses spaces."""
  return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def contains(text: str, gold: str) -> bool:
  """Whether a gold that normalisation does not empty stands in a text, anywhere, as published."""
  inner = normalize_answer(gold)
  return bool(inner) and inner in normalize_answer(text)


def first_hit(golds: Sequence[str], passages: Iterable[Passage]) -> int | None:
  """The place, from 0, of the first passage that holds a gold as whole words; None without one."""
  wanted = [f" {inner} " for gold in golds if (inner := normalize_answer(gold))]
  for place, passage in enumerate(passages):
    text = f" {normalize_answer(passage.contents)} "
    if any(gold in text for gold in wanted):
      return place
  return None


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
  """The 95 % bootstrap interval of the mean (percentiles of resampled means).

  Of the differences of two engines question by question, it is the paired interval.
  """
  array = np.asarray(values, np.float64)
  rng = np.random.default_rng(seed)
  means = [array[rng.integers(len(array), size=len(array))].mean() for _ in range(RESAMPLES)]
  return float(np.percentile(means, 2.5)), float(np.percentile(means, 97.5))
