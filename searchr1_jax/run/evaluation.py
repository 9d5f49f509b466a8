"""Answering whole question sets with the training's own loop, and what the answers are worth."""

from __future__ import annotations

import dataclasses
from typing import Callable, Mapping, Sequence

import numpy as np
import rich.box
import rich.table
import rich.text
from jaxtyping import Array

from retriever.protocol import RetrievalError, Search
from retriever.quality import interval
from searchr1_jax.model.decoder import Params
from searchr1_jax.rollout import drive
from searchr1_jax.rollout.draw import Sampling
from searchr1_jax.rollout.engine import Engine
from searchr1_jax.rollout.episode import Rules
from searchr1_jax.rollout.searches import Retrieval
from searchr1_jax.run import distributed
from searchr1_jax.types import Question, Score, StopReason, Trajectory

_MEASURES = ("em", "f1", "subem")


@dataclasses.dataclass(frozen=True)
class Answered:
  """One question with what became of it."""

  trajectory: Trajectory
  score: Score


def answer_all(engine: Engine, params: Params, questions: Sequence[Question], rules: Rules,
               search: Search, *, encode_prompt: Callable[[Question], tuple[int, ...]],
               score: Callable[[Trajectory], Score], how: Sampling, key: Array,
               retrieval: Retrieval) -> list[Answered]:
  """Every question once, in order. A search that fails is an error: no question is dropped."""
  tasks = [drive.Task(q, 0, encode_prompt(q)) for q in questions]
  trajectories, stats = distributed.rollout(engine, params, tasks, rules, search, how=how, key=key,
                                            retrieval=retrieval)
  lost = [t for t in trajectories if t.stop_reason is StopReason.RETRIEVAL_ERROR]
  if lost:
    reason = f" ({stats.search_failure})" if stats.search_failure else ""  # else: another process
    raise RetrievalError(
        f"the search engine failed in {len(lost)} of {len(tasks)} episodes{reason}; an evaluation "
        "drops no question, so mend the engine and start it again")
  return [Answered(t, score(t)) for t in trajectories]


def summarise(answered: Sequence[Answered]) -> dict[str, float | list[float] | int]:
  """Means over questions, each measure with its interval, and searches an episode."""
  out: dict[str, float | list[float] | int] = {"n": len(answered)}
  for name in _MEASURES:
    values = [getattr(a.score, name) for a in answered]
    out[name] = float(np.mean(values))
    out[f"{name}_interval"] = list(interval(values))
  out["searches"] = float(np.mean([len(a.trajectory.searches) for a in answered]))
  out["retrieval_hit"] = float(np.mean([a.score.retrieval_hit for a in answered]))
  out["format_valid"] = float(np.mean([a.score.format_valid for a in answered]))
  return out


def by_dataset(answered: Sequence[Answered]) -> dict[str, dict]:
  """A summary for each dataset in order of appearance, and one of all questions."""
  names = list(dict.fromkeys(a.trajectory.question.dataset for a in answered))
  out = {n: summarise([a for a in answered if a.trajectory.question.dataset == n]) for n in names}
  out["all"] = summarise(answered)
  return out


def table(summaries: Mapping[str, Mapping], title: str) -> rich.table.Table:
  """The summaries as a terminal table: percentages with their intervals."""
  out = rich.table.Table(title=rich.text.Text(title), box=rich.box.SIMPLE_HEAD)
  out.add_column("questions")
  for column in ("n", "EM %", "F1 %", "sub-EM %", "searches", "retrieval hit %"):
    out.add_column(column, justify="right")
  for name, s in summaries.items():
    cells = [f"{100 * s[m]:.1f} [{100 * s[m + '_interval'][0]:.1f}, "
             f"{100 * s[m + '_interval'][1]:.1f}]" for m in _MEASURES]
    out.add_row(rich.text.Text(name), str(s["n"]), *cells, f"{s['searches']:.2f}",
                f"{100 * s['retrieval_hit']:.1f}")
  return out
