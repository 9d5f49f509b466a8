"""Parameters and batches on a mesh: the same numbers wherever they live."""

from __future__ import annotations

import pytest

from searchr1_jax.model import sharding
from searchr1_jax.types import UserError

START = """
import sys
sys.path.insert(0, "tests")
import dataclasses, functools, jax, jax.numpy as jnp, numpy as np
import toys
from searchr1_jax.algo import update
from searchr1_jax.model import decoder, sharding, value
from searchr1_jax.types import Targets

assert len(jax.devices()) == 8
settings = update.PolicySettings(kl_loss_coef=0.05, entropy_coef=0.01)

@functools.cache
def parts(mesh):
  # The toys' parameters, and what is computed with them on a mesh: scores and losses.
  policy, critic, score_policy, score_value = toys.policy_and_value(chunk=40, mesh=mesh)
  policy_loss = lambda params, batch, targets: update.policy_objective(
      score_policy(params, batch, True), batch, targets, settings)
  value_loss = lambda params, batch, targets: update.value_objective(
      score_value(params, batch), batch, targets, 0.5)
  return policy_loss, value_loss, score_policy, score_value

policy, critic, *_ = toys.policy_and_value()

def close(found, wanted, what):
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found)):
    a, b = np.asarray(a), np.asarray(b)
    np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5 * np.abs(a).max(),
                               err_msg=f"{what} {jax.tree_util.keystr(path)}")

on = lambda mesh, params: jax.device_put(params, sharding.parameter_shardings(mesh, params))
"""

MESHES = START + """
((batch,),) = toys.plan(toys.trajectories(8), lengths=(16,), tokens=8 * 16).minibatches
_, _, *scores = parts(None)
score = jax.jit(lambda p, v, b: (scores[0](p, b, False).logprobs_BL, scores[1](v, b)))
targets = jax.tree.map(np.asarray, toys.targets_of(batch, *score(policy, critic, batch)))
reference = jax.tree.map(lambda x: 0.9 * x, policy)

@functools.partial(jax.jit, static_argnums=3)
def everything(models, batch, targets, mesh):
  # Policy and value with their gradients, and the reference's scores.
  policy_loss, value_loss, score_policy, _ = parts(mesh)
  both = lambda params: [policy_loss(params[0], batch, targets)[0],
                         value_loss(params[1], batch, targets)[0]]
  grads = jax.grad(lambda params: sum(both(params)))(models[:2])
  return both(models[:2]), score_policy(models[2], batch, True), grads

def run(shape):
  mesh = sharding.make_mesh(*shape)
  models = on(mesh, (policy, critic, reference))
  pieces = [len({str(s.index) for s in x.addressable_shards}) if x.ndim else 1
            for x in jax.tree.leaves(models)]
  inputs = (models, *sharding.put_batch(mesh, (batch, targets)))
  compiled = everything.lower(*inputs, mesh).compile()
  return compiled(*inputs), max(pieces), models, compiled.cost_analysis()["flops"]

alone, pieces, _, work = run((1, 1, 1))
assert pieces == 1 and min(abs(float(x)) for x in alone[0]) > 1e-3
for shape, most in (((8, 1, 1), 1), ((1, 8, 1), 8), ((1, 1, 8), 8), ((2, 2, 2), 4), ((1, 4, 2), 8)):
  spread, pieces, models, share = run(shape)
  assert pieces == most, (shape, pieces)
  # No device does the work of another: an eighth each, and what key-value heads are in the way of.
  assert share < 0.25 * work, (shape, share / work)
  close(spread, alone, shape)
  # 2 key-value heads cannot be spread over 8 devices: every device then has both.
  keys = models[0]["layers"]["attention"]["k"]["kernel"].sharding.spec
  assert ("tensor" in keys) == (shape[2] == 2), (shape, keys)
print("agreed")
"""

