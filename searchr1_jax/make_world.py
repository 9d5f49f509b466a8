"""Program: writes a generated world's corpus, questions and index, for a look or for other tools.

python -m searchr1_jax.make_world --world=tiny --seed=0 --test_seed=1 --out=worlds/tiny
"""

from __future__ import annotations

from typing import Sequence

from absl import flags

from searchr1_jax.run import cli
from searchr1_jax.types import UserError
from searchr1_jax.worlds import files


def main(words: Sequence[str]) -> None:
  def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("world", "tiny", "tiny or hard", flag_values=values)
    flags.DEFINE_integer("seed", 0, "of what training asks about", flag_values=values)
    flags.DEFINE_integer("test_seed", 1, "of what only the test asks about", flag_values=values)
    flags.DEFINE_string("out", None, "folder to write", flag_values=values)

  values, _ = cli.parse(words, define)
  if not values.out:
    raise UserError("no folder to write; give one as --out=worlds/tiny")
  print(files.write_world(values.out, values.world, values.seed, values.test_seed))


if __name__ == "__main__":
  cli.run_program(main)
