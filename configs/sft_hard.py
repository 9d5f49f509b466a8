"""Warm start of the hard world's policy: copying, reading, choosing a passage, then bad habits.

Reproduces: models/hard-base, which grpo_hard and ppo_hard start from.
Machine: two CPU cores, about 35 minutes.
Expected: greedy EM of at most 0.35 on worlds it has not seen, since it mostly guesses or stops early.
Command: python -m searchr1_jax.sft --config=configs/sft_hard.py --out=models/hard-base
"""

from __future__ import annotations

import ml_collections

from configs import sft_tiny


def get_config() -> ml_collections.ConfigDict:
  c = sft_tiny.get_config()
  c.look_back = 5.0
  c.shape.update(mlp_width=384, layers=4)
  c.stages = ("copying", "reading", "choosing", "habits")
  # Each stage is the shortest text that teaches the next skill: names said again; every fact of one
  # passage; of three passages whose names look alike. Episodes of the length asked for come along.
  c.copying = c.skills.copy_and_resolve_references()
  c.copying.update(
      world="hard", steps=400, decay_share=0.3, query="{subject} {relation}",
      thought="{subject} {relation} {object}", rows_by_hops=(), lengths_by_hops=(),
      recital_rows=48)
  c.reading = c.copying.copy_and_resolve_references()
  c.reading.update(steps=500, worlds=4, rows_by_hops=(16, 6), lengths_by_hops=(90, 154),
                   drill_rows=40, drill_length=72, recital_rows=8)
  c.choosing = c.reading.copy_and_resolve_references()
  c.choosing.update(steps=500, decay_share=0.5, top_k=3, rows_by_hops=(12, 7, 5),
                    lengths_by_hops=(176, 320, 464), drill_rows=16, drill_length=192)
  c.habits = sft_tiny.with_habits(c.choosing)
  del c.skills
  return c
