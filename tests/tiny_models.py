"""Small random decoders for the tests, and what PyTorch and transformers make of the same folder."""

from __future__ import annotations

import functools
import pathlib
import random
from typing import Any, Sequence

import jax
import numpy as np
import pytest

from searchr1_jax.model import decoder
from searchr1_jax.model.shapes import DecoderShape, RopeScaling

KINDS = ("qwen2", "qwen3", "llama", "llama3-rope")


def random_shape(kind: str, seed: int) -> DecoderShape:
  """A small shape of that kind, its sizes drawn; every second one ties its embeddings."""
  rng = random.Random(f"{kind} {seed}")
  family = kind.partition("3-")[0] if kind == "llama3-rope" else kind
  kv_heads, shared = rng.choice([(1, 4), (2, 1), (2, 2), (1, 3)])
  # Turns of 2 pi theta^(2i/16) positions: with 32 original ones some features are in each of the
  # three bands (kept below 32/4, slowed beyond 32/1, mixed in between).
  scaling = RopeScaling(8.0, 1.0, 4.0, 32) if kind == "llama3-rope" else None
  return DecoderShape(
      vocab_size=rng.choice([61, 97]), width=rng.choice([24, 48]), mlp_width=rng.choice([32, 56]),
      layers=rng.choice([2, 3]), heads=kv_heads * shared, kv_heads=kv_heads,
      head_size=16 if scaling else rng.choice([8, 10, 16]),
      rope_theta=100.0 if scaling else rng.choice([500.0, 10000.0, 1e6]),
      norm_eps=rng.choice([1e-5, 1e-6]), tied_embeddings=seed % 2 == 1,
      qkv_bias=family == "qwen2", qk_norm=family == "qwen3", rope_scaling=scaling,
      max_positions=256, family=family)


def random_params(shape: DecoderShape, seed: int) -> dict[str, Any]:
  """Parameters of which each counts: biases away from 0, norms from 1, logits a few nats apart."""
  rng = np.random.default_rng(seed)

  def fill(path, leaf):
    names = [p.key for p in path]
    x = rng.standard_normal(leaf.shape).astype(np.float32)
    if names[-1] == "scale":
      return 1 + x * np.float32(0.3)
    if names[-1] == "bias":
      return x * np.float32(0.5)
    if names[-1] == "embed":
      return x
    # Kernels: inputs on the first axis (the first two for o), behind the axis of the layers.
    first = int(names[0] == "layers")
    inputs = leaf.shape[first : first + (2 if "o" in names else 1)]
    return x / np.float32(np.sqrt(np.prod(inputs)))

  blank = jax.eval_shape(lambda: decoder.init_params(shape, jax.random.key(0)))
  return jax.tree.map(jax.numpy.asarray, jax.tree_util.tree_map_with_path(fill, blank))


def our_logits(shape: DecoderShape, params: Any, ids_BL: np.ndarray) -> np.ndarray:
  """Logits of whole rows, all ids allowed."""
  return np.asarray(_forward(params, jax.numpy.asarray(ids_BL, np.int32), shape))


@functools.partial(jax.jit, static_argnums=2)
def _forward(params, ids_BL, shape):
  positions_BL = jax.numpy.broadcast_to(jax.numpy.arange(ids_BL.shape[1]), ids_BL.shape)
  hidden_BLD, _ = decoder.Decoder(shape).apply({"params": params}, ids_BL, positions_BL)
  return decoder.logits(params, hidden_BLD, shape.vocab_size)


def torch_here() -> Any:
  """PyTorch; skips the test where it isn't installed (extra `dev`)."""
  return pytest.importorskip("torch", reason="PyTorch is the reference here: pip install .[dev]")


def reference_model(folder: pathlib.Path) -> Any:
  """The folder as transformers understands it, in float32."""
  torch = torch_here()
  import transformers

  return transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32, attn_implementation="eager").eval()


def reference_logits(model: Any, ids_BL: Sequence[Sequence[int]]) -> np.ndarray:
  """The reference's logits of whole rows."""
  torch = torch_here()
  with torch.no_grad():
    return model(torch.tensor(np.asarray(ids_BL))).logits.numpy()
