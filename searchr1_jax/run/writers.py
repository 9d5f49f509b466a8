"""Where numbers and samples go: files, curves, the terminal. Means are divided here, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
import math
import os
import pathlib
import typing
from typing import Any, Protocol

import ml_collections
import rich.console
import rich.live
import rich.table
import tensorboardX

from searchr1_jax.run import disk
from searchr1_jax.types import Mean, Score, Trajectory

METRICS_FILE = "metrics.jsonl"
SHOWN = ("reward", "em", "searches", "response_tokens", "kl_ref", "eval/em", "seconds/step")

Metrics = Mapping[str, Mean | float | int]


@typing.runtime_checkable
class Writer(Protocol):
  """Takes the numbers of one step, each step once, in order."""

  def write(self, step: int, metrics: Metrics) -> None: ...

  def close(self) -> None: ...


def divide(metrics: Metrics) -> dict[str, float | None]:
  """Plain numbers: a mean is its total over its count, and None where nothing was counted."""
  out: dict[str, float | None] = {}
  for name, value in metrics.items():
    if isinstance(value, Mean):
      total, count = float(value.total), float(value.count)
      out[name] = total / count if count else None
    else:
      out[name] = float(value)
  return out


class NullWriter:
  """Writes nothing."""

  def write(self, step: int, metrics: Metrics) -> None:
    """Drops the numbers."""

  def close(self) -> None:
    """Has nothing to close."""


class MultiWriter:
  """Hands the numbers, divided once, to every writer it holds."""

  def __init__(self, *writers: Writer):
    self._writers = writers

  def write(self, step: int, metrics: Metrics) -> None:
    plain = {name: math.nan if x is None else x for name, x in divide(metrics).items()}
    for writer in self._writers:
      writer.write(step, plain)

  def close(self) -> None:
    for writer in self._writers:
      writer.close()


class JsonlWriter:
  """One strict JSON object a step, `{"step": 7, "loss": 0.25}`, flushed; what is no number is null.

  A resumed run passes its first step: lines from there on, and a last line torn by a kill, are cut
  off before anything is written, so that every step stands in the file once.
  """

  def __init__(self, path: str | pathlib.Path, first_step: int = 0):
    self._path = pathlib.Path(path)
    with disk.writing(self._path):
      self._path.parent.mkdir(parents=True, exist_ok=True)
      _keep_lines_before(self._path, first_step)
      self._file = open(self._path, "a", encoding="utf-8")

  def write(self, step: int, metrics: Metrics) -> None:
    with disk.writing(self._path):
      self._file.write(_line({"step": step} | divide(metrics)))
      self._file.flush()

  def close(self) -> None:
    with disk.writing(self._path):  # what a full disk has not taken is tried once more
      self._file.close()


def read_lines(path: str | pathlib.Path) -> list[dict[str, Any]]:
  """What a `JsonlWriter` has written."""
  return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


class TensorBoardWriter:
  """Scalars as TensorBoard curves; points of steps that a resumed run does again are replaced."""

  def __init__(self, folder: str | pathlib.Path, first_step: int = 0):
    self._folder = folder
    with disk.writing(folder):
      self._board = tensorboardX.SummaryWriter(
          str(folder), purge_step=first_step or None, write_to_disk=True)

  def write(self, step: int, metrics: Metrics) -> None:
    with disk.writing(self._folder):
      for name, value in divide(metrics).items():
        if value is not None and math.isfinite(value):
          self._board.add_scalar(name, value, step)
      self._board.flush()

  def close(self) -> None:
    self._board.close()


class ProgressWriter:
  """A table that stays in place on a terminal; one line a step anywhere else."""

  def __init__(self, total_steps: int, shown: Sequence[str],
               console: rich.console.Console | None = None):
    self._console = console or rich.console.Console(highlight=False)
    self._total, self._shown = total_steps, tuple(shown)
    self._live = rich.live.Live(console=self._console, auto_refresh=False)
    if self._console.is_terminal:
      self._live.start()

  def write(self, step: int, metrics: Metrics) -> None:
    plain = divide(metrics)
    shown = {name: _short(plain[name]) for name in self._shown if name in plain}
    head = f"step {step}/{self._total}"
    if not self._console.is_terminal:
      line = "  ".join([head, *(f"{name} {value}" for name, value in shown.items())])
      self._console.print(line, soft_wrap=True, markup=False)
      return
    table = rich.table.Table(title=head, show_header=False, box=None)
    for name, value in shown.items():
      table.add_row(name, value)
    self._live.update(table, refresh=True)

  def close(self) -> None:
    self._live.stop()


class TrajectoryWriter:
  """Sample episodes: `trajectories.jsonl` for programs and `trajectories.txt` for people.

  `decode` turns ids into text. Control characters are escaped in the text that people read, so that
  no passage can move the cursor or turn the text around.
  """

  def __init__(self, folder: str | pathlib.Path, decode: typing.Callable[[Sequence[int]], str],
               first_step: int = 0):
    self._folder, self._decode = pathlib.Path(folder), decode
    jsonl, text = (self._folder / f"trajectories.{end}" for end in ("jsonl", "txt"))
    with disk.writing(self._folder):
      self._folder.mkdir(parents=True, exist_ok=True)
      kept = _keep_lines_before(jsonl, first_step)
      text.write_text("".join(_readable(entry) for entry in kept), encoding="utf-8")
      self._jsonl, self._text = (open(p, "a", encoding="utf-8") for p in (jsonl, text))

  def write(self, step: int, trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> None:
    entries = [_entry(step, trajectory, score, self._decode)
               for trajectory, score in zip(trajectories, scores, strict=True)]
    with disk.writing(self._folder):
      self._jsonl.writelines(map(_line, entries))
      self._text.writelines(map(_readable, entries))
      self._jsonl.flush()
      self._text.flush()

  def close(self) -> None:
    with disk.writing(self._folder), self._jsonl, self._text:
      pass  # closes both, whatever the first one meets


class Diary:
  """Where a run's numbers and sample episodes go; `earlier`: the steps that it goes on from."""

  def __init__(self, workdir: pathlib.Path, c: ml_collections.ConfigDict,
               decode: typing.Callable[[Sequence[int]], str], first_step: int):
    board = ([TensorBoardWriter(workdir / "tensorboard", first_step)] if c.log.tensorboard else [])
    self._numbers = MultiWriter(JsonlWriter(workdir / METRICS_FILE, first_step), *board,
                                ProgressWriter(c.steps, SHOWN))
    self._episodes = TrajectoryWriter(workdir, decode, first_step)
    self._count = c.log.trajectories
    self.earlier = read_lines(workdir / METRICS_FILE)

  def write(self, step: int, found: Metrics,
            episodes: Sequence[tuple[Trajectory, Score]]) -> None:
    self._numbers.write(step, found)
    shown = episodes[: self._count]
    self._episodes.write(step, [t for t, _ in shown], [s for _, s in shown])

  def close(self) -> None:
    try:
      self._numbers.close()
    finally:
      self._episodes.close()


