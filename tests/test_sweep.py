"""Sweeps: every combination runs once, a failure stops nothing, a signal stops all."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import sys

import pytest
import stand_ins

from launch import sweep
from searchr1_jax.run import cli
from searchr1_jax.types import UserError

# ml_collections loads config files by a way that Python is about to give up.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")

box = stand_ins.box
WORDS = ["--config=configs/grpo_tiny.py", "--config.steps=7", "algo.kl_coef=0,0.001", "seed=0,1"]


def write_summary(words: list[str], **changes) -> None:
  workdir = pathlib.Path(words[-1].partition("=")[2])
  workdir.mkdir(parents=True, exist_ok=True)
  summary = {"steps": 7, "seconds": 12.4, "em_before": 0.25, "em_before_interval": [0.2, 0.3],
             "em_after": 0.5, "em_after_interval": [0.4, 0.6]} | changes
  (workdir / "summary.json").write_text(json.dumps(summary))


def test_a_sweep_runs_the_product_and_goes_on_past_a_failure(tmp_path, capsys):
  started, out = [], tmp_path / "out"

  def run(words):
    started.append(list(words))
    if "--config.seed=1" in words and "--config.algo.kl_coef=0" in words:
      return 3
    write_summary(words)
    return 0

  with pytest.raises(UserError, match=r"1 of 4 runs failed: algo.kl_coef=0,seed=1; .*repeat"):
    sweep.main([*WORDS, f"--out={out}"], run)
  names = [f"algo.kl_coef={a},seed={s}" for a in ("0", "0.001") for s in "01"]
  assert started == [
      ["--config=configs/grpo_tiny.py", "--config.steps=7",
       *(f"--config.{s}" for s in name.split(",")), f"--workdir={out / name}"] for name in names]
  said = capsys.readouterr()
  assert "failed with exit code 3: algo.kl_coef=0,seed=1" in said.err
  rows = [line for line in said.out.splitlines() if line.strip().startswith("algo.")]
  assert [r.split()[1:] for r in rows] == [  # 0.25 of all questions is 25 %
      ["25.0", "[20.0,", "30.0]", "50.0", "[40.0,", "60.0]", "12"] if i != 1 else ["–"] * 3
      for i in range(4)]


def test_a_sweep_leaves_out_what_is_finished(tmp_path):
  started = []
  for name, steps in (("seed=0", 7), ("seed=1", 5)):  # the second was asked for fewer steps then
    write_summary([f"--workdir={tmp_path / name}"], steps=steps)
  (tmp_path / "seed=2").mkdir()
  (tmp_path / "seed=2" / "summary.json").write_text('{"steps": 7, "sec')  # killed while writing
  sweep.main([*WORDS[:2], "seed=0,1,2", f"--out={tmp_path}"],
             lambda words: started.append(words[-1]) or write_summary(words) or 0)
  assert started == [f"--workdir={tmp_path}/seed={n}" for n in (1, 2)]


def test_a_sweep_that_is_stopped_starts_nothing_more(tmp_path):
  started = []
  with pytest.raises(cli.Stopped):
    sweep.main([*WORDS, f"--out={tmp_path}"], lambda words: started.append(words) or cli.STOPPED)
  assert len(started) == 1


@pytest.mark.parametrize("words, says", [
    ([], "nothing is varied"), (["seed"], "nothing can be varied by 'seed'"),
    (["seed=0,0"], "two runs would have the same name"),
    (["sed=0,1"], "no key config.sed; did you"),
    (["seed=0,x"], "config.seed is 'x'; wanted a whole number"),
    (["seed=0,1", "--config.seed=2"], "given more than once"),
    (["algo=1,2"], "config.algo is a group of keys")])
def test_a_sweep_that_cannot_be_run_starts_nothing(tmp_path, words, says):
  with pytest.raises(UserError, match=says):
    sweep.main([WORDS[0], f"--out={tmp_path}/out", *words], lambda _: pytest.fail("started"))
  with pytest.raises(UserError, match="no folder for the runs"):
    sweep.main(WORDS, lambda _: pytest.fail("started"))


def test_values_with_brackets_and_paths_stay_whole():
  assert sweep.combinations(["rollout.seats=(6,),(8,16)"]) == {
      "rollout.seats=-6,-": ("rollout.seats=(6,)",),
      "rollout.seats=-8,16-": ("rollout.seats=(8,16)",)}
  assert list(sweep.combinations(["model.path=/a/b"])) == ["model.path=-a-b"]


def test_a_sweep_starts_the_trainer_as_local_does_and_hands_signals_on(box, tmp_path):
  """Ctrl-C in a terminal comes to the sweep and its launcher at once; the trainer still saves."""
  box.put("python", stand_ins.HEEDING)
  code = ("import sys; sys.executable = 'python'; from launch import sweep; "
          "from searchr1_jax.run import cli; cli.run_program(sweep.main)")
  child = box.start(sys.executable, "-c", code, *WORDS, f"--out={tmp_path}", start_new_session=True)
  while "ready" not in child.stdout.readline():
    pass
  os.killpg(child.pid, signal.SIGINT)
  out, err = child.communicate(timeout=30)
  assert child.returncode == cli.STOPPED and "the sweep was stopped" in err
  assert out.startswith("SIG") and "run 2" not in out


@pytest.mark.parametrize("path", ["README.md", "sweep.py"])
def test_the_sweep_that_is_named_can_be_run(path, tmp_path):
  text = (stand_ins.LAUNCH / path).read_text()
  (words,) = re.findall(r"python launch/sweep.py (--config=[^`\n]*)", text)
  words, started = [w for w in words.split() if not w.startswith("--out")], []
  sweep.main([*words, f"--out={tmp_path}"],
             lambda words: started.append(words) or write_summary(words) or 0)
  assert len(started) == 4
