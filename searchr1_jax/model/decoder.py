"""One decoder for Qwen2.5, Qwen3 and Llama in Flax Linen, used purely: `apply`, no hidden state.

Training reads whole rows; sampling passes a `Cache`, explicit and returned anew. The layers'
parameters are stacked along a leading axis (N) for training; `unstack_layers` lays them out one
by one, so that a decode loop slices no parameter.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, Mapping, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from searchr1_jax.model import attention, kernels, sharding
from searchr1_jax.model.shapes import DecoderShape

Params = Mapping[str, Any]

_PRODUCT = "product"  # what the products of a layer with its kernels are called
REMAT_POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names(_PRODUCT),
}


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
  """Keys and values of one layer; slot s of a row holds that row's position s."""

  k_BKES: Float[Array, "B K E S"]
  v_BKSE: Float[Array, "B K S E"]


class Place(NamedTuple):
  """Where the tokens of a call stand, for every layer alike.

  `rows_B`: their rows of the cache. `width`: how many of a row's slots they may see, all if None.
  """

  positions_BL: Int[Array, "B L"]
  turn: attention.Rotation
  rows_B: Int[Array, "B"] | None
  width: int | None


Cache = tuple[LayerCache, ...]


def empty_cache(shape: DecoderShape, rows: int, slots: int, dtype: Any) -> Cache:
  """A cache of `rows` x `slots` positions, nothing in it."""
  row = (rows, shape.kv_heads)
  return tuple(LayerCache(jnp.zeros((*row, shape.head_size, slots), dtype),
                          jnp.zeros((*row, slots, shape.head_size), dtype))
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


class Linear(nn.Module):
  """x · kernel (+ bias): contracts the last `inputs` axes of x; axes are named as in sharding.py."""

  axes: tuple[str, ...]
  outputs: tuple[int, ...]
  dtype: Any
  inputs: int = 1
  use_bias: bool = False

  @nn.compact
  def __call__(self, x):
    kernel = self.param("kernel", _init(self.axes), x.shape[-self.inputs:] + self.outputs,
                        jnp.float32)
    y = checkpoint_name(kernels.project(x.astype(self.dtype), kernel, self.inputs), _PRODUCT)
    if not self.use_bias:
      return y
    zeros = nn.with_logical_partitioning(nn.initializers.zeros, self.axes[self.inputs:])
    bias = self.param("bias", zeros, self.outputs, jnp.float32).astype(self.dtype)
    return y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


class Attention(nn.Module):
  """Grouped-query attention with rotary positions; with a cache, new keys are written into it."""

  shape: DecoderShape
  dtype: Any
  kernel: str
  platform: str
  mesh: Mesh | None

  @nn.compact
  def __call__(self, x_BLD, place: Place, cache: LayerCache | None, kept_BP):
    s = self.shape

    def project(name, heads, axis):
      return Linear(("width", axis, "head"), (heads, s.head_size), self.dtype,
                    use_bias=s.qkv_bias, name=name)

    turn = place.turn
    k_BLKE = project("k", s.kv_heads, "kv_heads")(x_BLD)
    v_BLKE = project("v", s.kv_heads, "kv_heads")(x_BLD)
    if s.qk_norm:
      k_BLKE = RMSNorm(s.norm_eps, "head", name="k_norm")(k_BLKE)
    k_BLKE = attention.rotate(k_BLKE, turn)
    if kept_BP is not None:
      x_BLD, turn = take_positions((x_BLD, turn), kept_BP)
    q_BLHE = project("q", s.heads, "heads")(x_BLD)
    if s.qk_norm:
      q_BLHE = RMSNorm(s.norm_eps, "head", name="q_norm")(q_BLHE)
    q_BLHE = attention.rotate(q_BLHE, turn)
    if cache is not None:
      chunk = k_BLKE.shape[1] > 1
      write = _write_by_row if chunk and self.platform == "tpu" else _write
      cache = write(cache, k_BLKE, _finite(v_BLKE), place)
      at_BL = (place.positions_BL if kept_BP is None else
               take_positions(place.positions_BL, kept_BP))
      out_BLHE = attention.cached_attention(q_BLHE, *_read(cache, place), at_BL, self.kernel)
    elif kept_BP is not None:
      out_BLHE = attention.attention_at(q_BLHE, attention.by_head(k_BLKE),
                                        attention.by_head(v_BLKE), kept_BP)
    else:
      out_BLHE = attention.causal_attention(q_BLHE, k_BLKE, v_BLKE, self.kernel,
                                            self.mesh)
    out_BLD = Linear(("heads", "head", "width"), (s.width,), self.dtype, inputs=2,
                     name="o")(out_BLHE)
    return out_BLD, cache


def take_positions(tree: Any, kept_BP: Int[Array, "B P"]) -> Any:
  """Of arrays [B, L, ...] the positions `kept_BP` of each row; beyond L stands for the last."""
  def take(x):
    return jnp.take_along_axis(x, kept_BP.reshape(kept_BP.shape + (1,) * (x.ndim - 2)), axis=1,
                               mode="clip")

  return jax.tree.map(take, tree)


def _finite(v_BLKE):
  """A value that overflowed is kept as 0: slots outlive their episode, and one that nobody may see
  still enters the mixture, at weight 0. Its own episode knows by the stream that it overflowed."""
  return jnp.where(jnp.isfinite(v_BLKE), v_BLKE, jnp.zeros_like(v_BLKE))


def _write(cache: LayerCache, k_BLKE, v_BLKE, place: Place) -> LayerCache:
  """Each new key and value goes to the slot of its position; what lies beyond the cache is dropped."""
  rows_B1 = (jnp.arange(k_BLKE.shape[0]) if place.rows_B is None else place.rows_B)[:, None]
  k = cache.k_BKES.at[rows_B1, :, :, place.positions_BL].set(
      k_BLKE.astype(cache.k_BKES.dtype), mode="drop")
  v = cache.v_BKSE.at[rows_B1, :, place.positions_BL].set(
      v_BLKE.astype(cache.v_BKSE.dtype), mode="drop")
  return LayerCache(k, v)


def _write_by_row(cache: LayerCache, k_BLKE, v_BLKE, place: Place) -> LayerCache:
  """`_write` of positions that follow each other, one row after another.

  For chunks on TPUs, where XLA turns the whole cache round before and after a scatter: it copies
  it twice. A row's window of slots is read, and written again with what is new in it.
  """
  rows, slots, length = cache.v_BKSE.shape[0], cache.v_BKSE.shape[2], v_BLKE.shape[1]
  size = min(length, slots)
  rows_B = jnp.arange(v_BLKE.shape[0]) if place.rows_B is None else place.rows_B
  first_B = jnp.minimum(place.positions_BL[:, 0], slots - size)

  def one(b, cache: LayerCache) -> LayerCache:
    slot_M = first_B[b] + jnp.arange(size)
    at_M = jnp.clip(slot_M - place.positions_BL[b, 0], 0, length - 1)
    new_M = (jnp.take(place.positions_BL[b], at_M) == slot_M) & (rows_B[b] < rows)

    def put(old, x_BLKE, slots_axis):
      start = tuple(first_B[b] if i == slots_axis else 0 if i else rows_B[b] for i in range(4))
      shape = tuple(size if i == slots_axis else n if i else 1 for i, n in enumerate(old.shape))
      new = jnp.moveaxis(jnp.take(x_BLKE[b], at_M, axis=0), 0, slots_axis - 1)[None]
      is_new = new_M.reshape([size if i == slots_axis else 1 for i in range(4)])
      window = jnp.where(is_new, new.astype(old.dtype), jax.lax.dynamic_slice(old, start, shape))
      return jax.lax.dynamic_update_slice(old, window, start)

    return LayerCache(put(cache.k_BKES, k_BLKE, 3), put(cache.v_BKSE, v_BLKE, 2))

  return jax.lax.fori_loop(0, v_BLKE.shape[0], one, cache)


def _read(cache: LayerCache, place: Place) -> tuple[Array, Array]:
  """Keys and values that the rows of a call may see."""
  if place.rows_B is None:
    return cache.k_BKES[..., : place.width], cache.v_BKSE[:, :, : place.width]

  def take(x, slots_axis: int):  # one gather: to cut slots off first would copy rows of others
    size = list(x.shape[1:])
    size[slots_axis - 1] = place.width or size[slots_axis - 1]
    one = lambda row: jax.lax.dynamic_slice(x, (row, 0, 0, 0), (1, *size))[0]
    return jax.vmap(one)(place.rows_B)

  return take(cache.k_BKES, 3), take(cache.v_BKSE, 2)


class MLP(nn.Module):
  """SwiGLU: down(silu(gate(x)) · up(x))."""

  shape: DecoderShape
  dtype: Any

  @nn.compact
  def __call__(self, x_BLD):
    into = lambda name: Linear(("width", "mlp"), (self.shape.mlp_width,), self.dtype, name=name)
    hidden_BLM = kernels.swiglu(into("gate")(x_BLD), into("up")(x_BLD))
    return Linear(("mlp", "width"), (self.shape.width,), self.dtype, name="down")(hidden_BLM)


class Block(nn.Module):
  """One pre-norm layer: attention, then MLP, each added to the stream.

  With `kept_BP` it computes those positions only, which still see all that stands before them.
  """

  shape: DecoderShape
  dtype: Any
  kernel: str
  platform: str
  mesh: Mesh | None

  @nn.compact
  def __call__(self, x_BLD, place: Place, cache: LayerCache | None = None, kept_BP=None):
    eps = self.shape.norm_eps
    x_BLD = sharding.spread_rows(self.mesh, x_BLD)
    mixed, cache = Attention(
        self.shape, self.dtype, self.kernel, self.platform, self.mesh, name="attention")(
        RMSNorm(eps, name="attention_norm")(x_BLD), place, cache, kept_BP)
    x_BLD = (x_BLD if kept_BP is None else take_positions(x_BLD, kept_BP)) + mixed
    x_BLD = x_BLD + MLP(self.shape, self.dtype, name="mlp")(RMSNorm(eps, name="mlp_norm")(x_BLD))
    return sharding.spread_rows(self.mesh, x_BLD), cache


class Decoder(nn.Module):
  """Ids to final hidden states, and hidden states to logits.

  `stacked`: parameters of the layers in one leading axis, run by a scan (whole rows only);
  otherwise layer by layer, with or without a cache. `mesh`: where rows are spread, if they are.
  `platform`: what it is compiled for; the mesh's, or this process's, if None. `attention_kernel`:
  chosen for the platform if None.
  """

  shape: DecoderShape
  dtype: Any = jnp.float32
  stacked: bool = True
  remat: str = "none"
  attention_kernel: str | None = None
  mesh: Mesh | None = None
  platform: str | None = None

  def setup(self):
    s = self.shape
    self.embed = self.param("embed", _init(("vocab", "width")), (s.vocab_size, s.width), jnp.float32)
    platform = self.platform or (
        self.mesh.devices.flat[0].platform if self.mesh else jax.default_backend())
    block, kernel = Block, self.attention_kernel or attention.choose_kernel(
        platform, self.dtype, s, self.mesh.shape["tensor"] if self.mesh else 1)
    if self.remat != "none":
      block = nn.remat(Block, policy=REMAT_POLICIES[self.remat], prevent_cse=not self.stacked)
    if self.stacked:
      scanned = nn.scan(
          block, variable_axes={"params": 0}, split_rngs={"params": True}, length=s.layers,
          in_axes=nn.broadcast, metadata_params={nn.PARTITION_NAME: "layers"})
      self.layers = scanned(s, self.dtype, kernel, platform, self.mesh)
    else:
      self.layers = [block(s, self.dtype, kernel, platform, self.mesh) for _ in range(s.layers)]
    self.norm = RMSNorm(s.norm_eps)
    if not s.tied_embeddings:
      self.head = self.param("head", _init(("width", "vocab")), (s.width, s.vocab_size), jnp.float32)

  def __call__(self, ids_BL: Int[Array, "B L"], positions_BL: Int[Array, "B L"],
               cache: Cache | None = None, rows_B: Int[Array, "B"] | None = None,
               kept_BP: Int[Array, "B P"] | None = None, width: int | None = None
               ) -> tuple[Float[Array, "B M D"], Cache | None]:
    """Hidden states after the last norm; with a cache, the cache with the new tokens in it.

    `rows_B`: the row of the cache that each row of `ids_BL` continues; its own number if None. A
    token whose position (or row) lies beyond the cache is written nowhere. `width`: see Place.
    `kept_BP`: the places along L whose states are wanted, all if None.
    """
    x_BLD = jnp.take(self.embed, ids_BL, axis=0).astype(self.dtype)
    turn = attention.rotation(positions_BL, attention.rope_frequencies(self.shape))
    place = Place(positions_BL, turn, rows_B, width)
    if self.stacked:
      if cache is not None:
        raise ValueError("a cache needs unstacked layers: see unstack_layers")
      x_BLD, _ = self.layers(x_BLD, place)
      return self.norm(x_BLD if kept_BP is None else take_positions(x_BLD, kept_BP)), None
    caches = []
    for i, layer in enumerate(self.layers):
      last = i == len(self.layers) - 1
      x_BLD, layer_cache = layer(x_BLD, place, None if cache is None else cache[i],
                                 kept_BP if last else None)
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
