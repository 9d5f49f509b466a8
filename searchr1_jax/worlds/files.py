"""A world as files: the corpus and the question sets that a run reads like any others."""

from __future__ import annotations

import json
import pathlib

import numpy as np

from retriever import build
from searchr1_jax.run import disk
from searchr1_jax.types import UserError
from searchr1_jax.worlds import world as worlds

HOPS = (1, 2, 3)
MARK = "world.json"  # in the folder of every world: which one it is


def test_files(folder: pathlib.Path) -> tuple[str, ...]:
  """The held-out sets, one for each number of hops."""
  return tuple(str(folder / f"test_{n}hop.jsonl") for n in HOPS)


def write_world(folder: str | pathlib.Path, name: str, seed: int, test_seed: int) -> pathlib.Path:
  """Writes corpus.jsonl, train.jsonl, test_?hop.jsonl and the index; the same bytes every time.

  The corpus holds both halves: what training asks about (from `seed`) and what only the test asks
  about (from `test_seed`); the two share no name, not even a piece of one.
  """
  if name not in worlds.SPECS:
    raise UserError(f"world {name!r} is not known; choose one of {', '.join(worlds.SPECS)}")
  if not (0 <= seed and 0 <= test_seed):
    raise UserError(f"the seeds of a world are {seed} and {test_seed}; wanted numbers from 0 up")
  folder = pathlib.Path(folder)
  disk.begin_output(folder, MARK, {"world": name, "seed": seed, "test_seed": test_seed})
  spec = worlds.SPECS[name]
  rl_rng, test_rng = np.random.default_rng((0, seed)), np.random.default_rng((1, test_seed))
  rl, test = worlds.make_world(spec, "rl", rl_rng), worlds.make_world(spec, "test", test_rng)
  train = worlds.sample_questions(rl, spec.questions["rl"], rl_rng, "train-")
  held_out = worlds.sample_questions(test, spec.questions["test"], test_rng, "test-")
  passages = {**rl.passages, **test.passages}
  with disk.writing(folder):
    _write_lines(folder / "corpus.jsonl", [
        {"id": str(i), "contents": f'"{title}"\n{text}'}
        for i, (title, text) in enumerate(passages.items())])
    _write_lines(folder / "train.jsonl", map(_row, train))
    for n, path in zip(HOPS, test_files(folder)):
      _write_lines(pathlib.Path(path), [_row(q) for q in held_out if len(q.hops) == n])
    build.build(folder / "corpus.jsonl", folder / "index", quiet=True, overwrite=True)
  return folder


def _row(question: worlds.WorldQuestion) -> dict:
  return {"id": question.id, "question": question.text, "golden_answers": [question.answer]}


def _write_lines(path: pathlib.Path, rows) -> None:
  path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
