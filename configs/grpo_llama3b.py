"""GRPO with Llama-3.2-3B on eight H100, the model of the first published scripts.

Reproduces: Search-R1 (arXiv:2503.09516), Llama-3.2-3B, GRPO, on NQ and HotpotQA's training questions.
Machine: 8 x H100 80 GB, nothing offloaded.
  12 hours planned for its 500 steps, at 40 % of the roofline (docs/cost.md).
Expected: no score of these seven sets is at hand for this model.
Command: python -m searchr1_jax.train --config=configs/grpo_llama3b.py --workdir=runs/grpo_llama3b
"""

from __future__ import annotations

import ml_collections

from configs import grpo_qwen3b


def get_config() -> ml_collections.ConfigDict:
  c = grpo_qwen3b.get_config()
  c.model.path = "meta-llama/Llama-3.2-3B"
  # Eight key-value heads: a row takes four times the cache of Qwen2.5-3B's.
  c.rollout.update(rows=64, seats=(16, 40))
  return c
