"""A published size from folder to folder: import, one GRPO update, export; memory against its count.

  python -m benchmarks.full_size --model Qwen2.5-0.5B --rows 4 --length 1024

Weights are random, the rest is as in training: scores of policy and reference, forward, backward
with layers computed again, AdamW in float32. `count` says what must be resident at the fullest
moment and why, in bytes; `peak` is the kernel's high-water mark. One JSON line.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import tempfile
import time

from benchmarks import common, weights as folders

p = argparse.ArgumentParser(description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--model", default="Qwen2.5-0.5B", help="a name of searchr1_jax.model.shapes.NAMED")
p.add_argument("--rows", type=int, default=4)
p.add_argument("--length", type=int, default=1024)
p.add_argument("--remat", default="full")
p.add_argument("--logits-tokens", type=int, default=512)
p.add_argument("--cpus", default=None, help="pin to these cores, e.g. 0 or 0,1")
args = p.parse_args()
common.pin(args.cpus)

import jax
import jax.numpy as jnp

from searchr1_jax.algo import update
from searchr1_jax.model import shapes, weights

shape = shapes.NAMED[args.model]
score, optimizer, learner = common.grpo_learner(shape, args.logits_tokens, args.remat, scan=True)
seconds, peaks = {}, {}


def phase(name: str, work):
  """Runs `work`; notes its seconds and the most that was resident meanwhile."""
  pathlib.Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
  began = time.perf_counter()
  result = jax.block_until_ready(work())
  seconds[name] = round(time.perf_counter() - began, 1)
  peaks[name] = folders.resident("VmHWM") - start
  return result


with tempfile.TemporaryDirectory() as scratch:
  source, target = pathlib.Path(scratch) / "model", pathlib.Path(scratch) / "out"
  folders.generate(source, shape, jnp.dtype("bfloat16"))
  jax.block_until_ready(jnp.zeros(8) + 1)  # jax's own memory comes first
  start = folders.resident("VmRSS")
  reference = phase("import", lambda: weights.load(source))
  state = phase("begin", lambda: update.starter(optimizer)(reference))
  batch, targets = common.example_batch(0, args.rows, args.length, args.length // 4,
                                        shape.vocab_size)
  scores = jax.jit(lambda params, batch: score(params, batch, False).logprobs_BL)
  ref_BL = phase("score", lambda: scores(reference, batch))
  targets = dataclasses.replace(targets, old_logprobs_BL=ref_BL, ref_logprobs_BL=ref_BL)
  state, found = phase("update", lambda: learner.learn(state, [batch], [targets], 1e-6))
  phase("export", lambda: weights.save(target, state.params, shape, dtype=jnp.dtype("bfloat16")))
  written = sum(f.stat().st_size for f in target.glob("*.safetensors"))
  again, _ = weights.read_config(target)

count = shapes.count_parameters(shape)
stream = shape.layers * args.rows * args.length * shape.width
logits = args.logits_tokens * shape.vocab_size
common.report(
    bench="full_size", model=args.model, parameters=count, rows=args.rows, length=args.length,
    written=written, read_back=again == shape, grad_norm=float(found["grad_norm"].total),
    seconds=seconds, peak=peaks,
    count={"policy": 4 * count, "moments": 8 * count, "reference": 4 * count,
           "gradient": 4 * count, "layer inputs": 4 * stream, "logits and their slopes": 8 * logits})
