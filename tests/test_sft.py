"""The warm start: exercises that ask what can be known, heads that look where they should."""

from __future__ import annotations

import collections
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import sft_hard, sft_tiny
from searchr1_jax import sft
from searchr1_jax.model import attention, decoder, shapes, weights
from searchr1_jax.types import UserError
from searchr1_jax.worlds import demonstrations, names
from searchr1_jax.worlds import world as worlds


@pytest.fixture(scope="module")
def teacher() -> demonstrations.Teacher:
  world = worlds.make_world(worlds.HARD, "warm_start", np.random.default_rng(0), scale=0.08)
  return demonstrations.Teacher(
      world, demonstrations.SmallSearch(world, 512), 3, query="{subject} {relation}",
      thought="{subject} {relation} {object}")


def cut(pieces, tokenizer) -> None:
  """Whatever the cut, the ids are those of the whole text."""
  apart = [i for p in pieces for i in tokenizer.encode_plain(p.text)]
  assert apart == tokenizer.encode_plain("".join(p.text for p in pieces))


def test_a_drill_asks_once_for_every_fact_it_shows(teacher, tokenizer):
  rng = np.random.default_rng(1)
  for _ in range(20):
    pieces = teacher.drill(rng)
    cut(pieces, tokenizer)
    text = "".join(p.text for p in pieces)
    shown = [line.split('"')[1] for line in text.split("\n") if "(Title: " in line]
    assert len(shown) == 3
    facts = [f"<think> {t} {relation} {value}</think>" for t in shown
             for relation, value in teacher.world.entities[t].facts.items()]
    asked = [p.text for p in pieces if p.weight == 1]
    assert collections.Counter(asked) == collections.Counter(facts)
    # A title comes out of nowhere; only what repeats it can be known.
    assert all(p.text.startswith(" ") for p in pieces if 0 < p.weight < 1)


def test_a_recital_weighs_what_has_been_said_before(tokenizer):
  pieces = demonstrations.recital(names.pieces("rl"), np.random.default_rng(2), length=12)
  cut(pieces, tokenizer)
  known = set()
  for first, rest in zip(pieces[::2], pieces[1::2], strict=True):
    name = (first.text + rest.text).strip(" ;")
    assert first.weight == 0 and rest.weight == float(name in known)
    known.add(name)
    assert tokenizer.encode_plain(first.text + rest.text)[1:] == tokenizer.encode_plain(rest.text)
  assert 4 <= len(known) <= 7 and len(pieces) == 2 * (len(known) + 12)


def test_first_heads_look_one_and_two_tokens_back():
  shape = shapes.DecoderShape(
      vocab_size=32, width=16, mlp_width=16, layers=2, heads=4, kv_heads=2, head_size=32,
      rope_theta=10000.0, norm_eps=1e-6, tied_embeddings=True, qkv_bias=True, max_positions=64)
  before = decoder.init_params(shape, jax.random.key(0))
  after = sft.look_back(before, shape, 5.0)
  bias = {name: np.asarray(after["layers"]["attention"][name]["bias"]) for name in "qk"}
  turn = attention.rotation(jnp.arange(40)[None], attention.rope_frequencies(shape))
  turned = {name: attention.rotate(jnp.broadcast_to(jnp.asarray(b[0]), (1, 40, *b[0].shape)), turn)
            for name, b in bias.items()}
  scores_HLM = jnp.einsum("lhe,me->hlm", turned["q"][0, :, :2], turned["k"][0, :, 0]) / 32**0.5
  shares = np.asarray(jax.nn.softmax(jnp.where(np.tri(40), scores_HLM, -1e30), axis=-1))
  for head, distance in ((0, 1), (1, 2)):
    looked = [shares[head, i, i - distance] for i in range(distance, 40)]
    assert min(looked) > 0.85
  # Nothing else has changed: other heads, other layers, all kernels.
  for name in "qk":
    touched = np.zeros(bias[name].shape, bool)
    touched[0, : 2 if name == "q" else 1] = True
    assert not bias[name][~touched].any()
  zeroed = jax.tree_util.tree_map_with_path(
      lambda path, x: x * 0 if path[-1].key == "bias" else x, after)
  assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), zeroed, before))


