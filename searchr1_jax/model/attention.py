"""Attention, chosen in one place: whole rows when training, an explicit position mask with a cache.

Axes beyond those of types.py: E head size, R query heads that share one key-value head.
"""

from __future__ import annotations

from typing import Any, Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
import numpy as np
from jaxtyping import Array, Float, Int

from searchr1_jax.model import kernels, sharding
from searchr1_jax.model.shapes import DecoderShape

Rotation = tuple[Float[Array, "B L 1 2 M"], Float[Array, "B L 1 2 M"]]

KERNELS = ("blocks", "cudnn", "splash")
_LANES = 128  # positions side by side in a TPU's register
_BLOCK = 128  # queries that share a set of keys, at least; a row has eight blocks at most


def rope_frequencies(shape: DecoderShape) -> np.ndarray:
  """Radians a position for each pair of features, float32 [E / 2]; Llama 3's stretch applied.

  Source: Su et al., arXiv:2104.09864; the stretch as in Llama 3.1's reference code.
  """
  exponents = np.arange(0, shape.head_size, 2, dtype=np.float32) / np.float32(shape.head_size)
  frequencies = (1.0 / np.float32(shape.rope_theta) ** exponents).astype(np.float32)
  scaling = shape.rope_scaling
  if scaling is None:
    return frequencies
  wavelengths = 2 * np.pi / frequencies
  turns = scaling.original_max_positions / wavelengths
  smooth = ((turns - scaling.low_freq_factor)
            / (scaling.high_freq_factor - scaling.low_freq_factor)).clip(0, 1)
  return ((1 - smooth) * frequencies / scaling.factor + smooth * frequencies).astype(np.float32)


def rotation(positions_BL: Int[Array, "B L"], frequencies: np.ndarray) -> Rotation:
  """Cosine and sine of each position's angles, laid out for `rotate`; every layer shares them."""
  angles = positions_BL[..., None].astype(jnp.float32) * jnp.asarray(frequencies)[None, None, :]
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  return (jnp.stack([cos, cos], axis=2)[:, :, None], jnp.stack([-sin, sin], axis=2)[:, :, None])


def rotate(x_BLHE: Float[Array, "B L H E"], turn: Rotation) -> Float[Array, "B L H E"]:
  """Rotary positions, the two halves of a head kept apart as Hugging Face's weights expect."""
  halves = x_BLHE.astype(jnp.float32).reshape(*x_BLHE.shape[:3], 2, -1)
  cos, sin = turn
  turned = halves * cos + lax.rev(halves, (3,)) * sin  # (a, b) -> (a cos - b sin, b cos + a sin)
  return turned.reshape(x_BLHE.shape).astype(x_BLHE.dtype)


def choose_kernel(platform: str, dtype: Any, shape: DecoderShape, tensor: int) -> str:
  """The kernel of whole rows on a platform ("cpu", "gpu", "tpu"): one of `KERNELS`.

  cuDNN's takes half precision, heads of a multiple of 8 up to 128, and queries, keys and values
  that lie alike over a mesh's `tensor` axis; splash heads that fill a TPU's lanes (JAX's own limits).
  """
  half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
  alike = shape.kv_heads % tensor == 0
  if platform == "gpu" and half and alike and shape.head_size % 8 == 0 and shape.head_size <= 128:
    return "cudnn"
  return "splash" if platform == "tpu" and half and alike and shape.head_size == 128 else "blocks"


