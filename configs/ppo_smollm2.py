"""PPO on real data with a real model: as grpo_smollm2, with a value model of 135 M parameters.

Reproduces: whole training steps of the method on real questions and 10,033 Wikipedia passages.
Machine: two CPU cores and 10 GB of memory, minutes a step (see LOG.md).
Expected: no score; a model this small learns little in the few steps a laptop allows.
Command: python -m searchr1_jax.train --config=configs/ppo_smollm2.py --workdir=runs/ppo_smollm2
"""

from __future__ import annotations

import ml_collections

from configs import grpo_smollm2


def get_config() -> ml_collections.ConfigDict:
  c = grpo_smollm2.get_config()
  c.data.questions = 8
  c.algo.update(name="ppo", group_size=1, kl_in="reward", kl_kind="k1")
  c.optimizer.update(value_lr=1e-5, value_warmup=0.0)
  return c
