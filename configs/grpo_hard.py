"""GRPO on the hard world: the yardstick on which algorithms are compared.

Entities whose names share pieces, three passages a search, facts as sentences in any order and in
four wordings beside one that states no fact, one to three hops, episodes of up to 512 tokens.

Reproduces: the method (arXiv:2503.09516) where reading is hard enough not to saturate at once.
Machine: two CPU cores, at most 30 minutes of training.
Expected: held-out greedy EM from about 0.3 to above 0.75; see LOG.md for its ceiling.
Command: python -m searchr1_jax.train --config=configs/grpo_hard.py --workdir=runs/grpo_hard
"""

from __future__ import annotations

import pathlib

import ml_collections

from configs import grpo_tiny


def get_config() -> ml_collections.ConfigDict:
  c = grpo_tiny.get_config()
  c.steps = 100
  c.model.path = str(pathlib.Path(__file__).resolve().parent.parent / "models" / "hard-base")
  c.world.name = "hard"
  c.episode.update(max_turn_tokens=24, max_episode_tokens=512, max_observation_tokens=160, top_k=3)
  c.rollout.update(chunk_buckets=(24, 144))
  c.batch.update(lengths=(192, 352, 512), tokens=3840)
  return c
