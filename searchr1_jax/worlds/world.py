"""A world: entities with facts, one passage each, and questions of one to three hops about them."""

from __future__ import annotations

import dataclasses
from typing import Mapping

import numpy as np

from searchr1_jax.worlds import grammar, names


@dataclasses.dataclass(frozen=True)
class WorldSpec:
  """How large and how wordy a world is.

  `entities`, `questions`: how many of each kind, and in each set. `wordy`: facts as sentences, said
  in different ways, and questions too. `shuffled`: facts in any order, so that reading has to go by
  what is said. `shared_names`, `distractions`: chance of a name's piece being another's too, and
  sentences a passage that state no fact.
  """

  entities: Mapping[str, int]
  questions: Mapping[str, int]
  hop_shares: tuple[float, float, float] = (0.4, 0.4, 0.2)
  wordy: bool = False
  shuffled: bool = False
  shared_names: float = 0.0
  distractions: int = 0


TINY = WorldSpec(
    entities=dict(country=10, city=80, person=300, company=150, perfume=260),
    questions=dict(rl=4000, test=2000))
HARD = WorldSpec(
    entities=dict(country=10, city=80, person=300, company=150, perfume=260),
    questions=dict(rl=6000, test=2000), wordy=True, shared_names=0.6, distractions=1, shuffled=True,
    hop_shares=(0.3, 0.4, 0.3))
SHUFFLED = dataclasses.replace(TINY, shuffled=True)
SPECS = {"tiny": TINY, "shuffled": SHUFFLED, "hard": HARD}


@dataclasses.dataclass(frozen=True)
class Entity:
  """A name with its kind; `facts` maps a relation's name to another entity's name."""

  name: str
  kind: str
  facts: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Hop:
  """One step to the answer: `relation` of `subject` is `object`; the question says `noun`."""

  relation: str
  noun: str
  subject: str
  object: str


@dataclasses.dataclass(frozen=True)
class WorldQuestion:
  """A question in words, and the hops that answer it, innermost first."""

  id: str
  text: str
  hops: tuple[Hop, ...]

  @property
  def answer(self) -> str:
    return self.hops[-1].object


@dataclasses.dataclass(frozen=True)
class World:
  """Half a corpus: entities by name, and the passage of each."""

  spec: WorldSpec
  entities: Mapping[str, Entity]
  passages: Mapping[str, str]

  def of_kind(self, kind: str) -> list[str]:
    return [e.name for e in self.entities.values() if e.kind == kind]


def make_world(spec: WorldSpec, pool: str, rng: np.random.Generator,
               scale: float = 1.0) -> World:
  """A world whose names come from one pool; `scale` shrinks the number of entities."""
  maker = names.NameMaker(rng, names.pieces(pool), spec.shared_names)
  make = {
      "country": maker.single,
      "city": maker.single,
      "person": lambda: maker.double("person"),
      "company": lambda: maker.with_word("company", grammar.COMPANY_WORDS, before=False),
      "perfume": lambda: maker.with_word("perfume", grammar.PERFUME_WORDS, before=True),
  }
  named = {k: [make[k]() for _ in range(max(2, round(spec.entities[k] * scale)))]
           for k in grammar.KINDS}
  entities = {}
  for kind, members in named.items():
    relations = [r for r in grammar.RELATIONS if r.subject == kind]
    for name in members:
      facts = {r.name: named[r.object][rng.integers(len(named[r.object]))] for r in relations}
      entities[name] = Entity(name, kind, facts)
  return World(spec, entities, {e.name: _passage(spec, e, named, rng) for e in entities.values()})


def _passage(spec: WorldSpec, entity: Entity, named, rng: np.random.Generator) -> str:
  facts = list(entity.facts.items())
  if spec.shuffled:
    facts = [facts[i] for i in rng.permutation(len(facts))]
  if not spec.wordy:
    return "; ".join(f"{relation} {value}" for relation, value in facts) + "."
  sentences = []
  for relation, value in facts:
    ways = grammar.BY_NAME[relation].sentences
    sentences.append(ways[rng.integers(len(ways))].format(s=entity.name, o=value))
  for _ in range(spec.distractions):
    ways = grammar.DISTRACTIONS[entity.kind]
    others = {k: v[rng.integers(len(v))] for k, v in named.items()}
    sentences.append(ways[rng.integers(len(ways))].format(s=entity.name, **others))
  if spec.shuffled:
    sentences = [sentences[i] for i in rng.permutation(len(sentences))]
  return " ".join(sentences)


def make_question(world: World, chain: tuple[grammar.Relation, ...], start: str,
                  rng: np.random.Generator, id: str = "") -> WorldQuestion:
  """The question that follows `chain` from the entity `start`."""
  hops, subject, phrase = [], start, start
  for relation in chain:
    noun = relation.nouns[rng.integers(len(relation.nouns)) if world.spec.wordy else 0]
    found = world.entities[subject].facts[relation.name]
    hops.append(Hop(relation.name, noun, subject, found))
    subject, phrase = found, f"the {noun} of {phrase}"
  return WorldQuestion(id, f"What is {phrase}?", tuple(hops))


def sample_questions(world: World, count: int, rng: np.random.Generator,
                     prefix: str = "") -> list[WorldQuestion]:
  """`count` different questions, hops in the spec's shares; fewer where the world has no more."""
  by_hops = [grammar.chains(n) for n in (1, 2, 3)]
  members = {k: world.of_kind(k) for k in grammar.KINDS}
  seen, out = set(), []
  for _ in range(50 * count):
    if len(out) == count:
      break
    hops = rng.choice(3, p=world.spec.hop_shares)
    chain = by_hops[hops][rng.integers(len(by_hops[hops]))]
    start = members[chain[0].subject][rng.integers(len(members[chain[0].subject]))]
    key = (start,) + tuple(r.name for r in chain)
    if key in seen:
      continue
    seen.add(key)
    out.append(make_question(world, chain, start, rng, id=f"{prefix}{len(out)}"))
  return out
