"""What a world says: kinds of entities, their relations, and the ways to put them into words."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Relation:
  """A fact from one kind of entity to another: `nouns` ask for it, `sentences` state it.

  The first noun is its plain name, which a query uses and a world of few words knows alone.
  """

  name: str
  subject: str
  object: str
  nouns: tuple[str, ...]
  sentences: tuple[str, ...]


COMPANY_WORDS = ("Labs", "Works", "Group", "House", "Union", "Trading")
PERFUME_WORDS = ("Noir", "Rose", "Amber", "Velvet", "Cedar", "Iris")


def _relation(name: str, subject: str, object_: str, other_nouns: tuple[str, ...],
              verb: str) -> Relation:
  """Three sentences that name the relation in different places, and one that says it by a verb."""
  return Relation(name, subject, object_, (name, *other_nouns), (
      f"{{s}} has the {name} {{o}}.", f"For {{s}} the {name} is {{o}}.",
      f"{{s}} is known for its {name} {{o}}.", f"{{s}} {verb} {{o}}."))


RELATIONS = (
    _relation("birthplace", "person", "city", ("native city", "city of birth"), "was born in"),
    _relation("employer", "person", "company", ("workplace", "company of work"), "works for"),
    _relation("headquarters", "company", "city", ("main office", "home city"), "resides in"),
    _relation("founder", "company", "person", ("originator", "first owner"), "was begun by"),
    _relation("maker", "perfume", "company", ("producer", "manufacturer"), "is sold by"),
    _relation("designer", "perfume", "person", ("perfumer", "author"), "was mixed by"),
    _relation("country", "city", "country", ("nation", "state"), "lies in"),
    _relation("mayor", "city", "person", ("city leader", "head of town"), "is led by"),
    _relation("capital", "country", "city", ("seat of power", "first city"), "is ruled from"),
)
BY_NAME = {r.name: r for r in RELATIONS}

# True of nobody's question: a sentence that names an entity of the right kind without the relation.
DISTRACTIONS = {
    "person": ("{s} once spent a summer in {city}.", "{s} is an old friend of {person}.",
               "{s} turned down an offer from {company}."),
    "company": ("{s} sold a building in {city}.", "{s} was once sued by {person}."),
    "perfume": ("{s} smells best in {city}.", "{s} is a favourite of {person}."),
    "city": ("{s} once hosted a fair for {company}.", "{s} has a statue of {person}."),
    "country": ("{s} keeps a museum in {city}.", "{s} put {person} on a stamp."),
}

KINDS = ("country", "city", "person", "company", "perfume")


def chains(hops: int) -> tuple[tuple[Relation, ...], ...]:
  """Every way to follow `hops` relations one after another without coming back to a kind twice.

  The innermost relation comes first: (maker, headquarters) asks for the headquarters of the maker.
  """
  found = [(r,) for r in RELATIONS]
  for _ in range(hops - 1):
    found = [c + (r,) for c in found for r in RELATIONS
             if r.subject == c[-1].object and r.object not in {x.subject for x in c}]
  return tuple(found)
