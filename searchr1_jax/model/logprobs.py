"""Log-probabilities of given tokens, in chunks over L: no [B, L, V] array in float32 anywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from searchr1_jax.model import decoder


def target_logprobs(
    params: decoder.Params,
    hidden_BLD: Float[Array, "B L D"],
    targets_BL: Int[Array, "B L"],
    *,
    allowed_vocab: int,
    temperature: float | Float[Array, ""],
    chunk: int,
    with_entropy: bool = False,
) -> tuple[Float[Array, "B L"], Float[Array, "B L"] | None]:
  """log softmax(logits / temperature) at the targets, and the entropy (nats) where asked.

  `chunk` positions at a time have their logits in memory, and they are computed again for the
  gradient; ids from `allowed_vocab` on have probability 0, as they have when sampling.
  """
  kernel_params = {k: params[k] for k in ("embed", "head") if k in params}

  def score(hidden_BCD, targets_BC):
    logits_BCV = decoder.logits(kernel_params, hidden_BCD, allowed_vocab) / temperature
    normalizer_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
    picked_BC = jnp.take_along_axis(logits_BCV, targets_BC[..., None], axis=-1)[..., 0]
    if not with_entropy:
      return picked_BC - normalizer_BC, None
    shares_BCV = jnp.exp(logits_BCV - normalizer_BC[..., None])
    return picked_BC - normalizer_BC, normalizer_BC - jnp.sum(shares_BCV * logits_BCV, axis=-1)

  length = targets_BL.shape[1]
  if length <= chunk:
    return score(hidden_BLD, targets_BL)
  count = -(-length // chunk)
  in_chunks = lambda x: jnp.moveaxis(
      jnp.pad(x, ((0, 0), (0, count * chunk - length)) + ((0, 0),) * (x.ndim - 2)).reshape(
          (x.shape[0], count, chunk) + x.shape[2:]), 1, 0)
  _, out = jax.lax.scan(lambda _, xs: (None, jax.checkpoint(score)(*xs)), None,
                        (in_chunks(hidden_BLD), in_chunks(targets_BL)))
  whole = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], count * chunk)[:, :length]
  return whole(out[0]), None if out[1] is None else whole(out[1])
