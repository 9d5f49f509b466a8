"""PPO on the tiny world: the same task as grpo_tiny, with a value model of the policy's size.

Reproduces: the method (arXiv:2503.09516) in small, with the paper's main algorithm.
Machine: two CPU cores, about 5 minutes of training.
Expected: held-out greedy EM from about 0.3 to above 0.95; see LOG.md for three seeds.
Command: python -m searchr1_jax.train --config=configs/ppo_tiny.py --workdir=runs/ppo_tiny
"""

from __future__ import annotations

import ml_collections

from configs import grpo_tiny


def get_config() -> ml_collections.ConfigDict:
  return with_ppo(grpo_tiny.get_config())


def with_ppo(c: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """A GRPO config's task for PPO: as many episodes a step, each of its own question."""
  c.steps = 80
  c.data.questions = 80
  c.algo.update(name="ppo", group_size=1, kl_in="reward", kl_kind="k1", drop_flat_groups=False,
                value_only_steps=3)
  c.optimizer.update(policy_lr=3e-4, value_lr=5e-4, value_warmup=0.0)
  return c
