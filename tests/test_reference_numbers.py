"""Our arithmetic against numbers that the reference PyTorch implementation computed.

The file is read as it is: whatever seeds, cases and shapes it holds are compared, and no number of
it stands here. Where this project departs on purpose, a test names the departure.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retriever.protocol import Passage
from searchr1_jax.algo import advantages, losses, schedules
from searchr1_jax.text import rewards
from searchr1_jax.types import Role, UserError

FILE = pathlib.Path(__file__).parent / "fixtures" / "reference_numbers.json"
REFERENCE = json.loads(FILE.read_text(encoding="utf-8"))
SEEDS = REFERENCE["per_seed"]
KINDS = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}
SHOWN = re.compile(r"(\s*<information>.*?</information>\s*)", re.DOTALL)

each_seed = pytest.mark.parametrize("seed", [pytest.param(s, id=f"seed{k}")
                                             for k, s in SEEDS.items()])


def numbers(x) -> np.ndarray:
  """A number, or lists of them, as float32; the file writes NaN as a string."""
  return np.asarray(x, np.float32)


def f32(x):
  return jnp.asarray(numbers(x))


def close(ours, theirs, slack=1e-6):
  """1e-5 relative; beside 0, `slack` times the size of what was added up to get there."""
  np.testing.assert_allclose(np.asarray(ours), numbers(theirs), rtol=1e-5, atol=slack)


def size(*arrays) -> float:
  return 1e-6 * max(1.0, *(float(np.abs(numbers(a)).max()) for a in arrays))


def published_mean(term_BL, mask_BL):
  """The masked token mean of one micro-batch, by our weights."""
  weight_BL = losses.aggregation_weights(
      mask_BL, "microbatch-token-mean", sequences=1, tokens=1, max_episode_tokens=1,
      micro_batches=1)
  return losses.weighted_sum(term_BL, weight_BL, mask_BL)


def sequence_mean(term_BL, mask_BL):
  weight_BL = losses.aggregation_weights(
      mask_BL, "seq-mean", sequences=len(mask_BL), tokens=1, max_episode_tokens=1,
      micro_batches=1)
  return losses.weighted_sum(term_BL, weight_BL, mask_BL)


def mean_of(x_BL, mask_BL) -> float:
  mean = losses.masked_mean(f32(x_BL), f32(mask_BL))
  return float(mean.total / mean.count)


# Masked statistics


@each_seed
def test_masked_statistics(seed):
  for case in seed["masked_stats"]:
    x_BL, mask_BL = f32(case["values"]), f32(case["mask"])
    slack = size(case["values"])
    mean, variance = advantages.moments([x_BL], [mask_BL])
    n = numbers(case["mask"]).sum()
    close(mean, case["masked_mean"], slack)
    close(mean_of(x_BL, mask_BL), case["masked_mean"], slack)
    close(variance, case["masked_var_unbiased"], slack)
    close(variance * float((n - 1) / n), case["masked_var_biased"], slack)
    for row, theirs in enumerate(case["masked_mean_axis_m1"]):
      one = slice(row, row + 1)
      close(sequence_mean(x_BL[one], mask_BL[one]), theirs, slack)
    mine = numbers(case["mask"]) > 0
    (whitened_BL,) = advantages.whiten([x_BL], [mask_BL])
    close(np.asarray(whitened_BL)[mine], numbers(case["whiten"])[mine], slack)
    close((np.asarray(whitened_BL) + np.asarray(mean))[mine],
          numbers(case["whiten_no_shift"])[mine], slack)


@each_seed
def test_departure_whitened_values_outside_the_mask_are_0(seed):
  for case in seed["masked_stats"]:
    (ours_BL,) = advantages.whiten([f32(case["values"])], [f32(case["mask"])])
    np.testing.assert_array_equal(np.asarray(ours_BL)[numbers(case["mask"]) == 0], 0.0)


# Advantages


@each_seed
def test_gae_over_all_response_positions(seed):
  for case in seed["gae"]:
    values_BL, mask_BL = f32(case["values"]), f32(case["eos_mask"])
    slack = size(case["values"], case["returns"])
    raw_BL, returns_BL = advantages.gae(
        f32(case["token_level_rewards"]), values_BL, jnp.ones_like(mask_BL),
        case["gamma"], case["lam"])
    close(raw_BL, case["raw_advantages_returns_minus_values"], slack)
    close(returns_BL, case["returns"], slack)
    (whitened_BL,) = advantages.whiten([raw_BL], [mask_BL])
    mine = numbers(case["eos_mask"]) > 0
    close(np.asarray(whitened_BL)[mine], numbers(case["advantages_whitened"])[mine], 3 * slack)


def group_of(case) -> dict:
  """The rewards of each group of a case."""
  groups: dict = {}
  for group, row in zip(case["index"], case["token_level_rewards"], strict=True):
    groups.setdefault(group, []).append(float(numbers(row).sum()))
  return groups


@each_seed
def test_grpo(seed):
  for case in seed["grpo"]:
    rewards_B = numbers(case["token_level_rewards"]).sum(-1)
    ours_B, keep_B = advantages.grpo_advantages(
        rewards_B, case["index"], np.ones(len(rewards_B), np.bool_))
    assert keep_B.all(), case["case"]
    flat = {g for g, r in group_of(case).items() if len(r) > 1 and len(set(r)) == 1}
    for b, group in enumerate(case["index"]):
      if group in flat:  # where the reference shows rounding noise over its epsilon, or 0
        assert ours_B[b] == 0.0, case["case"]
      else:
        mine = numbers(case["eos_mask"][b]) > 0
        np.testing.assert_allclose(
            np.where(mine, ours_B[b], 0.0), numbers(case["advantages"][b]), rtol=1e-5, atol=1e-6,
            err_msg=case["case"])


@each_seed
def test_departure_a_flat_group_gets_exactly_0_and_not_rounding_noise(seed):
  for case in seed["grpo"]:
    if len(set(case["index"])) == 1 and len(set(case["scores"])) == 1 and len(case["scores"]) > 1:
      ours_B, _ = advantages.grpo_advantages(
          np.asarray(case["scores"], np.float64), case["index"],
          np.ones(len(case["scores"]), np.bool_))
      np.testing.assert_array_equal(ours_B, 0.0)


@each_seed
def test_departure_two_questions_of_one_row_number_do_not_share_a_group(seed):
  for case in seed["grpo"]:
    if not case["case"].startswith("index_collision"):
      continue
    half = len(case["index"]) // 2
    index = case["index"][:2 * half]
    rewards_B, alive_B = numbers(case["scores"])[:2 * half], np.ones(2 * half, np.bool_)
    datasets = ["nq"] * half + ["hotpotqa"] * half
    apart_B, _ = advantages.grpo_advantages(
        rewards_B, zip(datasets, index), alive_B, group_size=half)
    for rows in (slice(0, half), slice(half, None)):
      alone_B, _ = advantages.grpo_advantages(rewards_B[rows], index[rows], alive_B[rows])
      np.testing.assert_array_equal(apart_B[rows], alone_B)
    with pytest.raises(UserError, match="row id"):
      advantages.grpo_advantages(rewards_B, index, alive_B, group_size=half)


# Losses


@functools.partial(jax.value_and_grad, has_aux=True)
def published_policy_loss(logprobs_BL, old_BL, advantages_BL, mask_BL, clip):
  gap_BL = losses.log_ratio(logprobs_BL, old_BL, mask_BL)
  terms = losses.policy_loss(gap_BL, advantages_BL, mask_BL, clip, clip)
  return published_mean(terms.loss_BL, mask_BL), terms


def policy_case(case, clip):
  mask_BL = f32(case["mask"])
  (loss, terms), grad_BL = published_policy_loss(
      f32(case["log_prob"]), f32(case["old_log_prob"]), f32(case["advantages"]), mask_BL, clip)
  clipped, kl = (published_mean(x, mask_BL) for x in (terms.clipped_BL, terms.kl_BL))
  return loss, clipped, kl, grad_BL


@each_seed
def test_policy_loss(seed):
  """Whatever is NaN there is finite here, and a ratio past the bound may differ; else all agree."""
  clips = [case["cliprange"] for case in seed["policy_loss"] if "cliprange" in case]
  for case in seed["policy_loss"]:
    loss, clipped, kl, grad_BL = policy_case(
        case, case["cliprange"] if "cliprange" in case else clips[0])
    ours = [loss, clipped, kl]
    mine = numbers(case["mask"]) > 0
    gaps = np.abs(numbers(case["log_prob"]) - numbers(case["old_log_prob"]))[mine]
    bounded = bool((gaps > losses.GAP_LIMIT).any())
    largest = np.exp(gaps.max(initial=0.0)) * np.abs(numbers(case["advantages"])).max()
    theirs = [case[k] for k in ("pg_loss", "pg_clipfrac", "ppo_kl")]
    if "d_pg_loss_d_log_prob" in case:
      ours, theirs = ours + [grad_BL], theirs + [case["d_pg_loss_d_log_prob"]]
    for i, (our, their) in enumerate(zip(ours, map(numbers, theirs), strict=True)):
      our = np.asarray(our)
      assert np.isfinite(our).all(), case["case"]
      known = np.isfinite(their)
      if not (bounded and i in (0, 3)):  # the loss and its gradient
        np.testing.assert_allclose(
            our[known], their[known], rtol=1e-5, atol=size(largest), err_msg=case["case"])


@each_seed
def test_departure_an_empty_mask_gives_0_and_overflow_under_the_mask_no_gradient(seed):
  for case in seed["policy_loss"]:
    mask_BL = numbers(case["mask"])
    loss, clipped, kl, grad_BL = policy_case(case, 0.2)
    np.testing.assert_array_equal(np.asarray(grad_BL)[mask_BL == 0], 0.0)
    if not mask_BL.any():
      assert loss == clipped == kl == 0.0
    assert np.isfinite(loss) and np.isfinite(grad_BL).all()


@each_seed
def test_value_loss(seed):
  for case in seed["value_loss"]:
    mask_BL = f32(case["mask"])

    def loss(values_BL, case=case, mask_BL=mask_BL):
      terms = losses.value_loss(values_BL, f32(case["values"]), f32(case["returns"]), mask_BL,
                                case["cliprange_value"])
      return published_mean(terms.loss_BL, mask_BL), published_mean(terms.clipped_BL, mask_BL)

    (value, clipped), grad_BL = jax.value_and_grad(loss, has_aux=True)(f32(case["vpreds"]))
    close(value, case["vf_loss"])
    close(clipped, case["vf_clipfrac"])
    close(grad_BL, case["d_vf_loss_d_vpreds"])


@each_seed
def test_kl_estimates(seed):
  case = seed["kl_penalty"]
  policy_BL, ref_BL = f32([case["logprob"]]), f32([case["ref_logprob"]])
  gap = numbers(case["ref_logprob"]) - numbers(case["logprob"])
  for name, theirs in case["types"].items():

    def total(policy_BL, kind=KINDS[name]):
      kl_BL = losses.kl_estimate(policy_BL, ref_BL, jnp.ones_like(policy_BL), kind, compat=True)
      return jnp.sum(kl_BL), kl_BL

    (_, kl_BL), grad_BL = jax.value_and_grad(total, has_aux=True)(policy_BL)
    close(kl_BL[0], theirs["value"], 2e-6)
    their_grad = numbers(theirs["d_sum_d_logprob"])
    known = np.isfinite(their_grad)  # NaN there: exp overflowed before its clamp
    assert known.all() or (name == "low_var_kl" and (gap[~known] > losses.GAP_LIMIT).all())
    close(np.asarray(grad_BL)[0][known], their_grad[known], 2e-6)
    np.testing.assert_array_equal(np.asarray(grad_BL)[0][~known], 0.0)
  for name in case["unsupported"]:
    with pytest.raises(UserError, match="k1, abs, k2, k3"):
      losses.kl_estimate(policy_BL, ref_BL, jnp.ones_like(policy_BL), name)


@each_seed
def test_departure_k3_is_bounded_before_its_exp_alone(seed):
  case = seed["kl_penalty"]
  policy_BL, ref_BL = f32([case["logprob"]]), f32([case["ref_logprob"]])
  d = np.clip(numbers(case["ref_logprob"]) - numbers(case["logprob"]), -20, 20).astype(np.float64)
  ours_BL = losses.kl_estimate(policy_BL, ref_BL, jnp.ones_like(policy_BL), "k3")
  close(ours_BL[0], np.expm1(d) - d)


@each_seed
def test_entropy_and_logprobs(seed):
  case = seed["entropy"]
  logits_BLV, mask_BL = f32(case["logits"]), f32(case["mask"])
  close(losses.entropy_BL(logits_BLV, jnp.ones_like(mask_BL)), case["entropy"])
  close(published_mean(losses.entropy_BL(logits_BLV, mask_BL), mask_BL), case["entropy_loss"])
  close(losses.token_logprobs(logits_BLV, jnp.asarray(case["labels"])), case["logprobs"])


# The trainer's step from scores to advantages


def trainer_cases(seed):
  """Each variant of the trainer section: (KL kind, its results)."""
  for name, case in seed["trainer"].items():
    if named := re.fullmatch(r"fixed_kl_coef_[^_]+_(\w+)", name):
      yield KINDS[named[1]], case


@each_seed
def test_the_trainers_rewards_and_advantages(seed):
  inputs = seed["trainer"]["inputs"]
  width = len(inputs["responses"][0])
  attended_BL = numbers(inputs["attention_mask"])[:, -width:]
  scores_BL, values_BL = numbers(inputs["token_level_scores"]), f32(inputs["values"])
  policy_BL = numbers(inputs["info_mask"])[:, -width:]
  for kind, case in trainer_cases(seed):
    np.testing.assert_array_equal(policy_BL, numbers(case["loss_mask"]))
    coef = case["metrics"]["critic/kl_coeff"]
    kl_BL = losses.kl_estimate(f32(inputs["old_log_probs"]), f32(inputs["ref_log_prob"]),
                               f32(policy_BL), kind, compat=True)
    close(sequence_mean(kl_BL, f32(policy_BL)), case["metrics"]["critic/kl"])
    ours_BL = advantages.token_rewards(f32(scores_BL.sum(-1)), f32(policy_BL), kl_BL, coef)
    theirs_BL = numbers(case["token_level_rewards"])
    # a score that stands on an observation's token moves to the policy's last: SPEC, not published
    last_BL = np.cumsum(policy_BL[:, ::-1], 1)[:, ::-1] * policy_BL == 1
    moved_BL = np.where(last_BL, scores_BL.sum(-1, keepdims=True), 0) - scores_BL
    close(ours_BL, theirs_BL + moved_BL, 1e-7)
    everywhere_BL = jnp.ones_like(values_BL)
    raw_BL, returns_BL = advantages.gae(f32(theirs_BL), values_BL, everywhere_BL, 1.0, 1.0)
    slack = size(inputs["values"])
    close(returns_BL, case["gae_returns"], slack)
    (whitened_BL,) = advantages.whiten([raw_BL], [f32(attended_BL)])
    close(np.asarray(whitened_BL)[attended_BL > 0],
          numbers(case["gae_advantages"])[attended_BL > 0], 3 * slack)
    metrics = case["data_metrics"]
    close(mean_of(whitened_BL, attended_BL), metrics["critic/advantages/mean"])
    close(mean_of(returns_BL, attended_BL), metrics["critic/returns/mean"])
    close(mean_of(values_BL, attended_BL), metrics["critic/values/mean"])
    close(theirs_BL.sum(-1).mean(), metrics["critic/rewards/mean"])


@each_seed
def test_the_trainers_loss_mask_metrics(seed):
  inputs = seed["trainer"]["inputs"]
  width = len(inputs["responses"][0])
  attended_BL = numbers(inputs["attention_mask"])[:, -width:]
  for _, case in trainer_cases(seed):
    share = losses.masked_mean(f32(case["loss_mask"]), f32(attended_BL))
    close(share.total, case["loss_mask_metrics"]["state_tokens/total"])
    close(share.total / share.count, case["loss_mask_metrics"]["state_tokens/coverage"])


@each_seed
def test_the_trainers_grpo_advantages_over_the_attention_mask(seed):
  trainer = seed["trainer"]
  width = len(trainer["inputs"]["responses"][0])
  attended_BL = numbers(trainer["inputs"]["attention_mask"])[:, -width:]
  rewards_B = numbers(trainer["inputs"]["token_level_scores"]).sum(-1)
  ours_B, _ = advantages.grpo_advantages(
      rewards_B, trainer["uid"], np.ones(len(rewards_B), np.bool_))
  close(ours_B[:, None] * attended_BL,
        trainer["grpo_advantages_mask_is_attention_mask_incl_info"])


# Controllers and schedules


def test_kl_controllers():
  for case in REFERENCE["kl_controllers"]:
    settings = case["target"], case["horizon"], case["n_steps"]
    adaptive = fixed = case["init"]
    for current_kl, after_adaptive, after_fixed in zip(
        case["current_kl"], case["adaptive_value_after_each"], case["fixed_value_after_each"],
        strict=True):
      adaptive = advantages.adaptive_kl(adaptive, current_kl, *settings)
      fixed = advantages.fixed_kl(fixed, current_kl, *settings)
      assert adaptive == pytest.approx(after_adaptive, rel=1e-9)
      assert fixed == after_fixed


def test_learning_rate_schedules():
  for name, case in REFERENCE["lr_schedule"].items():
    ratio, total = re.fullmatch(r"ratio=([\d.e-]+),total=(\d+)", name).groups()
    steps = schedules.warmup_steps(float(ratio), int(total))
    assert steps == case["num_warmup_steps"]
    published, ours = schedules.warmup(1.0, steps, compat=True), schedules.warmup(1.0, steps)
    (theirs,) = [v for k, v in case.items() if k.startswith("lr_multiplier")]
    close([published(t) for t in range(len(theirs))], theirs, 0.0)
    # departure: ours is one step ahead, so that the first step is not wasted on a rate of 0
    close([ours(t) for t in range(len(theirs) - 1)], theirs[1:], 0.0)
    assert ours(steps) == ours(int(total)) == 1.0


# Rewards


def spans_of(case) -> tuple[list[tuple[Role, str]], bool]:
  """A case's text cut into spans, and whether it shows where the response starts.

  Without that mark, what comes after the first `</answer>` (the prompt's example) is the response.
  """
  marked = "<|im_start|>assistant\n" in case["text"]
  _, _, response = case["text"].partition("<|im_start|>assistant\n" if marked else "</answer>")
  pieces = SHOWN.split(response)
  return [(Role.ENVIRONMENT if i % 2 else Role.POLICY, p) for i, p in enumerate(pieces)], marked


def golds_of(case) -> list[str]:
  return [case["gold"]] if isinstance(case["gold"], str) else case["gold"]


def answer_of(case) -> str | None:
  return rewards.last_answer(text for role, text in spans_of(case)[0] if role is Role.POLICY)


def read_from_the_prompt(case) -> bool:
  """Whether the reference took an answer that the response does not hold."""
  return case["extracted"] is not None and answer_of(case) is None


def empties_both(case) -> bool:
  """Whether normalisation leaves nothing of the answer nor of some gold."""
  answer = answer_of(case)
  return answer is not None and not rewards.normalize_answer(answer) and any(
      not rewards.normalize_answer(g) for g in golds_of(case))


CASES = [pytest.param(case, id=case["case"]) for case in REFERENCE["rewards"]["cases"]]


@pytest.mark.parametrize("case", CASES)
def test_answers_and_matches(case):
  answer, golds = answer_of(case), golds_of(case)
  if read_from_the_prompt(case):
    assert answer is None
    return
  assert answer == case["extracted"]
  if not empties_both(case):
    assert rewards.exact_match(answer, golds) == case["em_score"]
    assert rewards.subem(answer, golds) == case["subem_score"]


@pytest.mark.parametrize("case", CASES)
def test_formats_and_their_reward(case):
  spans, marked = spans_of(case)
  valid = rewards.format_valid(spans)
  if marked:  # the reference calls everything else invalid
    assert valid == case["valid_sequence"]
  if empties_both(case) or read_from_the_prompt(case):
    return
  answer = answer_of(case)
  correct = rewards.exact_match(answer, golds_of(case)) == 1.0
  table = functools.partial(
      rewards.format_reward, correct, bool(case["valid_sequence"]), answer is not None)
  close(table(0.2, 0.1), case["format_score_0p2_0p1_0p0_v03_script"])
  close(table(0.0, 0.0), case["format_score_default_zero_weights"])


@pytest.mark.parametrize("case", CASES)
def test_retrieval_hits(case):
  shown = [Passage("0", block, 0.0) for block in case["information_blocks"]]
  golds = golds_of(case)
  if all(rewards.normalize_answer(g) for g in golds):
    assert rewards.retrieval_hit(golds, shown) == float(case["retrieval_correct"])


def test_normalised_answers():
  for case in REFERENCE["rewards"]["normalize_answer"]:
    assert rewards.normalize_answer(case["input"]) == case["output"]


def departing(choose):
  return [case for case in REFERENCE["rewards"]["cases"] if choose(case)]


def test_departure_an_answer_of_the_prompt_earns_nothing():
  for case in departing(read_from_the_prompt):
    assert rewards.exact_match(answer_of(case), golds_of(case)) == 0.0


def test_departure_originals_are_compared_where_normalisation_empties_both():
  for case in departing(empties_both):
    answer = case["extracted"].strip().lower()
    expected = float(answer in [g.strip().lower() for g in golds_of(case)])
    assert rewards.exact_match(case["extracted"], golds_of(case)) == expected


def test_departure_a_notice_of_the_environment_is_no_answer():
  # the reference reads one text, so that its own notice about tags becomes the answer
  for case in departing(lambda c: "invalid_obs" in c["case"]):
    (_, text), = spans_of(case)[0]
    written, _, notice = text.partition("\n")
    assert rewards.last_answer([text]) == case["extracted"]
    spans = [(Role.POLICY, written), (Role.ENVIRONMENT, notice)]
    assert rewards.last_answer([t for role, t in spans if role is Role.POLICY]) is None
    assert not rewards.format_valid(spans)


def test_the_reward_sits_on_the_last_token():
  manager = REFERENCE["reward_manager"]
  _, width = manager["shape"]
  theirs_BL = np.zeros(manager["shape"], np.float32)
  for row, column, value in manager["reward_nonzero"]:
    theirs_BL[row, column] = value
  for row, (_, response, golds) in enumerate(manager["rows"]):
    mask_BL = f32([[float(column < len(response)) for column in range(width)]])
    answer = rewards.last_answer([response])
    reward = rewards.exact_match(answer, golds)
    ours_BL = advantages.token_rewards(f32([reward]), mask_BL, jnp.zeros_like(mask_BL), 0.0)
    if answer is not None:
      np.testing.assert_array_equal(ours_BL[0], theirs_BL[row])
    else:  # departure: it reads the prompt's answer, and pays for it in the last column
      np.testing.assert_array_equal(ours_BL, 0.0)