def test_looking_back_without_biases_is_refused():
  config = sft_hard.get_config()
  config.shape.update(width=32, mlp_width=32, layers=1, qkv_bias=False, family="llama")
  config.stages = ()
  with pytest.raises(UserError, match="config.look_back needs biases"):
    sft.train(config, pathlib.Path("never"))


def test_without_looking_back_biases_are_not_needed(tmp_path):
  config = sft_tiny.get_config()
  config.shape.update(width=32, mlp_width=32, layers=1, qkv_bias=False, family="llama")
  config.stages = ()
  sft.train(config, tmp_path / "out")
  assert weights.read_config(tmp_path / "out")[0].qkv_bias is False


@pytest.mark.parametrize("module", [sft_tiny, sft_hard])
def test_stages_have_the_rows_they_name_and_hardly_one_is_cut_short(module, tokenizer):
  config = module.get_config()
  for name in config.stages:
    stage, ends = config[name], []
    made = sft.batches(stage, "warm_start", tokenizer.encode_plain, 0)
    for groups, _ in zip(made, range(3)):
      assert [g.inputs_BL.shape for g in groups] == [(rows, length) for rows, length in (
          *zip(stage.rows_by_hops, stage.lengths_by_hops), (stage.drill_rows, stage.drill_length),
          (stage.recital_rows, stage.recital_length)) if rows]
      # An episode ends on a token that is weighed: one in the last place may have been cut there.
      ends += [g.weight_BL[:, -1] > 0 for g in groups[: len(stage.rows_by_hops)]]
    assert not ends or np.mean(np.concatenate(ends)) < 0.06


def test_stages_follow_one_another_into_a_folder(tmp_path, capsys):
  config = sft_hard.get_config()
  config.shape.update(width=32, mlp_width=32, layers=1, heads=2, kv_heads=1, head_size=16)
  config.stages = ("copying", "habits")
  config.copying.update(steps=3, warmup_steps=1, recital_rows=4)
  config.habits.update(steps=2, warmup_steps=1, rows_by_hops=(2,), lengths_by_hops=(176,), worlds=1)
  sft.train(config, tmp_path / "out")
  said = capsys.readouterr().out
  assert "copying 3/3" in said and "habits 2/2" in said
  shape, _ = weights.read_config(tmp_path / "out")
  assert shape.width == 32
  trained = weights.load(tmp_path / "out")
  start = sft.look_back(decoder.init_params(shape, jax.random.key(0)), shape, config.look_back)
  moved = jax.tree.map(lambda a, b: bool((a != b).any()), trained, start)
  assert moved["embed"] and moved["layers"]["attention"]["q"]["kernel"]
  assert jax.tree.all(jax.tree.map(lambda x: bool(jnp.isfinite(x).all()), trained))


def test_right_is_what_is_likeliest_where_it_is_asked():
  shape = shapes.DecoderShape(
      vocab_size=16, width=16, mlp_width=16, layers=1, heads=2, kv_heads=1, head_size=8,
      rope_theta=100.0, norm_eps=1e-6, tied_embeddings=True, qkv_bias=True, max_positions=64)
  params = decoder.init_params(shape, jax.random.key(1))
  inputs_BL = jnp.asarray(np.random.default_rng(0).integers(16, size=(2, 5)), jnp.int32)
  best_BL = jnp.argmax(decoder.logits(params, sft._hidden(
      params, sft.Rows(inputs_BL, inputs_BL, jnp.zeros((2, 5))), shape), 16), axis=-1)
  # One wrong token in the second row, another where nothing is asked.
  targets_BL = best_BL.at[1, 2].add(1).at[0, 0].add(1)
  weight_BL = jnp.ones((2, 5)).at[0, 0].set(0.5)
  ((rows, tokens),) = sft.right_shares(
      params, (sft.Rows(inputs_BL, targets_BL, weight_BL),), shape=shape, allowed_vocab=16)
  assert float(rows) == 0.5 and float(tokens) == pytest.approx(8 / 9)
