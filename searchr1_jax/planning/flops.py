"""Floating-point operations of a program, over its jaxpr: products alone, loops as they run.

The rest (norms, softmax, rotation) is bound by memory and counted there. All devices together.
"""

from __future__ import annotations

import math
from typing import Any, Iterator, Mapping

import jax.extend.core

# Attention in one kernel: two products forward, five backward; half of each if it is causal.
_ATTENTION = {"dot_product_attention_fwd": 2, "dot_product_attention_bwd": 5}


def count(jaxpr: Any, trips: Mapping[str, int]) -> float:
  """FLOPs of one run. `trips`: how often a `while` runs, by its scope; 1 if unnamed."""
  return sum((_equation(e, trips) for e in getattr(jaxpr, "jaxpr", jaxpr).eqns), 0.0)


def _equation(e: Any, trips: Mapping[str, int]) -> float:
  name = e.primitive.name
  if name == "dot_general":
    (left, _), _ = e.params["dimension_numbers"]
    contracted = math.prod(e.invars[0].aval.shape[a] for a in left)
    return 2.0 * math.prod(e.outvars[0].aval.shape) * contracted
  if (products := _ATTENTION.get(name.removesuffix("_wrapper"))) is not None:
    batch, queries, heads, size = e.invars[0].aval.shape
    whole = products * 2.0 * batch * heads * queries * e.invars[1].aval.shape[1] * size
    return whole / 2 if "CAUSAL" in str(e.params["mask_type"]) else whole
  if name == "cond":
    return max(count(branch, trips) for branch in e.params["branches"])
  inside = sum((count(j, trips) for j in _inner(e.params)), 0.0)
  return inside * _repeats(e, trips)


def _repeats(e: Any, trips: Mapping[str, int]) -> int:
  """How often what an equation holds is run, on all devices."""
  name = e.primitive.name
  if name == "scan":
    return e.params["length"]
  if name == "shard_map":
    return math.prod(e.params["mesh"].shape[a] for a in e.params["newly_manual_axes"])
  if name == "pallas_call":
    grid = e.params["grid_mapping"].grid  # ends in blocks of keys; those behind a query are skipped
    return math.prod(grid) * (grid[-1] + 1) // (2 * grid[-1])
  if name == "while":
    scope = str(e.source_info.name_stack).rpartition("/")[2]
    return trips[scope] if scope in trips else 1
  return 1


def _inner(params: Mapping[str, Any]) -> Iterator[Any]:
  """The jaxprs among an equation's parameters. Of a derivative's rule only what is run counts."""
  for key, value in params.items():
    for one in value if isinstance(value, (tuple, list)) else (value,):
      if isinstance(one, (jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr)):
        yield one