def escape_controls(text: str) -> str:
  """The text with what a terminal would obey shown as `\\x1b` or `\\u202e`; new lines stay."""
  return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode()
                 for c in text)


def _entry(step: int, trajectory: Trajectory, score: Score,
           decode: typing.Callable[[Sequence[int]], str]) -> dict[str, Any]:
  spans = [("prompt", trajectory.prompt_ids)] + [(s.role.value, s.ids) for s in trajectory.segments]
  question = trajectory.question
  return {
      "step": step, "dataset": question.dataset, "id": question.id, "sample": trajectory.sample,
      "question": question.question, "golden_answers": list(question.golden_answers),
      "answer": score.answer, "reward": score.reward, "em": score.em,
      "stop_reason": trajectory.stop_reason.value, "turns": trajectory.turns,
      "searches": [s.query for s in trajectory.searches],
      "spans": [{"role": role, "text": decode(ids), "tokens": len(ids)} for role, ids in spans]}


def _readable(entry: Mapping[str, Any]) -> str:
  answer = "none" if entry["answer"] is None else entry["answer"]
  wanted = " | ".join(entry["golden_answers"])
  # A field is one line, whatever it holds: only the spans keep their line breaks.
  field = lambda text: escape_controls(str(text)).replace("\n", "\\n")
  lines = [f"=== step {entry['step']}  {field(entry['dataset'])}/{field(entry['id'])}  "
           f"sample {entry['sample']}  reward {_short(entry['reward'])}  "
           f"{entry['stop_reason']} after {entry['turns']} turns",
           f"question: {field(entry['question'])}",
           f"answer:   {field(answer)}   wanted: {field(wanted)}"]
  for span in entry["spans"]:
    lines += [f"--- {span['role']} ({span['tokens']} tokens)", escape_controls(span["text"])]
  return "\n".join(lines) + "\n\n"


def _line(entry: Mapping[str, Any]) -> str:
  """One line of strict JSON: ASCII, so that lone surrogates survive; NaN and infinity are null."""
  return json.dumps(_finite(entry), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {k: _finite(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_finite(v) for v in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: float | None) -> str:
  return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"


def _keep_lines_before(path: pathlib.Path, first_step: int) -> list[dict[str, Any]]:
  """Cuts the file, atomically, to its whole lines of earlier steps, and returns what they hold."""
  if not path.exists():
    return []
  kept, whole = [], []
  for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
    try:
      entry = json.loads(line)
    except json.JSONDecodeError:
      continue  # torn by a kill
    if line.endswith("\n") and entry["step"] < first_step:
      kept.append(entry)
      whole.append(line)
  part = path.with_name(path.name + ".part")
  part.write_text("".join(whole), encoding="utf-8")
  os.replace(part, path)
  return kept
