"""PPO on the hard world: grpo_hard's task, with a value model of the policy's size.

Reproduces: the method (arXiv:2503.09516) with the paper's main algorithm, on the yardstick.
Machine: two CPU cores, at most 30 minutes of training.
Expected: held-out greedy EM from about 0.3 to above 0.75; see LOG.md for its ceiling.
Command: python -m searchr1_jax.train --config=configs/ppo_hard.py --workdir=runs/ppo_hard
"""

from __future__ import annotations

import ml_collections

from configs import grpo_hard, ppo_tiny


def get_config() -> ml_collections.ConfigDict:
  return ppo_tiny.with_ppo(grpo_hard.get_config())
