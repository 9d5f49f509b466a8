"""How a run ends and goes on: what it refuses to resume, what it saves when something fails."""

from __future__ import annotations

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import rich.console
import tiny_runs

from retriever.protocol import RetrievalError
from searchr1_jax import train
from searchr1_jax.model import weights
from searchr1_jax.run import checkpoint, disk, writers
from searchr1_jax.types import Question, Role, Segment, StopReason, Trajectory, UserError


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
  """Every run of this file compiles the same programs: they are kept."""
  names = {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
           "jax_persistent_cache_min_compile_time_secs": 0.0,
           "jax_persistent_cache_min_entry_size_bytes": -1}
  before = {name: getattr(jax.config, name) for name in names}
  for name, value in names.items():
    jax.config.update(name, value)
  yield
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> pathlib.Path:
  """A world, and copies of a model and of questions that a test may change."""
  folder = tmp_path_factory.mktemp("parts")
  tiny_runs.world(folder)
  shutil.copytree(tiny_runs.ROOT / "models" / "tiny-base", folder / "model")
  lines = (folder / "world" / "train.jsonl").read_text().splitlines(keepends=True)
  (folder / "train.jsonl").write_text("".join(lines[:40]))
  return folder


def config(parts: pathlib.Path, **changes):
  world = parts / "world"
  return tiny_runs.config(world, "grpo", **{
      "model__path": str(parts / "model"), "data__train": (str(parts / "train.jsonl"),),
      "data__test": (str(world / "test_1hop.jsonl"),), "steps": 2, "eval__every": 1,
      "eval__questions": 4, "eval__sampled": False} | changes)


@pytest.fixture(scope="module")
def done(parts, tmp_path_factory) -> pathlib.Path:
  """A run of two steps, evaluated before, between and after."""
  workdir = tmp_path_factory.mktemp("runs") / "done"
  train.train(config(parts, eval__around=True), workdir)
  return workdir


@pytest.fixture
def again(done, tmp_path) -> pathlib.Path:
  """A copy of that run."""
  return shutil.copytree(done, tmp_path / "again")


def steps_of(workdir: pathlib.Path) -> list[int]:
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line)["step"] for line in lines]


def test_the_final_step_has_its_metric_and_the_summary_the_same(done):
  saves = checkpoint.CheckpointReader(done / "checkpoints")
  assert saves.steps() == [1, 2]
  summary = json.loads((done / "summary.json").read_text())
  assert saves._metric_of(2) == summary["em_after"]
  assert summary["n"] == 4 and "em_before" in summary


def test_a_run_that_is_done_measures_nothing_again(parts, again, monkeypatch):
  monkeypatch.setattr(train.Trainer, "evaluate", lambda *_: pytest.fail("evaluated again"))
  summary = json.loads((again / "summary.json").read_text())
  repeated = train.train(config(parts, eval__around=True), again)
  assert {k: v for k, v in repeated.items() if "seconds" not in k} == {
      k: v for k, v in summary.items() if "seconds" not in k}


def test_a_run_that_is_done_goes_on_and_is_measured_anew(parts, again, monkeypatch):
  real, temperatures = train.Trainer.evaluate, []
  monkeypatch.setattr(train.Trainer, "evaluate", lambda self, params, t: (
      temperatures.append(t), real(self, params, t))[1])
  train.train(config(parts, eval__around=True, steps=3), again)
  assert temperatures == [0.0]  # the last step's only evaluation is the one after all steps
  assert steps_of(again) == [0, 1, 2]
  assert checkpoint.CheckpointReader(again / "checkpoints").steps()[-1] == 3


def test_fewer_steps_than_are_done_are_refused(parts, again):
  with pytest.raises(UserError, match="has done 2 steps already, config.steps is 1"):
    train.train(config(parts, eval__around=True, steps=1), again)


def test_another_model_and_other_questions_are_refused(parts, again):
  model, questions = parts / "model", parts / "train.jsonl"
  kept, lines = shutil.copytree(model, again / "kept"), questions.read_text()
  shape, _ = weights.read_config(model)
  params = jax.tree.map(lambda x: x * 1.05, weights.load(model))
  try:
    weights.save(model, params, shape, copy_from=kept)
    with pytest.raises(UserError, match="started with another base model"):
      train.train(config(parts, eval__around=True, steps=3), again)
  finally:
    shutil.copytree(kept, model, dirs_exist_ok=True)
  try:
    questions.write_text("".join(lines.splitlines(keepends=True)[::-1]))
    with pytest.raises(UserError, match="started with another set of questions"):
      train.train(config(parts, eval__around=True, steps=3), again)
  finally:
    questions.write_text(lines)


def test_a_checkpoint_without_those_fingerprints_is_refused_in_words(parts, again, monkeypatch):
  whole = checkpoint.CheckpointReader._load

  def older(self, step, abstract):
    state = whole(self, step, abstract)
    del state["host"]["fingerprints"]["base model"]
    return state

  monkeypatch.setattr(checkpoint.CheckpointReader, "_load", older)
  with pytest.raises(UserError, match="another version of this program"):
    train.train(config(parts, eval__around=True, steps=3), again)


