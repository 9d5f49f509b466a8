"""Rows of episodes on the device, and what the host knows of them.

An episode owns a row from its prompt to its end: `admit` gives it one, `insert` puts tokens behind
what the row holds, `decode` lets open rows write, `release` hands the row on. In between its cache
stays where it is. Rows live on every device of the process; each call serves all devices at once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
from jaxtyping import Array

from searchr1_jax.model import decoder, sharding
from searchr1_jax.model.shapes import DecoderShape
from searchr1_jax.rollout import sampler, slots
from searchr1_jax.rollout.draw import Sampling
from searchr1_jax.rollout.slots import EngineShapes, Insert
from searchr1_jax.rollout.stops import TokenAutomaton
from searchr1_jax.types import UserError


@dataclasses.dataclass(frozen=True)
class Written:
  """One turn: the sampled ids and the log-prob of each."""

  ids: tuple[int, ...]
  sampler_logprobs: tuple[float, ...]


@dataclasses.dataclass
class Counts:
  """What a rollout cost the device.

  Tokens prefilled, generated, and those not prefilled since another sample of the question had
  been (`shared_tokens`) or since the row's cache still held them (`kept_tokens`). `rounds`: decode
  calls; `seat_steps`: tokens that their seats could have written; `programs`: shapes that had not
  run before.
  """

  prefilled_tokens: int = 0
  generated_tokens: int = 0
  shared_tokens: int = 0
  kept_tokens: int = 0
  rounds: int = 0
  seat_steps: int = 0
  programs: int = 0


@dataclasses.dataclass
class _Row:
  """What the host knows of a row: whose it is, where its cache ends, the turn it is writing.

  `place` counts episodes as they come, `turns` those of this one; `prompt` is the number of the
  prompt in its first slots, `coming` that of the episode that it was given to.
  """

  taken: bool = False
  place: int = 0
  turns: int = 0
  prompt: int = -1
  coming: int = -1
  length: int = 0
  seeds: tuple[int, int] = (0, 0)
  writing: bool = False
  limit: int = 0
  stop: int = 0
  ids: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)


@functools.partial(jax.jit, static_argnames=("dtype", "mesh"))
def lay_out(params: decoder.Params, dtype: Any, mesh: Mesh | None = None) -> decoder.Params:
  """Parameters for decoding: cast once, layer by layer, so that the loop slices none.

  With a mesh, whole on each of its devices but for the heads that `tensor` splits.
  """
  laid = decoder.unstack_layers(jax.tree.map(lambda x: x.astype(dtype), params))
  return sharding.gather(mesh, laid)


def lay_out_here(params: decoder.Params, dtype: Any) -> tuple[Mesh, decoder.Params]:
  """Parameters laid out on this process's own devices, and the mesh of those."""
  spread = jax.tree.leaves(params)[0].sharding
  if isinstance(spread, NamedSharding):
    mesh, laid = sharding.rollout_mesh(spread.mesh), lay_out(params, dtype, spread.mesh)
  else:
    mesh = Mesh(np.array(list(spread.device_set)).reshape(1, 1, 1), sharding.MESH_AXES)
    laid = lay_out(params, dtype)
  return mesh, sharding.on_rollout_mesh(mesh, laid)


