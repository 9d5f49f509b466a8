"""How a learning rate grows at the start of a run; steps are training steps (rollout batches)."""

from __future__ import annotations

from typing import Callable

import jax.numpy as jnp
from jaxtyping import Array

Schedule = Callable[[int | Array], Array]
"""`schedule(training steps already taken) -> learning rate`, what optax calls a schedule."""


def warmup_steps(ratio: float, total_steps: int) -> int:
  """The whole steps in a share of a run, rounded down as published."""
  return int(ratio * total_steps)


def warmup(learning_rate: float, steps: int, compat: bool = False) -> Schedule:
  """A linear warm-up, then constant.

  lr(t) = learning_rate min(1, (t + 1) / steps);  compat: min(1, t / steps), whose first step is
  wasted on a rate of 0. Written as a quotient: an interpolation between the end points, as
  optax.linear_schedule has it, loses the small first rates to rounding.

  Args:
    learning_rate: the rate after the warm-up.
    steps: training steps of warm-up; 0 starts at the full rate.
    compat: starts at 0, as published.
  Source: the published warm-up; Search-R1, arXiv:2503.09516, appendix B.
  """
  done = 0.0 if compat else 1.0

  def schedule(count: int | Array) -> Array:
    taken = jnp.asarray(count, jnp.float32) + done
    share = taken / steps if steps > 0 else jnp.ones_like(taken)
    return learning_rate * jnp.minimum(share, 1.0)

  return schedule
