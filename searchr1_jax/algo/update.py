"""Scoring and updates: jitted steps over one batch of the closed list, added up over a mini-batch.

    score    log-probs (policy, reference) and values of the tokens, before any update
    assess   rewards, KL and values → advantages and returns, statistics over all batches
    learn    gradients of each batch added up, one optimizer step a mini-batch

Models come in as functions, so the arithmetic is the same for a decoder and for a test's toy.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from searchr1_jax.algo import advantages, losses
from searchr1_jax.model import decoder, logprobs, sharding, value
from searchr1_jax.model.shapes import DecoderShape
from searchr1_jax.types import Mean, Targets, TokenBatch, UpdatePlan, UserError

Metrics = Mapping[str, Mean]


class Scores(NamedTuple):
  """Log-prob of each target, and the entropy there (None unless asked), in nats."""

  logprobs_BL: Float[Array, "B L"]
  entropy_BL: Float[Array, "B L"] | None


ScorePolicy = Callable[[Any, TokenBatch, bool], Scores]
ScoreValue = Callable[[Any, TokenBatch], Float[Array, "B L"]]


@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Parameters under training. `skipped` counts optimizer steps refused for a non-finite gradient."""

  params: Any
  opt_state: Any
  steps: Int[Array, ""]
  skipped: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class PolicySettings:
  """What the policy's loss is made of; see the functions of `losses` for each."""

  clip_low: float = 0.2
  clip_high: float = 0.2
  dual_clip: float | None = None
  ratio: str = "token"
  kl_loss_coef: float = 0.0
  kl_kind: str = "k3"
  entropy_coef: float = 0.0
  log_entropy: bool = False
  llds_coef: float = 0.0
  importance_cap: float | None = None
  compat: bool = False

  def __post_init__(self):
    if self.ratio not in ("token", "sequence"):
      raise UserError(f"algo.ratio is {self.ratio!r}; choose 'token' or 'sequence' (GSPO)")


def decoder_scores(shape: DecoderShape, *, allowed_vocab: int, temperature: float, chunk: int,
                   dtype: Any, remat: str, scan: bool, attention_kernel: str | None = None,
                   mesh: jax.sharding.Mesh | None = None) -> tuple[ScorePolicy, ScoreValue]:
  """The two scoring functions of a decoder and of the value model on its backbone."""
  # Hidden states need no output head, and a value model has none.
  headless = dataclasses.replace(shape, tied_embeddings=True)
  module = decoder.Decoder(headless, dtype, stacked=scan, remat=remat,
                           attention_kernel=attention_kernel, mesh=mesh)

  def hidden(params, batch: TokenBatch):
    positions_L = jnp.arange(batch.inputs_BL.shape[1])
    positions_BL = jnp.broadcast_to(positions_L[None], batch.inputs_BL.shape)
    laid = params if scan else decoder.unstack_layers(params)
    return module.apply({"params": laid}, batch.inputs_BL, positions_BL, kept_BP=batch.kept_BP)[0]

  def spread(found_BP, batch: TokenBatch):
    """Back to their places in the rows; 0 where nothing was kept."""
    rows_B1 = jnp.arange(batch.kept_BP.shape[0])[:, None]
    empty_BL = jnp.zeros(batch.inputs_BL.shape, found_BP.dtype)
    return empty_BL.at[rows_B1, batch.kept_BP].set(found_BP, mode="drop")

  def score_policy(params, batch: TokenBatch, with_entropy: bool) -> Scores:
    targets_BP = decoder.take_positions(batch.targets_BL, batch.kept_BP)
    logprobs_BP, entropy_BP = logprobs.target_logprobs(
        params, hidden(params, batch), targets_BP, allowed_vocab=allowed_vocab,
        temperature=temperature, chunk=chunk, with_entropy=with_entropy, mesh=mesh)
    return Scores(spread(logprobs_BP, batch), spread(entropy_BP, batch) if with_entropy else None)

  def score_value(params, batch: TokenBatch) -> Float[Array, "B L"]:
    return spread(value.values(params, hidden(params["backbone"], batch)), batch)

  return score_policy, score_value


