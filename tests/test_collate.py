"""Collation: one shift, one mask, one gradient however the rows are split."""

from __future__ import annotations

import dataclasses

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from configs import base
from searchr1_jax.algo import collate, losses, update
from searchr1_jax.types import Question, Role, Segment, StopReason, Targets, Trajectory, UserError

ONE = Trajectory(
    Question("d", "0", "?", ("!",)), 0, (10, 11, 12),
    (Segment(Role.POLICY, (20, 21), (-0.1, -0.2)), Segment(Role.ENVIRONMENT, (30, 31, 32)),
     Segment(Role.POLICY, (22,), (-0.3,))), StopReason.ANSWER)


def only_batch(plan):
  ((batch,),) = plan.minibatches
  return batch


def test_the_one_shift():
  b = only_batch(toys.plan([ONE], lengths=(10,), tokens=20, multiple=2))
  # Position l reads token l and speaks of token l + 1; the second row and the tail are empty.
  np.testing.assert_array_equal(b.inputs_BL[0], [10, 11, 12, 20, 21, 30, 31, 32, 22, 0])
  np.testing.assert_array_equal(b.targets_BL[0], [11, 12, 20, 21, 30, 31, 32, 22, 0, 0])
  np.testing.assert_array_equal(b.policy_mask_BL[0], [0, 0, 1, 1, 0, 0, 0, 1, 0, 0])
  np.testing.assert_array_equal(b.response_mask_BL[0], [0, 0, 1, 1, 1, 1, 1, 1, 0, 0])
  np.testing.assert_allclose(b.sampler_logprobs_BL[0], [0, 0, -.1, -.2, 0, 0, 0, -.3, 0, 0])
  np.testing.assert_array_equal(b.value_mask_BL, b.policy_mask_BL)
  np.testing.assert_array_equal(b.lengths_B, [9, 0])
  # 3 of 10 positions are kept, with room for a half; the rest names one that isn't there.
  np.testing.assert_array_equal(b.kept_BP, [[2, 3, 7, 10, 10], [10] * 5])
  for field in dataclasses.fields(b):
    if field.name != "kept_BP":
      assert not getattr(b, field.name)[1].any(), field.name


def test_without_masked_observations_the_whole_response_is_the_policys():
  b = only_batch(toys.plan([ONE], mask_observations=False))
  np.testing.assert_array_equal(b.policy_mask_BL, b.response_mask_BL)


def test_compat_trains_values_on_the_response_and_the_position_behind_it():
  b = only_batch(toys.plan([ONE], lengths=(10,), compat=True))
  np.testing.assert_array_equal(b.value_mask_BL[0], [0, 0, 1, 1, 1, 1, 1, 1, 1, 0])


@hypothesis.given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5), min_size=1,
                           max_size=9), st.integers(1, 5), st.integers(0, 99))
def test_what_counts_is_what_the_policy_sampled(forms, prompt, seed):
  rng = np.random.default_rng(seed)
  kept = [toys.trajectory(rng, *form, prompt=prompt) for form in forms]
  plan = toys.plan(kept, lengths=(8, 16, 40), tokens=40)
  counted = []
  for batch in plan.minibatches[0]:
    mine_BL = batch.policy_mask_BL > 0
    for row in range(len(mine_BL)):
      counted.append((tuple(batch.targets_BL[row][mine_BL[row]].tolist()),
                      tuple(batch.sampler_logprobs_BL[row][mine_BL[row]].tolist())))
    np.testing.assert_array_equal(batch.loss_weight_BL[~mine_BL], 0)
  sampled = [(sum((s.ids for s in t.segments if s.role is Role.POLICY), ()),
              tuple(np.float32(p) for s in t.segments for p in s.sampler_logprobs)) for t in kept]
  assert sorted(c for c in counted if c[0]) == sorted(sampled)


AGGREGATIONS = ("seq-mean", "token-mean", "seq-sum-norm")
SPLITS = {"1 batch": ((32,), 8 * 32), "2 batches": ((32,), 4 * 32), "8 batches": ((32,), 32),
          "buckets": ((6, 9, 13, 32), 32)}


