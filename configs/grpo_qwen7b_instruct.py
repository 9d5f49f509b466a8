"""GRPO with Qwen2.5-7B-Instruct on eight H100.

Reproduces: Search-R1 (arXiv:2503.09516), instruct model, GRPO, on NQ and HotpotQA's training questions.
Machine: 8 x H100 80 GB, nothing offloaded.
  21 hours planned for its 500 steps, at 40 % of the roofline (docs/cost.md).
Expected: mean EM .396 on the seven test sets with the paper's retriever (paper, table 3).
Command: python -m searchr1_jax.train --config=configs/grpo_qwen7b_instruct.py --workdir=runs/grpo_qwen7b_instruct
"""

from __future__ import annotations

import ml_collections

from configs import grpo_qwen7b


def get_config() -> ml_collections.ConfigDict:
  c = grpo_qwen7b.get_config()
  c.model.path = "Qwen/Qwen2.5-7B-Instruct"
  return c