def causal_attention(q_BLHE: Float[Array, "B L H E"], k_BLKE: Float[Array, "B L K E"],
                     v_BLKE: Float[Array, "B L K E"], kernel: str = "blocks",
                     mesh: Mesh | None = None) -> Float[Array, "B L H E"]:
  """Whole right-padded rows: a query sees the keys up to its own position.

  Padding stands to the right of every real token, so causality alone hides it from them. "blocks"
  goes block by block of queries, so that keys behind a block cost nothing.
  """
  if kernel == "cudnn":
    return jax.nn.dot_product_attention(q_BLHE, k_BLKE, v_BLKE, is_causal=True,
                                        implementation="cudnn")
  length = q_BLHE.shape[1]
  q_BKRLE = _by_head(q_BLHE, k_BLKE.shape[2])
  k_BKSE, v_BKSE = by_head(k_BLKE), by_head(v_BLKE)
  if kernel == "splash" and length % _LANES == 0:
    attend = sharding.over_rows_and_heads(mesh, _splash(q_BKRLE.shape[2], length))
    scaled = q_BKRLE * np.asarray(q_BKRLE.shape[-1] ** -0.5, q_BKRLE.dtype)
    return _by_position(attend(scaled, k_BKSE, v_BKSE))
  block = max(_BLOCK, -(-length // 8))
  edges = [*range(0, length, block), length]
  return _by_position(jnp.concatenate([
      kernels.attend(q_BKRLE[:, :, :, a:b], k_BKSE[:, :, :b], v_BKSE[:, :, :b],
                     jnp.asarray(np.tri(b - a, b, a, dtype=bool))[None])
      for a, b in zip(edges[:-1], edges[1:])], axis=3))


def _splash(shared: int, length: int, interpret: bool = False) -> Callable:
  """Causal attention of rows and key-value heads, `shared` queries each, in one TPU kernel."""
  from jax.experimental.pallas.ops.tpu.splash_attention import (  # slow to import, for TPUs alone
      splash_attention_kernel, splash_attention_mask)
  size = next(n for n in (512, 384, 256, _LANES) if length % n == 0)
  names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv",
           "block_kv_dkv_compute", "block_q_dq", "block_kv_dq")
  mask = splash_attention_mask.MultiHeadMask(
      [splash_attention_mask.CausalMask((length, length))] * shared)
  one = splash_attention_kernel.make_splash_mqa_single_device(
      mask, block_sizes=splash_attention_kernel.BlockSizes(**dict.fromkeys(names, size)),
      interpret=interpret)
  return jax.vmap(jax.vmap(one))


def attention_at(q_BLHE: Float[Array, "B L H E"], k_BKSE: Float[Array, "B K S E"],
                 v_BKSE: Float[Array, "B K S E"],
                 positions_BL: Int[Array, "B L"]) -> Float[Array, "B L H E"]:
  """Queries at any positions against keys of which s stands at position s: p sees those up to p."""
  return _attend_up_to(kernels.attend, q_BLHE, k_BKSE, v_BKSE, positions_BL)


def cached_attention(q_BLHE: Float[Array, "B L H E"], k_BKES: Float[Array, "B K E S"],
                     v_BKSE: Float[Array, "B K S E"], positions_BL: Int[Array, "B L"],
                     kernel: str = "blocks") -> Float[Array, "B L H E"]:
  """`attention_at` over keys and values as a cache keeps them, without gradients.

  Of one query a row, which reads each key once, no kernel could read less than the plain form.
  """
  if kernel == "cudnn" and q_BLHE.shape[1] > 1:
    visible_BLS = _visible(positions_BL, v_BKSE.shape[2])
    return jax.nn.dot_product_attention(
        q_BLHE, k_BKES.transpose(0, 3, 1, 2), v_BKSE.transpose(0, 2, 1, 3),
        mask=visible_BLS[:, None], implementation="cudnn")
  return _attend_up_to(kernels.attend_cached, q_BLHE, k_BKES, v_BKSE, positions_BL)


def by_head(x_BLKE: Float[Array, "B L K E"]) -> Float[Array, "B K L E"]:
  """Keys or values with the positions of each head side by side, as `attention_at` reads them."""
  return jnp.swapaxes(x_BLKE, 1, 2)


def _visible(positions_BL, slots: int):
  """Which slots a query sees: those up to its position."""
  return jnp.arange(slots)[None, None, :] <= positions_BL[:, :, None]


def _attend_up_to(attend, q_BLHE, k, v_BKSE, positions_BL):
  """The attention of queries that see the keys up to their positions, `k` as `attend` takes it."""
  visible_BLS = _visible(positions_BL, v_BKSE.shape[2])
  q_BKRLE = _by_head(q_BLHE, v_BKSE.shape[1])
  return _by_position(attend(q_BKRLE, k, v_BKSE, visible_BLS))


def _by_head(q_BLHE, kv_heads):
  """[B, L, H, E] -> [B, K, R, L, E]."""
  batch, length, _, size = q_BLHE.shape
  return q_BLHE.reshape(batch, length, kv_heads, -1, size).transpose(0, 2, 3, 1, 4)


def _by_position(x_BKRLE):
  """[B, K, R, L, E] -> [B, L, H, E]."""
  batch, _, _, length, size = x_BKRLE.shape
  return x_BKRLE.transpose(0, 3, 1, 2, 4).reshape(batch, length, -1, size)
