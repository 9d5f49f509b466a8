"""Jitted sampling over a cache that outlives the turn: `prefill` inserts tokens, `decode` writes some.

Between calls the cache of a row holds every token of its episode, the last sampled one included,
and `hidden_BD` is the state that predicts its next token; so an insertion prefills exactly the new
tokens and nothing again. Temperature, limits, stops and lengths are device values: only the
shapes of arrays compile. The functions see the rows of one device; `programs` puts them on a mesh.

The loops have names (`fetch`, `write`, `keep`, `share`), by which a count of costs knows them.

Rows are decoded on a desk: a few seats, each with room for as many tokens as the longest row in
hand needs. So rows that wait for a search cost nothing, and attention costs what lengths ask for.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt32

from searchr1_jax.model import attention, decoder, sharding
from searchr1_jax.model.shapes import DecoderShape
from searchr1_jax.rollout.draw import Sampling, draw


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowState:
  """What the device holds of every row: its cache, the state behind its last token (`hidden_BD`)
  and the one behind its prompt (`prompt_BD`), with which other samples begin."""

  cache: decoder.Cache
  hidden_BD: Float[Array, "B D"]
  prompt_BD: Float[Array, "B D"]


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inserts:
  """Tokens to put into rows, right-padded to C. `rows_R` beyond the rows marks an empty place.

  `starts_R`: how many of the row's tokens stay. `prompt_R`: whether they end the row's prompt.
  """

  rows_R: Int[np.ndarray, "R"]
  ids_RC: Int[np.ndarray, "R C"]
  counts_R: Int[np.ndarray, "R"]
  starts_R: Int[np.ndarray, "R"]
  prompt_R: Bool[np.ndarray, "R"]


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shares:
  """Rows that begin with another's prompt; one entry a device in `count_N`, places behind it empty."""

  from_R: Int[np.ndarray, "R"]
  to_R: Int[np.ndarray, "R"]
  count_N: Int[np.ndarray, "N"]


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seats:
  """Who sits at the desk. `rows_B` beyond the rows marks an empty seat, behind all taken ones.

  `lengths_B`: tokens in a row's cache; `limits_B`: the length at which it must stop; `stops_B`: the
  automaton's state; `seeds_BM`: what its randomness is addressed by. The first `fetches_N` of
  `fetch_B` are seats whose rows have to be brought.
  """

  rows_B: Int[np.ndarray, "B"]
  lengths_B: Int[np.ndarray, "B"]
  limits_B: Int[np.ndarray, "B"]
  stops_B: Int[np.ndarray, "B"]
  seeds_BM: UInt32[np.ndarray, "B 2"]
  fetch_B: Int[np.ndarray, "B"]
  fetches_N: Int[np.ndarray, "N"]


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stops:
  """What ends a turn: the automaton's table, its first final state, and the end tokens."""

  next_state_SV: Int[Array, "S V"]
  n_plain: Int[Array, ""]
  ends_V: Bool[Array, "V"]


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pieces:
  """What a call wrote: `counts_B` of the ids of each seat, and whether its turn goes on.

  `steps_N`: tokens that the busiest seat of each device wrote.
  """

  ids_BT: Int[Array, "B T"]
  logprobs_BT: Float[Array, "B T"]
  counts_B: Int[Array, "B"]
  stops_B: Int[Array, "B"]
  open_B: Bool[Array, "B"]
  steps_N: Int[Array, "N"]


def new_rows(shape: DecoderShape, rows: int, slots: int, dtype: Any) -> RowState:
  """`rows` empty rows, each with room for `slots` tokens."""
  hidden_BD = jnp.zeros((rows, shape.width), dtype)
  return RowState(decoder.empty_cache(shape, rows, slots, dtype), hidden_BD, hidden_BD)


def prefill_rows(params: decoder.Params, state: RowState, inserts: Inserts, *,
                 model: decoder.Decoder, width: int) -> RowState:
  """Puts tokens into rows: ragged, each row at its own position; keeps last-token states only.

  `width`: slots of a row that its tokens may see.
  """
  rows_R, counts_R = inserts.rows_R, inserts.counts_R
  slots = state.cache[0].v_BKSE.shape[2]
  column_1C = jnp.arange(inserts.ids_RC.shape[1])[None, :]
  positions_RC = jnp.where(column_1C < counts_R[:, None], inserts.starts_R[:, None] + column_1C,
                           slots)
  last_R1 = jnp.maximum(counts_R - 1, 0)[:, None]
  hidden_R1D, cache = model.apply({"params": params}, inserts.ids_RC, positions_RC, state.cache,
                                  rows_R, last_R1, width)
  put = lambda old, rows: old.at[rows].set(hidden_R1D[:, 0], mode="drop")
  nowhere = state.hidden_BD.shape[0]
  return RowState(cache, put(state.hidden_BD, rows_R),
                  put(state.prompt_BD, jnp.where(inserts.prompt_R, rows_R, nowhere)))


