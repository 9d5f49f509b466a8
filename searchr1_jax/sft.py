"""Program: supervised warm start of a tiny policy on generated worlds, from nothing to a folder.

python -m searchr1_jax.sft --config=configs/sft_tiny.py --out=models/tiny-base
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import queue
import tempfile
import threading
import time
import typing
from typing import Callable, Iterator, Sequence

from absl import flags
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import optax.contrib
from jaxtyping import Array, Float, Int

from searchr1_jax.model import attention, decoder, folders, logprobs, shapes, weights
from searchr1_jax.run import cli
from searchr1_jax.text.tokenizer import Tokenizer
from searchr1_jax.types import UserError
from searchr1_jax.worlds import demonstrations, grammar, names, vocabulary
from searchr1_jax.worlds import world as worlds

EncodePlain = Callable[[str], Sequence[int]]


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
  """Shifted, padded demonstrations; `weight_BL` is each target's weight in the loss."""

  inputs_BL: Int[Array, "B L"]
  targets_BL: Int[Array, "B L"]
  weight_BL: Float[Array, "B L"]


def pad_rows(demos: Sequence[tuple[list[int], list[float]]], length: int) -> Rows:
  """Demonstrations (ids, weights) as rows of `length` targets; longer ones are cut."""
  ids = np.zeros((len(demos), length + 1), np.int32)
  weight = np.zeros((len(demos), length + 1), np.float32)
  for row, (tokens, weights_) in enumerate(demos):
    n = min(len(tokens), length + 1)
    ids[row, :n], weight[row, :n] = tokens[:n], weights_[:n]
  return Rows(ids[:, :-1], ids[:, 1:], weight[:, 1:])


def encode(pieces: Sequence[demonstrations.Piece],
           encode_plain: EncodePlain) -> tuple[list[int], list[float]]:
  """Ids of a demonstration and the weight of each."""
  ids: list[int] = []
  weight: list[float] = []
  for piece in pieces:
    new = encode_plain(piece.text)
    ids.extend(new)
    weight.extend([piece.weight] * len(new))
  return ids, weight


def batches(stage: ml_collections.ConfigDict, pool: str, encode_plain: EncodePlain, seed: int,
            first: int = 0) -> Iterator[tuple[Rows, ...]]:
  """Endless batches about small fresh worlds: one `Rows` for each number of hops and exercise."""
  spec = worlds.SPECS[stage.world]
  encode_plain = functools.lru_cache(maxsize=200_000)(encode_plain)
  habits = demonstrations.Habits(**stage.habits)
  recite = functools.partial(demonstrations.recital, names.pieces(pool))
  for step in range(first, 10**9):
    rng = np.random.default_rng((seed, step))
    teachers = [_any_teacher(stage, spec, pool, rng) for _ in range(stage.worlds)]
    out = []
    for hops, (rows, length) in enumerate(zip(stage.rows_by_hops, stage.lengths_by_hops), 1):
      taught = [teachers[i % len(teachers)] for i in range(rows)]
      questions = [_any_question(t.world, hops, rng) for t in taught]
      shown = [demonstrations.Habits() if rng.random() < stage.clean_share else habits
               for _ in questions]
      demos = [t.demonstrate(q, h, rng) for t, q, h in zip(taught, questions, shown)]
      out.append(pad_rows([encode(d, encode_plain) for d in demos], length))
    drills = [teachers[i % len(teachers)].drill(rng) for i in range(stage.drill_rows)]
    recitals = [recite(rng) for _ in range(stage.recital_rows)]
    for exercises, length in ((drills, stage.drill_length), (recitals, stage.recital_length)):
      if exercises:
        out.append(pad_rows([encode(e, encode_plain) for e in exercises], length))
    yield tuple(out)


def _any_teacher(stage: ml_collections.ConfigDict, spec: worlds.WorldSpec, pool: str,
                 rng: np.random.Generator) -> demonstrations.Teacher:
  world = worlds.make_world(spec, pool, rng, scale=stage.world_scale)
  search = demonstrations.SmallSearch(world, stage.dim)
  return demonstrations.Teacher(world, search, stage.top_k, stage.copy_weight, stage.query,
                                stage.thought)


