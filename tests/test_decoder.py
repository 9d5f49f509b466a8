"""The decoder against transformers, and against itself along every other way through it."""

from __future__ import annotations

import dataclasses
import functools

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

from searchr1_jax.model import decoder, shapes, value, weights
from searchr1_jax.model.logprobs import target_logprobs
from searchr1_jax.types import UserError

SHAPE = tiny.random_shape("qwen2", 0)  # untied, with biases
PARAMS = tiny.random_params(SHAPE, 0)


def some_ids(shape, rows, length, seed=0):
  return np.random.default_rng(seed).integers(0, shape.vocab_size, (rows, length), np.int32)


def hidden(ids_BL, params=PARAMS, dtype=jnp.float32, **how):
  """Final states of whole rows."""
  positions_BL = jnp.broadcast_to(jnp.arange(ids_BL.shape[1]), ids_BL.shape)
  out_BLD, _ = decoder.Decoder(SHAPE, dtype, **how).apply(
      {"params": params}, jnp.asarray(ids_BL), positions_BL)
  return out_BLD


@functools.cache
def unstacked():
  return decoder.unstack_layers(PARAMS)


@functools.cache
def cached_forward():
  """One jitted forward with a cache; compiles for each new shape of ids."""
  @jax.jit
  def forward(params, ids_BL, positions_BL, cache, rows_B=None):
    hidden_BLD, cache = decoder.Decoder(SHAPE, stacked=False).apply(
        {"params": params}, ids_BL, positions_BL, cache, rows_B)
    return decoder.logits(params, hidden_BLD, SHAPE.vocab_size), cache

  return forward


# Against transformers.


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_transformers_reads_what_we_write(kind, seed, tmp_path):
  shape = tiny.random_shape(kind, seed)
  params = tiny.random_params(shape, seed)
  weights.save(tmp_path / "model", params, shape)
  model = tiny.reference_model(tmp_path / "model")
  ids_BL = some_ids(shape, 3, 48)
  expected = tiny.reference_logits(model, ids_BL)
  assert expected.std() > 0.5  # logits that differ: closeness says something
  np.testing.assert_allclose(tiny.our_logits(shape, params, ids_BL), expected, atol=1e-4)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_we_read_what_transformers_writes(kind, tmp_path):
  torch = tiny.torch_here()
  import transformers

  shape = tiny.random_shape(kind, 2)
  config = transformers.AutoConfig.for_model(
      shape.family, **{k: v for k, v in shapes.to_hugging_face(shape).items() if k != "model_type"})
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_config(
      config, dtype=torch.float32, attn_implementation="eager").eval()
  with torch.no_grad():
    for parameter in model.parameters():  # its own initial biases are all 0, its norms 1
      parameter.add_(0.2 * torch.randn_like(parameter))
  # Small shards: the folder then has an index and several files.
  model.save_pretrained(tmp_path, max_shard_size="20KB")
  assert len(list(tmp_path.glob("*.safetensors"))) > 1
  read, _ = weights.read_config(tmp_path)
  assert read == shape
  ids_BL = some_ids(shape, 2, 40)
  np.testing.assert_allclose(
      tiny.our_logits(read, weights.load(tmp_path), ids_BL),
      tiny.reference_logits(model, ids_BL), atol=1e-4)


# One model, several ways through it.


def test_scan_equals_layer_by_layer():
  ids_BL = some_ids(SHAPE, 3, 20)
  hidden_BLD = jax.jit(functools.partial(hidden, ids_BL, stacked=False))(unstacked())
  np.testing.assert_allclose(
      decoder.logits(unstacked(), hidden_BLD, SHAPE.vocab_size),
      tiny.our_logits(SHAPE, PARAMS, ids_BL), atol=1e-5)
  again = decoder.stack_layers(unstacked())
  jax.tree.map(np.testing.assert_array_equal, again, dict(PARAMS))


def test_layers_stack_in_the_order_of_their_numbers():
  # "layers_10" sorts before "layers_2" as text.
  params = {f"layers_{i}": {"x": jnp.full((1,), i)} for i in range(12)}
  np.testing.assert_array_equal(decoder.stack_layers(params)["layers"]["x"][:, 0], np.arange(12))


