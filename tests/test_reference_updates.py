"""Whole updates against those of the reference PyTorch implementation, in compat arithmetic.

The models are the file's toys, logits = (E[ids] + P[positions]) W^T + b; everything else (losses,
weights, accumulation, clipping, AdamW) is ours. No number of the file stands here.
"""

from __future__ import annotations

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchr1_jax.algo import collate, losses, update
from searchr1_jax.types import (
    Question, Role, Segment, StopReason, Targets, TokenBatch, Trajectory)

FILE = pathlib.Path(__file__).parent / "fixtures" / "reference_numbers.json"
SEEDS = json.loads(FILE.read_text(encoding="utf-8"))["per_seed"]
KINDS = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}

ACTORS = [pytest.param(case, id=f"seed{seed}-{case['case']}")
          for seed, of in SEEDS.items() for case in of["actor_update"]]
# A critic's optimizer is described once, with the actors of its seed.
CRITICS = [pytest.param(of["critic_update"] | {"optimizer": of["actor_update"][0]["optimizer"]},
                        id=f"seed{seed}") for seed, of in SEEDS.items()]


VOCAB = 10**6  # of ids in general: a toy's input is position * VOCAB + id


def f32(x) -> np.ndarray:
  return np.asarray(x, np.float32)


def optimizer_of(case) -> tuple[float, object]:
  """The rate, and our optimizer, from a text such as `AdamW lr=… betas=(…,…) eps=… wd=…`."""
  text = case["optimizer"]
  number = r"([-+.\deE]+)"
  read = lambda pattern: [float(x) for x in re.search(pattern, text).groups()]
  (rate,), (b1, b2) = read(rf"lr={number}"), read(rf"betas=\({number}, *{number}\)")
  (eps,), (decay,) = read(rf"eps={number}"), read(rf"wd={number}")
  assert "AdamW" in text and "decoupled" in text
  return rate, update.make_optimizer(b1=b1, b2=b2, eps=eps, weight_decay=decay,
                                     clip_norm=case["config"]["grad_clip"])


class Rows:
  """The file's rows as ours: its response column j is our position `first` + j."""

  def __init__(self, case):
    i = case["inputs"]
    self.ids_BL = np.asarray(i["input_ids"], np.int32)
    self.positions_BL = np.asarray(i["position_ids"], np.int32)
    self.length, self.responses = self.ids_BL.shape[1], np.shape(i["responses"])[1]
    self.first = self.length - self.responses - 1
    self.attention_BL = f32(i["attention_mask"])

  def laid(self, columns_BT) -> np.ndarray:
    return np.pad(f32(columns_BT), ((0, 0), (self.first, 1)))

  def picked(self, x_BL) -> np.ndarray:
    return np.asarray(x_BL)[:, self.first : self.length - 1]

  def batch(self, rows: slice, policy_BL, value_BL, micro_batches: int) -> TokenBatch:
    weigh = lambda mask_BL: losses.aggregation_weights(
        mask_BL, "microbatch-token-mean", sequences=1, tokens=1, max_episode_tokens=1,
        micro_batches=micro_batches)
    policy_BL, value_BL = policy_BL[rows], value_BL[rows]
    ids_BL, flat_B = self.ids_BL[rows], np.zeros(len(policy_BL), np.float32)
    return jax.tree.map(jnp.asarray, TokenBatch(
        inputs_BL=self.positions_BL[rows] * VOCAB + ids_BL, targets_BL=np.pad(ids_BL[:, 1:], ((0, 0), (0, 1))),
        lengths_B=self.attention_BL[rows].sum(1).astype(np.int32),
        kept_BP=np.broadcast_to(np.arange(self.length, dtype=np.int32), ids_BL.shape),
        policy_mask_BL=policy_BL, response_mask_BL=policy_BL, value_mask_BL=value_BL,
        loss_weight_BL=weigh(policy_BL), value_weight_BL=weigh(value_BL),
        sampler_logprobs_BL=np.zeros_like(policy_BL), reward_B=flat_B, advantage_B=flat_B))


