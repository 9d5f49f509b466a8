"""Warm start of the tiny policy: skills from clean episodes, then the habits of a poor searcher.

Reproduces: models/tiny-base, which grpo_tiny and ppo_tiny start from.
Machine: two CPU cores, about 12 minutes.
Expected: greedy EM of about 0.3 on worlds it has not seen, since it mostly guesses or stops early.
Command: python -m searchr1_jax.sft --config=configs/sft_tiny.py --out=models/tiny-base
"""

from __future__ import annotations

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.seed = 0
  c.start = ""                # a folder whose weights to start from; "" starts from nothing
  c.look_back = 0.0           # above 0, first heads that attend to the last tokens, so sharply
  c.save_dtype = "float32"    # of the weights in the folder
  c.shape = dict(width=128, mlp_width=256, layers=3, heads=4, kv_heads=2, head_size=32,
                 rope_theta=10000.0, norm_eps=1e-6, tied_embeddings=True, qkv_bias=True,
                 max_positions=1024, family="qwen2")
  c.stages = ("skills", "habits")
  c.skills = dict(
      world="tiny",
      steps=1500, warmup_steps=40, decay_share=0.5,  # linear decay over the last half
      muon_lr=0.02, adam_lr=2e-3,   # matrices of the layers; everything else
      rows_by_hops=(20, 14, 10), lengths_by_hops=(60, 96, 128),  # demonstrations a step, tokens each
      drill_rows=0, drill_length=192,  # drills in reading a step, tokens each
      recital_rows=0, recital_length=64,  # the same for names said again
      worlds=1, world_scale=0.08,   # fresh ones a step; entities, as a share of a whole world's
      top_k=1, dim=1024,            # passages a search, size of the hashed vectors
      query="{relation} {subject}",  # how the teacher asks the engine
      thought="found {object}",     # how it says what a search found
      copy_weight=0.5,              # of a name repeated by a passage, in the loss
      clean_share=1.0,              # demonstrations without bad habits
      habits=dict(guess=0.0, guess_confident=0.0, confident=("person", "city"), stop_early=0.0,
                  wrong_query=0.0, malformed=0.0))
  c.habits = with_habits(c.skills)
  return c


def with_habits(skills: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
  """The stage that spoils what `skills` has taught, on episodes like its own."""
  stage = skills.copy_and_resolve_references()
  stage.update(steps=100, warmup_steps=10, decay_share=0.3, muon_lr=0.0, adam_lr=5e-4,
               copy_weight=0.0, clean_share=0.15, drill_rows=0, recital_rows=0)
  stage.habits.update(guess=0.3, guess_confident=0.9, stop_early=0.35, wrong_query=0.04,
                      malformed=0.04)
  return stage