def toy_gradient(plan, mean_of_batches: bool = False):
  """Gradients of a policy and of a value that are tables of numbers by token and position."""
  def objective(params, b):
    scores_BL = params["by_id"][b.inputs_BL] * params["by_target"][b.targets_BL]
    flat = jnp.zeros_like(scores_BL)
    advantages_BL = b.advantage_B[:, None] * b.policy_mask_BL
    goals = Targets(flat - 0.1, flat, advantages_BL, flat, b.reward_B[:, None] + flat)
    policy, _ = update.policy_objective(update.Scores(scores_BL, None), b, goals,
                                        update.PolicySettings(kl_loss_coef=0.1))
    critic, _ = update.value_objective(scores_BL, b, goals, 0.5)
    if mean_of_batches:  # what must not be done: each batch its own mean
      weight_BL = losses.aggregation_weights(
          b.policy_mask_BL, "microbatch-token-mean", sequences=1, tokens=1, max_episode_tokens=1,
          micro_batches=len(plan.minibatches[0]))
      policy = losses.weighted_sum(scores_BL * advantages_BL, jnp.asarray(weight_BL),
                                   b.policy_mask_BL)
    return policy + critic

  rng = np.random.default_rng(1)
  params = {k: jnp.asarray(0.5 * rng.standard_normal(toys.VOCAB), jnp.float32)
            for k in ("by_id", "by_target")}
  grads = [jax.jit(jax.grad(objective))(params, jax.tree.map(jnp.asarray, b))
           for m in plan.minibatches for b in m]
  return jax.tree.map(lambda *xs: sum(xs[1:], xs[0]), *grads)


def furthest(a, b) -> float:
  """The largest difference, relative to the largest number."""
  gaps = jax.tree.map(lambda x, y: jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(x)), a, b)
  return float(max(jax.tree.leaves(gaps)))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_one_gradient_however_the_rows_are_split(aggregation):
  kept, plans = toys.trajectories(8), {}
  for name, (lengths, tokens) in SPLITS.items():
    plans[name] = toys.plan(kept, lengths=lengths, tokens=tokens, aggregation=aggregation)
  assert [len(p.minibatches[0]) for p in plans.values()][:3] == [1, 2, 8]
  assert len({b.inputs_BL.shape for b in plans["buckets"].minibatches[0]}) > 2
  whole = toy_gradient(plans["1 batch"])
  for name in list(SPLITS)[1:]:
    assert furthest(whole, toy_gradient(plans[name])) < 1e-5, name


def test_a_mean_of_each_batch_would_depend_on_the_split():
  kept = toys.trajectories(8)
  one, two = (toys.plan(kept, lengths=(32,), tokens=n * 32, aggregation="token-mean")
              for n in (8, 4))
  assert furthest(toy_gradient(one, True), toy_gradient(two, True)) > 1e-2


@pytest.mark.parametrize("aggregation, share", [
    # 8 episodes in 2 mini-batches of 4; the longest is (2, 3, 1, 4, 2): 5 policy tokens of
    # 3 + (2 + 3) + (1 + 6) + 5 = 20 in its mini-batch; 40 tokens an episode at most.
    ("seq-mean", 1 / 5 / 4), ("token-mean", 1 / 20), ("seq-sum-norm", 1 / 40 / 4)])
def test_denominators_are_those_of_the_whole_minibatch(aggregation, share):
  plan = toys.plan(toys.trajectories(8), lengths=(32,), tokens=32, updates=2,
                   aggregation=aggregation)
  first = plan.minibatches[0][0]
  np.testing.assert_allclose(first.loss_weight_BL[first.policy_mask_BL > 0], share, rtol=1e-6)
  assert len(plan.minibatches) == 2
  for batches in plan.minibatches:  # the value's weights are a token mean, whatever the policy's
    weights = np.concatenate([b.value_weight_BL[b.value_mask_BL > 0] for b in batches])
    np.testing.assert_allclose(weights, 1 / len(weights), rtol=1e-6)


def test_the_published_mean_is_of_each_batch():
  plan = toys.plan(toys.trajectories(8), lengths=(32,), tokens=4 * 32,
                   aggregation="microbatch-token-mean")
  assert [float(b.loss_weight_BL.sum()) for b in plan.minibatches[0]] == pytest.approx([.5, .5])
  assert [float(b.value_weight_BL.sum()) for b in plan.minibatches[0]] == pytest.approx([.5, .5])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_rows_that_teach_nothing_stay_in_the_denominators(aggregation):
  kept, taught = toys.trajectories(8), np.arange(8) % 3 != 0
  all_rows = toys.plan(kept, aggregation=aggregation, tokens=256)
  some = toys.plan(kept, aggregation=aggregation, tokens=256, taught=taught)
  weights = lambda p: {tuple(i[:n].tolist()): w for b in p.minibatches[0]
                       for i, n, w in zip(b.inputs_BL, b.lengths_B, b.loss_weight_BL) if n}
  before, after = weights(all_rows), weights(some)
  assert set(after) == {t.ids for t, use in zip(kept, taught) if use}
  for ids, weight_L in after.items():
    np.testing.assert_array_equal(weight_L, before[ids])