def policy_objective(scores: Scores, batch: TokenBatch, targets: Targets,
                     settings: PolicySettings) -> tuple[Float[Array, ""], Metrics]:
  """The batch's share of the policy's loss, and its metrics.

  loss = Σ weight · (clipped objective + kl_loss_coef · KL − entropy_coef · H + llds_coef · LLDS)
  """
  s, mask_BL = settings, batch.policy_mask_BL
  ratio_of = losses.log_ratio if s.ratio == "token" else losses.sequence_log_ratio
  gap_BL = ratio_of(scores.logprobs_BL, targets.old_logprobs_BL, mask_BL)
  terms = losses.policy_loss(gap_BL, targets.advantages_BL, mask_BL, s.clip_low, s.clip_high,
                             s.dual_clip)
  loss_BL = terms.loss_BL
  if s.importance_cap is not None:
    loss_BL = loss_BL * losses.truncated_importance_weight(
        targets.old_logprobs_BL, batch.sampler_logprobs_BL, mask_BL, s.importance_cap)
  metrics = {"policy_loss": losses.masked_mean(loss_BL, mask_BL),
             "clip_fraction": losses.masked_mean(terms.clipped_BL, mask_BL),
             "kl_old": losses.masked_mean(terms.kl_BL, mask_BL)}
  if s.kl_loss_coef:
    kl_BL = losses.kl_estimate(scores.logprobs_BL, targets.ref_logprobs_BL, mask_BL, s.kl_kind,
                               s.compat)
    loss_BL = loss_BL + s.kl_loss_coef * kl_BL
    metrics["kl_loss"] = losses.masked_mean(kl_BL, mask_BL)
  if scores.entropy_BL is not None:
    metrics["entropy"] = losses.masked_mean(scores.entropy_BL, mask_BL)
    if s.entropy_coef:
      entropy_BL = jnp.where(mask_BL > 0, scores.entropy_BL, 0.0)
      loss_BL = loss_BL - s.entropy_coef * entropy_BL
  if s.llds_coef:
    lost_BL = losses.lost_likelihood(scores.logprobs_BL, targets.old_logprobs_BL,
                                     targets.advantages_BL, mask_BL)
    loss_BL = loss_BL + s.llds_coef * lost_BL
    metrics["llds"] = losses.masked_mean(lost_BL, mask_BL)
  return losses.weighted_sum(loss_BL, batch.loss_weight_BL, mask_BL), metrics


def value_objective(values_BL: Float[Array, "B L"], batch: TokenBatch, targets: Targets,
                    clip: float | None) -> tuple[Float[Array, ""], Metrics]:
  """The batch's share of the value's loss, and its metrics."""
  mask_BL = batch.value_mask_BL
  terms = losses.value_loss(values_BL, targets.old_values_BL, targets.returns_BL, mask_BL, clip)
  metrics = {"value_loss": losses.masked_mean(terms.loss_BL, mask_BL),
             "value_clip_fraction": losses.masked_mean(terms.clipped_BL, mask_BL),
             "value": losses.masked_mean(values_BL, mask_BL)}
  return losses.weighted_sum(terms.loss_BL, batch.value_weight_BL, mask_BL), metrics


def make_optimizer(*, b1: float, b2: float, eps: float, weight_decay: float,
                   clip_norm: float | None) -> optax.GradientTransformation:
  """AdamW's direction, the gradient clipped by its global norm; the rate is applied by `learn`."""
  parts = [] if clip_norm is None else [optax.clip_by_global_norm(clip_norm)]
  parts += [optax.scale_by_adam(b1=b1, b2=b2, eps=eps), optax.add_decayed_weights(weight_decay)]
  return optax.chain(*parts)


