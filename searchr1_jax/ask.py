"""Program: asks a trained policy one question and shows how it comes to its answer.

python -m searchr1_jax.ask --workdir=runs/tiny "What is the maker of Rose Pepa?"

--checkpoint=newest, best, base (untrained) or a step; --temperature=0 (greedy) or above; and
--config.KEY=VALUE on top of the run's own config. What the policy writes appears as it's written.
"""

from __future__ import annotations

import codecs
import contextlib
import pathlib
from typing import Callable, Sequence

from absl import flags
import jax
import rich.console
import rich.text

from searchr1_jax.rollout import draw, drive
from searchr1_jax.run import cli, setup, writers
from searchr1_jax.run.load import load_trained
from searchr1_jax.types import Question, Role, StopReason, UserError

STYLES = {Role.POLICY: "bold", Role.ENVIRONMENT: "dim"}
PIECE = 8  # tokens that appear at a time


class Stream:
  """Prints an episode while it is written, each side in its own style."""

  def __init__(self, console: rich.console.Console, decode_bytes: Callable[[Sequence[int]], bytes]):
    self._console, self._decode_bytes = console, decode_bytes
    self._begin(None)

  def __call__(self, task: int, role: Role, ids: Sequence[int]) -> None:
    """Ids that came into the episode; a character that a later token completes waits for it."""
    if role is not self._role:
      self.end()
      self._begin(role)
    self._print(self._decoder.decode(self._decode_bytes(ids)))

  def end(self) -> None:
    """Finishes the line, if one was begun."""
    self._print(self._decoder.decode(b"", final=True))
    if self._began:
      self._console.print()

  def _begin(self, role: Role | None) -> None:
    self._role, self._began, self._breaks = role, False, ""
    self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

  def _print(self, text: str) -> None:
    """Line ends wait for what follows them, so that none stand at the edges of a segment."""
    text = self._breaks + text if self._began else text.lstrip("\n")
    shown = text.rstrip("\n")
    self._breaks = text[len(shown):]
    if shown:
      self._began = True
      self._console.print(rich.text.Text(writers.escape_controls(shown), STYLES[self._role]),
                          end="", soft_wrap=True)


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
  c.rollout.update(rows=1, seats=(1,), row_buckets=(1,), seat_tokens=PIECE)
  setup.check(c)
  c = setup.prepare_world(c, workdir)
  policy, params, _ = load_trained(c, workdir, values.checkpoint)
  question = Question("asked", "0", rest[0], ())
  console = rich.console.Console()
  stream = Stream(console, policy.tokenizer.decode_bytes)
  with contextlib.ExitStack() as held:
    search = held.enter_context(setup.open_search(c))
    held.callback(stream.end)
    (t,), stats = drive.rollout(
        policy.engine, params, [drive.Task(question, 0, policy.encode_prompt(question))],
        policy.rules, search, how=draw.sampling(values.temperature),
        key=jax.random.key(c.seed), retrieval=setup.retrieval(c),
        watcher=drive.Watcher(tokens=stream))
  answer = policy.score(t).answer
  if t.stop_reason is StopReason.RETRIEVAL_ERROR:
    raise UserError(f"the search engine failed ({stats.search_failure}); mend it and ask again")
  if not t.segments:
    raise UserError(f"the question and its prompt take {len(t.prompt_ids)} tokens, an episode has "
                    f"{c.episode.max_episode_tokens}: no room for an answer; ask something shorter")
  console.print(rich.text.Text(
      f"\nanswer: {writers.escape_controls(answer) if answer is not None else 'none'}   "
      f"({len(t.searches)} searches, stopped by {t.stop_reason.value})"))


if __name__ == "__main__":
  cli.run_program(main)
