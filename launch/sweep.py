"""Program: trains every combination of some settings, one run after another, then compares them.

python launch/sweep.py --config=configs/grpo_tiny.py --out=runs/sweep algo.kl_coef=0,0.001 seed=0,1

Starts: `launch/local.sh` for each combination, here four, in a workdir of `--out` that is named
after it. Needs: what local.sh needs. --config.KEY=VALUE holds for all runs. The same command
again leaves out runs that are finished and resumes the others; one that fails is reported, and the
rest go on.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from typing import Any, Callable, Mapping, Sequence

from absl import flags
import ml_collections
import rich.box
import rich.console
import rich.table
import rich.text

from searchr1_jax.run import cli, disk
from searchr1_jax.types import UserError

TRAIN = pathlib.Path(__file__).resolve().parent / "local.sh"
_COMMA = re.compile(r",(?![^(\[]*[)\]])")  # one that stands outside of brackets

Runner = Callable[[Sequence[str]], int]  # the trainer's words to its exit code


def main(words: Sequence[str], run: Runner | None = None) -> None:
  values, axes = cli.parse(words, lambda v: _define(v, words), positional=len(words))
  if not values.out:
    raise UserError("no folder for the runs; give one as --out=runs/sweep")
  common = [w for w in words if re.match(r"--?(no)?config[.=]", w)]
  runs = {name: common + [f"--config.{s}" for s in settings]
          for name, settings in combinations(axes).items()}
  configs = {name: _config(its) for name, its in runs.items()}  # all are tried before one starts
  out = disk.make_folder(pathlib.Path(values.out))
  failed = sweep(out, runs, {n: c.steps for n, c in configs.items()}, run or run_trainer)
  rich.console.Console().print(table({n: summary_of(out / n) for n in runs}))
  if failed:
    raise UserError(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}; mend what "
                    "they said, and repeat the command")


def _define(values: flags.FlagValues, words: Sequence[str]) -> None:
  flags.DEFINE_string("out", None, "the folder of all runs", flag_values=values)
  cli.define_config(values, words, cli.base_config())


def _config(words: Sequence[str]) -> ml_collections.ConfigDict:
  """What the trainer would make of them; a key or value that it would not take is an error here."""
  return cli.parse(words, lambda v: cli.define_config(v, words, cli.base_config()))[0].config


def sweep(out: pathlib.Path, runs: Mapping[str, Sequence[str]], steps: Mapping[str, int],
          run: Runner) -> list[str]:
  """Runs what is not finished; returns the names of those that failed."""
  failed = []
  for number, (name, words) in enumerate(runs.items(), 1):
    done = summary_of(out / name)
    finished = done is not None and done["steps"] == steps[name]
    note = ", finished before" if finished else ""
    print(f"run {number} of {len(runs)}: {name}{note}", flush=True)
    code = 0 if finished else run([*words, f"--workdir={out / name}"])
    if code == cli.STOPPED:
      raise cli.Stopped("the sweep was stopped; the same command goes on from there")
    if code:
      print(f"failed with exit code {code}: {name}", file=sys.stderr, flush=True)
      failed.append(name)
  return failed


def run_trainer(words: Sequence[str]) -> int:
  """The trainer as launch/local.sh starts it; a signal to stop is handed on and stops the sweep."""
  asked, children = [], []

  def stop(number, _):
    asked.append(number)
    for child in children:
      child.send_signal(signal.SIGTERM)

  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, stop)
  with subprocess.Popen([TRAIN, *words], env=os.environ | {"PYTHON": sys.executable}) as child:
    children.append(child)
    if asked:  # while it was being started
      child.send_signal(signal.SIGTERM)
    code = child.wait()
  return cli.STOPPED if asked else code


def summary_of(workdir: pathlib.Path) -> dict[str, Any] | None:
  """What a run came to; None before its end, and where a kill has left half a file."""
  try:
    return json.loads((workdir / "summary.json").read_text())
  except (FileNotFoundError, ValueError):
    return None


def combinations(axes: Sequence[str]) -> dict[str, tuple[str, ...]]:
  """`["a=1,2", "b=3"]` to `{"a=1,b=3": ("a=1", "b=3"), "a=2,b=3": …}`, the last varying fastest."""
  choices = []
  for axis in axes:
    key, equals, values = axis.partition("=")
    if not (key and equals and values):
      raise UserError(f"nothing can be varied by {axis!r}; wanted KEY=VALUE,VALUE, such as "
                      "seed=0,1")
    choices.append([f"{key}={value}" for value in _COMMA.split(values)])
  named = [(re.sub(r"[^\w.=,+-]", "-", ",".join(c)), c) for c in itertools.product(*choices)]
  if not axes:
    raise UserError("nothing is varied; name settings, such as algo.kl_coef=0,0.001 seed=0,1")
  if len(out := dict(named)) < len(named):
    raise UserError("two runs would have the same name; give each key once, and values that differ "
                    "in letters or digits")
  return out


def table(summaries: Mapping[str, Mapping[str, Any] | None]) -> rich.table.Table:
  """A row a run: greedy exact match on the test questions before and after, and its seconds."""
  out = rich.table.Table(box=rich.box.SIMPLE_HEAD)
  out.add_column("run", overflow="fold")
  for column in ("EM % before", "EM % after", "seconds"):
    out.add_column(column, justify="right")
  for name, summary in summaries.items():
    cells = ("–", "–", "–")
    if summary:
      cells = (_score(summary, "before"), _score(summary, "after"), f"{summary['seconds']:.0f}")
    out.add_row(rich.text.Text(name), *map(rich.text.Text, cells))
  return out


def _score(summary: Mapping[str, Any], when: str) -> str:
  if f"em_{when}" not in summary:  # a run that measures nothing then
    return "–"
  low, high = summary[f"em_{when}_interval"]
  return f"{100 * summary[f'em_{when}']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


if __name__ == "__main__":
  cli.run_program(main)
