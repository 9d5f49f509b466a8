"""What an array's bits come to in 128 bits, computed where it lives, the same from every layout."""

from __future__ import annotations

from typing import Any, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

# Where the lanes start: the fractional bits of the square roots of 2, 3, 5 and 7.
SEEDS = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A)


def of_leaves(leaves: Mapping[str, Any]) -> dict[str, str]:
  """The digest of each array, JAX's or numpy's, as hexadecimal digits."""
  # One after another: a CPU takes up only so many programs at a time, and processes that took up
  # different ones would wait for each other.
  lanes = {name: np.asarray(lanes_of(_as_words(leaf))) for name, leaf in leaves.items()}
  return {name: "".join(f"{lane:08x}" for lane in found.tolist()) for name, found in lanes.items()}


@jax.jit
def lanes_of(leaf: Array | np.ndarray) -> UInt32[Array, "4"]:
  """Four sums over all elements, in which place and bits of each are mixed.

  lane_k = Σ_i mix(bits_i xor (c_k + Σ_axes mix(index_axis(i) + c_k,axis)))   mod 2^32

  `mix` is one to one, so that another value of one element always changes every lane; two elements
  swapped, or a block overwritten, go unseen with a chance of 2^-128. Sums of integers are exact in
  any order. One reduction over four operands reads the array once and makes nothing of its size.
  """
  if leaf.dtype == bool:
    bits = leaf.astype(jnp.uint32)
  else:
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
  lanes = []
  for seed in SEEDS:
    place = jnp.uint32(seed)
    for axis in range(bits.ndim):
      index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
      place = place + _mix(index + jnp.uint32(seed * (2 * axis + 3) % 2**32))
    lanes.append(_mix(bits ^ place))
  add = lambda xs, ys: tuple(x + y for x, y in zip(xs, ys))
  return jnp.stack(jax.lax.reduce(
      tuple(lanes), (np.uint32(0),) * len(lanes), add, tuple(range(bits.ndim))))


def _mix(x: Array) -> Array:
  """A permutation of the 32-bit words in which each bit that goes in moves all that come out."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
  x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
  return x ^ (x >> 16)


def _as_words(leaf: Any) -> Any:
  """On the devices, wherever it waits; 64-bit numbers, which only numpy has, as twice as many of 32."""
  if isinstance(leaf, jax.Array) and leaf.sharding.memory_kind != "device":
    return jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))
  if leaf.dtype.itemsize == 8:
    return np.atleast_1d(np.ascontiguousarray(leaf)).view(np.uint32)
  return leaf
