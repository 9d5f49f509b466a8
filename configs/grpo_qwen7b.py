"""GRPO with Qwen2.5-7B on eight H100.

Reproduces: Search-R1 (arXiv:2503.09516), base model, GRPO, on NQ and HotpotQA's training questions.
Machine: 8 x H100 80 GB, nothing offloaded.
  21 hours planned for its 500 steps, at 40 % of the roofline (docs/cost.md).
Expected: mean EM .350 on the seven test sets with the paper's retriever (paper, table 3).
Command: python -m searchr1_jax.train --config=configs/grpo_qwen7b.py --workdir=runs/grpo_qwen7b
"""

from __future__ import annotations

import ml_collections

from configs import grpo_qwen3b


def get_config() -> ml_collections.ConfigDict:
  c = grpo_qwen3b.get_config()
  c.model.path = "Qwen/Qwen2.5-7B"
  c.rollout.rows = 80
  return c
