"""GRPO with Qwen2.5-3B on eight H100: groups of five in place of a value model.

Reproduces: Search-R1 (arXiv:2503.09516), base model, GRPO, on NQ and HotpotQA's training questions.
Machine: 8 x H100 80 GB, nothing offloaded.
  9.4 hours planned for its 500 steps, at 40 % of the roofline (docs/cost.md).
Expected: mean EM .312 on the seven test sets with the paper's retriever (paper, table 3).
Command: python -m searchr1_jax.train --config=configs/grpo_qwen3b.py --workdir=runs/grpo_qwen3b
"""

from __future__ import annotations

import ml_collections

from configs import ppo_qwen3b


def get_config() -> ml_collections.ConfigDict:
  c = ppo_qwen3b.get_config()
  c.algo.update(name="grpo", group_size=5, kl_in="loss", kl_kind="k3")
  c.rollout.rows = 96  # 320 episodes a device: some wait for their searches while 64 write
  return c
