"""One decoder for Qwen2.5, Qwen3 and Llama in Flax Linen, used purely: `apply`, no hidden state.

Training reads whole rows; sampling passes a `Cache`, explicit and returned anew. The layers'
parameters are stacked along a leading axis (N) for training; `unstack_layers` lays them out one
by one, so that a decode loop slices no parameter.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from searchr1_jax.model import attention
from searchr1_jax.model.shapes import DecoderShape

Params = Mapping[str, Any]

REMAT_POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
  """Keys and values of one layer; slot s of a row holds that row's position s."""

  k_BSKE: Float[Array, "B S K E"]
  v_BSKE: Float[Array, "B S K E"]


Cache = tuple[LayerCache, ...]


def empty_cache(shape: DecoderShape, rows: int, slots: int, dtype: Any) -> Cache:
  """A cache of `rows` x `slots` positions, nothing in it."""
  size = (rows, slots, shape.kv_heads, shape.head_size)
  return tuple(LayerCache(jnp.zeros(size, dtype), jnp.zeros(size, dtype))
               for _ in range(shape.layers))


def cache_bytes(shape: DecoderShape, rows: int, slots: int, dtype: Any) -> int:
  """Bytes that `empty_cache` takes."""
  per_slot = 2 * shape.layers * shape.kv_heads * shape.head_size * jnp.dtype(dtype).itemsize
  return rows * slots * per_slot


def stack_layers(params: Params) -> dict[str, Any]:
  """`layers_0`, `layers_1`, … stacked into `layers`, leading axis N."""
  names = sorted((k for k in params if k.startswith("layers_")), key=lambda k: int(k[7:]))
  out = {k: v for k, v in params.items() if k not in names}
  out["layers"] = jax.tree.map(lambda *xs: jnp.stack(xs), *(params[k] for k in names))
  return out


def unstack_layers(params: Params) -> dict[str, Any]:
  """The inverse of `stack_layers`."""
  count = jax.tree.leaves(params["layers"])[0].shape[0]
  out = {k: v for k, v in params.items() if k != "layers"}
  for i in range(count):
    out[f"layers_{i}"] = jax.tree.map(lambda x: x[i], params["layers"])
  return out


def _init(axes: tuple[str, ...], scale: float = 0.02):
  return nn.with_logical_partitioning(nn.initializers.normal(scale), axes)


class RMSNorm(nn.Module):
  """x / sqrt(mean(x²) + eps) · scale over the last axis, the mean in float32."""

  eps: float
  axis: str = "width"

  @nn.compact
  def __call__(self, x):
    ones = nn.with_logical_partitioning(nn.initializers.ones, (self.axis,))
    scale = self.param("scale", ones, (x.shape[-1],), jnp.float32)
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + self.eps)
    return normed.astype(x.dtype) * scale.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


class Attention(nn.Module):
  """Grouped-query attention with rotary positions; with a cache, new keys are written into it."""

  shape: DecoderShape
  dtype: Any

  @nn.compact
  def __call__(self, x_BLD, positions_BL, cache: LayerCache | None, rows_B):
    s = self.shape

    def project(name, heads, axis):
      return nn.DenseGeneral(
          (heads, s.head_size), use_bias=s.qkv_bias, dtype=self.dtype, name=name,
          kernel_init=_init(("width", axis, "head")),
          bias_init=nn.with_logical_partitioning(nn.initializers.zeros, (axis, "head")))(x_BLD)

    q_BLHE = project("q", s.heads, "heads")
    k_BLKE = project("k", s.kv_heads, "kv_heads")
    v_BLKE = project("v", s.kv_heads, "kv_heads")
    if s.qk_norm:
      q_BLHE = RMSNorm(s.norm_eps, "head", name="q_norm")(q_BLHE)
      k_BLKE = RMSNorm(s.norm_eps, "head", name="k_norm")(k_BLKE)
    frequencies = attention.rope_frequencies(s)
    q_BLHE = attention.rotate(q_BLHE, positions_BL, frequencies)
    k_BLKE = attention.rotate(k_BLKE, positions_BL, frequencies)
    if cache is None:
      out_BLHE = attention.causal_attention(q_BLHE, k_BLKE, v_BLKE)
    else:
      cache = _write(cache, k_BLKE, v_BLKE, positions_BL, rows_B)
      read = (lambda x: x) if rows_B is None else (lambda x: jnp.take(x, rows_B, 0, mode="clip"))
      out_BLHE = attention.cached_attention(q_BLHE, read(cache.k_BSKE), read(cache.v_BSKE),
                                            positions_BL)
    out_BLD = nn.DenseGeneral(s.width, axis=(-2, -1), use_bias=False, dtype=self.dtype, name="o",
                              kernel_init=_init(("heads", "head", "width")))(out_BLHE)
    return out_BLD, cache


