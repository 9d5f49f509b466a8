"""Gradients written out against those that autodiff finds for the same formulas."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

from searchr1_jax.model import attention, decoder, kernels
from searchr1_jax.model.logprobs import target_logprobs


def draw(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def agree(ours, plain, *inputs, **close):
  """Both values, and both gradients of the same random sum over the outputs, in every input."""
  weight = draw(*jax.eval_shape(plain, *inputs).shape, seed=9)
  graded = lambda f: jax.jit(jax.value_and_grad(
      lambda *xs: jnp.sum(f(*xs).astype(jnp.float32) * weight), argnums=range(len(inputs))))
  found, wanted = graded(ours)(*inputs), graded(plain)(*inputs)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    assert a.dtype == b.dtype and np.abs(b).max() > 1e-3
    np.testing.assert_allclose(a, b, **(dict(rtol=1e-5, atol=1e-5 * float(np.abs(b).max())) | close))


@pytest.mark.parametrize("outputs", [(2,), (5, 4), (3, 40)])
@pytest.mark.parametrize("inputs", [(7,), (3, 6)])
def test_a_projection_is_a_tensor_product(inputs, outputs):
  # Narrower outputs than inputs and wider ones: two forms of the kernel's gradient.
  n = len(inputs)
  agree(lambda x, w: kernels.project(x, w, n), lambda x, w: jnp.tensordot(x, w, n),
        draw(2, 9, *inputs), draw(*inputs, *outputs, seed=1))


def test_a_kernels_gradient_is_summed_in_float32():
  # 4,096 rows of 1 + 2^-7: in bfloat16 the sum would stand still long before its end.
  x = jnp.full((4096, 2), 1 + 2**-7, jnp.bfloat16)
  loss = lambda w: jnp.sum(kernels.project(x, w, 1).astype(jnp.float32))
  for outputs in (1, 3):
    gradient = jax.jit(jax.grad(loss))(jnp.ones((2, outputs), jnp.float32))
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, 4096 * (1 + 2**-7), rtol=1e-6)


def test_swiglu_is_silu_times_up():
  agree(kernels.swiglu, lambda g, u: jax.nn.silu(g) * u, 3 * draw(4, 50), draw(4, 50, seed=1))


def plain_attention(q_BLHE, k_BSKE, v_BSKE, visible_BLS):
  shared = q_BLHE.shape[2] // k_BSKE.shape[2]
  k, v = (jnp.repeat(x, shared, axis=2) for x in (k_BSKE, v_BSKE))
  scores = jnp.einsum("blhe,bshe->bhls", q_BLHE, k) / np.float32(q_BLHE.shape[-1] ** 0.5)
  shares = jax.nn.softmax(jnp.where(visible_BLS[:, None], scores, -jnp.inf), axis=-1)
  return jnp.einsum("bhls,bshe->blhe", shares, v)


@pytest.mark.parametrize("length", [1, 40, 128, 129, 300])
def test_causal_attention_is_the_plain_one_whatever_its_blocks(length):
  # 300 positions make three blocks, the last of 44.
  visible = jnp.asarray(np.tri(length, dtype=bool))[None]
  inputs = draw(2, length, 4, 8), draw(2, length, 2, 8, seed=1), draw(2, length, 2, 8, seed=2)
  if length == 1:  # one key: nothing to choose, so queries and keys have no gradient
    np.testing.assert_allclose(attention.causal_attention(*inputs),
                               plain_attention(*inputs, visible), rtol=1e-6)
    return
  agree(attention.causal_attention, lambda *x: plain_attention(*x, visible), *inputs)


def test_attention_at_positions_is_the_rows_of_the_whole():
  q, k, v = draw(2, 30, 4, 8), draw(2, 30, 2, 8, seed=1), draw(2, 30, 2, 8, seed=2)
  kept_BP = jnp.asarray([[0, 3, 29], [7, 8, 9]], jnp.int32)
  flip = lambda x: jnp.swapaxes(x, 1, 2)
  agree(lambda q, k, v: attention.attention_at(decoder.take_positions(q, kept_BP), flip(k), flip(v),
                                               kept_BP),
        lambda q, k, v: decoder.take_positions(attention.causal_attention(q, k, v), kept_BP), q, k, v)


def test_bfloat16_loses_no_more_than_its_rounding():
  # A part that all keys share changes nothing, so no gradient of q lies along it. It must not carry
  # the rounding of the output there: keys have biases of many times what they differ by.
  inputs = (draw(2, 40, 4, 8), draw(2, 40, 2, 8, seed=1) + 30, draw(2, 40, 2, 8, seed=2) + 10,
            draw(2, 40, 4, 8, seed=3))
  inputs = [x.astype(jnp.bfloat16) for x in inputs]

  def slope(dtype):
    q, k, v, weight = (x.astype(dtype) for x in inputs)
    loss = lambda q: jnp.sum(weight.astype(jnp.float32) * attention.causal_attention(
        q, k, v).astype(jnp.float32))
    return jax.jit(jax.grad(loss))(q).astype(jnp.float32)

  half, full = slope(jnp.bfloat16), slope(jnp.float32)
  assert float(jnp.linalg.norm(half - full) / jnp.linalg.norm(full)) < 0.06  # 0.2 with the output's


def test_large_scores_keep_shares_that_add_up_to_one():
  # Keys that are all alike, at scores of 3 x 300^2 x 8 / 8^.5: each of 32 queries spreads 1 over
  # the values, which the largest score and the logarithm of up to 32 in one float32 would not give.
  q, k = jnp.full((1, 32, 1, 8), 900.0), jnp.full((1, 32, 1, 8), 300.0)
  loss = lambda v: jnp.sum(attention.causal_attention(q, k, v))
  total = jnp.sum(jax.jit(jax.grad(loss))(draw(1, 32, 1, 8)), axis=(0, 1, 2))
  np.testing.assert_allclose(total, 32, rtol=1e-5)


@pytest.mark.parametrize("platform, dtype, kv_heads, tensor, kernel", [
    ("gpu", "bfloat16", 2, 2, "cudnn"), ("gpu", "bfloat16", 2, 4, "blocks"),
    ("gpu", "float32", 2, 1, "blocks"), ("cpu", "bfloat16", 2, 1, "blocks"),
    ("tpu", "bfloat16", 2, 1, "blocks")])
def test_the_kernel_of_attention_is_one_that_can_run(platform, dtype, kv_heads, tensor, kernel):
  shape = dataclasses.replace(SHAPES["tied"], heads=8, kv_heads=kv_heads, head_size=16)
  assert attention.choose_kernel(platform, dtype, shape, tensor) == kernel
  lanes = dataclasses.replace(shape, head_size=128)
  on_tpu = platform == "tpu"
  assert attention.choose_kernel(platform, dtype, lanes, tensor) == ("splash" if on_tpu else kernel)


@pytest.mark.parametrize("length, shared", [(128, 3), (384, 1)])
def test_splash_attends_as_blocks_do(length, shared):
  """Its kernel, interpreted: output, and gradients of queries, keys and values."""
  q, k, v = draw(2, length, 2 * shared, 128), *(draw(2, length, 2, 128, seed=n) for n in (1, 2))
  weights = draw(*q.shape, seed=3)
  splash = attention._splash(shared, length, interpret=True)

  def by_splash(q, k, v):
    scaled = attention._by_head(q, 2) * np.float32(128**-0.5)
    return attention._by_position(splash(scaled, attention.by_head(k), attention.by_head(v)))

  for attend in (by_splash, attention.causal_attention):
    value, slopes = jax.value_and_grad(
        lambda *x: jnp.sum(attend(*x) * weights), argnums=(0, 1, 2))(q, k, v)
    if attend is by_splash:
      wanted = (value, *slopes)
  for one, other in zip(wanted, (value, *slopes)):
    np.testing.assert_allclose(one, other, atol=2e-3, rtol=2e-3)


def test_attention_survives_scores_that_overflow_an_exponential():
  q, k, v = 40 * draw(1, 20, 2, 8), 40 * draw(1, 20, 1, 8, seed=1), draw(1, 20, 1, 8, seed=2)
  loss = lambda *x: jnp.sum(attention.causal_attention(*x) ** 2)
  for x in jax.tree.leaves(jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(q, k, v)):
    assert np.isfinite(x).all()


# Log-probabilities.

SHAPES = {"tied": tiny.random_shape("qwen3", 1), "untied": tiny.random_shape("qwen2", 0)}


@pytest.mark.parametrize("chunk", [5, 16, 1000])
@pytest.mark.parametrize("tied", SHAPES)
def test_the_gradient_of_logprobs_and_entropy_is_autodiffs(tied, chunk):
  shape = SHAPES[tied]
  params = {k: v for k, v in tiny.random_params(shape, 0).items() if k in ("embed", "head")}
  targets_BL = jnp.asarray(np.random.default_rng(1).integers(0, 50, (3, 11)), jnp.int32)

  def ours(hidden_BLD, params):
    found = target_logprobs(params, hidden_BLD, targets_BL, allowed_vocab=50, temperature=0.7,
                            chunk=chunk, with_entropy=True)
    return jnp.stack(found)

  def plain(hidden_BLD, params):
    all_BLV = jax.nn.log_softmax(decoder.logits(params, hidden_BLD, 50) / 0.7, axis=-1)
    picked_BL = jnp.take_along_axis(all_BLV, targets_BL[..., None], axis=-1)[..., 0]
    entropy_BL = -jnp.sum(jnp.where(all_BLV > -1e20, jnp.exp(all_BLV) * all_BLV, 0), axis=-1)
    return jnp.stack([picked_BL, entropy_BL])

  hidden_BLD = 0.3 * draw(3, 11, shape.width, seed=2)  # logits of a few nats
  weight = draw(2, 3, 11, seed=3)
  graded = lambda f: jax.jit(jax.value_and_grad(
      lambda h, p: jnp.sum(f(h, p) * weight), argnums=(0, 1)))(hidden_BLD, params)
  for a, b in zip(jax.tree.leaves(graded(ours)), jax.tree.leaves(graded(plain)), strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * float(np.abs(b).max()))


def largest_float32(compiled_text: str) -> int:
  """Elements of the largest float32 array anywhere in a compiled program."""
  sizes = re.findall(r"\bf32\[([\d,]+)\]", compiled_text)
  return max(int(np.prod([int(n) for n in s.split(",")])) for s in sizes)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_array_of_all_logits_is_in_the_compiled_program(with_entropy):
  # 4 rows of 64 with 503 ids: 128,768 logits. In chunks of 32 tokens an eighth of them are held,
  # beside a kernel of 16 x 503 and its gradient.
  embed, targets_BL = draw(503, 16), jnp.zeros((4, 64), jnp.int32)

  def loss(params, hidden_BLD, chunk):
    found = target_logprobs(params, hidden_BLD, targets_BL, allowed_vocab=503, temperature=1.0,
                            chunk=chunk, with_entropy=with_entropy)
    return sum(jnp.sum(x) for x in found if x is not None)

  text = lambda chunk: jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2).lower(
      {"embed": embed}, draw(4, 64, 16), chunk).compile().as_text()
  assert largest_float32(text(32)) == 32 * 503
  assert largest_float32(text(4 * 64)) == 4 * 64 * 503  # the same measure, where they are held


def test_entropy_costs_nothing_where_it_is_not_asked():
  def exponentials(with_entropy):
    found = lambda h: target_logprobs(
        {"embed": draw(50, 8)}, h, jnp.zeros((2, 6), jnp.int32), allowed_vocab=50, temperature=1.0,
        chunk=4, with_entropy=with_entropy)
    return str(jax.make_jaxpr(found)(draw(2, 6, 8))).count(" exp ")

  assert exponentials(False) < exponentials(True)


# Memory.


def test_remat_keeps_less_for_the_backward_pass():
  # Temporaries of the compiled gradient, 8 layers of 4 x 256 tokens: all activations, the results
  # of matrix products only, or no more than each layer's input.
  shape = dataclasses.replace(SHAPES["tied"], layers=8, width=48, mlp_width=192)
  params = jax.eval_shape(lambda: decoder.init_params(shape, jax.random.key(0)))
  ids_BL = jax.ShapeDtypeStruct((4, 256), jnp.int32)

  def temporaries(remat):
    def loss(params, ids_BL):
      positions_BL = jnp.broadcast_to(jnp.arange(256)[None], ids_BL.shape)
      module = decoder.Decoder(shape, remat=remat)
      return jnp.sum(module.apply({"params": params}, ids_BL, positions_BL)[0] ** 2)

    compiled = jax.jit(jax.grad(loss)).lower(params, ids_BL).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  full, dots, none = map(temporaries, ("full", "dots", "none"))
  assert full < 0.6 * dots < 0.6 * none
