"""The programs as a user types them: they work, and a mistake gets one clear message."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny_runs

from searchr1_jax import ask, evaluate, export, make_world, train
from searchr1_jax.model import weights
from searchr1_jax.run import cli, load, setup
from searchr1_jax.text.tokenizer import Tokenizer
from searchr1_jax.types import UserError

# ml_collections loads a config file by a function that Python will drop.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")

PPO = "--config=configs/ppo_tiny.py"
GRPO = "--config=configs/grpo_tiny.py"


def typed(module: str, *words: str) -> str:
  """What `python -m module words` prints."""
  done = subprocess.run([sys.executable, "-m", f"searchr1_jax.{module}", *words],
                        cwd=tiny_runs.ROOT, capture_output=True, text=True, timeout=900)
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> pathlib.Path:
  """Two steps of PPO."""
  workdir = tmp_path_factory.mktemp("runs") / "ppo"
  typed("train", PPO, f"--workdir={workdir}", "--config.steps=2", "--config.data.questions=8",
        "--config.eval.around=False", "--config.algo.value_only_steps=1")
  return workdir


def test_train_leaves_a_whole_run(run):
  numbers = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
  assert [n["step"] for n in numbers] == [0, 1]
  assert "value/value_loss" in numbers[0] and "policy/policy_loss" not in numbers[0]
  assert "policy/policy_loss" in numbers[1]
  assert json.loads((run / "summary.json").read_text())["steps"] == 2
  assert "=== step 1" in (run / "trajectories.txt").read_text()
  assert (run / "checkpoints" / "step_00000002").is_dir() and (run / "tensorboard").is_dir()


def test_evaluate_answers_the_held_out_questions(run, tmp_path):
  printed = typed("evaluate", f"--workdir={run}", "--questions=6", f"--out={tmp_path / 'out'}")
  assert "EM %" in printed and "step 2 (newest), greedy" in " ".join(printed.split())
  assert json.loads((tmp_path / "out" / "summary.json").read_text())["all"]["n"] == 6
  assert len((tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()) == 6


def test_export_writes_the_trained_policy(run, tmp_path, monkeypatch, capsys):
  out = tmp_path / "mine"
  main(monkeypatch, export.main, f"--workdir={run}", f"--out={out}")
  assert "step 2 (newest)" in capsys.readouterr().out
  policy, params, _ = load.load_trained(cli.load_config(run), run, "newest")
  jax.tree.map(np.testing.assert_array_equal, weights.load(out), dict(params))
  base = weights.load(policy.folder)
  assert not np.array_equal(base["embed"], params["embed"])  # training has moved it
  assert Tokenizer.load(out).fingerprint == policy.tokenizer.fingerprint
  main(monkeypatch, export.main, f"--workdir={run}", f"--out={out}", "--dtype=bfloat16")  # replaces it
  size = lambda f: (f / "model.safetensors").stat().st_size
  assert 0.45 < size(out) / size(policy.folder) < 0.55
  (tmp_path / "thesis").mkdir()
  (tmp_path / "thesis" / "chapter1.txt").touch()
  with pytest.raises(UserError, match="holds no model"):
    export.main([f"--workdir={run}", f"--out={tmp_path / 'thesis'}"])
  with pytest.raises(UserError, match="no folder to write"):
    export.main([f"--workdir={run}"])


def test_ask_shows_an_episode(run):
  question = json.loads((next(run.glob("world-*")) / "test_1hop.jsonl").read_text().splitlines()[0])
  assert "answer: " in typed("ask", f"--workdir={run}", question["question"])


def test_the_same_command_again_has_nothing_to_do(run, monkeypatch, capsys):
  before = (run / "metrics.jsonl").read_text()
  took = json.loads((run / "summary.json").read_text())["seconds_by_phase"]
  main(monkeypatch, train.main, PPO, f"--workdir={run}", "--config.steps=2",
       "--config.data.questions=8", "--config.eval.around=False",
       "--config.algo.value_only_steps=1")
  assert (run / "metrics.jsonl").read_text() == before
  printed = capsys.readouterr().out
  assert "run folder" in printed and "found a checkpoint after step 2" in printed
  # What the run took is what its steps took, whichever process did them.
  summary = json.loads((run / "summary.json").read_text())
  assert summary["seconds_by_phase"] == pytest.approx(took)
  assert summary["seconds"] >= took["step"]


@pytest.mark.parametrize("program, names", [
    (train, "--config.algo.kl_coef=0.01"), (evaluate, "--engine=empty"), (ask, "--checkpoint=")])
def test_help_needs_nothing_else(program, names, monkeypatch, capsys):
  with pytest.raises(SystemExit) as ended:
    main(monkeypatch, program.main, "--help")
  assert ended.value.code in (None, 0)
  assert names in capsys.readouterr().out


def main(monkeypatch, program, *words: str) -> None:
  monkeypatch.setattr(sys, "argv", ["program", *words])
  monkeypatch.chdir(tiny_runs.ROOT)
  # A second config file in one process would be loaded over the first and keep its names.
  monkeypatch.delitem(sys.modules, "config_config", raising=False)
  cli.run_program(program)


@pytest.fixture
def refused(monkeypatch, capsys):
  """Runs a program that must end with exit code 2 and a short message; the message."""
  def refuse(program, *words: str) -> str:
    with pytest.raises(SystemExit) as end:
      main(monkeypatch, program, *words)
    message = capsys.readouterr().err
    assert end.value.code == 2, message
    assert message.startswith("error: ") and "Traceback" not in message
    assert len(message.splitlines()) <= 8, message
    return message

  return refuse


@pytest.mark.parametrize("word, says", [
    ("--config.stpes=3", "there is no key config.stpes; did you mean config.steps?"),
    ("--config.algo.clip_lo=.1", "no key config.algo.clip_lo; did you mean config.algo.clip_low?"),
    ("--config.clip_low=.1", "no key config.clip_low; did you mean config.algo.clip_low?"),
    ("--config.steps.more=3", "there is no key config.steps.more"),
    ("--config.algo=ppo", "config.algo is a group of keys"),
    ("--stpes=3", "there is no flag --stpes; did you mean --config.steps?"),
    ("--wrokdir=x", "there is no flag --wrokdir; did you mean --workdir?"),
    ("steps=3", "nothing takes the argument 'steps=3'; did you mean --config.steps=3?"),
    ("leftover", "nothing takes the argument 'leftover'"),
    ("--config.steps=abc", "config.steps is 'abc'; wanted a whole number"),
    ("--config.steps=2.5", "config.steps is '2.5'; wanted a whole number"),
    ("--config.steps=-1", "config.steps is -1; wanted 0 or more"),
    ("--config.eval.around=maybe", "config.eval.around is 'maybe'; wanted True or False"),
    ("--config.algo.kl_coef=much", "config.algo.kl_coef is 'much'; wanted a number"),
    ("--config.algo.dual_clip=x", "config.algo.dual_clip is 'x'; wanted a number"),
    ("--config.batch.lengths=(64,", "config.batch.lengths is '(64,'; wanted a tuple"),
    ("--config.batch.lengths=(a,b)", "config.batch.lengths is ('(a,b)',); wanted whole numbers"),
    ("--config.optimizer.policy_lr=nan", "config.optimizer.policy_lr is nan; wanted a finite"),
    ("--config.algo.kl_coef=inf", "config.algo.kl_coef is inf"),
    ("--config.algo.name=pop", "config.algo.name is 'pop'; choose one of 'ppo'"),
    ("--config.model.dtype=float16", "config.model.dtype is 'float16'"),
    ("--config.algo.group_size=2", "set algo.group_size=1"),
    ("--config.algo.epochs=2", "updates_per_batch=1 is no multiple of algo.epochs=2"),
    ("--config.algo.llds_coef=.2", "raise algo.updates_per_batch"),
    ("--config.algo.ratio=sequence", "use it with grpo or rloo"),
    ("--config.algo.compat=search-r1", "algo.aggregation=microbatch-token-mean"),
    ("--config.algo.drop_flat_groups=True", "drop_flat_groups needs groups"),
    ("--config.model.path=", "config.model.path is empty"),
    ("--config.world.name=", "no data: set config.world.name"),
    ("--config.world.name=small", "world 'small' is not known; choose one of tiny"),
    ("--config.batch.lengths=(64,96)", "config.batch.lengths ends at 96"),
    ("--config.batch.lengths=(192,96)", "must be rising"),
    ("--config.batch.lengths=(True,192)", "config.batch.lengths is (True, 192); wanted whole"),
    ("--config.batch.tokens=191", "config.batch.tokens is 191, less than one row of 192"),
    ("--config.data.questions=999999", "a batch of 999999 out of"),
    ("--config.rollout.row_buckets=(24,99)", "wanted sizes from 1 to rollout.rows=80"),
    ("--config.rollout.seats=(81,)", "wanted sizes from 1 to rollout.rows=80"),
    ("--config.rollout.seats=(0,)", "config.rollout.seats is (0,); wanted whole"),
    ("--config.rollout.search_seconds=1e10", "wanted more than 0 and at most 1000000"),
    ("--config.rollout.top_k=2147483648", "wanted 0 or more and less than 2147483648"),
    ("--config.rollout.in_flight=0", "config.rollout.in_flight is 0; wanted 1 or more"),
    ("--config.rollout.cache_gib=1e-6", "that one row and its seat take"),
    ("--config.episode.top_k=0", "config.episode.top_k is 0; wanted 1 or more"),
    ("--config.episode.max_episode_tokens=4096", "config.batch.lengths ends at 192"),
    ("--config.mesh.data=3", "needs 3 devices, there are 1"),
    ("--config.data.test=('t.jsonl',)", "generates all data, config.data.test would not be used"),
    ("--config.retriever.index=index", "config.retriever.index would not be used"),
    ("--config.algo.updates_per_batch=81", "80 episodes a step"),
    ("--config.rollout.temperature=0", "config.rollout.temperature is 0.0; wanted 0.001 or more"),
    ("--config.rollout.top_p=1.5", "is 1.5; wanted more than 0 and at most 1"),
    ("--config.algo.clip_low=1", "is 1.0; wanted 0 or more and less than 1"),
    ("--config.algo.dual_clip=0.5", "config.algo.dual_clip is 0.5; wanted more than 1"),
    ("--config.seed=4294967296", "wanted 0 or more and less than 4294967296"),
    ("--config.limits.lost_share=-1", "is -1.0; wanted 0 or more and at most 1")])
def test_a_mistyped_word_is_named(refused, tmp_path, word, says):
  assert says in refused(train.main, PPO, f"--workdir={tmp_path / 'w'}", word)


@pytest.mark.parametrize("words, says", [
    (["--config.algo.kl_in=reward"], "algo.name=grpo takes no per-token reward"),
    (["--config.algo.kl_controller=adaptive"], "set algo.kl_in=reward"),
    (["--config.algo.value_only_steps=3"], "algo.value_only_steps needs a value"),
    (["--config.model.reference_memory=pinned_host", "--config.algo.kl_coef=0"],
     "algo.kl_coef=0 has none; set model.reference_memory=device"),
    (["--config.algo.importance_cap=2", "--config.algo.mask_observations=False"],
     "no sampler wrote the observations"),
    (["--config.algo.name=rloo", "--config.algo.group_size=1"], "group_size to 2 or more")])
def test_contradictions_of_groups_are_refused(refused, tmp_path, words, says):
  assert says in refused(train.main, GRPO, f"--workdir={tmp_path / 'w'}", *words)


BOUNDED = [(interval, name) for interval, names in setup.BOUNDS.items() for name in names]


@pytest.mark.parametrize("interval, name", BOUNDED, ids=[name for _, name in BOUNDED])
def test_a_number_out_of_bounds_is_named(interval, name):
  c = cli.base_config()
  *groups, key = name.split(".")
  place = functools.reduce(lambda c, group: c[group], groups, c)
  low = float(interval[1:-1].split(",")[0])
  place[key] = place.get_type(key)(low if interval[0] == "(" else low - 1)
  with pytest.raises(UserError, match=f"config.{name} is .*; wanted"):
    setup.check(c)


def test_a_config_that_is_none_of_training_is_named(refused, tmp_path):
  workdir = f"--workdir={tmp_path / 'w'}"
  message = refused(train.main, "--config=configs/sft_tiny.py", workdir)
  assert "configs/sft_tiny.py is not the config of a training run: it has no group algo" in message
  start = "from configs import grpo_tiny\n\ndef get_config():\n  c = grpo_tiny.get_config()\n"
  for line, says in (
      ("c.algo.kl = 0.1", "config.algo.kl that is not known; did you mean config.algo.kl"),
      ("c.data = dict(train='a.jsonl')", "config.data.train is 'a.jsonl'; wanted a tuple"),
      ("del c.algo['lam']", "has no config.algo.lam; start it from configs/base.py")):
    (tmp_path / "mine.py").write_text(f"{start}  with c.unlocked():\n    {line}\n  return c\n")
    assert says in refused(train.main, f"--config={tmp_path / 'mine.py'}", workdir)
  assert not (tmp_path / "w").exists()


def test_folders_that_cannot_be_are_named(refused, run, tmp_path):
  (tmp_path / "file").write_text("mine")
  assert "file cannot be a folder" in refused(train.main, PPO, f"--workdir={tmp_path / 'file'}")
  assert "no folder for the run" in refused(train.main, PPO, "--workdir=")
  for program in (evaluate.main, ask.main):
    assert "no run; give its folder" in refused(program, "--workdir=")
    assert "is not the folder of a run" in refused(program, f"--workdir={tmp_path / 'file'}")
    message = refused(program, "--workdir=models/tiny-base")
    assert "config.json is not the config of a training run: it has no group" in message
  here = f"--workdir={run}"
  assert "file cannot be a folder" in refused(evaluate.main, here, f"--out={tmp_path / 'file'}")
  assert "--out names no folder" in refused(evaluate.main, here, "--out=")
  assert "no folder to write" in refused(make_world.main, "--out=")
  assert (tmp_path / "file").read_text() == "mine"


def test_an_evaluation_never_writes_over_a_run(refused, run):
  before = (run / "trajectories.jsonl").read_text(), (run / "summary.json").read_text()
  message = refused(evaluate.main, f"--workdir={run}", f"--out={run}")
  assert "is not empty and no older output of this program" in message
  assert before == ((run / "trajectories.jsonl").read_text(), (run / "summary.json").read_text())


def test_a_live_run_can_be_evaluated(run, monkeypatch):
  # What looks like a leftover is the step that the run is writing.
  half = run / "checkpoints" / "step_00000003.orbax-checkpoint-tmp"
  half.mkdir()
  main(monkeypatch, evaluate.main, f"--workdir={run}", "--questions=2")
  half.rmdir()


def test_a_run_from_before_a_key_was_added(refused, run, tmp_path, monkeypatch):
  old = shutil.copytree(run, tmp_path / "old")
  saved = json.loads((old / "config.json").read_text())
  del saved["algo"]["importance_cap"], saved["reward"]["search_cost"]
  (old / "config.json").write_text(json.dumps(saved))
  config = cli.load_config(old)
  assert config.reward.search_cost == 0.0 and config.algo.importance_cap is None
  main(monkeypatch, evaluate.main, f"--workdir={old}", "--questions=2",
       "--config.episode.max_searches=1")  # None until now: its type is that of the base
  assert "config.episode.max_searches is 'few'; wanted a whole number" in refused(
      evaluate.main, f"--workdir={old}", "--config.episode.max_searches=few")
  saved["reward"]["serch_cost"] = 1.0
  (old / "config.json").write_text(json.dumps(saved))
  assert ("has a key config.reward.serch_cost that is not known; did you mean "
          "config.reward.search_cost" in refused(evaluate.main, f"--workdir={old}"))


def test_what_is_missing_or_double_is_named(refused, tmp_path):
  workdir = f"--workdir={tmp_path / 'w'}"
  assert "no config; give one as --config=" in refused(train.main, workdir)
  assert ("'configs/ppo_tinny.py' does not exist; did you mean configs/ppo_tiny.py?"
          in refused(train.main, "--config=configs/ppo_tinny.py", workdir))
  assert "no folder for the run" in refused(train.main, PPO)
  twice = refused(train.main, PPO, workdir, "--config.steps=3", "--config.steps=4")
  assert "--config.steps is given more than once" in twice
  assert "Missing value for flag --config.steps" in refused(train.main, PPO, workdir,
                                                            "--config.steps")


def test_a_config_file_that_does_not_run_is_named(refused, tmp_path):
  for text, says in (("def get_config(:", "invalid syntax"), ("import nothing_such", "No module"),
                     ("x = 1", "get_config"), ("def get_config():\n  return 1 / 0", "division")):
    (tmp_path / "mine.py").write_text(text)
    message = refused(train.main, f"--config={tmp_path / 'mine.py'}", f"--workdir={tmp_path}")
    assert "mine.py cannot be read" in message and says in message


@pytest.fixture(scope="module")
def world(tmp_path_factory):
  return tiny_runs.world(tmp_path_factory.mktemp("worlds"))


def small(folder: pathlib.Path, world: pathlib.Path, **changes) -> list[str]:
  config = tiny_runs.config_file(folder / "small.py", world, "grpo", **changes)
  return [f"--config={config}", f"--workdir={folder / 'w'}"]


def test_a_missing_index_is_named(refused, world, tmp_path):
  message = refused(train.main, *small(tmp_path, world, retriever__index=str(tmp_path / "none")))
  assert str(tmp_path / "none") in message


def test_an_unreadable_row_is_named_by_file_and_line(refused, world, tmp_path):
  rows = tmp_path / "rows.jsonl"
  good = {"id": "0", "question": "q?", "golden_answers": ["a"]}
  for bad, says in (('{"id": "1", "question": ', "rows.jsonl:2: not one JSON object"),
                    (json.dumps(good | {"id": "1", "golden_answers": []}), "field 'golden_answers'"),
                    (json.dumps(good), "rows.jsonl:2")):
    rows.write_text(json.dumps(good) + "\n" + bad + "\n")
    assert says in refused(train.main, *small(tmp_path, world, data__train=(str(rows),)))


def test_a_tokenizer_of_another_model_is_named(refused, world, tmp_path):
  model = tmp_path / "model"
  model.mkdir()
  for file in (tiny_runs.ROOT / "models" / "tiny-base").iterdir():
    (model / file.name).write_bytes(file.read_bytes())
  config = json.loads((model / "config.json").read_text())
  (model / "config.json").write_text(json.dumps(config | {"vocab_size": 64}))
  message = refused(train.main, *small(tmp_path, world, model__path=str(model)))
  assert "they belong to different models" in message and "64" in message


def test_a_corpus_line_without_contents_is_named(tmp_path):
  corpus = tmp_path / "corpus.jsonl"
  corpus.write_text('{"id": "0", "contents": "\\"T\\"\\nx"}\n{"id": "1"}\n')
  done = subprocess.run(
      [sys.executable, "-m", "retriever.build", str(corpus), f"--out={tmp_path / 'i'}"],
      cwd=tiny_runs.ROOT, capture_output=True, text=True, timeout=600)
  assert done.returncode == 2 and len(done.stderr.splitlines()) <= 8, done.stderr
  assert "corpus.jsonl" in done.stderr and "contents" in done.stderr
  assert "Traceback" not in done.stderr


def test_a_workdir_belongs_to_one_run(refused, run):
  same = (PPO, f"--workdir={run}", "--config.steps=2", "--config.data.questions=8",
          "--config.eval.around=False", "--config.algo.value_only_steps=1")
  message = refused(train.main, *same, "--config.algo.clip_low=0.1")
  assert "another config: config.algo.clip_low was 0.2, is 0.1; repeat" in message
  config = cli.load_config(run)
  config.model.update(remat="full", reference_memory="pinned_host", logits_tokens=64,
                      scan_layers=not config.model.scan_layers)
  config.optimizer.moments_memory = "pinned_host"
  train._refuse_other_run(config, run)  # where and when numbers are kept is no other run
  config.batch.tokens += 192
  with pytest.raises(UserError, match="another config: config.batch.tokens was"):
    train._refuse_other_run(config, run)


def test_a_run_that_is_not_there_is_named(refused, tmp_path):
  for program in (evaluate.main, ask.main):
    assert "no run; give its folder" in refused(program)
    assert "is not the folder of a run" in refused(program, f"--workdir={tmp_path}")
  (tmp_path / "config.json").write_text('{"steps": ')
  assert "config.json is no whole JSON" in refused(evaluate.main, f"--workdir={tmp_path}")


def test_mistakes_about_a_run_are_named(refused, run):
  here = f"--workdir={run}"
  assert "no question; give one" in refused(ask.main, here)
  assert "nothing takes the argument 'two'" in refused(ask.main, here, "one", "two")
  assert "--checkpoint is 'old'" in refused(evaluate.main, here, "--checkpoint=old")
  assert "has no checkpoint of step 7" in refused(evaluate.main, here, "--checkpoint=7")
  assert "was evaluated while training" in refused(evaluate.main, here, "--checkpoint=best")
  assert "config.retriever.engine is 'google'" in refused(evaluate.main, here, "--engine=google")
  assert "temperature" in refused(evaluate.main, here, "--temperature=-1")
  assert "--temperature is nan" in refused(evaluate.main, here, "--temperature=nan")
  assert "--checkpoint is '\u00b2'" in refused(evaluate.main, here, "--checkpoint=\u00b2")
  assert "did you mean config.world.test_seed?" in refused(
      evaluate.main, here, "--config.world.tset_seed=3")


def test_make_world_names_its_mistakes(refused, tmp_path):
  assert "no folder to write" in refused(make_world.main)
  assert "world 'big' is not known" in refused(make_world.main, "--world=big", f"--out={tmp_path}")
  assert "wanted numbers from 0 up" in refused(make_world.main, "--seed=-1", f"--out={tmp_path}")