def _any_question(world: worlds.World, hops: int, rng: np.random.Generator) -> worlds.WorldQuestion:
  chains = grammar.chains(hops)
  chain = chains[rng.integers(len(chains))]
  members = world.of_kind(chain[0].subject)
  return worlds.make_question(world, chain, members[rng.integers(len(members))], rng)


def _hidden(params: decoder.Params, rows: Rows, shape: shapes.DecoderShape):
  positions_L = jnp.arange(rows.inputs_BL.shape[1])
  positions_BL = jnp.broadcast_to(positions_L[None], rows.inputs_BL.shape)
  unstacked = decoder.unstack_layers(params)
  return decoder.Decoder(shape, stacked=False).apply(
      {"params": unstacked}, rows.inputs_BL, positions_BL)[0]


def make_step(shape: shapes.DecoderShape, optimizer: optax.GradientTransformation,
              allowed_vocab: int):
  """The jitted step: (params, optimizer state, rows by hops) -> (params, state, loss)."""

  def loss_of(params, groups):
    total = sum(jnp.sum(g.weight_BL) for g in groups)
    loss = jnp.float32(0)
    for g in groups:
      logprobs_BL, _ = logprobs.target_logprobs(
          params, _hidden(params, g, shape), g.targets_BL, allowed_vocab=allowed_vocab,
          temperature=1.0, chunk=g.targets_BL.size)
      loss = loss - jnp.sum(g.weight_BL * logprobs_BL)
    return loss / total

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, opt_state, groups):
    loss, grads = jax.value_and_grad(loss_of)(params, groups)
    with jax.numpy_dtype_promotion("standard"):
      updates, opt_state = optimizer.update(grads, opt_state, params)
      params = optax.apply_updates(params, updates)
    return params, opt_state, loss

  return step


def make_optimizer(stage: ml_collections.ConfigDict) -> optax.GradientTransformation:
  """Muon on the layers' matrices with Adam on the rest, or Adam alone; linear decay at the end."""
  def schedule(peak):
    hold = int(stage.steps * (1 - stage.decay_share))
    return optax.join_schedules(
        [optax.linear_schedule(peak / stage.warmup_steps, peak, stage.warmup_steps),
         optax.constant_schedule(peak), optax.linear_schedule(peak, 0.0, stage.steps - hold)],
        [stage.warmup_steps, hold])

  clip, adam_rate = optax.clip_by_global_norm(1.0), schedule(stage.adam_lr)
  if stage.muon_lr == 0.0:
    return optax.chain(clip, optax.adam(adam_rate, b2=0.99))
  return optax.chain(clip, optax.contrib.muon(
      schedule(stage.muon_lr), adam_learning_rate=adam_rate, adam_b2=0.99,
      muon_weight_dimension_numbers=_matrices))


def _matrices(params: decoder.Params):
  """Which axes of each stacked kernel make a matrix (N stays apart); None for all else."""
  numbers = optax.contrib.MuonDimensionNumbers
  into_heads, out_of_heads, plain = numbers(1, (2, 3)), numbers((1, 2), 3), numbers(1, 2)
  axes = {"q": into_heads, "k": into_heads, "v": into_heads, "o": out_of_heads,
          "gate": plain, "up": plain, "down": plain}

  def of(path, _):
    names = [p.key for p in path]
    return axes[names[-2]] if names[-1] == "kernel" else None

  return jax.tree_util.tree_map_with_path(of, params)


