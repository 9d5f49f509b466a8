"""PPO with Qwen2.5-7B on a TPU v5p-8: four chips of 95 GB.

Reproduces: Search-R1 (arXiv:2503.09516), base model, PPO, on NQ and HotpotQA's training questions.
Machine: TPU v5p-8 (4 chips), nothing offloaded.
  31 hours planned for its 500 steps, at 40 % of the roofline (docs/cost.md).
Expected: mean EM .431 on the seven test sets with the paper's retriever (paper, table 2).
Command: python -m searchr1_jax.train --config=configs/ppo_qwen7b_v5p8.py --workdir=runs/ppo_qwen7b_v5p8
"""

from __future__ import annotations

import ml_collections

from configs import ppo_qwen7b


def get_config() -> ml_collections.ConfigDict:
  c = ppo_qwen7b.get_config()
  c.machine = "v5p-8"
  c.mesh.fsdp = 4
  # One size of each: a program of unrolled layers takes a TPU's compiler a minute or two.
  c.rollout.update(rows=48, seats=(32,), row_buckets=(8,), chunk_buckets=(512,), widths=(2048,))
  c.batch.tokens = 65536
  return c
