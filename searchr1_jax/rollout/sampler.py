"""Jitted sampling over a cache that outlives the turn: `prefill` inserts tokens, `decode` writes some.

The state of all rows is one pytree, donated from call to call. Between calls the cache of a row
holds every token of its episode, the last sampled one included, and `hidden_BD` is the state that
predicts its next token; so an insertion prefills exactly the new tokens and nothing again.
Temperature, limits, stops and lengths are device values: only the shapes of arrays compile.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from searchr1_jax.model import decoder
from searchr1_jax.model.shapes import DecoderShape


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerState:
  """Every row's cache and where it stands. T: the longest turn.

  `lengths_B` tokens are in the cache; `limits_B` is the length at which the row must stop;
  `stops_B` the automaton's state; `seeds_BM` what the row's randomness is addressed by;
  `written_B` tokens of `ids_BT` belong to the turn being written. `prefilled` and `generated`
  count tokens as the device saw them.
  """

  cache: decoder.Cache
  hidden_BD: Float[Array, "B D"]
  lengths_B: Int[Array, "B"]
  limits_B: Int[Array, "B"]
  stops_B: Int[Array, "B"]
  seeds_BM: UInt32[Array, "B 2"]
  active_B: Bool[Array, "B"]
  ids_BT: Int[Array, "B T"]
  logprobs_BT: Float[Array, "B T"]
  written_B: Int[Array, "B"]
  prefilled: Int[Array, ""]
  generated: Int[Array, ""]


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


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inserts:
  """Tokens to put into rows, right-padded to C. `rows_R` beyond the batch marks an empty place.

  `starts_R`: how many of the row's tokens stay (0 begins a new episode). `opens_R`: whether a
  turn may be written after it, up to a length of `limits_R`.
  """

  rows_R: Int[np.ndarray, "R"]
  ids_RC: Int[np.ndarray, "R C"]
  counts_R: Int[np.ndarray, "R"]
  starts_R: Int[np.ndarray, "R"]
  opens_R: Bool[np.ndarray, "R"]
  limits_R: Int[np.ndarray, "R"]
  seeds_RM: UInt32[np.ndarray, "R 2"]


def new_state(shape: DecoderShape, rows: int, slots: int, max_turn: int,
              dtype: Any) -> SamplerState:
  """A state of `rows` empty rows, each with room for `slots` tokens."""
  per_row = lambda dt: jnp.zeros(rows, dt)
  return SamplerState(
      cache=decoder.empty_cache(shape, rows, slots, dtype),
      hidden_BD=jnp.zeros((rows, shape.width), dtype),
      lengths_B=per_row(jnp.int32), limits_B=per_row(jnp.int32), stops_B=per_row(jnp.int32),
      seeds_BM=jnp.zeros((rows, 2), jnp.uint32), active_B=per_row(bool),
      ids_BT=jnp.zeros((rows, max_turn), jnp.int32),
      logprobs_BT=jnp.zeros((rows, max_turn), jnp.float32), written_B=per_row(jnp.int32),
      prefilled=jnp.int32(0), generated=jnp.int32(0))


@functools.partial(jax.jit, static_argnames=("shape", "dtype"), donate_argnames="state")
def prefill(params: decoder.Params, state: SamplerState, inserts: Inserts, *,
            shape: DecoderShape, dtype: Any) -> SamplerState:
  """Puts tokens into rows: ragged, each row at its own position; keeps last-token states only."""
  rows_R, counts_R = inserts.rows_R, inserts.counts_R
  slots = state.cache[0].k_BKSE.shape[2]
  column_1C = jnp.arange(inserts.ids_RC.shape[1])[None, :]
  real_RC = column_1C < counts_R[:, None]
  positions_RC = jnp.where(real_RC, inserts.starts_R[:, None] + column_1C, slots)
  hidden_RCD, cache = decoder.Decoder(shape, dtype, stacked=False).apply(
      {"params": params}, inserts.ids_RC, positions_RC, state.cache, rows_R)
  last_R = jnp.maximum(counts_R - 1, 0)
  hidden_RD = jnp.take_along_axis(hidden_RCD, last_R[:, None, None], axis=1)[:, 0]
  put = lambda old, new: old.at[rows_R].set(new, mode="drop")
  return dataclasses.replace(
      state,
      cache=cache,
      hidden_BD=put(state.hidden_BD, hidden_RD),
      lengths_B=put(state.lengths_B, inserts.starts_R + counts_R),
      limits_B=put(state.limits_B, inserts.limits_R),
      stops_B=put(state.stops_B, jnp.zeros_like(counts_R)),
      seeds_BM=put(state.seeds_BM, inserts.seeds_RM),
      active_B=put(state.active_B, inserts.opens_R),
      written_B=put(state.written_B, jnp.zeros_like(counts_R)),
      prefilled=state.prefilled + jnp.sum(counts_R))


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "allowed_vocab"),
                   donate_argnames="state")
def decode(params: decoder.Params, state: SamplerState, next_state_SV: Int[Array, "S V"],
           n_plain: Int[Array, ""], ends_V: Bool[Array, "V"], key: Array, how: Sampling,
           wait_for: Int[Array, ""], *, shape: DecoderShape, dtype: Any,
           allowed_vocab: int) -> SamplerState:
  """Writes tokens into the active rows until at most `wait_for` of them are still writing.

  A row stops AT the token that completes a stop string, at an end token, or at its limit; that
  token is in the cache too. `key` belongs to the seed and the training step; a token's randomness
  is addressed by it, the row's `seeds` (question, sample) and its position.
  """
  module = decoder.Decoder(shape, dtype, stacked=False)
  slots = state.cache[0].k_BKSE.shape[2]
  batch = state.active_B.shape[0]
  row_keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.fold_in(key, seed[0]), seed[1]))(
      state.seeds_BM)

  def write(s: SamplerState) -> SamplerState:
    logits_BV = decoder.logits(params, s.hidden_BD, allowed_vocab)
    ids_B, logprobs_B = draw(logits_BV, jax.vmap(jax.random.fold_in)(row_keys, s.lengths_B), how)
    row_B = jnp.arange(batch)
    column_B = jnp.where(s.active_B, s.written_B, s.ids_BT.shape[1])
    positions_B = jnp.where(s.active_B, s.lengths_B, slots)
    hidden_B1D, cache = module.apply({"params": params}, ids_B[:, None], positions_B[:, None],
                                     s.cache)
    step_B = s.active_B.astype(jnp.int32)
    stops_B = jnp.where(s.active_B, next_state_SV[s.stops_B, ids_B].astype(jnp.int32), s.stops_B)
    lengths_B = s.lengths_B + step_B
    over_B = (stops_B >= n_plain) | ends_V[ids_B] | (lengths_B >= s.limits_B)
    return dataclasses.replace(
        s, cache=cache, stops_B=stops_B, lengths_B=lengths_B, written_B=s.written_B + step_B,
        hidden_BD=jnp.where(s.active_B[:, None], hidden_B1D[:, 0], s.hidden_BD),
        ids_BT=s.ids_BT.at[row_B, column_B].set(ids_B, mode="drop"),
        logprobs_BT=s.logprobs_BT.at[row_B, column_B].set(logprobs_B, mode="drop"),
        active_B=s.active_B & ~over_B, generated=s.generated + jnp.sum(step_B))

  # At least one token, so that a call always makes progress.
  going = lambda carry: jnp.any(carry[1].active_B) & (
      (carry[0] == 0) | (jnp.sum(carry[1].active_B) > wait_for))
  _, state = jax.lax.while_loop(going, lambda c: (c[0] + 1, write(c[1])), (jnp.int32(0), state))
  return state


def draw(logits_BV: Float[Array, "B V"], keys_B: Array,
         how: Sampling) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
  """Draws an id a row, and tells its log-prob under logits / temperature.

  The log-prob knows nothing of top-p and top-k: the loss compares it with a policy that has
  neither. Greedy rows report the log-prob at temperature 1.
  """
  greedy = how.temperature <= 0
  scaled_BV = logits_BV / jnp.where(greedy, 1.0, how.temperature)
  kept_BV = jax.lax.cond((how.top_p < 1) | (how.top_k > 0), _cut_off, lambda x, _: x, scaled_BV, how)
  drawn_B = jax.lax.cond(
      greedy, lambda x, _: jnp.argmax(x, axis=-1).astype(jnp.int32),
      lambda x, keys: jax.vmap(jax.random.categorical)(keys, x).astype(jnp.int32), kept_BV, keys_B)
  picked_B = jnp.take_along_axis(scaled_BV, drawn_B[:, None], axis=-1)[:, 0]
  return drawn_B, picked_B - jax.nn.logsumexp(scaled_BV, axis=-1)


def _cut_off(logits_BV, how: Sampling):
  """-1e30 outside the smallest set of ids that holds `top_p` of the mass, and outside `top_k`."""
  vocab = logits_BV.shape[-1]
  sorted_BV = jnp.sort(logits_BV, axis=-1)[:, ::-1]
  shares_BV = jax.nn.softmax(sorted_BV, axis=-1)
  before_BV = jnp.cumsum(shares_BV, axis=-1) - shares_BV
  top_k = jnp.where(how.top_k > 0, how.top_k, vocab)
  kept_BV = (before_BV < how.top_p) & (jnp.arange(vocab)[None, :] < top_k)
  last_B1 = jnp.maximum(jnp.sum(kept_BV, axis=-1, keepdims=True) - 1, 0)
  threshold_B1 = jnp.take_along_axis(sorted_BV, last_B1, axis=-1)
  return jnp.where(logits_BV >= threshold_B1, logits_BV, -1e30)