def look_back(params: decoder.Params, shape: shapes.DecoderShape,
              sharpness: float) -> decoder.Params:
  """Lets the heads of layer 0's first group start out attending to one token back, two back, ….

  Copying needs such a head before anything rewards it, so by itself it comes late and suddenly.
  Constant queries and keys, turned against each other by `distance`, meet there after rotation:
  their score is sharpness² Σ_i cos(ω_i (m − n − distance)), between positions m and n.
  """
  if not shape.qkv_bias:
    raise UserError("config.look_back needs biases to set; set config.shape.qkv_bias=True, or "
                    "config.look_back=0.0")
  half = shape.head_size // 2
  distances = np.arange(1, shape.heads // shape.kv_heads + 1)
  turns = distances[:, None] * attention.rope_frequencies(shape)
  bias = {name: np.array(params["layers"]["attention"][name]["bias"]) for name in "qk"}
  bias["q"][0, : len(turns)] = sharpness * np.concatenate([np.cos(turns), -np.sin(turns)], axis=1)
  bias["k"][0, 0, :half] = sharpness
  attention_ = params["layers"]["attention"]
  changed = {name: attention_[name] | {"bias": jnp.asarray(b)} for name, b in bias.items()}
  return params | {"layers": params["layers"] | {"attention": attention_ | changed}}


@functools.partial(jax.jit, static_argnames=("shape", "allowed_vocab"))
def right_shares(params: decoder.Params, groups: tuple[Rows, ...], *, shape: shapes.DecoderShape,
                 allowed_vocab: int) -> list[tuple[Array, Array]]:
  """By group: shares of the rows, and of the tokens, whose targets are the likeliest ones."""
  out = []
  for g in groups:
    best_BL = jnp.argmax(decoder.logits(params, _hidden(params, g, shape), allowed_vocab), axis=-1)
    asked_BL = g.weight_BL == 1
    missed_BL = asked_BL & (best_BL != g.targets_BL)
    total = functools.partial(jnp.sum, dtype=jnp.float32)
    out.append((1 - jnp.mean(jnp.any(missed_BL, axis=1), dtype=jnp.float32),
                1 - total(missed_BL) / total(asked_BL)))
  return out


def train_stage(params: decoder.Params, stage: ml_collections.ConfigDict, name: str, *,
                shape: shapes.DecoderShape, tokenizer: Tokenizer, seed: int) -> decoder.Params:
  """Runs one stage; prints its loss, and what it gets right of texts about unseen names."""
  optimizer = make_optimizer(stage)
  with jax.numpy_dtype_promotion("standard"):
    opt_state = optimizer.init(params)
  step = make_step(shape, optimizer, tokenizer.size)
  unseen = next(batches(stage, "rl", tokenizer.encode_plain, seed + 1))
  ready: queue.Queue = queue.Queue(maxsize=4)  # the next batches are written while one trains

  def write_ahead():
    for batch, _ in zip(batches(stage, "warm_start", tokenizer.encode_plain, seed),
                        range(stage.steps)):
      ready.put(batch)

  threading.Thread(target=write_ahead, daemon=True).start()
  began = time.monotonic()
  for i in range(1, stage.steps + 1):
    params, opt_state, loss = step(params, opt_state, ready.get())
    if i % 100 == 0 or i == stage.steps:
      shares = right_shares(params, unseen, shape=shape, allowed_vocab=tokenizer.size)
      print(f"{name} {i}/{stage.steps}  loss {float(loss):.4f}  rows/tokens right "
            + "  ".join(f"{float(rows):.2f}/{float(tokens):.2f}" for rows, tokens in shares)
            + f"  {time.monotonic() - began:.0f} s", flush=True)
  return params


def train(config: ml_collections.ConfigDict, out: pathlib.Path) -> None:
  """All stages one after another, then the folder."""
  with tempfile.TemporaryDirectory() as scratch:
    vocabulary.build_tokenizer(scratch)
    tokenizer = Tokenizer.load(scratch)
    vocab = -(-tokenizer.size // 16) * 16  # a round number of rows; the rest is never drawn
    shape = shapes.DecoderShape(vocab_size=vocab, **config.shape)
    params = (weights.load(config.start) if config.start
              else decoder.init_params(shape, jax.random.key(config.seed)))
    if config.look_back and not config.start:
      params = look_back(params, shape, config.look_back)
    print(f"{shapes.count_parameters(shape):,} parameters, {tokenizer.size} tokens")
    for name in config.stages:
      params = train_stage(params, config[name], name, shape=shape, tokenizer=tokenizer,
                           seed=config.seed)
    weights.save(out, params, shape, dtype=jnp.dtype(config.save_dtype), copy_from=scratch)
  print(f"written: {out}")


def main(words: Sequence[str]) -> None:
  def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("out", None, "folder to write, in Hugging Face's layout",
                        flag_values=values)
    cli.define_config(values, words)

  values, _ = cli.parse(words, define)
  if not values.out:
    raise UserError("no folder to write; give one as --out=models/tiny-base")
  folders.refuse(values.out)
  train(values.config, pathlib.Path(values.out))


if __name__ == "__main__":
  cli.run_program(main)
