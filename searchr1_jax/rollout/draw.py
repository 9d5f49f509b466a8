"""Drawing tokens from logits: greedy, temperature, top-p and top-k, all of them device values."""

from __future__ import annotations

import dataclasses
import math
import typing

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are drawn: `temperature` 0 is greedy; `top_p` 1 and `top_k` 0 cut nothing off."""

  temperature: Float[Array, ""]
  top_p: Float[Array, ""]
  top_k: Int[Array, ""]


def sampling(temperature: float, top_p: float = 1.0, top_k: int = 0) -> Sampling:
  """`Sampling` from plain numbers."""
  return Sampling(jnp.float32(temperature), jnp.float32(top_p), jnp.int32(top_k))


def draw(logits_BV: Float[Array, "B V"], uniform_B: Float[Array, "B"],
         how: Sampling) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
  """The id that each row's number in [0, 1) picks, and its log-prob under logits / temperature.

  The log-prob knows nothing of top-p and top-k: the loss compares it with a policy that has
  neither. Greedy rows report the log-prob at temperature 1.
  """
  greedy = how.temperature <= 0
  scaled_BV = logits_BV / jnp.where(greedy, 1.0, how.temperature)
  shifted_BV = scaled_BV - jnp.max(scaled_BV, axis=-1, keepdims=True)
  weights_BV = jnp.exp(shifted_BV)
  least_B = lax.cond((how.top_p < 1) | (how.top_k > 0), _least_kept,
                     lambda w, _: jnp.zeros(w.shape[:1], w.dtype), weights_BV, how)
  # The weight of the likeliest is 1, but for how a compiler may round.
  most_B = jnp.max(weights_BV, axis=-1)
  least_B = jnp.where(greedy, most_B, jnp.minimum(least_B, most_B))
  ids_B = _pick(jnp.where(weights_BV >= least_B[:, None], weights_BV, 0),
                jnp.where(greedy, 0.0, uniform_B))
  picked_B = jnp.take_along_axis(shifted_BV, ids_B[:, None], axis=-1)[:, 0]
  return ids_B, jnp.minimum(picked_B, 0) - jnp.log(jnp.sum(weights_BV, axis=-1))


def _pick(weights_BV: Float[Array, "B V"], uniform_B: Float[Array, "B"]) -> Int[Array, "B"]:
  """The id at a share `uniform_B` of the total weight: one random number a row, not one an id.

  Blocks of ids first, then an id of the block, so that few numbers are summed in a row. An id
  of weight 0 is never picked.
  """
  rows, vocab = weights_BV.shape
  size = math.isqrt(vocab - 1) + 1
  blocks_BMN = jnp.pad(weights_BV, ((0, 0), (0, -vocab % size))).reshape(rows, -1, size)
  block_B, share_B = _first_beyond(jnp.sum(blocks_BMN, axis=-1), uniform_B)
  block_BN = jnp.take_along_axis(blocks_BMN, block_B[:, None, None], axis=1)[:, 0]
  return block_B * size + _first_beyond(block_BN, share_B)[0]


def _first_beyond(weights_BN: Float[Array, "B N"], share_B: Float[Array, "B"]
                  ) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
  """Where the running sum passes the share of the total, and at which share of that weight."""
  size = weights_BN.shape[1]
  ends_BN = jnp.matmul(weights_BN, np.triu(np.ones((size, size), np.float32)),
                       precision=lax.Precision.HIGHEST)
  wanted_B1 = (share_B * ends_BN[:, -1])[:, None]
  # Where rounding leaves no sum beyond the share: the last weight above 0.
  candidates_BN = weights_BN > 0
  number_N = jnp.arange(size, dtype=jnp.int32)[None, :]
  last_B1 = jnp.max(jnp.where(candidates_BN, number_N, 0), axis=-1, keepdims=True)
  first_B1 = jnp.min(jnp.where(candidates_BN & (ends_BN > wanted_B1), number_N, last_B1), axis=-1,
                     keepdims=True)
  at = lambda x_BN: jnp.take_along_axis(x_BN, first_B1, axis=-1)[:, 0]
  share_B = 1 - (at(ends_BN) - wanted_B1[:, 0]) / at(weights_BN)
  return first_B1[:, 0], jnp.clip(share_B, 0, 1)


def _least_kept(weights_BV: Float[Array, "B V"], how: Sampling) -> Float[Array, "B"]:
  """The least weight in the smallest set of ids that holds `top_p` of the mass, or `top_k` ids.

  It is searched bit by bit, since positive floats are ordered like their bits: 31 sums instead of
  a sort. Ids of one weight stay or go together.
  """
  mass_B = jnp.where(how.top_p < 1, how.top_p * jnp.sum(weights_BV, axis=-1), jnp.inf)
  count = jnp.where(how.top_k > 0, how.top_k, weights_BV.shape[-1])
  as_float = lambda bits_B: lax.bitcast_convert_type(bits_B, jnp.float32)

  def narrow(i, least_B):
    tried_B = least_B | (1 << (30 - i))
    kept_BV = weights_BV >= as_float(tried_B)[:, None]
    mass_kept_B = jnp.sum(jnp.where(kept_BV, weights_BV, 0), axis=-1)
    count_kept_B = jnp.sum(kept_BV, axis=-1)
    enough_B = (mass_kept_B >= mass_B) | (count_kept_B >= count)
    return jnp.where(enough_B & (count_kept_B > 0), tried_B, least_B)

  with jax.named_scope("cut"):
    return as_float(lax.fori_loop(0, 31, narrow, jnp.zeros(weights_BV.shape[:1], jnp.int32)))
