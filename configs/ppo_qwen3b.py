"""PPO with Qwen2.5-3B on eight H100: the published recipe, from which the other large configs start.

The questions are the authors' nq_hotpotqa_train (Hugging Face: PeterJinGo/nq_hotpotqa_train), the
passages the 2018 Wikipedia dump of 21,015,324; SEARCHR1_DATA names the folder that holds both. The
paper's retriever is E5; `python -m retriever.build` makes indexes of hashed words in memory, which
is not that yet, and training's own evaluations take 2,048 of the 51,713 test questions.

Reproduces: Search-R1 (arXiv:2503.09516), base model, PPO, on NQ and HotpotQA's training questions.
Machine: 8 x H100 80 GB, nothing offloaded.
  3.3 hours planned for its 500 steps, at 40 % of the roofline (docs/cost.md).
Expected: mean EM .303 on the seven test sets with the paper's retriever (paper, table 2).
Command: python -m searchr1_jax.train --config=configs/ppo_qwen3b.py --workdir=runs/ppo_qwen3b
"""

from __future__ import annotations

import os
import pathlib

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
  c = base.get_config()
  c.machine = "h100x8"
  c.model.update(path="Qwen/Qwen2.5-3B", dtype="bfloat16", rollout_dtype="bfloat16", remat="full")
  data = pathlib.Path(os.environ.get("SEARCHR1_DATA", "data"))
  c.data.update(train=(str(data / "nq_hotpotqa" / "train.parquet"),),
                test=(str(data / "nq_hotpotqa" / "test.parquet"),))
  c.retriever.index = str(data / "wiki-18" / "index")
  # 64 episodes a device at a time: a batch of 512 questions needs no more.
  c.rollout.update(rows=64, seats=(16, 64), row_buckets=(8, 16), chunk_buckets=(256, 512),
                   widths=(1024, 1536, 2048, 4096))
  c.mesh.fsdp = 8
  # Parameters are gathered once a batch: the larger it is, the less is sent.
  c.batch.tokens = 262144
  c.eval.questions = 2048
  return c
