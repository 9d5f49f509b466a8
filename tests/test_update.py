"""Objectives and optimizer steps, through the whole decoder."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from searchr1_jax.algo import collate, losses, update
from searchr1_jax.model import logprobs
from searchr1_jax.types import Mean, Targets, UserError

SETTINGS = {
    "ppo": update.PolicySettings(entropy_coef=0.01),
    "grpo": update.PolicySettings(kl_loss_coef=0.05, entropy_coef=0.01),
    "gspo with everything": update.PolicySettings(
        ratio="sequence", kl_loss_coef=0.05, entropy_coef=0.01, llds_coef=0.2, importance_cap=2.0,
        dual_clip=3.0)}


@functools.cache
def toy_models():
  return toys.policy_and_value()


@pytest.fixture(scope="module")
def models():
  return toy_models()


@pytest.fixture(scope="module")
def batch():
  ((only,),) = toys.plan(toys.trajectories(6), lengths=(16,), tokens=6 * 16).minibatches
  only = jax.tree.map(jnp.asarray, only)
  # All positions are scored here, so that it's the masks which keep observations out.
  return dataclasses.replace(only, kept_BP=jnp.broadcast_to(jnp.arange(16), (6, 16)))


@pytest.fixture(scope="module")
def targets(models, batch):
  params, critic, score_policy, score_value = models
  score = jax.jit(lambda p, v, b: (score_policy(p, b, False).logprobs_BL, score_value(v, b)))
  return toys.targets_of(batch, *score(params, critic, batch))


@functools.cache
def everything(settings):
  """A jitted function of batch and targets: both losses, all metrics, all gradients."""
  params, critic, score_policy, score_value = toy_models()

  def both(both_params, batch, targets):
    loss, found = update.policy_objective(
        score_policy(both_params[0], batch, True), batch, targets, settings)
    value_loss, more = update.value_objective(
        score_value(both_params[1], batch), batch, targets, 0.5)
    return loss + value_loss, (loss, value_loss, found, more)

  graded = jax.jit(jax.value_and_grad(both, has_aux=True))
  return lambda batch, targets: graded((params, critic), batch, targets)


def same(a, b) -> bool:
  return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b),
                                                  strict=True))


def near(a, b) -> None:
  """Every leaf to 1e-5 of its own largest number."""
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * max(1e-6, float(jnp.abs(y).max())))


# Masking, through the whole decoder


def other_observation_targets(batch):
  """Other ids as targets wherever the policy did not write (its own stay)."""
  other_BL = jnp.where(batch.policy_mask_BL > 0, batch.targets_BL,
                       (batch.targets_BL + 7) % (toys.VOCAB - 2))
  assert int((other_BL != batch.targets_BL).sum()) > 10
  return dataclasses.replace(batch, targets_BL=other_BL)


def shifted_by_one(batch):
  """What a mistake would look like: the mask of the token that is read, not of its target."""
  late = lambda x: jnp.pad(x[:, :-1], ((0, 0), (1, 0)))
  return dataclasses.replace(batch, policy_mask_BL=late(batch.policy_mask_BL),
                             loss_weight_BL=late(batch.loss_weight_BL))


@pytest.mark.parametrize("name", SETTINGS)
def test_an_observation_is_never_a_target(batch, targets, name):
  of = everything(SETTINGS[name])
  assert same(of(batch, targets), of(other_observation_targets(batch), targets))


@pytest.mark.parametrize("name", SETTINGS)
def test_that_test_would_see_a_mask_shifted_by_one(batch, targets, name):
  of = everything(SETTINGS[name])
  wrong = dataclasses.replace(
      other_observation_targets(batch), policy_mask_BL=shifted_by_one(batch).policy_mask_BL,
      loss_weight_BL=shifted_by_one(batch).loss_weight_BL)
  goals = dataclasses.replace(
      targets, advantages_BL=batch.advantage_B[:, None] * wrong.policy_mask_BL)
  (_, (loss, *_)), grads = of(shifted_by_one(batch), goals)
  (_, (other_loss, *_)), other_grads = of(wrong, goals)
  assert abs(float(loss - other_loss)) > 1e-3
  assert not same(grads[0], other_grads[0])


def test_what_stands_under_the_mask_of_targets_never_counts(batch, targets):
  of = everything(SETTINGS["grpo"])
  poison = lambda x: jnp.where(batch.policy_mask_BL > 0, x, jnp.nan)
  assert same(of(batch, targets), of(batch, jax.tree.map(poison, targets)))


@pytest.mark.parametrize("what", ["policy", "KL", "entropy"])
def test_each_term_moves_the_policy(batch, targets, what):
  # Otherwise the tests above could pass because a term is not there at all.
  flat = dataclasses.replace(targets, advantages_BL=jnp.zeros_like(targets.advantages_BL))
  settings = {"policy": update.PolicySettings(), "KL": update.PolicySettings(kl_loss_coef=1.0),
              "entropy": update.PolicySettings(entropy_coef=1.0)}[what]
  goals = targets if what == "policy" else flat
  _, grads = everything(settings)(batch, goals)
  assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grads[0])) > 1e-4


# Scores


@pytest.mark.parametrize("chunk", [1, 5])
def test_chunks_and_layouts_give_the_same_scores_and_gradients(models, batch, chunk):
  params = models[0]
  def total(score):
    def of(params):
      found = score(params, batch, True)
      return jnp.sum(batch.policy_mask_BL * (found.logprobs_BL - 0.1 * found.entropy_BL)), found
    return jax.jit(jax.value_and_grad(of, has_aux=True))(params)

  whole = total(models[2])
  parts = total(toys.policy_and_value(chunk=chunk, scan=chunk != 5)[2])
  near(parts, whole)


@pytest.mark.parametrize("scan", [True, False])
def test_what_no_mask_reads_need_not_be_scored(models, batch, targets, scan):
  params, critic, score_policy, score_value = toys.policy_and_value(scan=scan)
  few = dataclasses.replace(batch, kept_BP=jnp.asarray(
      collate.kept_positions(np.asarray(batch.policy_mask_BL))))
  assert few.kept_BP.shape == (6, 8) and int((few.kept_BP == 16).sum()) > 6  # half, and not full

  def both(all_params, batch):
    loss, _ = update.policy_objective(score_policy(all_params[0], batch, True), batch, targets,
                                      SETTINGS["grpo"])
    value_loss, _ = update.value_objective(score_value(all_params[1], batch), batch, targets, 0.5)
    return loss, value_loss

  def graded(batch):
    return jax.jit(jax.value_and_grad(lambda p: sum(both(p, batch))))((params, critic))

  near(graded(few), graded(batch))


def test_scores_are_those_of_plain_logits(models, batch):
  hidden_BLD = jax.random.normal(jax.random.key(3), (6, 16, toys.SHAPE.width))
  params = models[0]
  found_BL, entropy_BL = logprobs.target_logprobs(
      params, hidden_BLD, batch.targets_BL, allowed_vocab=toys.VOCAB - 2, temperature=0.7, chunk=5,
      with_entropy=True)
  logits_BLV = (hidden_BLD @ params["head"])[..., : toys.VOCAB - 2] / 0.7
  ones_BL = jnp.ones_like(found_BL)
  np.testing.assert_allclose(found_BL, losses.token_logprobs(logits_BLV, batch.targets_BL),
                             rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(entropy_BL, losses.entropy_BL(logits_BLV, ones_BL), rtol=1e-5,
                             atol=1e-5)


# Learning

RATE = 1e-2


@functools.cache
def rules(**changes):
  """A learner of the policy with AdamW, and its optimizer."""
  rule = update.make_optimizer(**(dict(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01, clip_norm=1.0)
                                  | changes))

  def objective(params, batch, targets):
    return update.policy_objective(toy_models()[2](params, batch, False), batch, targets,
                                   update.PolicySettings())

  return update.Learner(objective, rule), rule


def learner(**changes):
  learn, rule = rules(**changes)
  return learn, update.starter(rule)(toy_models()[0])


def bits(state):
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(
      (state.params, state.opt_state, state.steps))]


@pytest.mark.parametrize("bad", ["advantage", "log-prob", "rate", "weight"])
def test_what_is_not_finite_changes_nothing_but_skipped(batch, targets, bad):
  learn, state = learner()
  state, _ = learn.learn(state, [batch], [targets], RATE)  # moments that are not 0 any more
  before = bits(state)
  poison = lambda x: x.at[0, int(jnp.argmax(batch.policy_mask_BL[0]))].set(jnp.nan)
  case = {
      "advantage": (batch, {"advantages_BL": poison(targets.advantages_BL)}, RATE),
      "log-prob": (batch, {"old_logprobs_BL": poison(targets.old_logprobs_BL)}, RATE),
      "weight": (dataclasses.replace(batch, loss_weight_BL=poison(batch.loss_weight_BL)), {}, RATE),
      "rate": (batch, {}, float("nan"))}[bad]
  state, _ = learn.learn(state, [case[0]], [dataclasses.replace(targets, **case[1])], case[2])
  assert int(state.skipped) == 1 and int(state.steps) == 1
  assert bits(state) == before
  state, _ = learn.learn(state, [batch], [targets], RATE)
  assert (int(state.skipped), int(state.steps)) == (1, 2) and bits(state) != before


def test_a_rate_of_zero_moves_moments_but_no_parameter(batch, targets):
  learn, state = learner()
  params = [np.asarray(x).tobytes() for x in jax.tree.leaves(state.params)]
  state, _ = learn.learn(state, [batch], [targets], 0.0)
  assert [np.asarray(x).tobytes() for x in jax.tree.leaves(state.params)] == params
  assert int(state.steps) == 1


def test_the_first_state_is_a_copy(models, batch, targets):
  learn, state = learner()
  learn.learn(state, [batch], [targets], RATE)  # donates the state's buffers
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(models[0]))


def test_batches_of_a_minibatch_add_up_to_one_step(models):
  kept, ends = toys.trajectories(6), []
  score = jax.jit(lambda params, b: models[2](params, b, False).logprobs_BL)
  for tokens in (6 * 16, 2 * 16):
    (batches,) = toys.plan(kept, lengths=(16,), tokens=tokens).minibatches
    batches = [jax.tree.map(jnp.asarray, b) for b in batches]
    goals = []
    for b in batches:
      now_BL = score(models[0], b)
      goals.append(Targets(now_BL - 0.05, now_BL, b.advantage_B[:, None] * b.policy_mask_BL, now_BL,
                           now_BL))
    # eps 1: an Adam whose first step follows the gradient instead of its sign.
    learn, state = learner(eps=1.0)
    state, found = learn.learn(state, batches, goals, RATE)
    ends.append((state.params, found["grad_norm"].total, found["policy_loss"]))
  assert float(ends[0][1]) > 1e-2
  near(*ends)


@pytest.mark.parametrize("aggregation", ["seq-mean", "token-mean"])
def test_on_policy_the_gradient_is_reinforces(models, aggregation):
  # At policy = old the ratio is 1, nothing is clipped, and d rho = d log p:
  # the gradient is that of -sum weight A log p.
  params, _, score_policy, _ = models
  ((batch,),) = toys.plan(toys.trajectories(6), lengths=(16,), tokens=96,
                          aggregation=aggregation).minibatches
  batch = jax.tree.map(jnp.asarray, batch)
  old_BL = jax.jit(lambda p: score_policy(p, batch, False).logprobs_BL)(params)
  goals = Targets(old_BL, old_BL, batch.advantage_B[:, None] * batch.policy_mask_BL, old_BL, old_BL)

  def ppo(params):
    return update.policy_objective(score_policy(params, batch, False), batch, goals,
                                   update.PolicySettings())[0]

  def reinforce(params):
    return -jnp.sum(batch.loss_weight_BL * batch.advantage_B[:, None]
                    * score_policy(params, batch, False).logprobs_BL)

  ours, plain = (jax.jit(jax.grad(f))(params) for f in (ppo, reinforce))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(
      a, b, rtol=1e-4, atol=1e-6 * float(jnp.abs(b).max())), ours, plain)


# Targets


def scored(plan, seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda b: jnp.asarray(rng.standard_normal(b.inputs_BL.shape), jnp.float32)
  return [[update.Scored(draw(b), draw(b), draw(b)) for b in m] for m in plan.minibatches]


def on_device(plan):
  return dataclasses.replace(plan, minibatches=tuple(
      tuple(jax.tree.map(jnp.asarray, b) for b in m) for m in plan.minibatches))


PPO = dict(kl_coef=0.1, gamma=1.0, lam=1.0, kl_kind="k1")


def test_advantages_are_whitened_over_all_batches_together():
  plan = on_device(toys.plan(toys.trajectories(8), lengths=(9, 32), tokens=64, updates=2))
  targets, _ = update.ppo_targets(plan, scored(plan), compat=False, **PPO)
  flat = [(b, t) for m, ts in zip(plan.minibatches, targets, strict=True)
          for b, t in zip(m, ts, strict=True)]
  assert len(flat) > 3
  values = np.concatenate([np.asarray(t.advantages_BL)[b.policy_mask_BL > 0] for b, t in flat])
  assert abs(values.mean()) < 1e-5 and abs(values.std(ddof=1) - 1) < 1e-5
  # Each batch alone is not at mean 0: the statistics were everybody's.
  alone = [np.asarray(t.advantages_BL)[b.policy_mask_BL > 0].mean() for b, t in flat]
  assert max(map(abs, alone)) > 0.1
  for b, t in flat:
    np.testing.assert_array_equal(np.asarray(t.advantages_BL)[b.policy_mask_BL == 0], 0)


def test_returns_with_gamma_and_lambda_1_are_what_is_still_to_come():
  # R_l = sum over the policy's tokens from l on of (-kl_coef * k1), + the reward at the last.
  plan = on_device(toys.plan(toys.trajectories(3), lengths=(16,), tokens=3 * 16))
  ((batch,),), (((s,),)) = plan.minibatches, scored(plan)
  (((t,),), found) = update.ppo_targets(plan, [[s]], compat=False, **PPO)
  for row in range(3):
    mine = np.flatnonzero(batch.policy_mask_BL[row])
    kl = np.asarray(s.old_logprobs_BL - s.ref_logprobs_BL)[row][mine]
    rewards = -0.1 * kl
    rewards[-1] += float(batch.reward_B[row])
    np.testing.assert_allclose(np.asarray(t.returns_BL)[row][mine],
                               np.cumsum(rewards[::-1])[::-1], rtol=1e-4, atol=1e-5)
  kl = np.asarray(s.old_logprobs_BL - s.ref_logprobs_BL)[np.asarray(batch.policy_mask_BL) > 0]
  np.testing.assert_allclose(float(found["kl_ref"].total), kl.sum(), rtol=1e-4, atol=1e-5)


def test_values_of_observations_reach_no_target():
  plan = on_device(toys.plan(toys.trajectories(6), lengths=(16,), tokens=6 * 16))
  ((batch,),), ((s,),) = plan.minibatches, scored(plan)
  poison = lambda x: jnp.where(batch.policy_mask_BL > 0, x, 1e6)
  mine = lambda scored_: [np.asarray(x)[np.asarray(batch.policy_mask_BL) > 0]
                          for x in jax.tree.leaves(update.ppo_targets(
                              plan, [[scored_]], compat=False, **(PPO | {"lam": 0.9}))[0])]
  assert same(mine(s), mine(update.Scored(*map(poison, s))))


def test_group_targets_spread_a_trajectorys_advantage():
  plan = on_device(toys.plan(toys.trajectories(6), lengths=(16,), tokens=6 * 16))
  ((batch,),) = plan.minibatches
  (((t,),), found) = update.group_targets(plan, scored(plan), kl_kind="k3")
  np.testing.assert_array_equal(
      t.advantages_BL, np.asarray(batch.advantage_B)[:, None] * np.asarray(batch.policy_mask_BL))
  assert float(found["kl_ref"].count) == float(batch.policy_mask_BL.sum())


def test_the_sampler_gap_is_over_the_policys_tokens(batch):
  at = (0, int(jnp.argmax(batch.policy_mask_BL[0])))
  gap = update.sampler_gap(batch, batch.sampler_logprobs_BL.at[at].add(0.25).at[0, 0].add(9.0))
  assert float(gap["max"]) == pytest.approx(0.25, rel=1e-5)
  assert float(gap["mean"].total) == pytest.approx(0.25, rel=1e-5)


def test_metrics_of_parts_add_up():
  one = {"a": Mean(jnp.float32(1), jnp.float32(2))}
  other = {"a": Mean(jnp.float32(3), jnp.float32(4)), "b": one["a"]}
  added = update.add_metrics(one, other)
  assert (float(added["a"].total), float(added["a"].count), float(added["b"].total)) == (4, 6, 1)


def test_an_unknown_ratio_is_named():
  with pytest.raises(UserError, match="ratio is 'row'"):
    update.PolicySettings(ratio="row")