def test_prefill_in_pieces_and_single_tokens_equal_the_whole_row():
  ids_BL = some_ids(SHAPE, 2, 24)
  whole_BLV = tiny.our_logits(SHAPE, PARAMS, ids_BL)
  cache = decoder.empty_cache(SHAPE, 2, 32, jnp.float32)
  at, pieces = 0, []
  for length in (7, 8, 7, 1, 1):
    positions_BL = np.broadcast_to(np.arange(at, at + length, dtype=np.int32), (2, length))
    piece, cache = cached_forward()(unstacked(), ids_BL[:, at : at + length], positions_BL, cache)
    pieces.append(piece)
    at += length
  np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole_BLV, atol=1e-5)


def test_padding_to_the_right_changes_nothing():
  ids_BL = some_ids(SHAPE, 3, 16)
  lengths = (16, 9, 16)
  junk_BL = some_ids(SHAPE, 3, 16, seed=1)
  for row, n in enumerate(lengths):
    junk_BL[row, :n] = ids_BL[row, :n]
  plain, junk = (tiny.our_logits(SHAPE, PARAMS, x) for x in (ids_BL, junk_BL))
  for row, n in enumerate(lengths):
    np.testing.assert_array_equal(plain[row, :n], junk[row, :n])  # other padding: not a bit
  alone = tiny.our_logits(SHAPE, PARAMS, ids_BL[1:2, :9])
  np.testing.assert_allclose(plain[1, :9], alone[0], atol=1e-5)  # no padding
  assert not np.array_equal(plain[1, 9:], junk[1, 9:])


def test_padding_to_the_left_changes_nothing():
  # Rows of 5, 9 and 12 tokens against the right edge of 12; a junk token in front has a position
  # beyond the cache, so it is written nowhere and seen by nobody.
  held, ids_BL = np.array([5, 9, 12]), some_ids(SHAPE, 3, 12)
  column_1L = np.arange(12)[None, :]
  positions_BL = column_1L - (12 - held)[:, None]
  positions_BL = np.where(positions_BL < 0, 32, positions_BL).astype(np.int32)
  cache = decoder.empty_cache(SHAPE, 3, 32, jnp.float32)
  found_BLV, _ = cached_forward()(unstacked(), ids_BL, positions_BL, cache)
  for row, n in enumerate(held):
    alone_BLV = tiny.our_logits(SHAPE, PARAMS, ids_BL[row : row + 1, 12 - n :])
    np.testing.assert_allclose(found_BLV[row, 12 - n :], alone_BLV[0], atol=1e-5)


def test_rows_continue_where_they_stand_and_touch_no_other():
  # Rows 0 to 3 hold 5, 9, 7 and 3 tokens. Row 2 goes on by 4, row 0 by 2; two places are empty
  # (row 4 doesn't exist), and what stands beyond a row's tokens is junk at position 32.
  held, ids_BL = (5, 9, 7, 3), some_ids(SHAPE, 4, 16)
  column_1L = np.arange(10, dtype=np.int32)[None, :]
  positions_BL = np.where(column_1L < np.array(held)[:, None], column_1L, 32).astype(np.int32)
  cache = decoder.empty_cache(SHAPE, 4, 32, jnp.float32)
  _, before = cached_forward()(unstacked(), ids_BL[:, :10], positions_BL, cache)

  rows_B, counts, new_BL = np.array([2, 4, 0, 4], np.int32), (4, 0, 2, 0), some_ids(SHAPE, 4, 4, 1)
  positions_BL = np.full((4, 4), 32, np.int32)
  for place, (row, n) in enumerate(zip(rows_B, counts)):
    positions_BL[place, :n] = held[row % 4] + np.arange(n)
    new_BL[place, :n] = ids_BL[row % 4, held[row % 4] : held[row % 4] + n]
  out_BLV, after = cached_forward()(unstacked(), new_BL, positions_BL, before, rows_B)

  for place, row in ((0, 2), (2, 0)):
    n, m = held[row], counts[place]
    whole_BLV = tiny.our_logits(SHAPE, PARAMS, ids_BL[row : row + 1, : n + m])
    np.testing.assert_allclose(out_BLV[place, :m], whole_BLV[0, n:], atol=1e-5)
  arrays = lambda cache: [(x.k_BKES, (1, 2)) for x in cache] + [(x.v_BKSE, (1, 3)) for x in cache]
  for (old, axes), (new, _) in zip(arrays(before), arrays(after)):
    changed_BS = np.any(np.asarray(old) != np.asarray(new), axis=axes)
    assert [tuple(x) for x in np.argwhere(changed_BS)] == [
        (0, 5), (0, 6), (2, 7), (2, 8), (2, 9), (2, 10)]


