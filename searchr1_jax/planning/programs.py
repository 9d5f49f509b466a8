"""Every program of a training step, with arrays that are only described: the callables of training.

What `train` and the engine jit is taken as it is, and called with the shapes, dtypes and places
that they call it with; how often follows from a `Load`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, Iterator, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import ml_collections

from searchr1_jax.algo import update
from searchr1_jax.model import decoder, sharding, value, weights
from searchr1_jax.model.shapes import DecoderShape
from searchr1_jax.planning import workload
from searchr1_jax.planning.workload import Load
from searchr1_jax.rollout import draw, engine, sampler, slots, stops
from searchr1_jax.run import setup
from searchr1_jax.run.learning import Learning
from searchr1_jax.text import actions
from searchr1_jax.types import Targets, TokenBatch

@dataclasses.dataclass(frozen=True)
class Program:
  """One compiled program. `calls`: in a training step. `trips`: of its loops, by their names.

  `makes`: the residents that are its results, and so are counted where those are. `fetches`: those
  that it brings to the device where they wait in the host's memory.
  """

  phase: str
  name: str
  function: Any
  args: tuple
  kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  calls: float = 0.0
  trips: Mapping[str, int] = dataclasses.field(default_factory=dict)
  makes: tuple[str, ...] = ()
  fetches: tuple[str, ...] = ()


# What is resident while the programs of a phase run.
_ALWAYS = ("reference", "policy", "policy moments", "value", "value moments")
PHASES: Mapping[str, tuple[str, ...]] = {
    "begin": (*_ALWAYS, "base"),
    "lay out": (*_ALWAYS, "laid out"),
    "rollout": (*_ALWAYS, "laid out", "rows", "desk"),
    "score": (*_ALWAYS, "batches"),
    "update": (*_ALWAYS, "batches", "gradient"),
}


class Step:
  """The programs and residents of a config's training step on a mesh of described devices."""

  def __init__(self, c: ml_collections.ConfigDict, shape: DecoderShape, allowed_vocab: int,
               mesh: Mesh, load: Load):
    self._c, self._shape, self._mesh, self.load = c, shape, mesh, load.within(c.episode)
    self._allowed_vocab = allowed_vocab
    self._learning = Learning(c, shape, allowed_vocab, mesh)
    self._engine = setup.engine_shapes(c, shape)
    self._batches = setup.batch_shapes(c)
    self._here = sharding.rollout_mesh(mesh)
    self._dtype = jnp.dtype(c.model.rollout_dtype)
    self.episodes = c.data.questions * c.algo.group_size
    base = weights.abstract_params(shape, mesh=mesh)
    critic = jax.eval_shape(value.from_policy, base)
    critic["backbone"] = {name: base[name] for name in critic["backbone"]}  # its head has no place
    start = lambda params: self._placed_state(jax.eval_shape(self._learning.start, params))
    self._policy, self._value = start(base), start(critic) if self._learning.needs_value else None
    self._base, self._value_base = base, critic
    self._laid = self._lay_out_shapes()
    self._row_state = self._rows()

  # --- what is resident

  @functools.cached_property
  def residents(self) -> Mapping[str, Any]:
    """Everything that lives longer than a call, by name; phases name what they find alive."""
    found = {"base": self._base, "reference": self._reference, "laid out": self._laid,
             "rows": self._row_state, "gradient": self._base,
             "desk": self._desk(self._engine.seats[-1], self._engine.slots),
             "batches": [self._batch(*self._main_batch)] * math.ceil(self._batch_count)}
    if self._learning.base_is_reference:
      del found["base"]  # they are the same arrays
    for name, state in (("policy", self._policy), ("value", self._value)):
      if state is not None:
        found |= {name: state.params, f"{name} moments": state.opt_state}
    return {name: tree for name, tree in found.items() if tree is not None}

  @property
  def pinned(self) -> frozenset[str]:
    """The residents that wait in the host's memory; devices that are only described don't say."""
    moments = self._c.optimizer.moments_memory == "pinned_host"
    reference = self._c.model.reference_memory == "pinned_host"
    return frozenset(("policy moments", "value moments") * moments + ("reference",) * reference)

  @functools.cached_property
  def _reference(self) -> Any:
    if not self._learning.has_reference:
      return None
    if self._learning.base_is_reference:
      return self._base
    return self._placed(jax.eval_shape(self._learning.to_reference, self._base),
                        self._c.model.reference_memory)

  # --- the programs

  def programs(self, every_shape: bool) -> Iterator[Program]:
    """Of each kind the one that is called most and the largest, or all of the closed list."""
    yield from self._begin()
    yield from self._rollout(every_shape)
    yield from self._score(every_shape)
    yield from self._update(every_shape)

  def _begin(self) -> Iterator[Program]:
    learn = self._learning
    yield Program("begin", "policy state", learn.start, (self._base,), makes=("policy",),
                  fetches=("policy moments",))
    if self._value is not None:
      yield Program("begin", "value state", learn.start, (self._value_base,), makes=("value",),
                    fetches=("value moments",))
    if learn.has_reference and not learn.base_is_reference:
      yield Program("begin", "reference", learn.to_reference, (self._base,), makes=("reference",))

  def _rollout(self, every_shape: bool) -> Iterator[Program]:
    yield Program("lay out", "lay out", engine.lay_out, self._lay_out_args, calls=1,
                  makes=("laid out",))
    yield from self._prefills(every_shape)
    yield from self._shares(every_shape)
    yield from self._decodes(every_shape)

  def _prefills(self, every_shape: bool) -> Iterator[Program]:
    s, episodes = self._engine, self.episodes / self._groups
    calls = workload.prefill_calls(self.load, s, episodes, episodes / self._c.algo.group_size)
    largest = (s.row_buckets[-1], s.chunk_buckets[-1], s.widths[-1])
    every = itertools.product(s.row_buckets, s.chunk_buckets, s.widths)
    for at in every if every_shape else sorted({*calls, largest}):
      rows, chunk, width = at
      yield Program("rollout", f"prefill {rows}×{chunk} in {width}", self._jitted.prefill,
                    (self._laid, self._row_state, self._inserts(rows, chunk)),
                    dict(width=width), calls[at] if at in calls else 0.0)

  def _shares(self, every_shape: bool) -> Iterator[Program]:
    s, copies = self._engine, self._c.algo.group_size - 1
    if not copies:
      return
    width = slots.at_least(s.widths, self.load.prompt)
    size = self._here.shape["data"] * s.rows
    shares = sampler.Shares(*(_ints(size) for _ in range(2)), _ints(self._here.shape["data"]))
    prompts = self.episodes / self._groups / (copies + 1)
    for w in s.widths if every_shape else [width]:
      yield Program("rollout", f"share {w}", self._jitted.share, (self._row_state, shares),
                    dict(width=w), calls=prompts if w == width else 0, trips=dict(share=copies))

  def _decodes(self, every_shape: bool) -> Iterator[Program]:
    s, load = self._engine, self.load
    usual = (s.seats[-1], slots.at_least(s.widths, min(math.ceil(load.length), s.slots)))
    every = itertools.product(s.seats, s.widths)
    cut = 31 if self._c.rollout.top_p < 1 or self._c.rollout.top_k else 0
    for at in every if every_shape else sorted({usual, (s.seats[-1], s.widths[-1])}):
      seats, width = at
      calls = workload.decode_calls(load, s, self.episodes / self._groups) if at == usual else 0.0
      trips = dict(write=workload.decode_steps(load, s), keep=seats, cut=cut,
                   fetch=max(1, round(seats * slots.STOPPED_SHARE)))
      yield Program("rollout", f"decode {seats} in {width}", self._jitted.decode,
                    self._decode_args(seats, width), calls=calls, trips=trips)

  def _score(self, every_shape: bool) -> Iterator[Program]:
    learn, policy = self._learning, self._policy.params
    for at, calls in self._batch_calls(every_shape):
      batch = self._batch(*at)
      add = functools.partial(Program, "score", calls=calls)
      yield add(f"log-probs {_times(at)}", learn.score_tokens, (policy, batch))
      if learn.has_reference:
        yield add(f"reference {_times(at)}", learn.score_reference, (self._reference, batch),
                  fetches=("reference",))
      if self._value is not None:
        yield add(f"values {_times(at)}", learn.score_values, (self._value.params, batch))
      yield self._targets_program(at, calls)

  def _targets_program(self, at: tuple[int, int, int], calls: float) -> Program:
    """What the updates learn from: small work on [B, L]."""
    a, batch = self._c.algo, self._batch(*at)
    scores, number = batch.policy_mask_BL, _scalar(jnp.float32)
    name, phase = f"targets {_times(at)}", "score"
    if self._value is None:
      return Program(phase, name, update.spread_advantages, (batch, scores, scores),
                     dict(kl_kind=a.kl_kind), calls)
    return Program(phase, name, update.estimate, (scores,) * 3 + (batch,) + (number,) * 3,
                   dict(kl_kind=a.kl_kind, compat=bool(a.compat)), calls)

  def _update(self, every_shape: bool) -> Iterator[Program]:
    c, models = self._c, {"policy": (self._learning.policy_learner, self._policy)}
    if self._value is not None:
      models["value"] = (self._learning.value_learner, self._value)
    updates, alone = c.algo.updates_per_batch, self._batch_count <= self._minibatches
    for name, (learner, state) in models.items():
      params, gradient = state.params, state.params
      add = functools.partial(Program, "update")
      yield add(f"{name} zeros", learner.zeros, (params,), calls=0 if alone else updates,
                makes=("gradient",))
      for at, calls in self._batch_calls(every_shape):
        batch, targets = self._batch(*at), self._targets(*at)
        calls *= c.algo.epochs
        title = f"{name} gradient {_times(at)}"
        yield add(title, learner.gradient, (params, gradient, batch, targets),
                  calls=0 if alone else calls, makes=("gradient",))
        if every_shape or alone:  # the only batch of its mini-batch has nothing to be added to
          yield add(f"{title} alone", learner.gradient, (params, None, batch, targets),
                    calls=calls if alone else 0, makes=("gradient",))
      yield add(f"{name} step", learner.apply, (state, gradient, _scalar(jnp.float32)),
                calls=updates, fetches=(f"{name} moments",))

  # --- arrays, described

  def _placed(self, tree: Any, memory: str = "device") -> Any:
    return jax.tree.map(_at, tree, sharding.parameter_shardings(self._mesh, tree, memory))

  def _placed_state(self, state: update.TrainState) -> update.TrainState:
    return dataclasses.replace(
        self._placed(state),
        opt_state=self._placed(state.opt_state, self._c.optimizer.moments_memory))

  @property
  def _lay_out_args(self) -> tuple:
    return self._policy.params, self._dtype, self._mesh

  def _lay_out_shapes(self) -> Any:
    laid = jax.eval_shape(functools.partial(engine.lay_out, dtype=self._dtype, mesh=self._mesh),
                          self._policy.params)
    places = sharding.parameter_shardings(self._here, laid, axes=("tensor",))
    return jax.tree.map(_at, laid, places)

  @functools.cached_property
  def _jitted(self) -> sampler.Programs:
    return sampler.programs(self._shape, self._dtype, self._allowed_vocab, self._engine.tokens,
                            self._here)

  @property
  def _groups(self) -> int:
    """Parts of the mesh that roll out by themselves: devices, or those that share heads."""
    return self._mesh.size // self._mesh.shape["tensor"]

  def _rows(self) -> sampler.RowState:
    """The rows' state, on the devices of a process."""
    s, n, place = self._engine, self._here.shape["data"], sharding.rollout_rows(self._here)
    state = jax.eval_shape(lambda: sampler.new_rows(self._shape, n * s.rows, s.slots, self._dtype))
    return sampler.RowState(self._by_head(state.cache), _at(state.hidden_BD, place),
                            _at(state.prompt_BD, place))

  def _desk(self, seats: int, width: int) -> decoder.Cache:
    return self._by_head(jax.eval_shape(lambda: decoder.empty_cache(
        self._shape, self._here.shape["data"] * seats, width, self._dtype)))

  def _by_head(self, cache: decoder.Cache) -> decoder.Cache:
    place = sharding.rollout_rows(self._here, self._shape.kv_heads)
    return jax.tree.map(lambda x: _at(x, place), cache)

  def _inserts(self, rows: int, chunk: int) -> sampler.Inserts:
    n = self._here.shape["data"] * rows
    return sampler.Inserts(_ints(n), _ints(n, chunk), _ints(n), _ints(n),
                           jax.ShapeDtypeStruct((n,), jnp.bool_))

  def _decode_args(self, seats: int, width: int) -> tuple:
    groups = self._here.shape["data"]
    n, everywhere = groups * seats, NamedSharding(self._here, PartitionSpec())
    seated = sampler.Seats(*(_ints(n) for _ in range(4)), jax.ShapeDtypeStruct((n, 2), jnp.uint32),
                           _ints(n), _ints(groups))
    # The automaton's states depend on the tags alone.
    table = stops.build_automaton([], [t.encode() for t in actions.STOP_TAGS],
                                  self._shape.vocab_size).next_state_SV
    fixed = (sampler.Stops(table, _scalar(jnp.int32),
                           jax.ShapeDtypeStruct((self._shape.vocab_size,), jnp.bool_)),
             jax.eval_shape(lambda: jax.random.key(0)),
             jax.eval_shape(lambda: draw.sampling(1.0)))
    fixed = jax.tree.map(lambda x: _at(x, everywhere), fixed)
    return self._laid, self._row_state, self._desk(seats, width), seated, *fixed, _scalar(jnp.int32)

  # --- update batches

  @property
  def _main_batch(self) -> tuple[int, int, int]:
    return workload.main_batch(self.load, self._batches)

  @property
  def _batch_count(self) -> float:
    return workload.batch_count(self.load, self._batches, self.episodes, self._minibatches)

  @property
  def _minibatches(self) -> int:
    return self._c.algo.updates_per_batch // self._c.algo.epochs

  def _batch_calls(self, every_shape: bool) -> list[tuple[tuple[int, int, int], float]]:
    largest = max(self._batches.all(), key=lambda at: (at[0] * at[1], at[1], at[2]))
    chosen = self._batches.all() if every_shape else sorted({self._main_batch, largest})
    return [(at, self._batch_count if at == self._main_batch else 0.0) for at in chosen]

  def _batch(self, rows: int, length: int, kept: int) -> TokenBatch:
    place = sharding.rows(self._mesh)
    array = lambda *size, dtype=jnp.float32: jax.ShapeDtypeStruct(size, dtype, sharding=place)
    tokens = lambda dtype=jnp.float32: array(rows, length, dtype=dtype)
    i = jnp.int32
    return TokenBatch(tokens(i), tokens(i), array(rows, dtype=i), array(rows, kept, dtype=i),
                      *(tokens() for _ in range(6)), array(rows), array(rows))

  def _targets(self, rows: int, length: int, kept: int) -> Targets:
    batch = self._batch(rows, length, kept)
    return Targets(*(batch.policy_mask_BL,) * 5)


def _at(x: Any, place: NamedSharding) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)


def _ints(*size: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(size, jnp.int32)


def _scalar(dtype: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct((), dtype)


def _times(at: tuple[int, int, int]) -> str:
  rows, length, kept = at
  return f"{rows}×{length}, {kept} kept"