class Engine:
  """Holds the rows' state; every call is one jitted program of the closed list, or a few."""

  def __init__(self, shape: DecoderShape, shapes: EngineShapes, automaton: TokenAutomaton,
               end_ids: Iterable[int], allowed_vocab: int, dtype: Any = jnp.float32):
    self.shape, self.shapes, self.dtype = shape, shapes, jnp.dtype(dtype)
    self._allowed_vocab = allowed_vocab
    ends_V = np.zeros(shape.vocab_size, bool)
    ends_V[list(end_ids)] = True
    self._stops = sampler.Stops(automaton.next_state_SV, np.int32(automaton.n_plain), ends_V)
    self._mesh: Mesh | None = None
    self._state: sampler.RowState | None = None
    self._params: decoder.Params | None = None
    self._met: set[tuple] = set()
    self._devices, self._rows = 1, []
    self.counts = Counts()
    self._clear_desk()

  @property
  def cache_bytes(self) -> int:
    """What KV cache and desk take on each device at most, in bytes, heads not yet split."""
    s = self.shapes
    return decoder.cache_bytes(self.shape, s.rows + s.seats[-1], s.slots, self.dtype)

  @property
  def memory(self) -> str:
    """What the caches will take, in words."""
    s = self.shapes
    return (f"{s.rows} rows and {s.seats[-1]} seats of {s.slots} tokens on each device, "
            f"{self.cache_bytes / 2**30:.3g} GiB of cache")

  @property
  def writing(self) -> int:
    """How many rows have an open turn."""
    return sum(r.writing for r in self._rows)

  def begin(self, params: decoder.Params, key: Array, how: Sampling) -> None:
    """Starts a rollout: lays the parameters out; rows are empty, counts at 0."""
    self.end()  # a rollout that an error cut short may have left its parameters here
    mesh, self._params = lay_out_here(params, self.dtype)
    if mesh != self._mesh:
      self._mesh = mesh
      self._met.clear()
      self._programs = sampler.programs(self.shape, self.dtype, self._allowed_vocab,
                                        self.shapes.tokens, mesh)
      self._stops = jax.device_put(self._stops, NamedSharding(mesh, PartitionSpec()))
    # Placed once: arrays of the host would travel with every call.
    self._how = jax.device_put((key, how), NamedSharding(mesh, PartitionSpec()))
    self._devices = mesh.shape["data"]
    self._state = self._programs.new_rows(self._devices * self.shapes.rows, self.shapes.slots)
    self._rows = [_Row() for _ in range(self._devices * self.shapes.rows)]
    self._prompts, self._admitted, self.counts = {}, 0, Counts()
    self._clear_desk()

  def end(self) -> None:
    """Drops parameters, cache and desk: an update needs the memory, and zeros cost nothing."""
    self._params = self._state = None
    self._clear_desk()

  def admit(self, prompt_ids: Sequence[int]) -> int | None:
    """A free row for an episode, beside another sample of its prompt if it can be; or None."""
    prompt = self._prompts.setdefault(tuple(prompt_ids), len(self._prompts))
    size = self.shapes.rows
    devices = [self._rows[d : d + size] for d in range(0, len(self._rows), size)]
    free = [i for i, rows in enumerate(devices) if not all(r.taken for r in rows)]
    if not free:
      return None
    taken = [sum(r.taken for r in rows) for rows in devices]
    # Samples of a prompt stay together, but not where others' seats would be empty.
    device = min(free, key=lambda i: (taken[i] // self.shapes.seats[-1],
                                      all(r.coming != prompt for r in devices[i]), taken[i]))
    # The one with the oldest prompt: others of a younger group may still come and share theirs.
    row = min((i for i in range(size) if not devices[device][i].taken),
              key=lambda i: devices[device][i].prompt)
    r = devices[device][row]
    r.taken, r.place, r.coming = True, self._admitted, prompt
    self._admitted += 1
    return device * size + row

  def release(self, row: int) -> None:
    """The row may serve another episode; until then its prompt can still be shared."""
    self._rows[row].taken = self._rows[row].writing = False

  def insert(self, inserts: Sequence[Insert]) -> None:
    """Puts each row's new tokens in: several rows a call, long ones in several chunks.

    A prompt that a row of the same device holds already is copied from there.
    """
    for i in inserts:
      self._check(i)
    prompts = {i.row: self._prompts.setdefault(tuple(i.ids), len(self._prompts))
               for i in inserts if i.fresh}
    device = lambda row: row // self.shapes.rows
    holders = {(device(n), r.prompt): n for n, r in enumerate(self._rows)
               if r.prompt >= 0 and prompts.get(n, r.prompt) == r.prompt}  # stays as it is
    own, shared = [], {}
    for i in inserts:
      at = (device(i.row), prompts.get(i.row))
      if i.fresh and at in holders:
        shared[i.row] = holders[at]
      else:
        own.append(i)
        if i.fresh:
          holders[at] = i.row
    lengths = [0 if i.fresh else self._rows[i.row].length for i in own]
    self.counts.kept_tokens += sum(lengths)
    for call in slots.plan_prefill(own, lengths, self.shapes, self._devices):
      self._prefill(call)
    if shared:
      self._share(shared, max(len(i.ids) for i in inserts if i.row in shared))
    for i in inserts:
      r = self._rows[i.row]
      if i.fresh:
        r.length, r.turns, r.prompt, r.seeds = 0, 0, prompts[i.row], i.seeds
        self.counts.shared_tokens += len(i.ids) if i.row in shared else 0
      r.length, r.turns = r.length + len(i.ids), r.turns + 1
      r.limit, r.stop, r.writing, r.ids, r.logprobs = r.length + i.max_tokens, 0, True, [], []
    changed = {i.row for i in inserts}
    self._seated = [[None if r in changed else r for r in rows] for rows in self._seated]

  def decode(self, on_piece: Callable[[int, Sequence[int]], None] = lambda row, ids: None
             ) -> Mapping[int, Written]:
    """Lets open turns go on for one call; the turns that ended.

    Episodes with the fewest turns come first, as they have most ahead of them: were they left to
    the end, seats would stand empty while the last ones search.

    `on_piece` is told what each row wrote, whether its turn ended or not.
    """
    size, rows = self.shapes.rows, self._rows
    first = lambda i: (rows[i].turns, rows[i].place)
    ready = [sorted((i for i in range(d, d + size) if rows[i].writing), key=first)
             for d in range(0, len(rows), size)]
    seats = slots.seats_for(max(map(len, ready)), self.shapes)
    chosen = [waiting[:seats] for waiting in ready]
    width = slots.at_least(self.shapes.widths, max(
        min(rows[i].limit, rows[i].length + self.shapes.tokens) for few in chosen for i in few))
    pieces = self._decode(chosen, seats, width)
    self.counts.rounds += 1
    self.counts.seat_steps += seats * int(pieces.steps_N.max()) * self._devices
    out = {}
    for device, seated in enumerate(self._seated):
      for at, row in enumerate(seated, start=device * seats):
        r, n = rows[row], int(pieces.counts_B[at])
        ids = pieces.ids_BT[at, :n].tolist()
        r.ids += ids
        r.logprobs += pieces.logprobs_BT[at, :n].tolist()
        r.length, r.stop, r.writing = r.length + n, int(pieces.stops_B[at]), bool(pieces.open_B[at])
        self.counts.generated_tokens += n
        on_piece(row, ids)
        if not r.writing:
          out[row] = Written(tuple(r.ids), tuple(r.logprobs))
    return out

  def wait(self) -> None:
    """Returns when the device has done what it was given."""
    jax.block_until_ready(self._state)

  def _check(self, insert: Insert) -> None:
    """Refuses what a row could not hold, before anything was changed."""
    total = (0 if insert.fresh else self._rows[insert.row].length) + len(insert.ids)
    if total + insert.max_tokens > self.shapes.slots:
      raise UserError(f"an episode needs {total + insert.max_tokens} tokens, a row holds "
                      f"{self.shapes.slots}; give rows that many slots or lower the rules' "
                      "max_episode_tokens")
    if not insert.ids:
      raise ValueError("an insert has at least one token: a row writes after something")

  def _met_first(self, *program: Any) -> None:
    """Counts a program that runs for the first time."""
    self.counts.programs += program not in self._met
    self._met.add(program)

  def _prefill(self, call: slots.PrefillCall) -> None:
    """One call: the parts of every device."""
    self._met_first("prefill", call.rows, call.chunk, call.width)
    size = (self._devices * call.rows,)
    ids_RC = np.zeros((*size, call.chunk), np.int32)
    rows_R = np.full(size, self.shapes.rows, np.int32)
    counts_R, starts_R = np.zeros(size, np.int32), np.zeros(size, np.int32)
    prompt_R = np.zeros(size, bool)
    for device, parts in enumerate(call.parts):
      for r, part in enumerate(parts, start=device * call.rows):
        n, insert = part.end - part.begin, part.insert
        ids_RC[r, :n] = insert.ids[part.begin : part.end]
        rows_R[r], counts_R[r] = insert.row - device * self.shapes.rows, n
        starts_R[r], prompt_R[r] = part.start, insert.fresh and part.end == len(insert.ids)
        self.counts.prefilled_tokens += n
    inserts = sampler.Inserts(rows_R, ids_RC, counts_R, starts_R, prompt_R)
    self._state = self._programs.prefill(self._params, self._take_state(), inserts,
                                         width=call.width)

  def _share(self, sources: Mapping[int, int], longest: int) -> None:
    """Rows begin with the prompts of other rows: {row: the row that holds its prompt}."""
    width, size = slots.at_least(self.shapes.widths, longest), self.shapes.rows
    self._met_first("share", width)
    from_R, to_R = (np.zeros(self._devices * size, np.int32) for _ in range(2))
    count_N = np.zeros(self._devices, np.int32)
    for row, source in sources.items():
      device = row // size
      at = device * size + count_N[device]
      from_R[at], to_R[at] = source % size, row % size
      count_N[device] += 1
    self._state = self._programs.share(self._take_state(), sampler.Shares(from_R, to_R, count_N),
                                       width=width)

  def _decode(self, chosen: Sequence[Sequence[int]], seats: int, width: int) -> sampler.Pieces:
    """One call for the rows chosen on each device; what their seats wrote, on the host."""
    self._met_first("decode", seats, width)
    if self._desk_size != (seats, width):
      self._clear_desk()
      self._desk = self._programs.new_desk(self._devices * seats, width)
      self._desk_size = (seats, width)
    size = (self._devices * seats,)
    zeros = lambda *more, dtype=np.int32: np.zeros((*size, *more), dtype)
    rows_B, fetches_N = np.full(size, self.shapes.rows, np.int32), np.zeros(self._devices, np.int32)
    lengths_B, limits_B, stops_B, fetch_B, seeds_BM = (
        zeros(), zeros(), zeros(), zeros(), zeros(2, dtype=np.uint32))
    for device, rows in enumerate(chosen):
      self._seated[device], brought = slots.seat(self._seated[device], rows)
      first = device * seats
      fetch_B[first : first + len(brought)], fetches_N[device] = brought, len(brought)
      for at, row in enumerate(self._seated[device], start=first):
        r = self._rows[row]
        rows_B[at], lengths_B[at] = row - device * self.shapes.rows, r.length
        limits_B[at], stops_B[at], seeds_BM[at] = r.limit, r.stop, r.seeds
    enough = np.int32(max(1, seats * slots.STOPPED_SHARE))
    desk, self._desk_size = self._desk, None
    self._state, self._desk, pieces = self._programs.decode(
        self._params, self._take_state(), desk,
        sampler.Seats(rows_B, lengths_B, limits_B, stops_B, seeds_BM, fetch_B, fetches_N),
        self._stops, *self._how, enough)
    self._desk_size = (seats, width)
    return jax.device_get(pieces)

  def _take_state(self) -> sampler.RowState:
    """The rows' state, for a program that it's donated to; were that to fail, none would be left."""
    state, self._state = self._state, None
    return state

  def _clear_desk(self) -> None:
    """Nobody sits at the desk, and its memory is free."""
    self._desk, self._desk_size = None, None
    self._seated: list[list[int | None]] = [[] for _ in range(self._devices)]