def toy_logits(params, batch: TokenBatch):
  """A decoder's positions are implied; this toy's are given, and travel inside its inputs."""
  hidden_BLD = params["E"][batch.inputs_BL % VOCAB] + params["P"][batch.inputs_BL // VOCAB]
  return jnp.einsum("bld,vd->blv", hidden_BLD, params["W"]) + params["b"][None, None]


def score_policy(params, batch) -> update.Scores:
  logits_BLV = toy_logits(params, batch)
  return update.Scores(losses.token_logprobs(logits_BLV, batch.targets_BL),
                       losses.entropy_BL(logits_BLV, batch.policy_mask_BL))


def score_value(params, batch):
  return toy_logits(params, batch)[..., 0]


def run_updates(case, rows: Rows, objective, targets, policy_BL, value_BL):
  """All mini-batches in order; metrics of each micro-batch, gradient norms, final parameters."""
  config = case["config"]
  mini, micro = config["ppo_mini_batch_size"], config["ppo_micro_batch_size"]
  rate, rule = optimizer_of(case)
  learner = update.Learner(objective, rule)
  measure = jax.jit(objective)
  state = update.starter(rule)(
      jax.tree.map(lambda x: jnp.asarray(f32(x)), dict(case["initial_params"]),
                   is_leaf=lambda x: isinstance(x, list)))
  found, norms = [], []
  for start in range(0, len(rows.ids_BL), mini):
    parts = [slice(at, at + micro) for at in range(start, start + mini, micro)]
    batches = [rows.batch(p, policy_BL, value_BL, len(parts)) for p in parts]
    goals = [jax.tree.map(lambda x: jnp.asarray(x[p]), targets) for p in parts]
    found += [measure(state.params, b, goal)[1] for b, goal in zip(batches, goals)]
    state, learned = learner.learn(state, batches, goals, rate)
    norms.append(learned["grad_norm"].total)
  assert int(state.skipped) == 0
  return found, norms, state.params, rate


def agree(found, metrics, names):
  """Our undivided means, one a micro-batch, with the file's lists."""
  for ours, theirs in names.items():
    divided = [float(f[ours].total / f[ours].count) for f in found]
    theirs = metrics[theirs] if isinstance(metrics[theirs], list) else [metrics[theirs]]
    # Beside 0, a millionth of the terms (nats, errors of about 1) that add up to the mean.
    np.testing.assert_allclose(divided[-len(theirs):], f32(theirs), rtol=1e-5, atol=1e-6,
                               err_msg=ours)


def agree_params(ours, theirs, rate):
  # Where the gradient is tiny Adam's first step is a sign: 1 % of a step there.
  for name, numbers in theirs.items():
    np.testing.assert_allclose(ours[name], f32(numbers), rtol=1e-5, atol=0.01 * rate, err_msg=name)


def actor_parts(case):
  rows, config, given = Rows(case), case["config"], case["inputs"]
  policy_BL = rows.laid(given["loss_mask"] if config["state_masking"]
                        else rows.attention_BL[:, -rows.responses:])
  settings = update.PolicySettings(
      clip_low=config["clip_ratio"], clip_high=config["clip_ratio"],
      entropy_coef=config["entropy_coeff"], kl_kind=KINDS[config["kl_loss_type"]],
      kl_loss_coef=config["kl_loss_coef"] if config["use_kl_loss"] else 0.0, compat=True)
  zeros_BL = np.zeros_like(policy_BL)
  targets = Targets(rows.laid(given["old_log_probs"]), rows.laid(given["ref_log_prob"]),
                    rows.laid(given["advantages"]), zeros_BL, zeros_BL)

  def objective(params, batch, goal):
    return update.policy_objective(score_policy(params, batch), batch, goal, settings)

  return rows, policy_BL, objective, targets


@pytest.mark.parametrize("case", ACTORS)
def test_the_toy_is_the_references(case):
  rows, policy_BL, *_ = actor_parts(case)
  params = {k: jnp.asarray(f32(v)) for k, v in case["initial_params"].items()}
  everything = slice(0, len(rows.ids_BL))
  batch = rows.batch(everything, policy_BL, policy_BL, 1)
  ours_BT = rows.picked(score_policy(params, batch).logprobs_BL)
  real_BT = rows.attention_BL[:, -rows.responses:] > 0
  np.testing.assert_allclose(ours_BT[real_BT], f32(case["log_probs_before"])[real_BT], rtol=1e-5,
                             atol=1e-6)


@pytest.mark.parametrize("case", ACTORS)
def test_actor_update(case):
  rows, policy_BL, objective, targets = actor_parts(case)
  found, norms, params, rate = run_updates(case, rows, objective, targets, policy_BL, policy_BL)
  metrics = case["metrics"]
  names = {"entropy": "actor/entropy_loss", "policy_loss": "actor/pg_loss",
           "clip_fraction": "actor/pg_clipfrac", "kl_old": "actor/ppo_kl"}
  if case["config"]["use_kl_loss"]:
    names["kl_loss"] = "actor/kl_loss"  # the reference keeps the last micro-batch's alone
  agree(found, metrics, names)
  np.testing.assert_allclose(norms, f32(metrics["actor/grad_norm"]), rtol=1e-5)
  agree_params(params, case["final_params"], rate)


@pytest.mark.parametrize("case", CRITICS)
def test_critic_update(case):
  rows, given = Rows(case), case["inputs"]
  value_BL = rows.laid(rows.attention_BL[:, -rows.responses - 1 : -1])
  np.testing.assert_array_equal(rows.picked(value_BL), f32(case["value_mask"]))
  zeros_BL = np.zeros_like(value_BL)
  targets = Targets(zeros_BL, zeros_BL, zeros_BL, rows.laid(given["values"]),
                    rows.laid(given["returns"]))

  def objective(params, batch, goal):
    return update.value_objective(score_value(params, batch), batch, goal,
                                  case["config"]["cliprange_value"])

  start = {k: jnp.asarray(f32(v)) for k, v in case["initial_params"].items()}
  batch = rows.batch(slice(0, len(rows.ids_BL)), value_BL, value_BL, 1)
  first_BT = rows.picked(score_value(start, batch))
  mine = rows.picked(value_BL) > 0
  np.testing.assert_allclose(first_BT[mine], f32(case["compute_values_output"])[mine], rtol=1e-5,
                             atol=1e-6)
  policy_BL = rows.laid(rows.attention_BL[:, -rows.responses:])  # another mask, which is not read
  found, norms, params, rate = run_updates(case, rows, objective, targets, policy_BL, value_BL)
  metrics = case["metrics"]
  agree(found, metrics, {"value_loss": "critic/vf_loss", "value_clip_fraction": "critic/vf_clipfrac",
                         "value": "critic/vpred_mean"})
  np.testing.assert_allclose(norms, f32(metrics["critic/grad_norm"]), rtol=1e-5)
  agree_params(params, case["final_params"], rate)


def as_trajectory(ids, attention, loss_mask, prompt: int) -> Trajectory:
  """A row of the file as an episode: runs of its loss mask are the policy's segments."""
  count = int(sum(attention))
  segments: list[Segment] = []
  for at in range(prompt, count):
    role = Role.POLICY if loss_mask[at - prompt] else Role.ENVIRONMENT
    before = segments.pop().ids if segments and segments[-1].role is role else ()
    run = before + (int(ids[at]),)
    segments.append(Segment(role, run, (0.0,) * len(run) if role is Role.POLICY else ()))
  return Trajectory(Question("reference", "0", "?", ("!",)), 0, tuple(map(int, ids[:prompt])),
                    tuple(segments), StopReason.ANSWER)


@pytest.mark.parametrize("case", ACTORS)
def test_collate_in_compat_makes_the_references_masks(case):
  rows, given = Rows(case), case["inputs"]
  prompt = rows.first + 1
  for row, (ids, attention, mask) in enumerate(zip(
      given["input_ids"], given["attention_mask"], given["loss_mask"])):
    plan = collate.collate(
        [as_trajectory(ids, attention, mask, prompt)], np.zeros(1, np.float32),
        np.zeros(1, np.float32), shapes=collate.BatchShapes((rows.length,), rows.length),
        weighting=collate.Weighting("microbatch-token-mean", rows.length, compat=True))
    ((batch,),) = plan.minibatches
    np.testing.assert_array_equal(rows.picked(batch.policy_mask_BL)[0], f32(mask))
    np.testing.assert_array_equal(
        rows.picked(batch.value_mask_BL)[0],
        rows.attention_BL[row, -rows.responses - 1 : -1])
