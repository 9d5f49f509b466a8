"""GRPO with Qwen2.5-7B on a TPU v6e-8: eight chips of 32 GB.

Reproduces: Search-R1 (arXiv:2503.09516), base model, GRPO, on NQ and HotpotQA's training questions.
Machine: TPU v6e-8 (8 chips), nothing offloaded; heads are split four ways, or the sampler's copy would not fit.
  36 hours planned for its 500 steps, at 40 % of the roofline (docs/cost.md).
Expected: mean EM .350 on the seven test sets with the paper's retriever (paper, table 3).
Command: python -m searchr1_jax.train --config=configs/grpo_qwen7b_v6e8.py --workdir=runs/grpo_qwen7b_v6e8
"""

from __future__ import annotations

import ml_collections

from configs import grpo_qwen7b


def get_config() -> ml_collections.ConfigDict:
  c = grpo_qwen7b.get_config()
  c.machine = "v6e-8"
  c.mesh.update(fsdp=2, tensor=4)
  # One size of each: a program of unrolled layers takes a TPU's compiler a minute or two.
  c.rollout.update(rows=48, seats=(32,), row_buckets=(8,), chunk_buckets=(512,), widths=(2048,))
  c.batch.tokens = 16384
  return c