SPLITS = START + """
everyone, found = toys.trajectories(64), {}
gap = lambda a, b: max(float(jnp.abs(x - y).max() / jnp.abs(y).max())
                       for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))

def both(models, batch, targets):
  (loss, found), (value, more) = (of(params, batch, targets) for of, params in zip(
      parts(mesh), models))
  return loss + value, found | more

def gradients(learner, mesh, aggregation, lengths, rows):
  # What the batches of one mini-batch add up to, and how many they are.
  (batches,) = toys.plan(everyone, lengths=lengths, tokens=rows * 16, aggregation=aggregation,
                         multiple=8).minibatches
  models = on(mesh, (policy, critic))
  sums = None if len(batches) == 1 else learner.zeros(models)
  for b in batches:
    near_BL = np.where(b.policy_mask_BL > 0, b.sampler_logprobs_BL - 2.5, 0).astype(np.float32)
    goals = Targets(near_BL, near_BL - 0.1, b.advantage_B[:, None] * b.policy_mask_BL,
                    near_BL * 0.1, near_BL * 0.2 + 1)
    b, goals = sharding.put_batch(mesh, (b, goals))
    sums, _ = learner.gradient(models, sums, b, goals)
  return sums, len(batches)

for shape in ((1, 1, 1), (2, 2, 2)):
  mesh = sharding.make_mesh(*shape)
  rule = update.make_optimizer(b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.0, clip_norm=1.0)
  of = functools.partial(gradients, update.Learner(both, rule, mesh), mesh)
  spread = mesh.size > 1  # fewer cases there: each compiles for eight devices
  for aggregation in ("token-mean", "seq-mean")[: 1 if spread else 2]:
    whole, count = of(aggregation, (16,), 64)
    assert count == 1
    close(whole, found.setdefault(aggregation, whole), shape)
    for lengths, rows, wanted in (((16,), 32, 2), ((16,), 8, 8), ((8, 16), 16, None))[spread:]:
      split, count = of(aggregation, lengths, rows)
      assert count == wanted or wanted is None and count > 3, count
      close(split, whole, (shape, aggregation, lengths, rows))
  # What the mean of each micro-batch gives, averaged, is another gradient.
  means = [of("microbatch-token-mean", (16,), rows)[0] for rows in (64, 8)]
  assert gap(*means) > 0.01, gap(*means)
print("agreed")
"""

PLACES = START + """
# Every parameter and moment of every family is in the table: on this mesh none is left whole but
# what has no axis to spread (a scalar, a norm over one head).
mesh = sharding.make_mesh(2, 2, 2)
rule = update.make_optimizer(b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.0, clip_norm=1.0)
for family in ({}, dict(tied_embeddings=True), dict(qkv_bias=False, qk_norm=True, family="qwen3")):
  params = decoder.init_params(dataclasses.replace(toys.SHAPE, **family), jax.random.key(0))
  for tree in (params, value.from_policy(params)):
    state = update.starter(rule, mesh)(tree)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
      name = jax.tree_util.keystr(path)
      whole = leaf.sharding.is_fully_replicated
      assert whole == (leaf.ndim == 0 or "q_norm" in name or "k_norm" in name), name

# Moments in the host's pinned memory: the same updates, and they are there before and after.
((batch,),) = toys.plan(toys.trajectories(8), lengths=(16,), tokens=8 * 16).minibatches
flat_BL = np.where(batch.policy_mask_BL > 0, -2.5, 0).astype(np.float32)
goals = Targets(flat_BL, flat_BL, batch.advantage_B[:, None] * batch.policy_mask_BL, flat_BL, flat_BL)
batch, goals = sharding.put_batch(mesh, (batch, goals))
ends = []
for memory in sharding.MEMORIES:
  state = update.starter(rule, mesh, memory)(on(mesh, policy))
  learner = update.Learner(parts(mesh)[0], rule, mesh, memory)
  for _ in range(2):
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.ndim}
    assert kinds == {memory}, kinds
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.params)} == {"device"}
    old, (state, _) = state, learner.learn(state, [batch], [goals], 1e-2)
    assert all(x.is_deleted() for x in jax.tree.leaves((old.params, old.opt_state)))
  for moment in (x for x in jax.tree.leaves(state.opt_state) if x.ndim):
    assert float(jnp.abs(jax.device_put(moment, jax.devices()[0])).max()) > 0
  ends.append(jax.tree.map(np.asarray, state))
  assert learner.apply._cache_size() == 1
jax.tree.map(np.testing.assert_array_equal, *ends)

# The reference there: scored through a copy on the devices, bit for bit.
stowed = jax.device_put(policy, sharding.parameter_shardings(mesh, policy, "pinned_host"))
scores = lambda params, b: parts(mesh)[2](sharding.to_memory(mesh, params), b, False).logprobs_BL
np.testing.assert_array_equal(jax.jit(scores)(stowed, batch), jax.jit(scores)(on(mesh, policy), batch))
print("agreed")
"""


@pytest.mark.parametrize("code", [MESHES, pytest.param(SPLITS, marks=pytest.mark.slow), PLACES],
                         ids=["meshes", "splits", "places"])
def test_eight_devices_agree_with_one(run_python, code):
  assert "agreed" in run_python(code, devices=8, timeout=900).stdout


@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 0, 1)])
def test_a_mesh_that_cannot_be_is_named(sizes):
  with pytest.raises(UserError, match="mesh .* needs . devices, there are 1"):
    sharding.make_mesh(*sizes)
