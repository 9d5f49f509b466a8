"""Program: how good an engine is for its purpose: does what it finds hold the answer?

  python -m retriever.evaluate --index SPEC [--index SPEC2 …] --questions F [--k 1,3,5,10]

A SPEC is an index folder, a URL, or a mapping as JSON (`retriever/opening.py`). Questions are
jsonl rows with `question` and `golden_answers`. Answer recall at k: the share of questions with a
passage among the first k that holds an answer as whole words, both normalised. MRR: the mean of
1 / place of the first such passage among the largest k. In brackets: 95 % bootstrap intervals. The
first index is compared with every other, question by question. --json: one object on the last line.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
import rich.table
import rich.text

from retriever import console, opening, quality, sharing
from retriever.protocol import CorpusError, RetrievalError, SearchEngine, UserError

WANTED = 'wanted {"question": "…", "golden_answers": ["…"]}'


@dataclasses.dataclass(frozen=True)
class Question:
  question: str
  golds: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Measured:
  """One engine's: `places`, of each question's first good passage (None without one); seconds of
  each query asked alone."""

  name: str
  places: tuple[int | None, ...]
  seconds: tuple[float, ...]

  def recall(self, k: int) -> list[float]:
    """1 for each question with a good passage among its first k, else 0."""
    return [float(p is not None and p < k) for p in self.places]

  def reciprocal(self) -> list[float]:
    return [0.0 if p is None else 1.0 / (p + 1) for p in self.places]


def main(argv: Sequence[str] | None = None) -> int:
  """Measures as the command line says; returns the exit code."""
  p = argparse.ArgumentParser("python -m retriever.evaluate", allow_abbrev=False,
                              description="Answer recall of search engines.")
  p.add_argument("--index", action="append", required=True, help="a spec; may be given repeatedly")
  p.add_argument("--questions", type=Path, required=True)
  p.add_argument("--k", default="1,3,5,10", help="numbers of passages, with commas")
  p.add_argument("--limit", type=int, default=0, help="the first so many questions; 0: all")
  p.add_argument("--json", action="store_true", help="one object on the last line")
  args = p.parse_args(argv)
  console.tell_retries()
  try:
    ks = _numbers(args.k)
    questions = read_questions(args.questions, args.limit)
    with contextlib.ExitStack() as held:
      engines = [held.enter_context(opening.open_engine(spec)) for spec in args.index]
      found = [measure(spec, engine, questions, ks[-1])
               for spec, engine in zip(args.index, engines)]
  except (UserError, RetrievalError, OSError, ValueError) as e:
    print(f"retriever.evaluate: {e}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print("retriever.evaluate: stopped", file=sys.stderr)
    return 130
  show(found, ks, rich.console.Console(width=150))
  if args.json:
    print(json.dumps(summary(found, ks)))
  return 0


def read_questions(path: Path, limit: int = 0) -> list[Question]:
  """The questions of a jsonl file; a row that is none is a CorpusError that names its line."""
  found = []
  if limit < 0:
    raise CorpusError(f"--limit is {limit}; wanted 0 for all, or how many")
  with path.open("rb") as lines:
    for number, line in enumerate(lines, 1):
      if limit and len(found) == limit:
        break
      try:
        row = json.loads(line)
        question, golds = row["question"], row["golden_answers"]
        if not (isinstance(question, str) and question.strip() and isinstance(golds, list) and golds
                and all(isinstance(g, str) for g in golds)):
          raise ValueError("a field of another kind, or empty")
      except (ValueError, KeyError, TypeError) as e:
        raise CorpusError(f"{path}:{number}: no question ({e}); {WANTED}") from e
      found.append(Question(question, tuple(golds)))
  if not found:
    raise CorpusError(f"{path} is empty; {WANTED}, one a line")
  return found


def measure(name: str, engine: SearchEngine, questions: Sequence[Question], k: int) -> Measured:
  """Asks every question alone, as one who waits would."""
  engine = engine.engine if isinstance(engine, sharing.Cached) else engine  # each is searched
  engine.search([questions[0].question], k)  # what is compiled or mapped at first use is not timed
  places, seconds = [], []
  with console.Bars(transient=True) as bars:
    for q in bars.track(questions, description="asking"):
      began = time.perf_counter()
      [passages] = engine.search([q.question], k)
      seconds.append(time.perf_counter() - began)
      places.append(quality.first_hit(q.golds, passages))
  return Measured(name, tuple(places), tuple(seconds))


def summary(found: Sequence[Measured], ks: Sequence[int]) -> dict[str, Any]:
  """All figures: means with their intervals, and the first engine's lead over each other one."""
  def about(values: Sequence[float]) -> dict[str, Any]:
    return {"mean": float(np.mean(values)), "interval": list(quality.interval(values))}

  engines = [{"index": m.name, "questions": len(m.places), "mrr": about(m.reciprocal()),
              "ms_p50": 1e3 * float(np.median(m.seconds)),
              "ms_p99": 1e3 * float(np.percentile(m.seconds, 99)),
              **{f"recall@{k}": about(m.recall(k)) for k in ks}} for m in found]
  leads = [{"index": found[0].name, "over": other.name,
            **{f"recall@{k}": about(np.subtract(found[0].recall(k), other.recall(k)).tolist())
               for k in ks}} for other in found[1:]]
  return {"engines": engines, "leads": leads}


def show(found: Sequence[Measured], ks: Sequence[int], page: rich.console.Console) -> None:
  """A table, a line an engine, and what the first one has over the others."""
  figures = summary(found, ks)
  names = [*(f"recall@{k}" for k in ks), "mrr"]
  table = rich.table.Table(title=f"{len(found[0].places)} questions, percent", title_justify="left")
  for column in ("index", *names, "ms p50", "ms p99"):
    table.add_column(column, justify="left" if column == "index" else "right")
  for e in figures["engines"]:
    table.add_row(rich.text.Text(e["index"]), *(_percent(e[n]) for n in names),
                  f"{e['ms_p50']:.1f}", f"{e['ms_p99']:.1f}")
  page.print(table)
  for lead in figures["leads"]:
    parts = ", ".join(f"recall@{k} {_percent(lead[f'recall@{k}'], '+.1f')}" for k in ks)
    page.print(f"{lead['index']} over {lead['over']}, points: {parts}", markup=False,
               highlight=False, soft_wrap=True)


def _percent(about: dict[str, Any], form: str = ".1f") -> str:
  low, high = about["interval"]
  return f"{100 * about['mean']:{form}} [{100 * low:{form}}, {100 * high:{form}}]"


def _numbers(text: str) -> list[int]:
  try:
    found = sorted({int(n) for n in text.split(",")})
  except ValueError as e:
    raise CorpusError(f"--k is {text!r}; wanted numbers with commas, such as 1,3,5") from e
  if found[0] < 1:
    raise CorpusError(f"--k is {text!r}; wanted numbers above 0")
  return found


if __name__ == "__main__":
  sys.exit(main())
