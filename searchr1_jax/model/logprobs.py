"""Log-probabilities of given tokens, in chunks over L: no [B, L, V] array in float32 anywhere."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from searchr1_jax.model import decoder, sharding


def target_logprobs(
    params: decoder.Params,
    hidden_BLD: Float[Array, "B L D"],
    targets_BL: Int[Array, "B L"],
    *,
    allowed_vocab: int,
    temperature: float | Float[Array, ""],
    chunk: int,
    with_entropy: bool = False,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "B L"], Float[Array, "B L"] | None]:
  """log softmax(logits / temperature) at the targets, and the entropy (nats) where asked.

  `chunk` tokens (of all rows together) at a time have their logits in memory, and they are computed
  again for the gradient; ids from `allowed_vocab` on have probability 0, as they have when sampling.
  `mesh`: where rows and parameters are spread, if they are.
  """
  tied = "head" not in params
  rows, length = targets_BL.shape
  size = min(length, max(1, chunk // rows))  # positions of each row
  count = -(-length // size)
  pad = lambda x: jnp.pad(x, ((0, 0), (0, count * size - length)) + ((0, 0),) * (x.ndim - 2))
  out = _score(params["embed" if tied else "head"], pad(hidden_BLD), pad(targets_BL),
               jnp.float32(temperature), (tied, allowed_vocab, count, with_entropy, mesh))
  logprobs_BL, entropy_BL = (x if x is None else x[:, :length] for x in out)
  return logprobs_BL, entropy_BL


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _score(kernel, hidden_BLD, targets_BL, temperature, how):
  return _score_forward(kernel, hidden_BLD, targets_BL, temperature, how)[0]


def _score_forward(kernel, hidden_BLD, targets_BL, temperature, how):
  """The scores, and the normalizer and entropy of each position for the way back."""
  _, _, count, with_entropy, _ = how
  whole = _whole(kernel, hidden_BLD, how)

  def chunk(_, xs):
    hidden_BCD, targets_BC = xs
    logits_BCV, hit_BCV = _logits(whole, hidden_BCD, targets_BC, temperature, how)
    normalizer_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
    picked_BC = jnp.sum(jnp.where(hit_BCV, logits_BCV, 0), axis=-1)
    entropy_BC = None
    if with_entropy:
      shares_BCV = jnp.exp(logits_BCV - normalizer_BC[..., None])
      entropy_BC = normalizer_BC - jnp.sum(shares_BCV * logits_BCV, axis=-1)
    return None, (picked_BC - normalizer_BC, entropy_BC, normalizer_BC)

  _, out = jax.lax.scan(chunk, None, _split((hidden_BLD, targets_BL), count), unroll=count == 1)
  logprobs_BL, entropy_BL, normalizer_BL = _join(out)
  return (logprobs_BL, entropy_BL), (
      kernel, hidden_BLD, targets_BL, temperature, entropy_BL, normalizer_BL)


def _score_backward(how, kept, slopes):
  """d log p / d logit = hit - p and dH / d logit = -p (log p + H), through logits made again."""
  kernel, hidden_BLD, targets_BL, temperature, entropy_BL, normalizer_BL = kept
  tied, _, count, with_entropy, mesh = how
  whole = _whole(kernel, hidden_BLD, how)
  shards = sharding.row_shards(mesh)
  by_shard = lambda x_B: x_B.reshape(shards, -1, *x_B.shape[1:])

  def chunk(dkernel_NDV, xs):
    hidden_BCD, targets_BC, entropy_BC, normalizer_BC, dlogprobs_BC, dentropy_BC = xs
    logits_BCV, hit_BCV = _logits(whole, hidden_BCD, targets_BC, temperature, how)
    logprobs_BCV = logits_BCV - normalizer_BC[..., None]
    slope_BC = dlogprobs_BC[..., None]
    if with_entropy:
      slope_BC = slope_BC + dentropy_BC[..., None] * (logprobs_BCV + entropy_BC[..., None])
    dlogits_BCV = jnp.where(hit_BCV, dlogprobs_BC[..., None], 0) - jnp.exp(logprobs_BCV) * slope_BC
    dlogits_BCV = (dlogits_BCV / temperature).astype(hidden_BCD.dtype)
    dhidden_BCD = jnp.einsum("bcv,vd->bcd" if tied else "bcv,dv->bcd", dlogits_BCV, whole)
    # Each shard of rows sums up by itself: what devices add together, they add once, at the end.
    dkernel_NDV += jnp.einsum("nbcd,nbcv->ndv", by_shard(hidden_BCD), by_shard(dlogits_BCV),
                              preferred_element_type=kernel.dtype)
    return dkernel_NDV, dhidden_BCD

  chunks = _split((hidden_BLD, targets_BL, entropy_BL, normalizer_BL, *slopes), count)
  size_DV = kernel.shape[::-1] if tied else kernel.shape
  empty_NDV = sharding.spread_sums(mesh, jnp.zeros((shards, *size_DV), kernel.dtype))
  dkernel_NDV, dhidden = jax.lax.scan(chunk, empty_NDV, chunks, unroll=count == 1)
  dkernel_DV = jnp.sum(dkernel_NDV, axis=0)
  return (dkernel_DV.T if tied else dkernel_DV), _join(dhidden), None, jnp.zeros_like(temperature)


_score.defvjp(_score_forward, _score_backward)


def _whole(kernel, hidden_BLD, how):
  """The kernel as it is multiplied with, gathered once for all chunks where it is spread."""
  tied, *_, mesh = how
  name = "embed" if tied else "head"
  return sharding.gather(mesh, {name: kernel.astype(hidden_BLD.dtype)})[name]


def _logits(kernel, hidden_BCD, targets_BC, temperature, how):
  """Float32 logits / temperature, and where the target stands."""
  tied, allowed_vocab, *_ = how
  params = {"embed": kernel} if tied else {"head": kernel}
  logits_BCV = decoder.logits(params, hidden_BCD, allowed_vocab) / temperature
  ids_V = jnp.arange(logits_BCV.shape[-1], dtype=targets_BC.dtype)
  return logits_BCV, targets_BC[..., None] == ids_V[None, None]


def _split(tree, count: int):
  """[B, count · C, ...] -> [count, B, C, ...], for a scan."""
  return jax.tree.map(lambda x: jnp.moveaxis(
      x.reshape(x.shape[0], count, -1, *x.shape[2:]), 1, 0), tree)


def _join(tree):
  """The inverse of `_split`."""
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]), tree)
