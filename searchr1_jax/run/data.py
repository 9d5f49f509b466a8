"""Questions from files and from TensorFlow Datasets, and the order in which a run sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import gzip
import hashlib
import json
import pathlib
from typing import Any
import zlib

import numpy as np
import pyarrow
import pyarrow.parquet

from searchr1_jax.types import Question, UserError

OnBad = Callable[[UserError], None]
"""Told of each row that is left out; without one, the first bad row is an error."""

_FIELDS = ("id", "question", "golden_answers", "prompt", "data_source", "reward_model")
_WANTED_ANSWERS = "a list of one or more non-blank strings"


def load_questions(spec: str | pathlib.Path, dataset_name: str | None = None,
                   on_bad: OnBad | None = None,
                   seen: dict[tuple[str, str], str] | None = None) -> list[Question]:
  """The questions of `FILE.jsonl[.gz]`, `FILE.parquet` or `tfds:NAME/SPLIT[@DATA_DIR]`, in order.

  The dataset's name is the one given, else the row's own `data_source`, else that of the file.
  `seen`: where each (dataset, id) stands, shared by sets that are read one after the other, since
  no two questions of a run may have one key.
  """
  questions, seen = [], {} if seen is None else seen
  name, rows = _open(str(spec))
  for where, row in rows:
    try:
      if isinstance(row, UserError):
        raise row
      question = _question(where, row, dataset_name, name)
      if question.key in seen:
        raise _bad(where, "id", question.id, f"another one than at {seen[question.key]}, both of "
                   f"dataset {question.dataset!r}; change the id, set data_source or rename a file")
    except UserError as error:
      if on_bad is None:
        raise
      on_bad(error)
      continue
    seen[question.key] = where
    questions.append(question)
  if not questions:
    raise UserError(f"{spec} holds no question")
  return questions


def load_datasets(specs: Mapping[str, str], on_bad: OnBad | None = None) -> list[Question]:
  """Several datasets, one after the other; each question keeps the name of its own."""
  return [q for name, spec in specs.items() for q in load_questions(spec, name, on_bad)]


def fingerprint(questions: Sequence[Question]) -> str:
  """One SHA-256 of all that a run reads of its questions, in their order."""
  digest = hashlib.sha256()
  for q in questions:
    digest.update(json.dumps([q.dataset, q.id, q.question, q.golden_answers, q.prompt]).encode())
  return digest.hexdigest()


def questions_at(questions: Sequence[Question], seed: int, cursor: int,
                 n: int) -> tuple[list[Question], int]:
  """The next `n` questions after the first `cursor` of the endless order of `seed`; the new cursor.

  Every epoch is a permutation of all questions, addressed by (seed, epoch), so the cursor is all
  there is to save. A batch runs on into the next epoch and never holds a question twice: epochs
  begin in one random half and end in the other.
  """
  count = len(questions)
  meets_no_epoch_end = n and count % n == 0 and cursor % n == 0
  if n < 1 or cursor < 0 or (n > count // 2 and not meets_no_epoch_end):
    raise UserError(
        f"a batch of {n} out of {count} questions: wanted 1 to {count // 2}, or "
        f"a divisor of {count}, so that no batch holds a question twice; set "
        "config.data.questions to that")
  places = (divmod(i, count) for i in range(cursor, cursor + n))
  return [questions[_order(count, seed, epoch)[at]] for epoch, at in places], cursor + n


@functools.lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
  halves = np.array_split(_shuffled(np.arange(count), seed, 0), [count // 2])
  return np.concatenate([_shuffled(h, seed, 2 * epoch + 1 + i) for i, h in enumerate(halves)])


def _shuffled(values_M: np.ndarray, seed: int, draw: int) -> np.ndarray:
  """Sorted by raw Philox words: numpy keeps those for ever, its own shuffle it may change."""
  words_M = np.random.Philox(key=(draw << 64) | seed % 2**64).random_raw(len(values_M))
  return values_M[np.argsort(words_M, kind="stable")]


def _open(spec: str) -> tuple[str, Iterator[tuple[str, Any]]]:
  """The dataset's own name, and its rows with where each stands."""
  if spec.startswith("tfds:"):
    name, data_dir = (spec[5:].partition("@")[i] for i in (0, 2))
    return name.rpartition("/")[0], _tfds_rows(spec, *name.rpartition("/")[::2], data_dir)
  path = pathlib.Path(spec)
  if not path.is_file():
    raise UserError(f"there is no file {spec}: give a path to .jsonl, .jsonl.gz or .parquet, or "
                    "tfds:NAME/SPLIT")
  stem = path.name.partition(".")[0]
  if path.suffix == ".parquet":
    return stem, _parquet_rows(path)
  if path.name.endswith((".jsonl", ".jsonl.gz")):
    return stem, _jsonl_rows(path)
  raise UserError(f"{spec} ends in {path.suffix!r}; wanted .jsonl, .jsonl.gz or .parquet")


