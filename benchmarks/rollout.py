"""Seconds of one search-shaped rollout: `turns` turns of T sampled tokens, each followed by R inserted.

  python -m benchmarks.rollout --N 8 --P 64 --T 32 --R 96 --turns 4 --cpus 0

The cache stays over the turns, so the prompt and each insertion are prefilled once. No stop can
occur, so every turn has exactly T tokens. One JSON line.
"""

from __future__ import annotations

import time

from benchmarks import common

p = common.parser(__doc__)
for name, default, what in (
    ("N", 8, "episodes"), ("P", 64, "tokens of a prompt"), ("T", 32, "tokens of a turn"),
    ("R", 96, "tokens inserted behind a turn"), ("turns", 4, "turns")):
  p.add_argument(f"--{name}", type=int, default=default, help=what)
sizes = lambda text: tuple(map(int, text.split(",")))
for name in ("widths", "chunks"):
  p.add_argument(f"--{name}", type=sizes, default=(), help="sizes, e.g. 96,224")
args = p.parse_args()
common.pin(args.cpus)

import jax
import numpy as np

from searchr1_jax.model import shapes
from searchr1_jax.rollout import draw
from searchr1_jax.rollout.engine import Engine, EngineShapes, Insert

shape, params = common.random_model(args)
slots = args.P + args.turns * args.T + (args.turns - 1) * args.R
# One program to prefill and one to decode. More chunks and widths are faster once compiled:
# --widths, --chunks.
chunks = args.chunks or (max(args.P, args.R),)
engine = Engine(shape, EngineShapes(args.N, slots, args.T, (args.N,), (args.N,), chunks, args.widths),
                common.never(args.vocab), end_ids=(), allowed_vocab=args.vocab)


def rollout(seed: int) -> None:
  rng = np.random.default_rng(seed)
  engine.begin(params, jax.random.key(seed), draw.sampling(1.0))
  rows = [engine.admit([r]) for r in range(args.N)]
  for turn in range(args.turns):
    new = rng.integers(2, args.vocab, (args.N, args.R if turn else args.P)).tolist()
    engine.insert([Insert(r, ids, args.T, turn == 0, (seed, r)) for r, ids in zip(rows, new)])
    written = engine.decode()
    if [len(w.ids) for w in written.values()] != [args.T] * args.N:
      raise RuntimeError("a turn was cut short")


def timed(seed: int) -> float:
  began = time.perf_counter()
  rollout(seed)
  return time.perf_counter() - began


first = timed(0)
seconds = [timed(i + 1) for i in range(args.repeats)]
counts = engine.counts
common.report(
    bench="rollout", N=args.N, P=args.P, T=args.T, R=args.R, turns=args.turns,
    params=shapes.count_parameters(shape), first_rollout_s=round(first, 3),
    rollout_s=common.spread(seconds), prefilled_tokens=counts.prefilled_tokens,
    generated_tokens=counts.generated_tokens,
    generated_tok_s=round(counts.generated_tokens / common.spread(seconds)["median"], 1))
