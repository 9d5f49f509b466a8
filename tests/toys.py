"""Small trajectories and a small decoder for tests of the learning side."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from searchr1_jax.algo import collate, update
from searchr1_jax.model import decoder, value
from searchr1_jax.model.shapes import DecoderShape
from searchr1_jax.types import Question, Role, Segment, StopReason, Targets, Trajectory

VOCAB = 23
SHAPE = DecoderShape(vocab_size=VOCAB, width=16, mlp_width=32, layers=2, heads=8, kv_heads=2,
                     head_size=4, rope_theta=1e4, norm_eps=1e-6, tied_embeddings=False,
                     qkv_bias=True, family="qwen2")
SHARE = dict(allowed_vocab=VOCAB - 2, temperature=1.0, dtype=jnp.float32, remat="none")


def trajectory(rng: np.random.Generator, *lengths: int, prompt: int = 4,
               name: str = "q") -> Trajectory:
  """An episode whose segments have these lengths, the policy's and the environment's in turn."""
  draw = lambda n: tuple(int(i) for i in rng.integers(1, VOCAB - 2, n))
  segments = []
  for i, n in enumerate(lengths):
    mine = i % 2 == 0
    scores = tuple(float(x) for x in -rng.random(n)) if mine else ()
    segments.append(Segment(Role.POLICY if mine else Role.ENVIRONMENT, draw(n), scores))
  return Trajectory(Question("toys", name, "?", ("!",)), 0, draw(prompt), tuple(segments),
                    StopReason.ANSWER)


def trajectories(count: int = 8, seed: int = 0) -> list[Trajectory]:
  """Episodes of different lengths, with none to two observations."""
  rng = np.random.default_rng(seed)
  forms = [(3,), (2, 5, 3), (1, 2, 6), (2, 3, 1, 4, 2), (5,), (2, 7, 1), (1,), (3, 2, 2)]
  return [trajectory(rng, *forms[i % len(forms)], prompt=2 + i % 3, name=f"q{i}")
          for i in range(count)]


def policy_and_value(chunk: int = 1024, scan: bool = True, mesh=None):
  """Parameters with life in them (the value's head too), and the two scoring functions."""
  keys = jax.random.split(jax.random.key(0), 3)
  params = jax.tree.map(lambda x: jnp.where(x == 1, x, 8 * x),  # norms stay at 1
                        decoder.init_params(SHAPE, keys[0]))
  critic = value.from_policy(params)
  critic["value_head"] = {"kernel": 0.3 * jax.random.normal(keys[1], (SHAPE.width,)),
                          "bias": jnp.float32(0.1)}
  return params, critic, *update.decoder_scores(SHAPE, chunk=chunk, scan=scan, mesh=mesh,
                                               **SHARE)


def plan(kept, *, lengths=(32,), tokens=1024, aggregation="seq-mean", updates=1, rewards=None,
         taught=None, multiple=1, **weighting):
  """Collated toys; every reward and advantage differs."""
  count = len(kept)
  rewards = np.linspace(-1, 1, count).astype(np.float32) if rewards is None else rewards
  return collate.collate(
      kept, rewards, np.linspace(-1.5, 2, count).astype(np.float32),
      shapes=collate.BatchShapes(tuple(lengths), tokens, multiple), updates=updates, taught_B=taught,
      weighting=collate.Weighting(aggregation, 40, **weighting))


def targets_of(batch, logprobs_BL, values_BL, seed: int = 0) -> Targets:
  """Targets near the current scores, so that clips, KL and returns all play a part."""
  rng = np.random.default_rng(seed)
  near = lambda x, scale: x + jnp.asarray(scale * rng.standard_normal(x.shape), jnp.float32)
  return Targets(near(logprobs_BL, 0.3), near(logprobs_BL, 0.3),
                 batch.advantage_B[:, None] * batch.policy_mask_BL, near(values_BL, 0.3),
                 near(values_BL, 0.8))
