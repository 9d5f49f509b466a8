"""GRPO with Qwen2.5-1.5B on one GPU of 80 GB, for those with one card.

Reproduces: the method of Search-R1 (arXiv:2503.09516) at a size that one card trains.
  A batch is a sixteenth of the published one, and so are the questions that it trains on.
Machine: 1 x H100 80 GB (or another GPU of 80 GB), nothing offloaded.
  2.5 hours planned for its 500 steps, at 40 % of the roofline (docs/cost.md).
Expected: no score published at this size.
Command: python -m searchr1_jax.train --config=configs/grpo_qwen15b_1gpu.py --workdir=runs/grpo_qwen15b_1gpu
"""

from __future__ import annotations

import ml_collections

from configs import grpo_qwen3b


def get_config() -> ml_collections.ConfigDict:
  c = grpo_qwen3b.get_config()
  c.machine = "h100x1"
  c.model.path = "Qwen/Qwen2.5-1.5B"
  c.mesh.fsdp = 1
  c.data.questions = 32
  c.rollout.update(rows=96, seats=(16, 64))
  c.batch.tokens = 65536
  return c
