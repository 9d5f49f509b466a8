"""The jitted programs of a step behind its rollout: what scores tokens, and what learns from them.

`train` runs them and `plan` compiles them for machines that are elsewhere, so they need no more
than a config, a model's shape and a mesh.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from searchr1_jax.algo import update
from searchr1_jax.model import decoder, sharding
from searchr1_jax.model.shapes import DecoderShape
from searchr1_jax.run import setup
from searchr1_jax.types import TokenBatch


class Learning:
  """`allowed_vocab`: ids of the tokenizer, the first of the model's. Nothing is allocated here."""

  def __init__(self, c: ml_collections.ConfigDict, shape: DecoderShape, allowed_vocab: int,
               mesh: jax.sharding.Mesh):
    self.needs_value = c.algo.name == "ppo"
    settings, self.optimizer = setup.policy_settings(c), setup.optimizer(c)
    score_policy, score_value = update.decoder_scores(
        shape, allowed_vocab=allowed_vocab, chunk=c.model.logits_tokens,
        temperature=c.rollout.temperature, dtype=jnp.dtype(c.model.dtype), remat=c.model.remat,
        scan=c.model.scan_layers, mesh=mesh)
    with_entropy = settings.entropy_coef != 0

    def score_tokens(params, batch):
      return score_policy(params, batch, False).logprobs_BL

    def score_reference(params, batch):
      return score_tokens(sharding.to_memory(mesh, params), batch)

    def policy_objective(params, batch, targets):
      scores = score_policy(params, batch, with_entropy)
      return update.policy_objective(scores, batch, targets, settings)

    def value_objective(params, batch, targets):
      return update.value_objective(score_value(params, batch), batch, targets, c.algo.value_clip)

    scoring = functools.partial(jax.jit, out_shardings=sharding.rows(mesh))
    self.score_tokens, self.score_values = scoring(score_tokens), scoring(score_value)
    self.score_reference = (self.score_tokens if c.model.reference_memory == "device"
                            else scoring(score_reference))
    where = dict(mesh=mesh, moments_memory=c.optimizer.moments_memory)
    self.start = update.starter(self.optimizer, **where)
    self.policy_learner = update.Learner(policy_objective, self.optimizer, **where)
    self.value_learner = update.Learner(value_objective, self.optimizer, **where)
    dtype, memory = jnp.dtype(c.model.dtype), c.model.reference_memory
    self.has_reference = bool(c.algo.kl_coef)
    self.base_is_reference = self.has_reference and (dtype, memory) == (jnp.float32, "device")
    self.to_reference = jax.jit(lambda base: sharding.to_memory(
        mesh, jax.tree.map(lambda x: x.astype(dtype), base), memory))

  def reference(self, base: decoder.Params) -> decoder.Params | None:
    """What the KL is measured from: the base in the dtype that it's computed in, if there is a KL.

    The base itself, and no copy of it, where nothing has to change.
    """
    if not self.has_reference:
      return None
    return base if self.base_is_reference else self.to_reference(base)

  def score(self, policy: Any, value: Any | None, reference: Any | None,
            batch: TokenBatch) -> update.Scored:
    """Log-probs and values of a batch's tokens, before any update."""
    old = self.score_tokens(policy, batch)
    ref = old if reference is None else self.score_reference(reference, batch)
    values = jnp.zeros_like(old) if value is None else self.score_values(value, batch)
    return update.Scored(old, ref, values)
