"""What the benchmarks share: arguments, pinning, a random model of given sizes, one JSON line."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import Any, Sequence

from searchr1_jax.run import host


def parser(doc: str) -> argparse.ArgumentParser:
  """Arguments of the model and of the measurement."""
  p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
  for name, default in dict(layers=4, d=256, heads=4, vocab=1024, repeats=5, seed=0).items():
    p.add_argument(f"--{name}", type=int, default=default)
  p.add_argument("--kv-heads", type=int, default=2)
  p.add_argument("--ffn", type=int, default=None, help="default 4 d")
  p.add_argument("--cpus", default=None, help="pin to these cores, e.g. 0 or 0,1")
  return p


def pin(cpus: str | None) -> None:
  """Pins the process and sets it up as the programs do; call it before jax is imported."""
  host.keep_freed_memory()
  if cpus:
    os.sched_setaffinity(0, {int(c) for c in cpus.split(",")})


def random_model(args: argparse.Namespace):
  """A Qwen2 of the sizes asked for, normal(0.02) weights: (shape, params)."""
  import jax
  from searchr1_jax.model import decoder, shapes
  shape = shapes.DecoderShape(
      vocab_size=args.vocab, width=args.d, mlp_width=args.ffn or 4 * args.d, layers=args.layers,
      heads=args.heads, kv_heads=args.kv_heads, head_size=args.d // args.heads,
      rope_theta=1e6, norm_eps=1e-6, tied_embeddings=True, qkv_bias=True)
  return shape, decoder.init_params(shape, jax.random.key(args.seed))


def never(vocab: int):
  """A stop that no token completes, so that every turn takes all the tokens that it may."""
  from searchr1_jax.rollout import stops
  return stops.build_automaton([b"x"] * vocab, [b"</search>"])


def grpo_learner(shape: Any, chunk: int, remat: str, scan: bool):
  """What a GRPO update in float32 takes: (function that scores, optimizer, learner)."""
  import jax.numpy as jnp
  from searchr1_jax.algo import update
  score, _ = update.decoder_scores(shape, allowed_vocab=shape.vocab_size, temperature=1.0,
                                   chunk=chunk, dtype=jnp.float32, remat=remat, scan=scan)
  settings = update.PolicySettings(kl_loss_coef=1e-3)
  optimizer = update.make_optimizer(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, clip_norm=1.0)
  learner = update.Learner(lambda params, batch, targets: update.policy_objective(
      score(params, batch, False), batch, targets, settings), optimizer)
  return score, optimizer, learner


def example_batch(seed: int, rows: int, length: int, prompt: int, vocab: int):
  """Rows of random tokens, two fifths of them behind the prompt not the policy's; their targets."""
  import jax
  import numpy as np
  from searchr1_jax.algo import collate, losses
  from searchr1_jax.types import Targets, TokenBatch
  rng, size = np.random.default_rng(seed), (rows, length)
  mask_BL = np.zeros(size, np.float32)
  mask_BL[:, prompt - 1 : -1] = rng.random((rows, length - prompt)) > 0.4
  logprobs_BL = -np.abs(rng.normal(np.log(vocab), 0.01, size)).astype(np.float32)
  weight_BL = losses.aggregation_weights(
      mask_BL, "token-mean", sequences=rows, tokens=float(mask_BL.sum()),
      max_episode_tokens=length, micro_batches=1)
  ids = lambda: rng.integers(2, vocab, size).astype(np.int32)
  batch = TokenBatch(
      inputs_BL=ids(), targets_BL=ids(), lengths_B=np.full(rows, length, np.int32),
      kept_BP=collate.kept_positions(mask_BL), policy_mask_BL=mask_BL, response_mask_BL=mask_BL,
      value_mask_BL=mask_BL, loss_weight_BL=weight_BL, value_weight_BL=weight_BL,
      sampler_logprobs_BL=logprobs_BL, reward_B=np.zeros(rows, np.float32),
      advantage_B=np.zeros(rows, np.float32))
  advantages_BL = rng.normal(size=(rows, 1)).astype(np.float32) * mask_BL
  empty_BL = np.zeros(size, np.float32)
  return jax.device_put((batch, Targets(logprobs_BL, logprobs_BL, advantages_BL, empty_BL,
                                        empty_BL)))


def spread(seconds: Sequence[float]) -> dict[str, float]:
  """Median, least and most."""
  return {"median": round(statistics.median(seconds), 4), "min": round(min(seconds), 4),
          "max": round(max(seconds), 4)}


def report(**found: Any) -> None:
  """One JSON line, with the versions that it was measured with."""
  import flax
  import jax
  found["env"] = {"jax": jax.__version__, "flax": flax.__version__,
                  "device": jax.devices()[0].device_kind, "cpus": len(os.sched_getaffinity(0))}
  print(json.dumps(found))