def share_rows(state: RowState, shares: Shares, *, width: int) -> RowState:
  """Begins rows with the prompts of others, at most `width` tokens: copied, not computed again."""
  def one(i, state: RowState) -> RowState:
    source, target = shares.from_R[i], shares.to_R[i]
    prompt_1D = lax.dynamic_slice_in_dim(state.prompt_BD, source, 1)
    put = lambda old: lax.dynamic_update_slice_in_dim(old, prompt_1D, target, 0)
    return RowState(_copy(state.cache, source, state.cache, target, 0, width),
                    put(state.hidden_BD), put(state.prompt_BD))

  with jax.named_scope("share"):
    return lax.fori_loop(0, shares.count_N[0], one, state)


def decode_rows(params: decoder.Params, state: RowState, desk: decoder.Cache, seats: Seats,
                stops: Stops, key: Array, how: Sampling, enough: Array, *,
                model: decoder.Decoder, allowed_vocab: int, tokens: int, in_step: bool
                ) -> tuple[RowState, decoder.Cache, Pieces]:
  """Writes up to `tokens` tokens a seat; ends early when `enough` turns have ended.

  A turn ends AT the token that completes a stop string, at an end token, or at its row's limit;
  that token is in the cache too. `key` belongs to the seed and the training step; a token's
  randomness is addressed by it, the row's seeds (question, sample) and its position. `in_step`:
  devices go on for as long as one of them does, since they meet in the products over `tensor`.
  """
  rows, width = state.hidden_BD.shape[0], desk[0].v_BKSE.shape[2]

  def fetch(i, desk):
    seat = seats.fetch_B[i]
    return _copy(state.cache, seats.rows_B[seat], desk, seat, 0, width)

  with jax.named_scope("fetch"):
    desk = lax.fori_loop(0, seats.fetches_N[0], fetch, desk)
  taken_B = seats.rows_B < rows
  row_keys = jax.vmap(lambda s: jax.random.fold_in(jax.random.fold_in(key, s[0]), s[1]))(
      seats.seeds_BM)
  empty = (taken_B.shape[0], tokens)
  written = Pieces(jnp.zeros(empty, jnp.int32), jnp.zeros(empty, jnp.float32),
                   jnp.zeros_like(seats.lengths_B), seats.stops_B, taken_B,
                   jnp.zeros((1,), jnp.int32))

  class Turn(NamedTuple):
    desk: decoder.Cache
    hidden_BD: Array
    written: Pieces

  def write(t: Turn) -> Turn:
    w, step = t.written, t.written.steps_N[0]
    at_B = seats.lengths_B + w.counts_B  # of the token to come; that of a closed seat stays
    ids_B, logprobs_B = draw(decoder.logits(params, t.hidden_BD, allowed_vocab),
                             _uniform(row_keys, at_B), how)
    positions_B = jnp.where(w.open_B, at_B, width)  # beyond the desk: written nowhere
    hidden_B1D, desk = model.apply({"params": params}, ids_B[:, None], positions_B[:, None], t.desk)
    states_B = jnp.where(w.open_B, stops.next_state_SV[w.stops_B, ids_B].astype(jnp.int32),
                         w.stops_B)
    counts_B = w.counts_B + w.open_B.astype(jnp.int32)
    over_B = (states_B >= stops.n_plain) | stops.ends_V[ids_B] | (
        seats.lengths_B + counts_B >= seats.limits_B)
    column = lambda old, new_B: lax.dynamic_update_slice(old, new_B[:, None], (0, step))
    return Turn(desk, jnp.where(w.open_B[:, None], hidden_B1D[:, 0], t.hidden_BD),
                Pieces(column(w.ids_BT, ids_B), column(w.logprobs_BT, logprobs_B), counts_B,
                       states_B, w.open_B & ~over_B, w.steps_N + 1))

  def going(t: Turn):
    ended = jnp.sum(taken_B) - jnp.sum(t.written.open_B)
    more = (t.written.steps_N[0] < tokens) & (ended < jnp.minimum(enough, jnp.sum(taken_B)))
    return lax.pmax(more.astype(jnp.int32), "data") > 0 if in_step else more

  hidden_BD = jnp.take(state.hidden_BD, seats.rows_B, axis=0, mode="clip")
  with jax.named_scope("write"):
    turn = lax.while_loop(going, write, Turn(desk, hidden_BD, written))

  def keep(seat, cache):  # what was written, and slots around it that hold the same or nothing
    start = jnp.minimum(seats.lengths_B[seat], width - tokens)
    return _copy(turn.desk, seat, cache, seats.rows_B[seat], start, tokens)

  with jax.named_scope("keep"):
    cache = lax.fori_loop(0, jnp.sum(taken_B), keep, state.cache)
  hidden_BD = state.hidden_BD.at[seats.rows_B].set(turn.hidden_BD, mode="drop")
  return dataclasses.replace(state, cache=cache, hidden_BD=hidden_BD), turn.desk, turn.written