def test_half_precision_keeps_logits_in_float32():
  ids_BL = some_ids(SHAPE, 2, 12)
  hidden_BLD = hidden(ids_BL, dtype=jnp.bfloat16)
  assert hidden_BLD.dtype == jnp.bfloat16
  logits = decoder.logits(PARAMS, hidden_BLD, SHAPE.vocab_size)
  assert logits.dtype == jnp.float32
  # bfloat16 keeps 8 bits: a few percent of logits that spread over several nats.
  gap = np.abs(logits - tiny.our_logits(SHAPE, PARAMS, ids_BL))
  assert 1e-4 < gap.mean() < 0.1


# Log-probabilities.


@functools.cache
def loss_inputs():
  ids_BL = some_ids(SHAPE, 2, 24)
  weight_BL = np.random.default_rng(5).standard_normal((2, 23)).astype(np.float32)
  return ids_BL, weight_BL


@functools.cache
def loss_and_gradient(remat, chunk, scan):
  ids_BL, weight_BL = loss_inputs()

  @jax.jit
  def run(params):
    def loss(params):
      laid_out = params if scan else decoder.unstack_layers(params)
      hidden_BLD = hidden(ids_BL[:, :-1], laid_out, stacked=scan, remat=remat)
      logprobs_BL, entropy_BL = target_logprobs(
          laid_out, hidden_BLD, jnp.asarray(ids_BL[:, 1:]), allowed_vocab=55, temperature=0.7,
          chunk=chunk, with_entropy=True)
      return jnp.sum(weight_BL * jnp.maximum(logprobs_BL, -30.0)) + jnp.sum(entropy_BL)
    return jax.value_and_grad(loss)(params)

  return jax.tree.map(np.asarray, run(PARAMS))


@pytest.mark.parametrize("remat, chunk, scan", [
    ("full", 7, True), ("dots", 64, True), ("none", 5, False)])
def test_saving_memory_changes_neither_loss_nor_gradient(remat, chunk, scan):
  loss, gradient = loss_and_gradient("none", 64, True)
  other_loss, other_gradient = loss_and_gradient(remat, chunk, scan)
  np.testing.assert_allclose(other_loss, loss, rtol=1e-5)
  for path, leaf in jax.tree_util.tree_flatten_with_path(gradient)[0]:
    assert np.abs(leaf).max() > 0, path
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max()),
               other_gradient, gradient)


def log_softmax_64(logits, temperature, allowed_vocab):
  scaled = logits[..., :allowed_vocab].astype(np.float64) / temperature
  scaled -= scaled.max(-1, keepdims=True)
  return scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))


@pytest.mark.parametrize("chunk", [3, 4, 12, 100])
def test_logprobs_and_entropy_are_those_of_the_softmax(chunk):
  ids_BL = some_ids(SHAPE, 2, 13)
  ids_BL[:, 1:] %= 50
  hidden_BLD = hidden(ids_BL[:, :-1])
  found_BL, entropy_BL = target_logprobs(
      PARAMS, hidden_BLD, jnp.asarray(ids_BL[:, 1:]), allowed_vocab=50,
      temperature=jnp.float32(1.3), chunk=chunk, with_entropy=True)
  expected = log_softmax_64(np.asarray(decoder.logits(PARAMS, hidden_BLD, SHAPE.vocab_size)), 1.3, 50)
  np.testing.assert_allclose(
      found_BL, np.take_along_axis(expected, ids_BL[:, 1:, None], -1)[..., 0], atol=1e-5)
  np.testing.assert_allclose(entropy_BL, -(np.exp(expected) * expected).sum(-1), atol=1e-5)
  without, none = target_logprobs(
      PARAMS, hidden_BLD, jnp.asarray(ids_BL[:, 1:]), allowed_vocab=50,
      temperature=jnp.float32(1.3), chunk=chunk)
  np.testing.assert_array_equal(without, found_BL)
  assert none is None


def test_ids_that_no_token_uses_have_no_probability_and_no_gradient():
  _, gradient = loss_and_gradient("none", 64, True)
  np.testing.assert_array_equal(gradient["head"][:, 55:], 0.0)
  assert np.all(np.abs(gradient["head"][:, :55]).max(0) > 0)
  hidden_BLD = jnp.ones((1, 1, SHAPE.width))
  shares = jax.nn.softmax(decoder.logits(PARAMS, hidden_BLD, 55), axis=-1)
  np.testing.assert_array_equal(shares[..., 55:], 0.0)
  np.testing.assert_allclose(shares[..., :55].sum(), 1.0, rtol=1e-6)