def starter(optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh | None = None,
            moments_memory: str = "device") -> Callable[[Any], TrainState]:
  """The jitted function from parameters to a state at step 0: a copy, since updates donate it."""
  @jax.jit
  def start(params):
    with jax.numpy_dtype_promotion("standard"):
      opt_state = optimizer.init(params)
    state = sharding.constrain(mesh, TrainState(
        jax.tree.map(jnp.copy, params), opt_state, jnp.int32(0), jnp.int32(0)))
    return dataclasses.replace(
        state, opt_state=sharding.to_memory(mesh, state.opt_state, moments_memory))

  return start


class Learner:
  """Jitted gradient and optimizer steps of one model (policy or value), spread over a mesh.

  With `moments_memory` "pinned_host" the moments are on the devices only while they are used.
  """

  def __init__(self, objective: Callable[[Any, TokenBatch, Targets], tuple[Array, Metrics]],
               optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh | None = None,
               moments_memory: str = "device"):
    place = functools.partial(sharding.constrain, mesh)
    move = functools.partial(sharding.to_memory, mesh)
    self.gradient = jax.jit(
        functools.partial(_add_gradient, objective, place), donate_argnums=1)
    self.zeros = jax.jit(lambda params: place(jax.tree.map(jnp.zeros_like, params)))
    apply = functools.partial(_apply, optimizer, place)

    def apply_moved(state, grads, learning_rate):
      state, norm = apply(dataclasses.replace(state, opt_state=move(state.opt_state)), grads,
                          learning_rate)
      return dataclasses.replace(state, opt_state=move(state.opt_state, moments_memory)), norm

    moved = moments_memory != "device"
    self.apply = jax.jit(apply_moved if moved else apply, donate_argnums=0)

  def learn(self, state: TrainState, batches: Sequence[TokenBatch], targets: Sequence[Targets],
            learning_rate: float) -> tuple[TrainState, Metrics]:
    """One optimizer step on a mini-batch, its batches' gradients added up."""
    # A batch alone needs no sum to be added to: one gradient less in memory.
    grads, metrics = None if len(batches) == 1 else self.zeros(state.params), {}
    for batch, target in zip(batches, targets, strict=True):
      grads, more = self.gradient(state.params, grads, batch, target)
      metrics = add_metrics(metrics, more)
    state, norm = self.apply(state, grads, jnp.float32(learning_rate))
    return state, {**metrics, "grad_norm": Mean(norm, jnp.ones_like(norm))}


def add_metrics(a: Metrics, b: Metrics) -> Metrics:
  """Sums two sets of means; a name that only one has is kept."""
  return {k: a[k] + b[k] if k in a and k in b else a.get(k, b.get(k)) for k in {**a, **b}}


def _add_gradient(objective, place, params, grads, batch, targets):
  (_, metrics), more = jax.value_and_grad(objective, has_aux=True)(params, batch, targets)
  return place(more if grads is None else jax.tree.map(jnp.add, grads, more)), metrics


def _apply(optimizer, place, state: TrainState, grads,
           learning_rate) -> tuple[TrainState, Array]:
  """params − rate · direction; a non-finite gradient or rate changes nothing but `skipped`."""
  norm = optax.tree.norm(grads)
  with jax.numpy_dtype_promotion("standard"):
    direction, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params = jax.tree.map(lambda p, d: p - learning_rate * d, state.params, direction)
  fine = jnp.isfinite(norm) & jnp.isfinite(learning_rate)
  keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(fine, a, b), new, old)
  step = fine.astype(jnp.int32)
  return TrainState(place(keep(params, state.params)), place(keep(opt_state, state.opt_state)),
                    place(state.steps + step), place(state.skipped + 1 - step)), norm


