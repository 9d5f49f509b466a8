"""Seconds of one GRPO policy update on B rows of L random tokens, two fifths of them not the policy's.

  python -m benchmarks.update --B 8 --L 256 --cpus 0

Forward, clipped ratio, k3 KL to given reference log-probs, backward, clip by norm, AdamW. Beside it
the matrix peak of the same run. One JSON line.
"""

from __future__ import annotations

import time

from benchmarks import common

p = common.parser(__doc__)
for name, default in dict(B=8, L=256, prompt=64).items():
  p.add_argument(f"--{name}", type=int, default=default)
p.add_argument("--remat", default="none")
p.add_argument("--chunk", type=int, default=512, help="positions a row with logits in memory")
p.add_argument("--scan", action="store_true", help="loop over stacked layers")
args = p.parse_args()
common.pin(args.cpus)

import jax
import jax.numpy as jnp
import numpy as np

from searchr1_jax.algo import losses, update
from searchr1_jax.model import shapes
from searchr1_jax.types import Targets, TokenBatch

shape, params = common.random_model(args)
score_policy, _ = update.decoder_scores(shape, allowed_vocab=args.vocab, temperature=1.0,
                                        chunk=args.chunk, dtype=jnp.float32, remat=args.remat,
                                        scan=args.scan)
settings = update.PolicySettings(kl_loss_coef=1e-3)
optimizer = update.make_optimizer(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, clip_norm=1.0)
learner = update.Learner(
    lambda params, batch, targets: update.policy_objective(
        score_policy(params, batch, False), batch, targets, settings), optimizer)
state = update.init_train_state(params, optimizer)


def example(seed: int) -> tuple[TokenBatch, Targets]:
  rng = np.random.default_rng(seed)
  size = (args.B, args.L)
  mask_BL = np.zeros(size, np.float32)
  mask_BL[:, args.prompt - 1 : -1] = rng.random((args.B, args.L - args.prompt)) > 0.4
  logprobs_BL = -np.abs(rng.normal(np.log(args.vocab), 0.01, size)).astype(np.float32)
  weight_BL = losses.aggregation_weights(
      mask_BL, "token-mean", sequences=args.B, tokens=float(mask_BL.sum()),
      max_episode_tokens=args.L, micro_batches=1)
  batch = TokenBatch(
      inputs_BL=rng.integers(2, args.vocab, size).astype(np.int32),
      targets_BL=rng.integers(2, args.vocab, size).astype(np.int32),
      lengths_B=np.full(args.B, args.L, np.int32), policy_mask_BL=mask_BL,
      response_mask_BL=mask_BL, value_mask_BL=mask_BL, loss_weight_BL=weight_BL,
      value_weight_BL=weight_BL, sampler_logprobs_BL=logprobs_BL,
      reward_B=np.zeros(args.B, np.float32), advantage_B=np.zeros(args.B, np.float32))
  advantages_BL = rng.normal(size=(args.B, 1)).astype(np.float32) * mask_BL
  return jax.device_put((batch, Targets(logprobs_BL, logprobs_BL, advantages_BL,
                                        np.zeros(size, np.float32), np.zeros(size, np.float32))))


def timed(seed: int) -> float:
  global state
  batch, targets = jax.block_until_ready(example(seed))
  began = time.perf_counter()
  state, _ = learner.learn(state, [batch], [targets], 1e-6)
  jax.block_until_ready(state)
  return time.perf_counter() - began


first = timed(0)
timed(1)
seconds = [timed(2 + i) for i in range(args.repeats)]
square = jnp.ones((1024, 1024), jnp.float32)
multiply = jax.jit(jnp.matmul)
multiply(square, square).block_until_ready()
peaks = []
for _ in range(20):
  began = time.perf_counter()
  multiply(square, square).block_until_ready()
  peaks.append(2 * 1024**3 / (time.perf_counter() - began) / 1e9)
tokens, count = args.B * args.L, shapes.count_parameters(shape)
gflop = (6 * count * tokens + 6 * args.layers * args.d * args.L * tokens) / 1e9
common.report(
    bench="update", B=args.B, L=args.L, params=count, first_call_s=round(first, 3),
    step_s=common.spread(seconds), tokens_s=round(tokens / min(seconds), 1),
    gflops=round(gflop / min(seconds), 1), matmul_peak_gflops=round(max(peaks), 1),
    share_of_peak=round(gflop / min(seconds) / max(peaks), 3))
