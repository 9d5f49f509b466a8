"""Parameters and batches on a mesh: the same numbers wherever they live."""

from __future__ import annotations

import pytest

from searchr1_jax.model import sharding
from searchr1_jax.types import UserError

COMPARE = """
import sys
sys.path.insert(0, "tests")
import dataclasses, jax, jax.numpy as jnp, numpy as np
import toys
from searchr1_jax.algo import update
from searchr1_jax.model import decoder, sharding, value

assert len(jax.devices()) == 8
policy, critic, score_policy, score_value = toys.policy_and_value(chunk=8)
((batch,),) = toys.plan(toys.trajectories(8), lengths=(16,), tokens=8 * 16).minibatches
score = jax.jit(lambda p, v, b: (score_policy(p, b, False).logprobs_BL, score_value(v, b)))
targets = jax.tree.map(np.asarray, toys.targets_of(batch, *score(policy, critic, batch)))
settings = update.PolicySettings(kl_loss_coef=0.05, entropy_coef=0.01)

def policy_loss(params, batch, targets):
  return update.policy_objective(score_policy(params, batch, True), batch, targets, settings)[0]

def value_loss(params, batch, targets):
  return update.value_objective(score_value(params, batch), batch, targets, 0.5)[0]

def on(mesh, params, loss):
  placed = jax.device_put(params, sharding.parameter_shardings(mesh, params))
  parts = [len({str(s.index) for s in x.addressable_shards}) if x.ndim else 1
           for x in jax.tree.leaves(placed)]
  rows, goals = sharding.put_batch(mesh, batch), sharding.put_batch(mesh, targets)
  return jax.jit(jax.value_and_grad(loss))(placed, rows, goals), max(parts)

for params, loss in ((policy, policy_loss), (critic, value_loss)):
  alone, parts = on(sharding.make_mesh(1, 1, 1), params, loss)
  assert parts == 1 and abs(float(alone[0])) > 1e-3
  for shape in ((2, 2, 2), (1, 8, 1)):
    spread, parts = on(sharding.make_mesh(*shape), params, loss)
    assert parts >= 4, parts
    np.testing.assert_allclose(spread[0], alone[0], rtol=1e-5)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(alone[1]), jax.tree.leaves(spread[1])):
      np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-5,
                                 atol=1e-5 * float(np.abs(a).max()), err_msg=str((shape, path)))

# Every parameter and moment of every family is in the table: on this mesh none is left whole but
# what has no axis to spread (a scalar, a norm over one head).
for family in ({}, dict(tied_embeddings=True), dict(qkv_bias=False, qk_norm=True, family="qwen3")):
  params = decoder.init_params(dataclasses.replace(toys.SHAPE, **family), jax.random.key(0))
  rule = update.make_optimizer(b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.0, clip_norm=1.0)
  for tree in (params, value.from_policy(params)):
    state = update.init_train_state(tree, rule, sharding.make_mesh(2, 2, 2))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
      name = jax.tree_util.keystr(path)
      whole = leaf.sharding.is_fully_replicated
      assert whole == (leaf.ndim == 0 or "q_norm" in name or "k_norm" in name), name
print("agreed")
"""


def test_eight_devices_find_the_loss_and_gradient_of_one(run_python):
  assert "agreed" in run_python(COMPARE, devices=8, timeout=600).stdout


@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 0, 1)])
def test_a_mesh_that_cannot_be_is_named(sizes):
  with pytest.raises(UserError, match="mesh .* needs . devices, there are 1"):
    sharding.make_mesh(*sizes)