@functools.partial(jax.jit, static_argnames=("kl_kind", "compat"))
def estimate(old_logprobs_BL, ref_logprobs_BL, values_BL, batch: TokenBatch, kl_coef, gamma, lam,
              *, kl_kind: str, compat: bool):
  """One batch's advantages (not whitened), returns and the KL that its rewards were charged."""
  mask_BL = batch.policy_mask_BL
  kl_BL = losses.kl_estimate(old_logprobs_BL, ref_logprobs_BL, mask_BL, kl_kind, compat)
  rewards_BL = advantages.token_rewards(batch.reward_B, mask_BL, kl_BL, kl_coef)
  # Outside compat value_mask is policy_mask: observations are skipped, not zeroed.
  advantages_BL, returns_BL = advantages.gae(
      rewards_BL, values_BL, batch.value_mask_BL, gamma, lam)
  return advantages_BL, returns_BL, losses.masked_mean(kl_BL, mask_BL)


class Scored(NamedTuple):
  """The scoring pass over one batch."""

  old_logprobs_BL: Float[Array, "B L"]
  ref_logprobs_BL: Float[Array, "B L"]
  values_BL: Float[Array, "B L"]


def ppo_targets(plan: UpdatePlan, scored: Sequence[Sequence[Scored]], *, kl_coef: float,
                gamma: float, lam: float, kl_kind: str,
                compat: bool) -> tuple[list[list[Targets]], Metrics]:
  """GAE over each trajectory's policy tokens, advantages whitened over the whole rollout batch."""
  batches = [b for m in plan.minibatches for b in m]
  flat = [s for m in scored for s in m]
  found = [estimate(s.old_logprobs_BL, s.ref_logprobs_BL, s.values_BL, b, jnp.float32(kl_coef),
                     jnp.float32(gamma), jnp.float32(lam), kl_kind=kl_kind, compat=compat)
           for b, s in zip(batches, flat, strict=True)]
  masks = [b.response_mask_BL if compat else b.policy_mask_BL for b in batches]
  white = advantages.whiten([f[0] for f in found], masks)
  metrics: Metrics = {}
  for f in found:
    metrics = add_metrics(metrics, {"kl_ref": f[2]})
  targets = [Targets(s.old_logprobs_BL, s.ref_logprobs_BL, a, s.values_BL, f[1])
             for s, a, f in zip(flat, white, found)]
  return _like(plan, targets), metrics


def group_targets(plan: UpdatePlan, scored: Sequence[Sequence[Scored]], *,
                  kl_kind: str) -> tuple[list[list[Targets]], Metrics]:
  """GRPO and kin: a trajectory's advantage at each of its policy tokens."""
  batches = [b for m in plan.minibatches for b in m]
  flat = [s for m in scored for s in m]
  targets, metrics = [], {}
  for b, s in zip(batches, flat, strict=True):
    advantages_BL, kl = spread_advantages(b, s.old_logprobs_BL, s.ref_logprobs_BL, kl_kind=kl_kind)
    targets.append(Targets(s.old_logprobs_BL, s.ref_logprobs_BL, advantages_BL, s.values_BL,
                           s.values_BL))
    metrics = add_metrics(metrics, {"kl_ref": kl})
  return _like(plan, targets), metrics


@functools.partial(jax.jit, static_argnames="kl_kind")
def spread_advantages(batch: TokenBatch, old_logprobs_BL, ref_logprobs_BL, *, kl_kind: str):
  kl_BL = losses.kl_estimate(old_logprobs_BL, ref_logprobs_BL, batch.policy_mask_BL, kl_kind)
  return (batch.advantage_B[:, None] * batch.policy_mask_BL,
          losses.masked_mean(kl_BL, batch.policy_mask_BL))


@jax.jit
def sampler_gap(batch: TokenBatch, old_logprobs_BL: Float[Array, "B L"]) -> dict[str, Any]:
  """How far the sampler's log-probs are from the trainer's: mean and largest gap, in nats."""
  gap_BL = jnp.abs(losses.log_ratio(old_logprobs_BL, batch.sampler_logprobs_BL,
                                    batch.policy_mask_BL))
  return {"mean": losses.masked_mean(gap_BL, batch.policy_mask_BL), "max": jnp.max(gap_BL)}


def _like(plan: UpdatePlan, flat: Sequence[Targets]) -> list[list[Targets]]:
  rest = iter(flat)
  return [[next(rest) for _ in m] for m in plan.minibatches]