def _jsonl_rows(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
  number = 0
  try:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as lines:
      for number, line in enumerate(lines, 1):
        if line.strip():
          yield f"{path}:{number}", _json(f"{path}:{number}", line)
  except (EOFError, gzip.BadGzipFile, zlib.error) as error:
    raise UserError(f"{path}:{number + 1}: the gzip file is cut off or damaged ({error}); "
                    "fetch it again") from error


def _json(where: str, line: bytes) -> Any:
  """The row, or the error that stands for it."""
  try:
    return json.loads(line.decode("utf-8-sig"))
  except (ValueError, RecursionError) as error:  # a number of 5000 digits is a ValueError too
    return UserError(f"{where}: not one JSON object in UTF-8 ({error})")


def _parquet_rows(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
  number = 0
  try:
    with pyarrow.parquet.ParquetFile(path) as file:
      for batch in file.iter_batches(batch_size=4096):
        for row in batch.to_pylist():
          number += 1
          yield f"{path}: row {number}", row
  except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
    raise UserError(f"{path}: not a whole parquet file, after row {number}: {error}") from error


def _tfds_rows(spec: str, name: str, split: str, data_dir: str) -> Iterator[tuple[str, Any]]:
  if not name or not split:
    raise UserError(f"{spec}: wanted tfds:NAME/SPLIT or tfds:NAME/SPLIT@DATA_DIR")
  import tensorflow_datasets as tfds  # seconds to import, and few runs need it

  try:
    source = tfds.builder(name, data_dir=data_dir or None).as_data_source(split=split)
  except (AssertionError, ImportError, OSError, RuntimeError, ValueError) as error:
    reason = str(error).strip().partition("\n")[0]
    raise UserError(
        f"{spec}: {reason}\nDatasets are read without TensorFlow, so they must have been prepared "
        f"as array_record files: run `tfds build {name} --file_format=array_record`, which itself "
        "may need TensorFlow, and name its folder after @") from error
  for i in range(len(source)):
    yield f"{spec}: row {i + 1}", _plain(source[i])


def _plain(value: Any) -> Any:
  """Bytes as text and arrays as lists, as JSON would have given them."""
  if isinstance(value, Mapping):
    return {k: _plain(v) for k, v in value.items()}
  if isinstance(value, (list, tuple, np.ndarray)):
    return [_plain(v) for v in value] if np.ndim(value) else _plain(value[()])
  if isinstance(value, np.generic):
    return _plain(value.item())
  return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


def _question(where: str, row: Any, given_name: str | None, own_name: str) -> Question:
  if not isinstance(row, Mapping):
    raise UserError(f"{where}: got {_shown(row)}, wanted an object with {', '.join(_FIELDS[:3])}")
  ident, source = row.get("id"), row.get("data_source")
  if isinstance(ident, bool) or not isinstance(ident, (str, int)) or ident == "":
    raise _bad(where, "id", ident, "a non-empty string or a whole number")
  if source is not None and not _is_text(source):
    raise _bad(where, "data_source", source, "a non-blank string or nothing")
  if not _is_text(row.get("question")):
    raise _bad(where, "question", row.get("question"), "a non-blank string of valid Unicode")
  return Question(
      dataset=given_name or source or own_name, id=str(ident), question=row["question"],
      golden_answers=_answers(where, row), prompt=_prompt(where, row.get("prompt")),
      meta={k: v for k, v in row.items() if k not in _FIELDS})


def _answers(where: str, row: Mapping[str, Any]) -> tuple[str, ...]:
  """`golden_answers`, or where that is absent the published `reward_model.ground_truth.target`."""
  field, answers = "golden_answers", row.get("golden_answers")
  if answers is None and row.get("reward_model") is not None:
    field, answers = "reward_model.ground_truth.target", row["reward_model"]
    for key in ("ground_truth", "target"):
      answers = answers.get(key) if isinstance(answers, Mapping) else None
  if not isinstance(answers, list) or not answers or not all(_is_text(a) for a in answers):
    raise _bad(where, field, answers, _WANTED_ANSWERS)
  return tuple(answers)


def _prompt(where: str, messages: Any) -> tuple[Mapping[str, str], ...] | None:
  if messages is None:
    return None
  good = isinstance(messages, list) and messages and all(
      isinstance(m, Mapping) and set(m) == {"role", "content"} and all(map(_is_text, m.values()))
      for m in messages)
  if not good:
    raise _bad(where, "prompt", messages, 'a list of {"role": string, "content": string}')
  return tuple(dict(m) for m in messages)


def _is_text(value: Any) -> bool:
  """A string with something in it that every tokenizer can take: no half of a surrogate pair."""
  return isinstance(value, str) and bool(value.strip()) and not any(
      "\ud800" <= c <= "\udfff" for c in value)


def _bad(where: str, field: str, got: Any, wanted: str) -> UserError:
  return UserError(f"{where}: field {field!r} is {_shown(got)}, wanted {wanted}")


def _shown(value: Any) -> str:
  text = "missing" if value is None else ascii(value)
  return text if len(text) <= 80 else text[:77] + "..."
