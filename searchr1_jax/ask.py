"""Program: asks a trained policy one question and shows how it comes to its answer.

python -m searchr1_jax.ask --workdir=runs/tiny "What is the maker of Rose Pepa?"

--checkpoint=newest, best, base (untrained) or a step; --temperature=0 (greedy) or above; and
--config.KEY=VALUE on top of the run's own config.
"""

from __future__ import annotations

import pathlib
from typing import Sequence

from absl import flags
import jax
import rich.console
import rich.text

from searchr1_jax.rollout import drive, sampler
from searchr1_jax.run import cli, setup, writers
from searchr1_jax.run.load import load_trained
from searchr1_jax.types import Question, Role, StopReason, UserError

STYLES = {Role.POLICY: "bold", Role.ENVIRONMENT: "dim"}


def main(words: Sequence[str]) -> None:
  def define(values: flags.FlagValues) -> None:
    cli.define_saved_config(values, words)
    flags.DEFINE_string("checkpoint", "newest", "newest, best, base, or a step",
                        flag_values=values)
    flags.DEFINE_float("temperature", 0.0, "0 is greedy", flag_values=values, lower_bound=0.0)

  values, rest = cli.parse(words, define, positional=1)
  if not rest or not rest[0].strip():
    raise UserError('no question; give one in quotes: ask --workdir=W "What is …?"')
  workdir, c = pathlib.Path(values.workdir), values.config
  # One episode needs one row of cache.
  c.rollout.rows, c.rollout.row_buckets = 1, (1,)
  setup.check(c)
  c = setup.prepare_world(c, workdir)
  policy, params, _ = load_trained(c, workdir, values.checkpoint)
  question = Question("asked", "0", rest[0], ())
  (t,), _ = drive.rollout(
      policy.engine, params, [drive.Task(question, 0, policy.encode_prompt(question))],
      policy.rules, setup.open_search(c), how=sampler.sampling(values.temperature),
      key=jax.random.key(c.seed))
  console = rich.console.Console()
  for segment in t.segments:
    text = writers.escape_controls(policy.tokenizer.decode(segment.ids)).strip("\n")
    console.print(rich.text.Text(text, style=STYLES[segment.role]))
  answer = policy.score(t).answer
  if t.stop_reason is StopReason.RETRIEVAL_ERROR:
    raise UserError("the search engine failed; mend it and ask again")
  console.print(rich.text.Text(
      f"\nanswer: {writers.escape_controls(answer) if answer is not None else 'none'}   "
      f"({len(t.searches)} searches, stopped by {t.stop_reason.value})"))


if __name__ == "__main__":
  cli.run_program(main)