# Shapes and their files.


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_shapes_survive_their_config_and_count_their_parameters(kind, seed):
  shape = tiny.random_shape(kind, seed)
  assert shapes.from_hugging_face(shapes.to_hugging_face(shape)) == shape
  params = tiny.random_params(shape, 0)
  assert shapes.count_parameters(shape) == sum(x.size for x in jax.tree.leaves(params))
  cache = decoder.empty_cache(shape, 3, 7, jnp.bfloat16)
  assert decoder.cache_bytes(shape, 3, 7, jnp.bfloat16) == sum(
      x.nbytes for x in jax.tree.leaves(cache))


def test_both_spellings_of_the_rotary_settings_are_read():
  shape = tiny.random_shape("llama3-rope", 0)
  old = shapes.to_hugging_face(shape)
  new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling")}
  new["rope_parameters"] = {**old["rope_scaling"], "rope_theta": old["rope_theta"]}
  assert shapes.from_hugging_face(new) == shapes.from_hugging_face(old) == shape


@pytest.mark.parametrize("kind, change, named", [
    ("qwen2", {"model_type": "mistral"}, "mistral"),
    ("qwen2", {"model_type": None}, "model_type None"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0}}, "dynamic"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"hidden_act": "gelu"}, "gelu"),
    ("llama", {"attention_bias": True}, "attention_bias"),
    ("llama", {"mlp_bias": True}, "mlp_bias"),
    ("qwen3", {"attention_bias": True}, "attention_bias"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"num_key_value_heads": 5}, "key-value heads"),
    ("llama", {"head_dim": 7}, "head size 7"),
])
def test_what_this_decoder_lacks_is_refused_by_name(kind, change, named):
  config = shapes.to_hugging_face(tiny.random_shape(kind, 0)) | change
  with pytest.raises(UserError, match=named):
    shapes.from_hugging_face(config)


def test_a_config_without_its_sizes_is_refused():
  config = shapes.to_hugging_face(SHAPE)
  del config["hidden_size"], config["vocab_size"]
  with pytest.raises(UserError, match="missing vocab_size, hidden_size"):
    shapes.from_hugging_face(config)


# The value model.


def test_a_fresh_value_head_says_zero_and_reads_every_feature():
  critic = value.from_policy(PARAMS)
  assert "head" not in critic["backbone"]
  hidden_BLD = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, SHAPE.width)),
                           jnp.float32)
  np.testing.assert_array_equal(value.values(critic, hidden_BLD), 0.0)
  critic["value_head"] = {"kernel": jnp.arange(SHAPE.width, dtype=jnp.float32),
                          "bias": jnp.float32(2.0)}
  # Position (0, 0) of an all-ones state: 0 + 1 + ... + (D - 1), and the bias.
  ones_BLD = jnp.ones((1, 1, SHAPE.width))
  d = SHAPE.width
  np.testing.assert_allclose(value.values(critic, ones_BLD), d * (d - 1) / 2 + 2.0)


def test_head_counts_must_match():
  with pytest.raises(UserError, match="multiple"):
    dataclasses.replace(SHAPE, heads=3, kv_heads=2)


WRITES = (jax.jit(decoder._write), jax.jit(decoder._write_by_row))


@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([(5, 16, 4), (5, 16, 1), (4, 8, 12)]))
def test_writing_row_by_row_is_writing_all_at_once(seed, sizes):
  """Rows begin anywhere, some hold nothing new, one may stand beyond the cache; 12 exceed 8 slots."""
  rows, slots, length = sizes
  rng = np.random.default_rng(seed)
  array = lambda *size: jnp.asarray(rng.normal(size=size), jnp.float32)
  cache = decoder.LayerCache(array(rows, 2, 6, slots), array(rows, 2, slots, 6))
  k_BLKE, v_BLKE = array(3, length, 2, 6), array(3, length, 2, 6)
  rows_B = rng.permutation(rows + 1)[:3].astype(np.int32)  # `rows` is beyond the cache
  counts_B1 = rng.integers(0, min(length, slots) + 1, (3, 1))
  starts_B1 = (rng.random((3, 1)) * (slots - counts_B1 + 1)).astype(int)
  column_1L = np.arange(length)[None, :]
  positions_BL = np.where(column_1L < counts_B1, starts_B1 + column_1L, slots).astype(np.int32)
  place = decoder.Place(jnp.asarray(positions_BL), None, jnp.asarray(rows_B), None)
  wanted, found = (write(cache, k_BLKE, v_BLKE, place) for write in WRITES)
  np.testing.assert_array_equal(found.k_BKES, wanted.k_BKES)
  np.testing.assert_array_equal(found.v_BKSE, wanted.v_BKSE)
