"""GRPO with Qwen2.5-14B on eight H100.

Reproduces: Search-R1 (arXiv:2503.09516), base model, GRPO, on NQ and HotpotQA's training questions.
Machine: 8 x H100 80 GB, nothing offloaded.
  52 hours planned for its 500 steps, at 40 % of the roofline (docs/cost.md).
Expected: no score published for GRPO at this size; PPO's mean EM is .479 (paper, table 5).
Command: python -m searchr1_jax.train --config=configs/grpo_qwen14b.py --workdir=runs/grpo_qwen14b
"""

from __future__ import annotations

import ml_collections

from configs import grpo_qwen3b


def get_config() -> ml_collections.ConfigDict:
  c = grpo_qwen3b.get_config()
  c.model.path = "Qwen/Qwen2.5-14B"
  # The sampler's copy, 27 GiB, is split over pairs of devices.
  c.mesh.update(fsdp=4, tensor=2)
  c.rollout.update(rows=40, seats=(16, 32))
  c.batch.tokens = 131072
  return c
