"""Program: answers question sets greedily and prints what the answers are worth.

python -m searchr1_jax.evaluate --workdir=runs/tiny
python -m searchr1_jax.evaluate --workdir=runs/tiny --checkpoint=base --engine=empty
python -m searchr1_jax.evaluate --workdir=runs/tiny --config.world.test_seed=7

--checkpoint=newest, best, base (untrained) or a step; --engine=empty or random, controls in place of
the run's own; --temperature=0 (greedy) or above; --questions=N, spread over the sets, in place of
all; --out=FOLDER for summaries and episodes; --config.KEY=VALUE on top of the run's config.
"""

from __future__ import annotations

import pathlib
from typing import Sequence

from absl import flags
import jax
import rich.console

from searchr1_jax.rollout import draw
from searchr1_jax.run import cli, disk, evaluation, setup, writers
from searchr1_jax.run.load import load_trained
from searchr1_jax.types import UserError

MARK = "evaluation.json"  # in the folder of every evaluation: of what it is


def main(words: Sequence[str]) -> None:
  def define(values: flags.FlagValues) -> None:
    cli.define_saved_config(values, words)
    flags.DEFINE_string("checkpoint", "newest", "newest, best, base, or a step",
                        flag_values=values)
    flags.DEFINE_string("engine", None, "empty or random: a control in place of the run's engine",
                        flag_values=values)
    flags.DEFINE_float("temperature", 0.0, "0 is greedy", flag_values=values, lower_bound=0.0)
    flags.DEFINE_integer("questions", 0, "at most, spread over the sets; 0 takes all",
                         flag_values=values, lower_bound=0)
    flags.DEFINE_string("out", None, "also write summaries and episodes to this folder",
                        flag_values=values)

  values, _ = cli.parse(words, define)
  workdir, c = pathlib.Path(values.workdir), values.config
  if values.engine is not None:
    c.retriever.engine = values.engine
  setup.check(c)
  folder = _begin(values) if values.out is not None else None
  c = setup.prepare_world(c, workdir)
  policy, params, name = load_trained(c, workdir, values.checkpoint)
  questions = setup.load_questions(tuple(c.data.test), values.questions)
  with setup.open_search(c) as search:
    answered = evaluation.answer_all(
        policy.engine, params, questions, policy.rules, search,
        encode_prompt=policy.encode_prompt, score=policy.score,
        how=draw.sampling(values.temperature), key=jax.random.key(c.seed),
        retrieval=setup.retrieval(c))
  summaries = evaluation.by_dataset(answered)
  title = f"{workdir}, {name}, " + (
      "greedy" if values.temperature == 0 else f"temperature {values.temperature:g}")
  rich.console.Console().print(evaluation.table(summaries, title))
  if folder is not None:
    diary = writers.TrajectoryWriter(folder, policy.tokenizer.decode)
    diary.write(0, [a.trajectory for a in answered], [a.score for a in answered])
    diary.close()
    disk.write_json(folder / "summary.json", summaries)
    print(f"written: {folder}")


def _begin(values: flags.FlagValues) -> pathlib.Path:
  """The folder to write, refused now rather than after the work."""
  if not values.out:
    raise UserError("--out names no folder; give one such as --out=runs/tiny-test, or leave it out")
  names = ("workdir", "checkpoint", "engine", "temperature", "questions")
  disk.begin_output(pathlib.Path(values.out), MARK, {n: values[n].value for n in names})
  return pathlib.Path(values.out)


if __name__ == "__main__":
  cli.run_program(main)