def _uniform(keys_B: Array, at_B: Int[Array, "B"]) -> Float[Array, "B"]:
  """A number in [0, 1) for a position under each key: the upper bits of the position's own key."""
  data_BM = jax.random.key_data(jax.vmap(jax.random.fold_in)(keys_B, at_B))
  return (data_BM[:, 0] >> 8).astype(jnp.float32) * np.float32(2**-24)


def _copy(source: decoder.Cache, row, target: decoder.Cache, to, start, count: int
          ) -> decoder.Cache:
  """Slots [start, start + count) of a row into the same slots of row `to` of another cache."""
  def move(old, new, axis):
    at = lambda row: tuple(start if i == axis else 0 if i else row for i in range(4))
    size = tuple(count if i == axis else n if i else 1 for i, n in enumerate(old.shape))
    return lax.dynamic_update_slice(new, lax.dynamic_slice(old, at(row), size), at(to))

  return tuple(decoder.LayerCache(move(s.k_BKES, t.k_BKES, 3), move(s.v_BKSE, t.v_BKSE, 2))
               for s, t in zip(source, target))


class Programs(NamedTuple):
  """The functions above as compiled programs over a mesh of `rollout_mesh`'s kind."""

  new_rows: Callable[..., RowState]  # (rows, slots), of all devices together
  new_desk: Callable[..., decoder.Cache]  # (seats, width)
  prefill: Callable[..., RowState]
  share: Callable[..., RowState]
  decode: Callable[..., tuple[RowState, decoder.Cache, Pieces]]


@functools.cache
def programs(shape: DecoderShape, dtype: Any, allowed_vocab: int, tokens: int,
             mesh: Mesh) -> Programs:
  """One set for engines alike, so that the second one compiles nothing. State and desk are donated."""
  platform = mesh.devices.flat[0].platform
  kernel = attention.choose_kernel(platform, dtype, shape, mesh.shape["tensor"])
  in_step = mesh.shape["data"] > 1 and mesh.shape["tensor"] > 1
  if in_step:  # see sharding.over_rows
    kernel = "blocks"
  model = decoder.Decoder(shape, dtype, stacked=False, attention_kernel=kernel, platform=platform)
  heads, rows = (sharding.rollout_rows(mesh, h) for h in (shape.kv_heads, 0))
  cache = (decoder.LayerCache(heads, heads),) * shape.layers
  state = RowState(cache, rows, rows)

  def over(function: Callable, *split: bool, **static) -> Callable:
    return sharding.over_rows(mesh, functools.partial(function, **static), split)

  @functools.partial(jax.jit, static_argnames="width", donate_argnames="state",
                     out_shardings=state)
  def prefill(params, state, inserts, *, width):
    return over(prefill_rows, False, True, True, model=model, width=width)(params, state, inserts)

  @functools.partial(jax.jit, static_argnames="width", donate_argnames="state",
                     out_shardings=state)
  def share(state, shares, *, width):
    return over(share_rows, True, True, width=width)(state, shares)

  @functools.partial(jax.jit, donate_argnames=("state", "desk"),
                     out_shardings=(state, cache, None))
  def decode(params, state, desk, seats, *rest):
    run = over(decode_rows, False, True, True, True, *(False,) * 4, model=model,
               allowed_vocab=allowed_vocab, tokens=tokens, in_step=in_step)
    return run(params, state, desk, seats, *rest)

  new = lambda what, shardings: jax.jit(
      lambda rows, slots: what(shape, rows, slots, dtype), static_argnums=(0, 1),
      out_shardings=shardings)
  return Programs(new(new_rows, state), new(decoder.empty_cache, cache), prefill, share, decode)