def _write(cache: LayerCache, k_BLKE, v_BLKE, positions_BL, rows_B) -> LayerCache:
  """Each new key and value goes to the slot of its position; what lies beyond the cache is dropped."""
  rows_B = jnp.arange(positions_BL.shape[0]) if rows_B is None else rows_B
  put = lambda old, new: old.at[rows_B[:, None], positions_BL].set(new.astype(old.dtype),
                                                                   mode="drop")
  return LayerCache(put(cache.k_BSKE, k_BLKE), put(cache.v_BSKE, v_BLKE))


class MLP(nn.Module):
  """SwiGLU: down(silu(gate(x)) · up(x))."""

  shape: DecoderShape
  dtype: Any

  @nn.compact
  def __call__(self, x_BLD):
    into = lambda name: nn.Dense(self.shape.mlp_width, use_bias=False, dtype=self.dtype, name=name,
                                 kernel_init=_init(("width", "mlp")))(x_BLD)
    return nn.Dense(self.shape.width, use_bias=False, dtype=self.dtype, name="down",
                    kernel_init=_init(("mlp", "width")))(nn.silu(into("gate")) * into("up"))


class Block(nn.Module):
  """One pre-norm layer: attention, then MLP, each added to the stream."""

  shape: DecoderShape
  dtype: Any

  @nn.compact
  def __call__(self, x_BLD, positions_BL, cache: LayerCache | None = None, rows_B=None):
    eps = self.shape.norm_eps
    mixed, cache = Attention(self.shape, self.dtype, name="attention")(
        RMSNorm(eps, name="attention_norm")(x_BLD), positions_BL, cache, rows_B)
    x_BLD = x_BLD + mixed
    x_BLD = x_BLD + MLP(self.shape, self.dtype, name="mlp")(RMSNorm(eps, name="mlp_norm")(x_BLD))
    return x_BLD, cache


class Decoder(nn.Module):
  """Ids to final hidden states, and hidden states to logits.

  `stacked`: parameters of the layers in one leading axis, run by a scan (whole rows only);
  otherwise layer by layer, with or without a cache.
  """

  shape: DecoderShape
  dtype: Any = jnp.float32
  stacked: bool = True
  remat: str = "none"

  def setup(self):
    s = self.shape
    self.embed = self.param("embed", _init(("vocab", "width")), (s.vocab_size, s.width), jnp.float32)
    block = Block
    if self.remat != "none":
      block = nn.remat(Block, policy=REMAT_POLICIES[self.remat], prevent_cse=not self.stacked)
    if self.stacked:
      scanned = nn.scan(
          block, variable_axes={"params": 0}, split_rngs={"params": True}, length=s.layers,
          in_axes=nn.broadcast, metadata_params={nn.PARTITION_NAME: "layers"})
      self.layers = scanned(s, self.dtype)
    else:
      self.layers = [block(s, self.dtype) for _ in range(s.layers)]
    self.norm = RMSNorm(s.norm_eps)
    if not s.tied_embeddings:
      self.head = self.param("head", _init(("width", "vocab")), (s.width, s.vocab_size), jnp.float32)

  def __call__(self, ids_BL: Int[Array, "B L"], positions_BL: Int[Array, "B L"],
               cache: Cache | None = None,
               rows_B: Int[Array, "B"] | None = None) -> tuple[Float[Array, "B L D"], Cache | None]:
    """Hidden states after the last norm; with a cache, the cache with the new tokens in it.

    `rows_B`: the row of the cache that each row of `ids_BL` continues; its own number if None. A
    token whose position (or row) lies beyond the cache is written nowhere.
    """
    x_BLD = jnp.take(self.embed, ids_BL, axis=0).astype(self.dtype)
    if self.stacked:
      if cache is not None:
        raise ValueError("a cache needs unstacked layers: see unstack_layers")
      x_BLD, _ = self.layers(x_BLD, positions_BL)
      return self.norm(x_BLD), None
    caches = []
    for i, layer in enumerate(self.layers):
      x_BLD, layer_cache = layer(x_BLD, positions_BL, None if cache is None else cache[i], rows_B)
      caches.append(layer_cache)
    return self.norm(x_BLD), None if cache is None else tuple(caches)


def output_kernel(params: Params) -> Float[Array, "D V"]:
  """The matrix from hidden states to logits, whether tied to the embedding or not."""
  return params["head"] if "head" in params else params["embed"].T


def logits(params: Params, hidden: Float[Array, "*batch D"],
           allowed_vocab: int) -> Float[Array, "*batch V"]:
  """Float32 logits; ids from `allowed_vocab` on (rows no tokenizer entry uses) get -1e30."""
  kernel = output_kernel(params).astype(hidden.dtype)
  out = jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)
  if allowed_vocab == kernel.shape[-1]:
    return out
  beyond = jnp.arange(kernel.shape[-1]) >= allowed_vocab
  return jnp.where(beyond.reshape((1,) * (out.ndim - 1) + (-1,)), jnp.float32(-1e30), out)


def init_params(shape: DecoderShape, key: Array) -> Params:
  """Fresh float32 parameters, layers stacked: normal(0.02), norms one, biases zero."""
  ids_BL = jnp.zeros((1, 1), jnp.int32)
  return nn.meta.unbox(Decoder(shape).init(key, ids_BL, ids_BL)["params"])
