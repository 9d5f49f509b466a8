"""Episodes as a teacher would write them, well or badly, for the warm start of a tiny policy.

A demonstration is a list of `Piece`s in the order and the cut in which an episode encodes them, each
with its weight in the loss: 1 for what the policy should write, `copy_weight` for an entity's name
where a passage repeats it (predictable, and it teaches copying), 0 elsewhere.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Sequence

import numpy as np

from retriever.encoders import HashingEncoder
from retriever.protocol import Passage
from searchr1_jax.text import prompts
from searchr1_jax.worlds import grammar
from searchr1_jax.worlds.world import Hop, World, WorldQuestion

_MAX_BYTES = 4096  # no generated passage is as long


@dataclasses.dataclass(frozen=True)
class Piece:
  """Text that is encoded by itself, and the weight of its tokens in the loss."""

  text: str
  weight: float


@dataclasses.dataclass(frozen=True)
class Habits:
  """How often a teacher goes wrong, each a probability a question.

  `guess`: answers with some name of the right kind, without a search, and `guess_confident` takes
  its place where the answer is of a kind of `confident`; `stop_early`: answers with what an earlier
  hop found, or with what the passage says about another relation; `wrong_query`: one search asks
  for a random entity or relation; `malformed`: one turn forgets its closing or opening tag.
  """

  guess: float = 0.0
  guess_confident: float = 0.0
  confident: tuple[str, ...] = ()
  stop_early: float = 0.0
  wrong_query: float = 0.0
  malformed: float = 0.0


class SmallSearch:
  """Exact search over one warm-start world by the hashing encoder: what an episode would see."""

  def __init__(self, world: World, dim: int):
    self._names = list(world.passages)
    contents = [f'"{name}"\n{world.passages[name]}' for name in self._names]
    self._encoder = HashingEncoder.fit(contents, dim)
    self._vectors = self._encoder.encode_passages(contents)

  def __call__(self, queries: Sequence[str], top_k: int) -> list[list[str]]:
    """Titles of the best passages for each query."""
    scores = self._encoder.encode_queries(queries) @ self._vectors.T
    return [[self._names[i] for i in np.argsort(-row)[:top_k]] for row in scores]


def recital(pool: Sequence[str], rng: np.random.Generator, length: int = 40) -> list[Piece]:
  """A few names said again and again in any order: copying alone, many times over.

  Every recital has names of its own from the pool's pieces. Where many rows of a batch repeat the
  same ones, remembering them pays at once and copying is not learned.
  """
  draw = lambda: " ".join(pool[i] for i in rng.integers(len(pool), size=rng.integers(1, 3)))
  chosen = [draw() for _ in range(rng.integers(4, 8))]
  order = [*rng.permutation(len(chosen)), *rng.integers(len(chosen), size=length)]
  out = []
  for i, which in enumerate(order):  # which one comes next shows by its first syllable
    name = chosen[which]
    out += [Piece(f" {name[:2]}", 0.0),
            Piece(f"{name[2:]};", 1.0 if i >= len(chosen) else 0.0)]
  return out


@dataclasses.dataclass(frozen=True)
class Teacher:
  """Writes demonstrations about one world.

  `query` asks the engine. `thought` says what a search has found, in the same words before the next
  search and before the answer, so that one skill of reading serves both. Where several passages say
  the same of different names, it repeats subject and relation first: the object then follows what
  it follows in the passage, and the query, in the same order, is copied as it stands.
  """

  world: World
  search: SmallSearch
  top_k: int
  copy_weight: float = 0.5
  query: str = "{relation} {subject}"
  thought: str = "found {object}"
  template: str = "{question}\n"

  def demonstrate(self, question: WorldQuestion, habits: Habits,
                  rng: np.random.Generator) -> list[Piece]:
    """One episode; which habits show is drawn from `rng`."""
    pieces = [Piece(prompts.fill_template(self.template, question.text), 0.0)]
    sure = _answer_kind(question) in habits.confident
    if rng.random() < (habits.guess_confident if sure else habits.guess):
      return pieces + [self._answer(self._guess(question, rng))]
    hops, early = question.hops, rng.random() < habits.stop_early
    if early and len(hops) > 1:
      hops = hops[: rng.integers(1, len(hops))]
    spoiled = rng.integers(len(hops)) if rng.random() < habits.wrong_query else None
    broken = rng.integers(len(hops)) if rng.random() < habits.malformed else None
    for i, hop in enumerate(hops):
      thought = self._found(hops[i - 1]) if i else f" need {hop.noun}"
      if i == broken:
        pieces += self._broken_turn(hop, thought)
      asked = self._spoil(hop, rng) if i == spoiled else hop
      pieces += self._search_turn(thought, asked)
    last = hops[-1]
    if early and len(question.hops) == 1:
      facts = self.world.entities[last.subject].facts
      last = dataclasses.replace(last, object=str(rng.choice(list(facts.values()))))
    return pieces + [self._answer(last)]

  def drill(self, rng: np.random.Generator) -> list[Piece]:
    """The passages of one search, then each of their facts in any order: reading, many times."""
    entity = self.world.entities[str(rng.choice(list(self.world.entities)))]
    asked = Hop(str(rng.choice(list(entity.facts))), "", entity.name, "")
    (titles,) = self.search([self._query(asked)], self.top_k)
    hops = [Hop(relation, relation, title, found) for title in titles
            for relation, found in self.world.entities[title].facts.items()]
    out = self._observation(titles, copied=titles, named=False)
    for i in rng.permutation(len(hops)):
      out.append(Piece(f"<think>{self._found(hops[i])}</think>", 1.0))
    return out

  def _search_turn(self, thought: str, asked: Hop) -> list[Piece]:
    query = self._query(asked)
    (titles,) = self.search([query], self.top_k)
    turn = Piece(f"<think>{thought}</think><search>{query}</search>", 1.0)
    return [turn] + self._observation(titles, copied=[asked.subject])

  def _observation(self, titles: Sequence[str], copied: Sequence[str],
                   named: bool = True) -> list[Piece]:
    out = [Piece(prompts.OBSERVATION_HEADER, 0.0)]
    for i, title in enumerate(titles):
      passage = Passage(title, f'"{title}"\n{self.world.passages[title]}', 0.0)
      shown = str(prompts.render_passage(i + 1, passage, max_bytes=_MAX_BYTES))
      out += self._copies(shown, title if title in copied else None, named)
    return out + [Piece(prompts.OBSERVATION_FOOTER, 0.0)]

  def _copies(self, passage: str, name: str | None, named: bool) -> list[Piece]:
    """The passage cut around `name`, for its weight; in the title it weighs if `named` before."""
    if name is None or not self.copy_weight:
      return [Piece(passage, 0.0)]
    parts = re.split(f"((?:(?<=\")| ){name})" if named else f"( {name})", passage)
    return [Piece(part, self.copy_weight if i % 2 else 0.0) for i, part in enumerate(parts) if part]

  def _broken_turn(self, hop: Hop, thought: str) -> list[Piece]:
    text = f"<think>{thought}</think>{self._query(hop)}</search>"
    return [Piece(text, 1.0), Piece(prompts.INVALID_NOTICE, 0.0)]

  def _query(self, hop: Hop) -> str:
    return " " + self.query.format(relation=hop.relation, subject=hop.subject)

  def _found(self, hop: Hop) -> str:
    return " " + self.thought.format(
        subject=hop.subject, relation=hop.relation, object=hop.object)

  def _answer(self, hop: Hop) -> Piece:
    return Piece(f"<think>{self._found(hop)}</think><answer> {hop.object}</answer>", 1.0)

  def _guess(self, question: WorldQuestion, rng: np.random.Generator) -> Hop:
    """Some name of the right kind, said of the one that stands in the question."""
    name = str(rng.choice(self.world.of_kind(_answer_kind(question))))
    return dataclasses.replace(question.hops[-1], subject=question.hops[0].subject, object=name)

  def _spoil(self, hop: Hop, rng: np.random.Generator) -> Hop:
    """The hop with another subject or another relation."""
    if rng.random() < 0.5:
      return dataclasses.replace(hop, subject=str(rng.choice(list(self.world.entities))))
    return dataclasses.replace(hop, relation=str(rng.choice(list(grammar.BY_NAME))))


def _answer_kind(question: WorldQuestion) -> str:
  return grammar.BY_NAME[question.hops[-1].relation].object
