"""A trained policy back from a run's folder."""

from __future__ import annotations

import pathlib

import jax
import ml_collections

from searchr1_jax.algo import update
from searchr1_jax.model import decoder, value, weights
from searchr1_jax.run import checkpoint, setup
from searchr1_jax.types import UserError


def load_trained(c: ml_collections.ConfigDict, workdir: pathlib.Path,
                 which: str) -> tuple[setup.Policy, decoder.Params, str]:
  """A run's policy, its parameters as of `which`, and what that came to in words.

  `which`: `newest`, `best`, `base` (untrained), or a step.
  """
  policy = setup.open_policy(c)
  if which == "base":
    return policy, policy.load_params(), "base"
  saves = checkpoint.CheckpointReader(workdir / "checkpoints")
  if not saves.steps():
    raise UserError(f"{workdir} has no checkpoint yet; train further, or give --checkpoint=base")
  abstract = lambda p: jax.eval_shape(update.starter(setup.optimizer(c)), p)
  base = weights.abstract_params(policy.shape)
  wanted = {"arrays": {"policy": abstract(base)}}
  if c.algo.name == "ppo":
    wanted["arrays"]["value"] = abstract(jax.eval_shape(value.from_policy, base))
  if which == "newest":
    step, saved = saves.restore_newest_whole(wanted)
  else:
    step = saves.best_step() if which == "best" else _step(which)
    if step is None:
      raise UserError(f"no checkpoint of {workdir} was evaluated while training; give a step, one "
                      f"of {saves.steps()}, or newest")
    saved = saves.restore(step, wanted)
  name = f"step {step}" + (f" ({which})" if which in ("newest", "best") else "")
  return policy, saved["arrays"]["policy"].params, name


def _step(text: str) -> int:
  if not text.isdecimal():
    raise UserError(f"--checkpoint is {text!r}; wanted newest, best, base or the number of a step")
  return int(text)
