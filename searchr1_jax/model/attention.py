"""Attention, chosen in one place: whole rows when training, an explicit position mask with a cache.

Axes beyond those of types.py: E head size, R query heads that share one key-value head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from searchr1_jax.model.shapes import DecoderShape

_MASKED = -1e30  # finite, so that a row with nothing to see yields numbers, not NaN


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


def rotate(x_BLHE: Float[Array, "B L H E"], positions_BL: Int[Array, "B L"],
           frequencies: np.ndarray) -> Float[Array, "B L H E"]:
  """Rotary positions, the two halves of a head kept apart as Hugging Face's weights expect."""
  angles = positions_BL[..., None].astype(jnp.float32) * jnp.asarray(frequencies)[None, None, :]
  cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
  first, second = jnp.split(x_BLHE.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return turned.astype(x_BLHE.dtype)


def causal_attention(q_BLHE: Float[Array, "B L H E"], k_BLKE: Float[Array, "B L K E"],
                     v_BLKE: Float[Array, "B L K E"]) -> Float[Array, "B L H E"]:
  """Whole right-padded rows: a query sees the keys up to its own position.

  Padding stands to the right of every real token, so causality alone hides it from them.
  """
  length = q_BLHE.shape[1]
  visible = jnp.tril(jnp.ones((length, length), bool))[None, None, None]
  return _attend(q_BLHE, k_BLKE, v_BLKE, visible)


def cached_attention(q_BLHE: Float[Array, "B L H E"], k_BSKE: Float[Array, "B S K E"],
                     v_BSKE: Float[Array, "B S K E"],
                     positions_BL: Int[Array, "B L"]) -> Float[Array, "B L H E"]:
  """New tokens against a cache in which slot s holds position s: query p sees the slots up to p."""
  slots = jnp.arange(k_BSKE.shape[1])[None, None, :]
  visible_BLS = slots <= positions_BL[:, :, None]
  return _attend(q_BLHE, k_BSKE, v_BSKE, visible_BLS[:, None, None])


def _attend(q, k, v, visible):
  """softmax(q k / sqrt(E)) v in float32, each key-value head shared by R query heads."""
  batch, length, heads, size = q.shape
  q = q.reshape(batch, length, k.shape[2], heads // k.shape[2], size)
  scores = jnp.einsum("blkre,bske->bkrls", q, k, preferred_element_type=jnp.float32)
  scores = jnp.where(visible, scores * np.float32(size**-0.5), np.float32(_MASKED))
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  out = jnp.einsum("bkrls,bske->blkre", weights, v)
  return out.reshape(batch, length, heads, size)
