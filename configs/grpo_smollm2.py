"""GRPO on real data with a real model, small enough for a laptop: SmolLM2-135M-Instruct.

Reproduces: whole training steps of the method on real questions and 10,033 Wikipedia passages.
Machine: two CPU cores and 6 GB of memory, minutes a step (see LOG.md).
Expected: no score; a model this small learns little in the few steps a laptop allows.
Command: make assets && python -m retriever.build assets/wiki-vital/corpus.jsonl --out assets/wiki-vital/index && python -m searchr1_jax.train --config=configs/grpo_smollm2.py --workdir=runs/grpo_smollm2
"""

from __future__ import annotations

import os
import pathlib

import ml_collections

from configs import base

# Two worked episodes and no word of instruction: a model this small follows examples, not orders.
TEMPLATE = """\
Question: Which river flows through Vienna?
<search> river Vienna </search>

<information>Doc 1(Title: "Vienna") Vienna, the capital of Austria, lies on the Danube.
</information>

<answer> Danube </answer>

Question: Who painted the Mona Lisa?
<search> Mona Lisa painter </search>

<information>Doc 1(Title: "Mona Lisa") The Mona Lisa is a portrait by Leonardo da Vinci.
</information>

<answer> Leonardo da Vinci </answer>

Question: {question}
"""


def get_config() -> ml_collections.ConfigDict:
  c = base.get_config()
  assets = pathlib.Path(os.environ.get("SEARCHR1_ASSETS", "assets"))
  c.steps = 4
  c.model.path = str(assets / "smollm2-135m")
  c.model.logits_tokens = 256
  c.model.remat = "full"
  c.data.update(train=(str(assets / "trivia" / "train.jsonl"),),
                test=(str(assets / "trivia" / "test.jsonl"),), questions=4)
  c.retriever.index = str(assets / "wiki-vital" / "index")
  c.prompt.update(template=TEMPLATE, chat_template="no")
  c.episode.update(max_turns=2, max_turn_tokens=40, max_episode_tokens=640,
                   max_observation_tokens=120, top_k=1)
  c.rollout.update(rows=10, seats=(8,), row_buckets=(2, 8), chunk_buckets=(64, 176),
                   widths=(256, 512), temperature=0.6)
  c.algo.update(name="grpo", group_size=2, kl_in="loss", kl_kind="k3", entropy_coef=0.0,
                updates_per_batch=1)
  c.optimizer.update(policy_lr=1e-5, policy_warmup=0.0)
  # Exact match is too rare here to tell episodes apart: near misses, answers and hits count too.
  c.reward.update(name="f1", retrieval_hit=0.2, no_answer_penalty=0.2)
  c.batch.update(lengths=(320, 640), tokens=1280)
  c.eval.update(every=0, around=False)
  c.checkpoint.update(every=2, keep=1, best=False)
  c.log.trajectories = 8
  return c
