"""Drawing tokens from logits: greedy, temperature, top-p and top-k, all of them device values."""

from __future__ import annotations

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_BLOCK = 128  # ids whose weights are first summed together


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
  top_B1 = jnp.max(scaled_BV, axis=-1, keepdims=True)
  weights_BV = jnp.exp(scaled_BV - top_B1)
  kept_BV = jax.lax.cond((how.top_p < 1) | (how.top_k > 0), _cut_off, lambda w, _: w, weights_BV,
                         how)
  ids_B = jax.lax.cond(
      greedy, lambda w, _: jnp.argmax(w, axis=-1).astype(jnp.int32), _pick, kept_BV, uniform_B)
  picked_B = jnp.take_along_axis(scaled_BV, ids_B[:, None], axis=-1)[:, 0]
  return ids_B, picked_B - top_B1[:, 0] - jnp.log(jnp.sum(weights_BV, axis=-1))


def _pick(weights_BV: Float[Array, "B V"], uniform_B: Float[Array, "B"]) -> Int[Array, "B"]:
  """The id at a share `uniform_B` of the total weight: one random number a row, not one an id.

  Blocks of ids first, then an id of the block, so that few numbers are summed in a row. An id
  of weight 0 is never picked.
  """
  vocab = weights_BV.shape[-1]
  padded_BV = jnp.pad(weights_BV, ((0, 0), (0, -vocab % _BLOCK)))
  blocks_BMV = padded_BV.reshape(weights_BV.shape[0], -1, _BLOCK)
  block_B, inside_B = _first_beyond(jnp.sum(blocks_BMV, axis=-1), uniform_B)
  block_BV = jnp.take_along_axis(blocks_BMV, block_B[:, None, None], axis=1)[:, 0]
  id_B, _ = _first_beyond(block_BV, inside_B)
  return (block_B * _BLOCK + id_B).astype(jnp.int32)


def _first_beyond(weights_BN: Float[Array, "B N"], share_B: Float[Array, "B"]
                  ) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
  """Where the running sum passes the share of the total, and how far into that weight it does."""
  ends_BN = jnp.cumsum(weights_BN, axis=-1)
  wanted_B1 = (share_B * ends_BN[:, -1])[:, None]
  # Rounding may leave no sum beyond the total's share: then the last weight above 0.
  last_B1 = weights_BN.shape[-1] - 1 - jnp.argmax(weights_BN[:, ::-1] > 0, axis=-1)[:, None]
  beyond_BN = (ends_BN > wanted_B1) & (weights_BN > 0)
  at_B1 = jnp.where(jnp.any(beyond_BN, axis=-1, keepdims=True),
                    jnp.argmax(beyond_BN, axis=-1)[:, None], last_B1)
  own_B1 = jnp.take_along_axis(weights_BN, at_B1, axis=-1)
  before_B1 = jnp.take_along_axis(ends_BN, at_B1, axis=-1) - own_B1
  return at_B1[:, 0], jnp.clip((wanted_B1 - before_B1) / own_B1, 0, 1)[:, 0]


def _cut_off(weights_BV, how: Sampling):
  """0 outside the smallest set of ids that holds `top_p` of the mass, and outside `top_k`."""
  vocab = weights_BV.shape[-1]
  sorted_BV = jnp.sort(weights_BV, axis=-1)[:, ::-1]
  shares_BV = sorted_BV / jnp.sum(sorted_BV, axis=-1, keepdims=True)
  before_BV = jnp.cumsum(shares_BV, axis=-1) - shares_BV
  top_k = jnp.where(how.top_k > 0, how.top_k, vocab)
  kept_BV = (before_BV < how.top_p) & (jnp.arange(vocab)[None, :] < top_k)
  last_B1 = jnp.maximum(jnp.sum(kept_BV, axis=-1, keepdims=True) - 1, 0)
  threshold_B1 = jnp.take_along_axis(sorted_BV, last_B1, axis=-1)
  return jnp.where(weights_BV >= threshold_B1, weights_BV, 0)
