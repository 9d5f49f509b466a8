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
p.add_argument("--chunk", type=int, default=512, help="tokens with logits in memory at a time")
p.add_argument("--scan", action="store_true", help="loop over stacked layers")
args = p.parse_args()
common.pin(args.cpus)

import jax
import jax.numpy as jnp

from searchr1_jax.algo import update
from searchr1_jax.model import shapes

shape, params = common.random_model(args)
_, optimizer, learner = common.grpo_learner(shape, args.chunk, args.remat, args.scan)
state = update.starter(optimizer)(params)


def timed(seed: int) -> float:
  global state
  batch, targets = jax.block_until_ready(
      common.example_batch(seed, args.B, args.L, args.prompt, args.vocab))
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
