"""The value model (critic): the policy's backbone with parameters of its own, and a scalar head."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from searchr1_jax.model import decoder


def from_policy(params: decoder.Params) -> dict[str, Any]:
  """Starts from the policy's weights; the head starts at 0, so every first value is 0."""
  backbone = {k: v for k, v in params.items() if k != "head"}
  width = params["embed"].shape[1]
  head = {"kernel": jnp.zeros((width,), jnp.float32), "bias": jnp.zeros((), jnp.float32)}
  return {"backbone": backbone, "value_head": head}


def values(params: decoder.Params, hidden_BLD: Float[Array, "B L D"]) -> Float[Array, "B L"]:
  """What the head reads from final hidden states: the reward expected from here on, in float32."""
  head = params["value_head"]
  return jnp.einsum("bld,d->bl", hidden_BLD.astype(jnp.float32), head["kernel"]) + head["bias"]
