"""How near decoding comes to the machine: bytes a second at batch 1, FLOPs a second at batch 32.

  SEARCHR1_ASSETS=... python -m benchmarks.decode --cpus 0

A real model (SmolLM2-135M in float32 unless --model names another folder), rows that hold --length
tokens. A token reads every parameter but the embedding of other tokens, once a call, and the keys
and values of its row; both are compared with what a streaming sum and a matrix product reach in the
same process. One JSON line.
"""

from __future__ import annotations

import os
import pathlib
import time

from benchmarks import common

p = common.parser(__doc__)
p.add_argument("--model", default=None)
p.add_argument("--batches", default="1,32", help="rows that decode together")
p.add_argument("--length", type=int, default=256, help="tokens in each row's cache before")
p.add_argument("--T", type=int, default=32, help="tokens that each row writes")
args = p.parse_args()
common.pin(args.cpus)

import jax
import jax.numpy as jnp
import numpy as np

from searchr1_jax.model import decoder, shapes, weights
from searchr1_jax.rollout import draw
from searchr1_jax.rollout.engine import Engine, Insert
from searchr1_jax.rollout.slots import EngineShapes


def fastest(function, *inputs, repeats: int = 5) -> float:
  """Seconds of the fastest of a few calls; the first one, which compiles, is not among them."""
  jax.block_until_ready(function(*inputs))
  found = []
  for _ in range(repeats):
    began = time.perf_counter()
    jax.block_until_ready(function(*inputs))
    found.append(time.perf_counter() - began)
  return min(found)


def streaming_rate() -> float:
  """Bytes a second that a sum over 512 MiB reads."""
  block = jnp.ones(2**27, jnp.float32)
  return block.nbytes / fastest(jax.jit(jnp.sum), block)


def matrix_rate(size: int = 2048) -> float:
  """FLOPs a second of a square matrix product."""
  a = jnp.ones((size, size), jnp.float32)
  return 2 * size**3 / fastest(jax.jit(jnp.matmul), a, a)


def seconds_a_token(rows: int, width: int) -> float:
  """The fastest of a few turns, a row's share of a call left aside."""
  engine = Engine(shape, EngineShapes(rows, width, args.T, (rows,), (min(rows, 4),),
                                      (args.length,)),
                  common.never(shape.vocab_size), (), shape.vocab_size)
  rng, found = np.random.default_rng(args.seed), []
  engine.begin(params, jax.random.key(0), draw.sampling(1.0))
  for turn in range(args.repeats + 1):
    for row in range(rows):
      engine.release(row)
    ids_BL = rng.integers(2, shape.vocab_size, (rows, args.length)).tolist()
    engine.insert([Insert(engine.admit(ids), ids, args.T, True, (turn, 0)) for ids in ids_BL])
    engine.wait()
    began = time.perf_counter()
    engine.decode()
    found.append((time.perf_counter() - began) / args.T)
  return min(found[1:])


folder = pathlib.Path(args.model or pathlib.Path(os.environ["SEARCHR1_ASSETS"]) / "smollm2-135m")
shape, _ = weights.read_config(folder)
params = weights.load(folder)
width = args.length + args.T
# What every token multiplies with, read once a call: all but an untied embedding.
read = shapes.count_parameters(shape) - (0 if shape.tied_embeddings
                                         else shape.vocab_size * shape.width)
per_row = decoder.cache_bytes(shape, 1, width, jnp.float32)
found = {}
for rows in map(int, args.batches.split(",")):
  seconds = seconds_a_token(rows, width)
  found[f"batch_{rows}"] = dict(
      ms_a_token=round(1e3 * seconds, 2), tok_s=round(rows / seconds, 1),
      gb_s=round((4 * read + rows * per_row) / seconds / 1e9, 1),
      gflop_s=round(2 * rows * read / seconds / 1e9, 1))
stream, matrix = streaming_rate(), matrix_rate()
for key in found:
  found[key]["share_of_bandwidth"] = round(found[key]["gb_s"] * 1e9 / stream, 2)
  found[key]["share_of_matrix_peak"] = round(found[key]["gflop_s"] * 1e9 / matrix, 2)
common.report(bench="decode", model=folder.name, length=args.length, T=args.T, **found,
              stream_gb_s=round(stream / 1e9, 1), matrix_gflop_s=round(matrix / 1e9, 1))
