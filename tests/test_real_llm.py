"""A pretrained model of 135 million parameters: ours and transformers' agree, number and word."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

from searchr1_jax.model import decoder, weights
from searchr1_jax.rollout import draw
from searchr1_jax.rollout.engine import Engine, EngineShapes, Insert
from searchr1_jax.rollout.stops import build_automaton
from searchr1_jax.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.assets, pytest.mark.slow]

NEW_TOKENS = 40
PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "The author of Pride and Prejudice is",
    "In 1969, the first people to walk on the Moon were",
    "Q: Which planet is the largest in the solar system?\nA:",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "The three primary colours are",
    "Photosynthesis is the process by which",
    "<think>I need to find out who",
)


@functools.cache
def opened(folder):
  shape, _ = weights.read_config(folder)
  return shape, weights.load(folder), Tokenizer.load(folder), tiny.reference_model(folder)


def test_logits_agree(assets):
  shape, params, tokenizer, model = opened(assets / "smollm2-135m")
  ids = tokenizer.encode(" ".join(PROMPTS))[:96]
  ours = tiny.our_logits(shape, params, np.array([ids]))
  np.testing.assert_allclose(ours, tiny.reference_logits(model, [ids]), atol=2e-3)


def test_greedy_text_agrees(assets):
  torch = tiny.torch_here()
  shape, params, tokenizer, model = opened(assets / "smollm2-135m")
  prompts = [tokenizer.encode(p) for p in PROMPTS]
  # A stop that never comes: the reference knows none.
  automaton = build_automaton(tokenizer.token_bytes, [b"\x00never\x00"], shape.vocab_size)
  few = (len(prompts),)
  engine = Engine(shape, EngineShapes(len(prompts), 80, NEW_TOKENS, few, few, (16,)),
                  automaton, tokenizer.eos_ids, tokenizer.size, jnp.float32)
  engine.begin(params, jax.random.key(0), draw.sampling(0.0))
  assert [engine.admit(ids) for ids in prompts] == list(range(len(prompts)))
  engine.insert([Insert(row, ids, NEW_TOKENS, True, (0, row)) for row, ids in enumerate(prompts)])
  written = {}
  while engine.writing:  # a call ends when a few of its rows have stopped
    written |= engine.decode()
  for row, ids in enumerate(prompts):
    with torch.no_grad():
      out = model.generate(
          torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
          max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=sorted(tokenizer.eos_ids),
          pad_token_id=tokenizer.pad_id)
    expected = out[0, len(ids):].tolist()
    assert tokenizer.decode(written[row].ids) == tokenizer.decode(expected)
    assert list(written[row].ids) == expected


def test_the_cast_for_decoding_keeps_the_distribution_close(assets):
  shape, params, tokenizer, _ = opened(assets / "smollm2-135m")
  ids_BL = jnp.array([tokenizer.encode(" ".join(PROMPTS))[:96]])
  positions_BL = jnp.arange(ids_BL.shape[1])[None]

  @functools.partial(jax.jit, static_argnames="dtype")
  def logprobs(params, dtype):
    hidden_BLD, _ = decoder.Decoder(shape, dtype).apply({"params": params}, ids_BL, positions_BL)
    return jax.nn.log_softmax(decoder.logits(params, hidden_BLD, tokenizer.size), axis=-1)

  exact, half = (np.asarray(logprobs(params, d)) for d in (jnp.float32, jnp.bfloat16))
  # KL from the float32 distribution, averaged over positions: well under what a step of training
  # moves the policy by.
  assert np.sum(np.exp(exact) * (exact - half), axis=-1).mean() < 0.01
