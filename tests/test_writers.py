"""run/writers.py: means divided once, strict lines, every step once, no terminal obeys a text."""

from __future__ import annotations

import io
import json
import math
import pathlib
import struct

import hypothesis
from hypothesis import strategies as st
import jax.numpy as jnp
import pytest
import rich.console
from tensorboardX.proto import event_pb2

from retriever.protocol import Passage
from searchr1_jax.run import disk, writers
from searchr1_jax.types import (Mean, Question, Role, Score, SearchRecord, Segment, StopReason,
                                Trajectory)


def mean(total: float, count: float) -> Mean:
  return Mean(jnp.array(total), jnp.array(count))


def strict(line: str) -> dict:
  """Parses JSON, refusing the NaN and Infinity that Python would let through."""
  def refuse(word):
    raise AssertionError(f"not JSON: {word}")
  return json.loads(line, parse_constant=refuse)


def scalars(folder: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
  """The curves in a folder; a record is its length (8 bytes), a sum (4), the event, a sum (4)."""
  found: dict[str, list[tuple[int, float]]] = {}
  for path in sorted(folder.glob("events*")):
    data = path.read_bytes()
    while data:
      (size,) = struct.unpack("<Q", data[:8])
      event = event_pb2.Event.FromString(data[12:12 + size])
      for value in event.summary.value:
        found.setdefault(value.tag, []).append((event.step, value.simple_value))
      data = data[size + 16:]
  return found


def test_a_mean_is_divided_once_and_an_empty_one_is_nothing():
  # 3/4 and 1/4 add up to 4/8 = 0.5; the mean of their means would be 0.5 only by equal counts.
  both = mean(3.0, 4.0) + mean(3.0, 8.0)  # 6/12
  assert writers.divide({"a": both, "b": mean(0.0, 0.0), "c": 2, "d": 0.5}) == {
      "a": 0.5, "b": None, "c": 2.0, "d": 0.5}


def test_lines_are_strict_json_and_there_at_once(tmp_path):
  writer = writers.JsonlWriter(tmp_path / "deep" / "metrics.jsonl")
  writer.write(0, {"loss": float("nan"), "kl": math.inf, "reward": mean(1.0, 4.0),
                   "empty": mean(0.0, 0.0)})
  (line,) = (tmp_path / "deep" / "metrics.jsonl").read_text().splitlines()  # before any close
  assert strict(line) == {"step": 0, "loss": None, "kl": None, "reward": 0.25, "empty": None}
  writer.close()


@hypothesis.given(written=st.integers(0, 12), torn=st.integers(0, 37), data=st.data())
def test_after_a_resume_every_step_stands_once(tmp_path_factory, written, torn, data):
  first = data.draw(st.integers(0, written))
  path = tmp_path_factory.mktemp("resume") / "metrics.jsonl"
  writer = writers.JsonlWriter(path)
  for step in range(written):
    writer.write(step, {"run": 1})
  writer.close()
  with open(path, "a") as f:
    f.write('{"step": 0, "run": 1, "value": 0.1234}\n'[:torn])  # all but the line end, at most
  writer = writers.JsonlWriter(path, first_step=first)
  for step in range(first, 15):
    writer.write(step, {"run": 2})
  writer.close()
  lines = [strict(line) for line in path.read_text().splitlines()]
  assert [x["step"] for x in lines] == list(range(15))
  assert [x["run"] for x in lines] == [1.0] * first + [2.0] * (15 - first)


def test_curves_are_what_was_written_without_what_is_no_number(tmp_path):
  writer = writers.TensorBoardWriter(tmp_path)
  writer.write(0, {"loss": mean(1.0, 2.0), "kl": float("nan"), "empty": mean(0.0, 0.0)})
  writer.write(1, {"loss": 0.25})
  writer.close()
  assert scalars(tmp_path) == {"loss": [(0, 0.5), (1, 0.25)]}


def test_progress_is_one_plain_line_a_step_where_there_is_no_terminal():
  stream = io.StringIO()
  console = rich.console.Console(file=stream, highlight=False)
  writer = writers.ProgressWriter(20, ("reward", "loss", "absent"), console)
  writer.write(3, {"loss": float("nan"), "reward": mean(1.0, 3.0), "hidden": 1.0})
  writer.close()
  assert stream.getvalue() == "step 3/20  reward 0.3333  loss –\n"


def test_progress_stays_in_place_on_a_terminal():
  stream = io.StringIO()
  console = rich.console.Console(file=stream, force_terminal=True, legacy_windows=False,
                                 _environ={"TERM": "xterm"})
  writer = writers.ProgressWriter(20, ("reward",), console)
  writer.write(1, {"reward": 0.5})
  writer.write(2, {"reward": 0.75})
  writer.close()
  assert "0.75" in stream.getvalue() and "\x1b[1A" in stream.getvalue()  # moved up, written over


def test_several_writers_see_the_same_numbers(tmp_path):
  both = writers.MultiWriter(*(writers.JsonlWriter(tmp_path / n) for n in "ab"),
                             writers.NullWriter())
  both.write(0, {"reward": mean(1.0, 4.0), "empty": mean(0.0, 0.0)})
  both.close()
  assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
  assert strict((tmp_path / "a").read_text()) == {"step": 0, "reward": 0.25, "empty": None}


TEXTS = {1: "Who\x1b[2J?", 2: "<search>x</search>", 3: "\u202e<b>\n", 4: "\ud800 end"}
EPISODE = Trajectory(
    question=Question("nq", "7\n=== step 9", "Who\r?", ("a\x07",)), sample=2, prompt_ids=(1,),
    segments=(Segment(Role.POLICY, (2,), (-0.5,)), Segment(Role.ENVIRONMENT, (3,)),
              Segment(Role.POLICY, (4,), (-0.25,))),
    stop_reason=StopReason.BUDGET, turns=1,
    searches=(SearchRecord(0, "x", (Passage("0", "T", 1.0),)),))
SCORE = Score(reward=0.25, em=0.0, f1=0.5, subem=0.0, format_valid=1.0, retrieval_hit=0.0,
              answer=None)


def decode(ids) -> str:
  return "".join(TEXTS[i] for i in ids)


def test_a_sample_keeps_its_roles_and_reads_without_being_obeyed(tmp_path):
  writer = writers.TrajectoryWriter(tmp_path, decode)
  writer.write(5, [EPISODE], [SCORE])
  writer.close()
  entry = strict((tmp_path / "trajectories.jsonl").read_text())
  assert [(s["role"], s["text"]) for s in entry["spans"]] == [
      ("prompt", TEXTS[1]), ("policy", TEXTS[2]), ("environment", TEXTS[3]), ("policy", TEXTS[4])]
  assert [entry[k] for k in ("step", "reward", "answer", "searches")] == [5, 0.25, None, ["x"]]
  text = (tmp_path / "trajectories.txt").read_text()
  assert all(c == "\n" or c.isprintable() for c in text)
  for shown in ("Who\\x1b[2J?", "\\u202e<b>", "\\ud800 end", "wanted: a\\x07", "Who\\r?"):
    assert shown in text
  assert text.count("\n=== ") == 0  # an id with a line break forges no head of an episode


def test_samples_of_steps_that_are_done_again_go(tmp_path):
  writer = writers.TrajectoryWriter(tmp_path, decode)
  for step in (1, 2, 3):
    writer.write(step, [EPISODE, EPISODE], [SCORE, SCORE])
  writer.close()
  writer = writers.TrajectoryWriter(tmp_path, decode, first_step=3)
  writer.write(3, [EPISODE], [SCORE])
  writer.close()
  steps = [strict(x)["step"] for x in (tmp_path / "trajectories.jsonl").read_text().splitlines()]
  assert steps == [1, 1, 2, 2, 3]
  heads = [x.split()[2] for x in (tmp_path / "trajectories.txt").read_text().splitlines()
           if x.startswith("=== step")]
  assert heads == ["1", "1", "2", "2", "3"]


@pytest.mark.parametrize("make", [
    lambda p: writers.JsonlWriter(p / "metrics.jsonl"),
    lambda p: writers.TrajectoryWriter(p, decode), lambda p: writers.TensorBoardWriter(p)])
def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path, make):
  (tmp_path / "file").write_text("")
  with pytest.raises(disk.StorageError, match="file.* could not be written"):
    make(tmp_path / "file")


def test_a_full_disk_is_a_storage_error_at_every_write(tmp_path):
  numbers, samples = writers.JsonlWriter(tmp_path / "m"), writers.TrajectoryWriter(tmp_path, decode)
  for owner, name in ((numbers, "_file"), (samples, "_jsonl"), (samples, "_text")):
    getattr(owner, name).close()
    setattr(owner, name, open("/dev/full", "w"))
  for write in (lambda: numbers.write(0, {"a": 1}), lambda: samples.write(0, [EPISODE], [SCORE]),
                numbers.close, samples.close):
    with pytest.raises(disk.StorageError, match="No space left"):
      write()


def test_every_episode_has_its_score(tmp_path):
  writer = writers.TrajectoryWriter(tmp_path, decode)
  with pytest.raises(ValueError):
    writer.write(0, [EPISODE], [])
  writer.close()


@hypothesis.given(st.text())
def test_escaped_text_is_printable_and_plain_text_is_itself(text):
  escaped = writers.escape_controls(text)
  assert all(c == "\n" or c.isprintable() for c in escaped)
  if all(c == "\n" or c.isprintable() for c in text):
    assert escaped == text
