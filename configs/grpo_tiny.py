"""GRPO on the tiny world: a 0.5 M-parameter policy learns to search, on two CPU cores.

Reproduces: the method (arXiv:2503.09516) in small: exact match alone teaches a policy to search.
Machine: two CPU cores, about 2 minutes of training.
Expected: held-out greedy EM from about 0.3 to above 0.95; see LOG.md for three seeds.
Command: python -m searchr1_jax.train --config=configs/grpo_tiny.py --workdir=runs/grpo_tiny
"""

from __future__ import annotations

import pathlib

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
  c = base.get_config()
  c.steps = 60
  c.model.path = str(pathlib.Path(__file__).resolve().parent.parent / "models" / "tiny-base")
  c.model.scan_layers = False
  c.world.name = "tiny"
  c.data.questions = 16
  c.prompt.template = "{question}\n"
  c.prompt.chat_template = "no"
  c.episode.update(max_turns=4, max_turn_tokens=20, max_episode_tokens=192,
                   max_observation_tokens=64, top_k=1)
  c.rollout.update(rows=80, seats=(80,), seat_tokens=20, row_buckets=(24, 80),
                   chunk_buckets=(24, 64), deterministic=True)
  c.algo.update(name="grpo", group_size=5, kl_in="loss", kl_kind="k3", entropy_coef=0.0,
                drop_flat_groups=True, updates_per_batch=1)
  c.optimizer.update(policy_lr=3e-4, policy_warmup=0.08, b2=0.99, weight_decay=0.0)
  c.batch.update(lengths=(128, 192), tokens=1920)
  c.eval.update(every=20, questions=500)
  c.checkpoint.update(every=20, keep=2)
  return c
