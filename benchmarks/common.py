"""What the benchmarks share: arguments, pinning, a random model of given sizes, one JSON line."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import Any, Sequence


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
  """Pins the process; call it before jax is imported."""
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
