"""What a step measured, by name: episodes, rollout, agreement of sampler and trainer, seconds."""

from __future__ import annotations

import time
from typing import Mapping, Sequence

import jax.numpy as jnp

from searchr1_jax.algo import update
from searchr1_jax.rollout import drive
from searchr1_jax.types import Mean, Role, Score, StopReason, Trajectory, UpdatePlan


class Clock:
  """Seconds by phase; each phase is charged with the time since the last charge."""

  def __init__(self):
    self.seconds: dict[str, float] = {}
    self._began = self._last = time.monotonic()

  def charge(self, phase: str) -> None:
    now = time.monotonic()
    self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
    self._last = now

  def take(self, phases: Mapping[str, float]) -> None:
    """Books phases that somebody else timed since the last charge."""
    for phase, seconds in phases.items():
      self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
    self._last = time.monotonic()

  def metrics(self) -> dict[str, float]:
    out = {f"seconds/{k}": v for k, v in self.seconds.items()}
    return out | {"seconds/step": time.monotonic() - self._began}

  def add(self, metrics: Mapping) -> None:
    """Adds the seconds of one step's metrics."""
    for name, value in metrics.items():
      if name.startswith("seconds/"):
        phase = name.removeprefix("seconds/")
        self.seconds[phase] = self.seconds.get(phase, 0.0) + float(value)


def of_episodes(trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> dict[str, Mean]:
  """Means over the episodes of a batch."""
  def mean(values) -> Mean:
    values = list(values)
    return Mean(jnp.float32(sum(values)), jnp.float32(len(values)))

  out = {name: mean(getattr(s, name) for s in scores)
         for name in ("reward", "em", "f1", "subem", "format_valid", "retrieval_hit")}
  out["answered"] = mean(s.answer is not None for s in scores)
  for name in sorted({part for s in scores for part in s.parts}):
    out[f"reward/{name}"] = mean(s.parts[name] for s in scores if name in s.parts)
  out["searches"] = mean(len(t.searches) for t in trajectories)
  for name in ("turns", "invalid_actions", "unexecuted_searches", "truncated_observations",
               "forged_information"):
    out[name] = mean(getattr(t, name) for t in trajectories)
  out["response_tokens"] = mean(len(t.response_ids) for t in trajectories)
  out["policy_tokens"] = mean(sum(len(s.ids) for s in t.segments if s.role is Role.POLICY)
                              for t in trajectories)
  for reason in StopReason:
    out[f"stop/{reason.value}"] = mean(t.stop_reason is reason for t in trajectories)
  return out


def of_rollout(stats: drive.RolloutStats, lost: int) -> dict[str, int | float]:
  """What a rollout did, what it spared, how busy it was; episodes lost to retrieval errors."""
  seconds = stats.seconds
  rate = lambda tokens, phase: tokens / seconds[phase] if seconds[phase] else 0.0
  return {"rollout/prefilled_tokens": stats.prefilled_tokens,
          "rollout/generated_tokens": stats.generated_tokens,
          "rollout/kept_tokens": stats.kept_tokens, "rollout/shared_tokens": stats.shared_tokens,
          "rollout/searches": stats.searches, "rollout/rounds": stats.rounds,
          "rollout/occupancy": stats.occupancy, "rollout/lost_episodes": lost,
          # What a clock or the machine decides, per second of prefill and of decoding.
          "speed/prefilled_tokens": rate(stats.prefilled_tokens, "prefill"),
          "speed/generated_tokens": rate(stats.generated_tokens, "decode"),
          "speed/search_wait": stats.search_wait, "speed/compilations": stats.programs}


def of_sampler(plan: UpdatePlan, scored: Sequence[Sequence[update.Scored]]
               ) -> dict[str, Mean | float]:
  """How far the sampler's log-probs are from the trainer's, in nats."""
  gaps = [update.sampler_gap(b, s.old_logprobs_BL)
          for m, group in zip(plan.minibatches, scored) for b, s in zip(m, group)]
  if not gaps:
    return {}
  total = gaps[0]["mean"]
  for gap in gaps[1:]:
    total = total + gap["mean"]
  return {"sampler_gap/mean": total,
          "sampler_gap/max": max(float(g["max"]) for g in gaps)}
