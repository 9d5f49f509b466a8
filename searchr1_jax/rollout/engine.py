"""Rows of episodes on the device: what the host knows of them, and the closed list of shapes.

An episode owns a row from its prompt to its end. `insert` puts tokens behind what a row holds (or
begins it anew), `decode` lets the open rows write; in between the cache stays where it is.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from searchr1_jax.model import decoder
from searchr1_jax.model.shapes import DecoderShape
from searchr1_jax.rollout import sampler
from searchr1_jax.rollout.stops import TokenAutomaton
from searchr1_jax.types import UserError


@dataclasses.dataclass(frozen=True)
class EngineShapes:
  """Everything that compiles: `rows` x `slots` of cache, turns up to `max_turn` tokens, and
  prefills of each of `row_buckets` x each of `chunk_buckets`."""

  rows: int
  slots: int
  max_turn: int
  row_buckets: tuple[int, ...]
  chunk_buckets: tuple[int, ...]

  def __post_init__(self):
    if not self.row_buckets or max(self.row_buckets) > self.rows:
      raise UserError(f"row_buckets {self.row_buckets} must hold 1 to {self.rows} (rows) rows")
    if not self.chunk_buckets:
      raise UserError("chunk_buckets is empty; name at least one length of a prefill")

  def programs(self) -> int:
    """How many programs an engine may compile: the prefills and one decode."""
    return len(self.row_buckets) * len(self.chunk_buckets) + 1


@dataclasses.dataclass(frozen=True)
class Insert:
  """Tokens for one row. `fresh`: the row begins anew, its randomness addressed by `seeds`.

  After it the policy may write up to `max_tokens` tokens.
  """

  row: int
  ids: Sequence[int]
  max_tokens: int
  fresh: bool
  seeds: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Written:
  """One turn: the sampled ids and the log-prob of each."""

  ids: tuple[int, ...]
  sampler_logprobs: tuple[float, ...]


@functools.partial(jax.jit, static_argnames=("dtype", "whole"))
def lay_out(params: decoder.Params, dtype: Any,
            whole: jax.sharding.NamedSharding | None = None) -> decoder.Params:
  """Parameters for decoding: cast once, layer by layer, so that the loop slices none.

  `whole` brings them together on every device of the mesh that they were spread over.
  """
  laid = decoder.unstack_layers(jax.tree.map(lambda x: x.astype(dtype), params))
  return laid if whole is None else jax.lax.with_sharding_constraint(laid, whole)


def _on_one_device(params: decoder.Params, dtype: Any) -> decoder.Params:
  """Laid out on one device of this process, which then needs no other process to decode."""
  spread = jax.tree.leaves(params)[0].sharding
  whole = (jax.sharding.NamedSharding(spread.mesh, jax.sharding.PartitionSpec())
           if isinstance(spread, jax.sharding.NamedSharding) else None)
  return jax.tree.map(lambda x: x.addressable_data(0), lay_out(params, dtype, whole))


class Engine:
  """Holds the rows' state; every call is one jitted program of the closed list, or a few."""

  def __init__(self, shape: DecoderShape, shapes: EngineShapes, automaton: TokenAutomaton,
               end_ids: Iterable[int], allowed_vocab: int, dtype: Any = jnp.float32):
    self.shape, self.shapes, self.dtype = shape, shapes, jnp.dtype(dtype)
    self._allowed_vocab = allowed_vocab
    self._next_state_SV = jnp.asarray(automaton.next_state_SV)
    self._n_plain = jnp.int32(automaton.n_plain)
    ends_V = np.zeros(shape.vocab_size, bool)
    ends_V[list(end_ids)] = True
    self._ends_V = jnp.asarray(ends_V)
    self._state: sampler.SamplerState | None = None
    self._params: decoder.Params | None = None
    self._lengths = np.zeros(shapes.rows, np.int64)

  @property
  def cache_bytes(self) -> int:
    """What the KV cache takes on the device, in bytes."""
    return decoder.cache_bytes(self.shape, self.shapes.rows, self.shapes.slots, self.dtype)

  def begin(self, params: decoder.Params, key: Array, how: sampler.Sampling) -> None:
    """Starts a rollout: lays the parameters out; rows are empty, counters at 0."""
    self._params = _on_one_device(params, self.dtype)
    self._key, self._how = key, how
    s = self.shapes
    state = self._state
    if state is None:
      state = sampler.new_state(self.shape, s.rows, s.slots, s.max_turn, self.dtype)
    # Placed where the parameters are: a state of another placement would compile once more.
    self._state = jax.device_put(
        dataclasses.replace(state, active_B=np.zeros(s.rows, bool), prefilled=np.int32(0),
                            generated=np.int32(0)), jax.tree.leaves(self._params)[0].sharding)
    self._lengths[:] = 0

  def end(self) -> None:
    """Drops the laid-out parameters; the cache stays for the next rollout."""
    self._params = None

  def insert(self, inserts: Sequence[Insert]) -> None:
    """Prefills each row's new tokens, several rows a call, long ones in several chunks."""
    for i in inserts:
      if i.fresh:
        self._lengths[i.row] = 0
      total = int(self._lengths[i.row]) + len(i.ids) + i.max_tokens
      if total > self.shapes.slots:
        raise UserError(f"an episode needs {total} tokens, a row holds {self.shapes.slots}; "
                        "raise rollout.slots or lower max_episode_tokens")
      if i.max_tokens > self.shapes.max_turn:
        raise UserError(f"a turn of {i.max_tokens} tokens was asked for, the engine's longest is "
                        f"{self.shapes.max_turn}; lower max_turn_tokens")
      if not i.ids:
        raise ValueError("an insert has at least one token: a row writes after something")
    for part in plan_inserts(inserts, self.shapes):
      self._prefill(*part)

  def decode(self, wait_for: int = 0) -> Mapping[int, Written]:
    """Lets open rows write until at most `wait_for` still do; the turns that ended, by row."""
    before_B = np.asarray(self._state.active_B)
    self._state = sampler.decode(
        self._params, self._state, self._next_state_SV, self._n_plain, self._ends_V, self._key,
        self._how, jnp.int32(wait_for), shape=self.shape, dtype=self.dtype,
        allowed_vocab=self._allowed_vocab)
    s = self._state
    active_B, written_B, ids_BT, logprobs_BT = jax.device_get(
        (s.active_B, s.written_B, s.ids_BT, s.logprobs_BT))
    out = {}
    for row in np.flatnonzero(before_B & ~active_B).tolist():
      n = int(written_B[row])
      out[row] = Written(tuple(ids_BT[row, :n].tolist()), tuple(logprobs_BT[row, :n].tolist()))
      self._lengths[row] += n
    return out

  def counters(self) -> dict[str, int]:
    """Tokens prefilled and generated since `begin`, as counted on the device."""
    return {"prefilled_tokens": int(self._state.prefilled),
            "generated_tokens": int(self._state.generated)}

  def wait(self) -> None:
    """Returns when the device has done what it was given."""
    jax.block_until_ready(self._state)

  def _prefill(self, members: Sequence[tuple[Insert, int, int]], rows: int, chunk: int) -> None:
    """One call: tokens [start, stop) of each member's ids."""
    slots = self.shapes.slots
    ids_RC = np.zeros((rows, chunk), np.int32)
    per_row = lambda fill=0: np.full(rows, fill, np.int32)
    rows_R, counts_R, starts_R, limits_R = per_row(self.shapes.rows), per_row(), per_row(), per_row()
    opens_R, seeds_RM = np.zeros(rows, bool), np.zeros((rows, 2), np.uint32)
    for r, (insert, start, stop) in enumerate(members):
      rows_R[r], counts_R[r] = insert.row, stop - start
      ids_RC[r, : stop - start] = insert.ids[start:stop]
      starts_R[r] = self._lengths[insert.row]
      self._lengths[insert.row] += stop - start
      opens_R[r] = stop == len(insert.ids)
      limits_R[r] = min(self._lengths[insert.row] + insert.max_tokens, slots)
      seeds_RM[r] = insert.seeds
    self._state = sampler.prefill(
        self._params, self._state,
        sampler.Inserts(rows_R, ids_RC, counts_R, starts_R, opens_R, limits_R, seeds_RM),
        shape=self.shape, dtype=self.dtype)


def plan_inserts(inserts: Sequence[Insert], shapes: EngineShapes
                 ) -> list[tuple[list[tuple[Insert, int, int]], int, int]]:
  """Calls (members with their token ranges, rows, chunk): each chunk in its smallest bucket.

  A row's chunks come in order, since its later tokens attend to the earlier ones.
  """
  longest, widest = max(shapes.chunk_buckets), max(shapes.row_buckets)
  calls = []
  pending = [(i, 0) for i in inserts]
  while pending:
    by_bucket: dict[int, list[tuple[Insert, int, int]]] = {}
    for insert, start in pending:
      stop = min(len(insert.ids), start + longest)
      chunk = min(c for c in shapes.chunk_buckets if c >= stop - start)
      by_bucket.setdefault(chunk, []).append((insert, start, stop))
    for chunk, members in sorted(by_bucket.items()):
      for first in range(0, len(members), widest):
        part = members[first : first + widest]
        calls.append((part, min(r for r in shapes.row_buckets if r >= len(part)), chunk))
    pending = [(i, start + longest) for i, start in pending if start + longest < len(i.ids)]
  return calls