def failing(real, call: int, error: Exception):
  """The function, which fails at its so-manieth call."""
  calls = []

  def wrapped(*args, **kwargs):
    calls.append(1)
    if len(calls) == call:
      raise error
    return real(*args, **kwargs)

  return wrapped


def test_an_evaluation_that_fails_loses_no_step(parts, done, tmp_path, monkeypatch):
  c = config(parts, eval__around=True, checkpoint__every=9)
  for call, at in ((2, 1), (3, 2)):  # between the steps, and after the last
    workdir = tmp_path / str(call)
    with monkeypatch.context() as patch:
      patch.setattr(train.Trainer, "evaluate",
                    failing(train.Trainer.evaluate, call, RetrievalError("the engine is away")))
      with pytest.raises(RetrievalError):
        train.train(c, workdir)
    assert checkpoint.CheckpointReader(workdir / "checkpoints").steps() == [at]
    assert steps_of(workdir) == list(range(at))
    train.train(c, workdir)  # the engine is back
    assert steps_of(workdir) == [0, 1]
    ends = [checkpoint.CheckpointReader(w / "checkpoints")._record(2) for w in (done, workdir)]
    assert ends[0] == ends[1]


def test_a_full_disk_is_a_storage_error(parts, tmp_path, monkeypatch):
  real = writers.JsonlWriter.__init__

  def on_a_full_disk(self, *args):
    real(self, *args)
    self._file.close()
    self._file = open("/dev/full", "w")

  monkeypatch.setattr(writers.JsonlWriter, "__init__", on_a_full_disk)
  with pytest.raises(disk.StorageError, match="metrics.jsonl .*No space left"):
    train.train(config(parts, eval__every=0), tmp_path / "w")


def test_a_second_run_in_one_workdir_is_refused(parts, again):
  with disk.locked(again), pytest.raises(UserError, match="another process is training in"):
    train.train(config(parts, eval__around=True), again)


@pytest.fixture(scope="module")
def trainer(parts, tmp_path_factory) -> train.Trainer:
  return train.Trainer(config(parts, steps=600, optimizer__policy_warmup=0.1,
                              algo__drop_flat_groups=False), tmp_path_factory.mktemp("trainer"))


def test_a_longer_run_keeps_the_warm_up_of_its_start(trainer):
  state = trainer.initial_state()
  assert state.host["warmup_steps"]["policy"] == 60
  state = state.noting(warmup_steps={"policy": 6, "value": 0})  # as a run of 60 steps has it
  peak = trainer.config.optimizer.policy_lr
  assert trainer.rate(state, "policy", 5) == pytest.approx(peak)
  assert trainer.rate(state, "policy", 2) == pytest.approx(peak / 2)


def episodes(groups: list[str], lost: tuple[int, ...] = ()) -> list[Trajectory]:
  end = lambda i: StopReason.RETRIEVAL_ERROR if i in lost else StopReason.ANSWER
  return [Trajectory(Question("toys", name, "?", ("!",)), i, (1,),
                     (Segment(Role.POLICY, (2,), (0.0,)),), end(i))
          for i, name in enumerate(groups)]


def test_groups_are_compared_among_their_survivors(trainer):
  # Groups of 3. a lost its third: 1 and 0 have mean 1/2, std 1/sqrt(2). b lost two: it goes.
  # c is whole: 1, 0, 0 have mean 1/3, std sqrt(1/3).
  rewards_B = np.array([1, 0, 9, 1, 9, 9, 1, 0, 0], np.float32)
  found, rows = trainer.compare(episodes(list("aaabbbccc"), lost=(2, 4, 5)), rewards_B)
  assert list(rows) == [0, 1, 6, 7, 8]
  half, third = 0.5 ** 0.5, 3 ** -0.5
  assert found == pytest.approx([half, -half, 2 * third, -third, -third], abs=1e-4)


def test_two_questions_of_one_key_are_no_group(trainer):
  with pytest.raises(UserError, match="has 6 episodes, wanted 3"):
    trainer.compare(episodes(["a"] * 6), np.ones(6, np.float32))


@pytest.mark.parametrize("measured", [(), ("before",), ("after",), ("before", "after")])
def test_whatever_was_measured_is_shown(measured, tmp_path, capsys):
  total = {"n": 7, "searches": 1.0, "retrieval_hit": 0.5} | {
      k: v for m in ("em", "f1", "subem") for k, v in ((m, 0.5), (f"{m}_interval", [0.4, 0.6]))}
  summary = {"steps": 3, "seconds": 1.0} | {f"by_dataset_{w}": {"all": total} for w in measured}
  train._show(rich.console.Console(), summary, tmp_path)
  printed = capsys.readouterr().out
  assert "3 steps" in printed and ("greedy" in printed) == bool(measured)
  assert [w for w in ("before", "after") if w in printed] == list(measured)
