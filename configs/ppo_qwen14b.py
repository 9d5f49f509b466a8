"""PPO with Qwen2.5-14B on eight H100.

Reproduces: Search-R1 (arXiv:2503.09516), base model, PPO, on NQ and HotpotQA's training questions.
Machine: 8 x H100 80 GB, the moments of AdamW in pinned memory of the host.
  15 hours planned for its 500 steps, at 40 % of the roofline (docs/cost.md).
Expected: mean EM .479 on the seven test sets with the paper's retriever (paper, table 5).
Command: python -m searchr1_jax.train --config=configs/ppo_qwen14b.py --workdir=runs/ppo_qwen14b
"""

from __future__ import annotations

import ml_collections

from configs import ppo_qwen3b


def get_config() -> ml_collections.ConfigDict:
  c = ppo_qwen3b.get_config()
  c.model.path = "Qwen/Qwen2.5-14B"
  # The sampler's copy, 27 GiB, is split over pairs of devices.
  c.mesh.update(fsdp=4, tensor=2)
  c.rollout.update(rows=48, seats=(16, 32))
  c.batch.tokens = 131072
  c.optimizer.moments_memory = "pinned_host"
  return c
