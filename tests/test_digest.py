"""run/digest.py: any change of an array's bits is seen, and none of its layout."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchr1_jax.run import digest


def of(leaf) -> str:
  return digest.of_leaves({"x": leaf})["x"]


def test_a_digest_is_what_the_formula_says():
  def mix(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16

  bits = [[1, 2**31, 7], [0, 2**32 - 1, 7]]
  lanes = []
  for seed in digest.SEEDS:
    place = lambda i, j: seed + mix((i + 3 * seed) % 2**32) + mix((j + 5 * seed) % 2**32)
    lanes.append(sum(mix(bits[i][j] ^ place(i, j) % 2**32)
                     for i in range(2) for j in range(3)) % 2**32)
  assert of(jnp.array(bits, jnp.uint32)) == "".join(f"{lane:08x}" for lane in lanes)


DTYPES = ("float32", "bfloat16", "float16", "int32", "uint8", "int8", "bool")


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_and_every_place_counts(dtype):
  rng = np.random.default_rng(0)
  dtype = jnp.dtype(dtype)
  raw = rng.integers(0, 2 if dtype == bool else 256, (3, 16 * dtype.itemsize), np.uint8)
  seen = {of(raw.view(dtype))}
  for row, byte, bit in itertools.product(range(3), range(raw.shape[1]), range(8)):
    if dtype == bool and bit:
      continue  # a bool has one bit
    other = raw.copy()
    other[row, byte] ^= 1 << bit
    seen.add(of(other.view(dtype)))
  flips = raw.size * (1 if dtype == bool else 8)
  for a, b in itertools.combinations(range(3), 2):
    other = raw.copy()
    other[[a, b]] = raw[[b, a]]
    seen.add(of(other.view(dtype)))
  assert len(seen) == 1 + flips + 3


def test_numpy_and_jax_tell_the_same_and_64_bits_are_all_read():
  x = np.arange(12, dtype=np.float32).reshape(3, 4)
  assert of(x) == of(jnp.asarray(x)) == of(np.asfortranarray(x))
  wide = np.arange(5, dtype=np.int64) + 2**40
  assert len({of(wide), of(wide + 2**50), of(wide[::-1]), of(wide - 2**40)}) == 4
  assert of(np.int64(3).reshape(())) != of(np.int64(2**33 + 3).reshape(()))
  assert of(jnp.float32(0)) != of(jnp.float32(-0.0)) and len(of(jnp.zeros((0, 3)))) == 32


def test_no_layout_changes_it_and_nothing_is_gathered(run_python):
  run_python("""
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from searchr1_jax.model import sharding
from searchr1_jax.run import digest
mesh = sharding.make_mesh(2, 2, 2)
x = jax.random.normal(jax.random.key(0), (16, 32, 8))
for dtype in (jnp.float32, jnp.bfloat16):
  y = x.astype(dtype)
  alone = digest.of_leaves({"y": y})
  for spec in (P(), P("data", "fsdp", "tensor"), P(None, ("fsdp", "tensor")), P("tensor")):
    there = jax.device_put(y, NamedSharding(mesh, spec))
    assert digest.of_leaves({"y": there}) == alone, spec
    compiled = digest.lanes_of.lower(there).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2048
""")


def test_a_digest_takes_no_memory_of_the_array_s_size():
  x = jax.ShapeDtypeStruct((24, 512, 512), jnp.float32)
  memory = digest.lanes_of.lower(x).compile().memory_analysis()
  assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 2048