def test_a_prompt_that_fills_its_episode_counts_and_is_not_trained():
  kept = toys.trajectories(4)
  question = dataclasses.replace(kept[0], prompt_ids=tuple(range(5000)), segments=())
  plan, usual = (toys.plan([*kept, t], aggregation="seq-mean") for t in (question, kept[0]))
  assert sum((b.lengths_B > 0).sum() for b in plan.minibatches[0]) == 4
  share = lambda p: [w for b in p.minibatches[0] for w in b.loss_weight_BL.sum(1) if w]
  assert share(plan) == pytest.approx([.2] * 4) and share(usual) == pytest.approx([.2] * 5)


def test_a_minibatch_that_teaches_nothing_is_left_out():
  taught = np.arange(8) >= 4
  plan = toys.plan(toys.trajectories(8), updates=2, taught=taught)
  assert len(plan.minibatches) == 1
  nothing = toys.plan(toys.trajectories(8), taught=np.zeros(8, bool))
  assert nothing.minibatches == () and nothing.padding_share == 0


def test_padding_share_counts_empty_rows_too():
  # 9 tokens in 2 rows of 10.
  assert toys.plan([ONE], lengths=(10,), tokens=20, multiple=2).padding_share == pytest.approx(1 - 9 / 20)


@hypothesis.given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 4))
def test_buckets_use_only_the_closed_list_and_lose_no_row(lengths, multiple):
  shapes = collate.BatchShapes((5, 16, 40), 64, multiple)
  groups = collate.bucket(lengths, shapes)
  assert sorted(i for rows, _, _ in groups for i in rows) == list(range(len(lengths)))
  closed = {(rows, length) for rows, length, _ in shapes.all()}
  for rows, size, length in groups:
    assert (size, length) in closed and 0 < len(rows) <= size
    assert max(lengths[i] for i in rows) <= length
  assert all(rows % multiple == 0 for rows, _, _ in shapes.all())


def test_the_cut_with_the_least_padding_is_found():
  # Batches of 8 x 10, 2 x 10, 16 x 5 and 4 x 5. Two long rows and two short ones: 2 x 10 + 4 x 5
  # = 40 positions, where one batch for all would take 80.
  shapes = collate.BatchShapes((5, 10), 80)
  groups = collate.bucket([9, 3, 10, 4], shapes)
  assert [g[0] for g in groups] == [[2, 0], [3, 1]] and sum(r * n for _, r, n in groups) == 40
  # Five rows of 192, two of 352 or one of 512: for one short row the longest is the least.
  hard = collate.BatchShapes((192, 352, 512), 3840)
  assert collate.bucket([100], hard) == [([0], 1, 512)]
  # Nine short ones: 4 + 4 + 4 rows of 5 (60) beat one batch of 16 (80).
  assert [g[1:] for g in collate.bucket([5] * 9, shapes)] == [(4, 5)] * 3


@pytest.mark.parametrize("median, spread", [(900, 0.3), (1300, 0.45), (2200, 0.5)])
def test_the_shipped_lengths_leave_at_most_15_percent_padding(median, spread):
  c = base.get_config()
  rng = np.random.default_rng(0)
  lengths = np.clip(np.exp(rng.normal(np.log(median), spread, 256)), 250, 4096).astype(int).tolist()
  groups = collate.bucket(lengths, collate.BatchShapes(tuple(c.batch.lengths), c.batch.tokens, 8))
  assert 1 - sum(lengths) / sum(rows * length for _, rows, length in groups) <= 0.15


@hypothesis.given(st.integers(1, 60), st.data())
def test_minibatches_are_even_and_lose_no_row(count, data):
  updates = data.draw(st.integers(1, count))
  runs = collate.split_minibatches(count, updates)
  assert [i for run in runs for i in run] == list(range(count))
  assert len(runs) == updates and max(map(len, runs)) - min(map(len, runs)) <= 1


@pytest.mark.parametrize("call, says", [
    (lambda: toys.plan([ONE], lengths=(8,)), "9 tokens fits no update length"),
    (lambda: toys.plan([ONE], updates=2), "1 episodes cannot make 2 updates"),
    (lambda: toys.plan([]), "no trajectory"),
    (lambda: toys.plan([ONE], aggregation="mean"), "unknown aggregation 'mean'"),
    (lambda: collate.BatchShapes((8, 4), 32), "rising"),
    (lambda: collate.BatchShapes((), 32), "at least one")])
def test_mistakes_are_named(call, says):
  with pytest.raises(UserError, match=says):
    call()
