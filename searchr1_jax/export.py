"""Program: writes a trained policy as a Hugging Face folder, tokenizer included.

python -m searchr1_jax.export --workdir=runs/tiny --out=models/mine

--checkpoint=newest, best, base (untrained) or a step; --dtype=float32 (as trained) or bfloat16 (half
the size). What it writes can be named as config.model.path, and transformers reads it.
"""

from __future__ import annotations

import pathlib
from typing import Sequence

from absl import flags
import jax.numpy as jnp

from searchr1_jax.model import folders, weights
from searchr1_jax.run import cli
from searchr1_jax.run.load import load_trained
from searchr1_jax.types import UserError


def main(words: Sequence[str]) -> None:
  def define(values: flags.FlagValues) -> None:
    cli.define_saved_config(values, words)
    flags.DEFINE_string("checkpoint", "newest", "newest, best, base, or a step",
                        flag_values=values)
    flags.DEFINE_enum("dtype", "float32", ("float32", "bfloat16"), "of the weights written",
                      flag_values=values)
    flags.DEFINE_string("out", None, "folder to write", flag_values=values)

  values, _ = cli.parse(words, define)
  if not values.out:
    raise UserError("no folder to write; give one as --out=models/NAME")
  folders.refuse(values.out)  # now rather than after the work
  policy, params, name = load_trained(values.config, pathlib.Path(values.workdir),
                                      values.checkpoint)
  _, config = weights.read_config(policy.folder)
  weights.save(values.out, params, policy.shape, dtype=jnp.dtype(values.dtype), config=config,
               copy_from=policy.folder)
  print(f"{values.out}: {name} of {values.workdir}, {values.dtype}")


if __name__ == "__main__":
  cli.run_program(main)
