"""Program: trains a policy to search. Read `step` downward for the method.

python -m searchr1_jax.train --config=configs/grpo_tiny.py --workdir=runs/tiny

The same command again resumes from the newest whole checkpoint in the workdir.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import time
from typing import Any, Sequence

from absl import flags
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import rich.console

from retriever.engine import SearchEngine
from searchr1_jax.algo import advantages, collate, schedules, update
from searchr1_jax.model import sharding, value
from searchr1_jax.rollout import drive, sampler
from searchr1_jax.run import checkpoint, cli, data, evaluation, metrics as measures, setup, writers
from searchr1_jax.types import Question, Score, StopReason, Trajectory, UserError

EVALUATION_DRAW = 2**31 - 1  # the "step" that addresses the randomness of sampled evaluations
SHOWN = ("reward", "em", "searches", "response_tokens", "kl_ref", "eval/em", "seconds/step")


@dataclasses.dataclass(frozen=True)
class RunState:
  """Everything that a resumed run needs. `host` is plain JSON: cursor, controllers, guards."""

  policy: update.TrainState
  value: update.TrainState | None
  host: dict[str, Any]

  def to_checkpoint(self) -> dict[str, Any]:
    arrays = {"policy": self.policy} | ({"value": self.value} if self.value else {})
    return {"arrays": arrays, "host": self.host}

  @classmethod
  def from_checkpoint(cls, saved: dict[str, Any]) -> RunState:
    return cls(saved["arrays"]["policy"], saved["arrays"].get("value"), saved["host"])


class Trainer:
  """The parts of a run, put together once: nothing here changes from step to step."""

  def __init__(self, config: ml_collections.ConfigDict, workdir: pathlib.Path):
    self.mesh = setup.mesh(config)
    self.shapes, self.weighting = setup.batch_shapes(config), setup.weighting(config)
    self.config = c = setup.prepare_world(config, workdir)
    self.model = setup.open_policy(c)
    self.search: SearchEngine = setup.open_search(c)
    self.train_questions = setup.load_questions(tuple(c.data.train))
    data.questions_at(self.train_questions, c.seed, 0, c.data.questions)  # too many? say so now
    self.test_questions = (setup.load_questions(tuple(c.data.test), c.eval.questions)
                           if c.data.test else [])
    self.needs_value = c.algo.name == "ppo"
    score_policy, score_value = setup.scorers(c, self.model)
    self.score_tokens = jax.jit(lambda params, batch: score_policy(params, batch, False).logprobs_BL)
    self.score_values = jax.jit(score_value)
    settings = setup.policy_settings(c)
    with_entropy = settings.entropy_coef != 0

    def policy_objective(params, batch, targets):
      scores = score_policy(params, batch, with_entropy)
      return update.policy_objective(scores, batch, targets, settings)

    def value_objective(params, batch, targets):
      return update.value_objective(score_value(params, batch), batch, targets, c.algo.value_clip)

    self.optimizer = setup.optimizer(c)
    self.policy_learner = update.Learner(policy_objective, self.optimizer, self.mesh)
    self.value_learner = update.Learner(value_objective, self.optimizer, self.mesh)
    rate = lambda peak, share: schedules.warmup(
        peak, schedules.warmup_steps(share, c.steps), compat=bool(c.algo.compat))
    self.policy_rate = rate(c.optimizer.policy_lr, c.optimizer.policy_warmup)
    self.value_rate = rate(c.optimizer.value_lr, c.optimizer.value_warmup)
    base = self.model.load_params()
    self.base = jax.device_put(base, sharding.parameter_shardings(self.mesh, base))
    self.reference = self.base if c.algo.kl_coef else None

  def initial_state(self) -> RunState:
    """Step 0: the base model; a value model, where there is one, with the same backbone."""
    start = lambda params: update.init_train_state(params, self.optimizer, self.mesh)
    host = {"cursor": 0, "kl_coef": float(self.config.algo.kl_coef), "bad_updates": 0,
            "skipped": 0, "fingerprints": self.fingerprints()}
    return RunState(start(self.base), start(value.from_policy(self.base)) if self.needs_value
                    else None, host)

  def fingerprints(self) -> dict[str, str]:
    """What a resumed run must find unchanged."""
    return {"search": self.search.fingerprint, "tokenizer": self.model.tokenizer.fingerprint}

  def step(self, state: RunState, step: int) -> tuple[RunState, dict, list]:
    """One training step: questions → rollout → score → advantages → update."""
    c, clock = self.config, measures.Clock()
    questions, cursor = data.questions_at(
        self.train_questions, c.seed, state.host["cursor"], c.data.questions)
    trajectories, stats = self.rollout(state, questions, step)
    clock.take(stats.seconds)
    kept, lost = self.survivors(trajectories)
    scores = [self.model.score(t) for t in kept]
    rewards_B = np.array([s.reward for s in scores], np.float32)
    advantages_B, taught_B = self.compare(kept, rewards_B)
    plan = collate.collate(kept, rewards_B, advantages_B, shapes=self.shapes, updates=self.minibatches,
                           weighting=self.weighting, taught_B=taught_B)
    clock.charge("host")
    minibatches = [[sharding.put_batch(self.mesh, b) for b in m] for m in plan.minibatches]
    plan = dataclasses.replace(plan, minibatches=tuple(map(tuple, minibatches)))
    scored = [[self.score(state, b) for b in m] for m in plan.minibatches]
    jax.block_until_ready(scored)
    clock.charge("score")
    targets, about = self.targets(plan, scored, state.host["kl_coef"])
    state, learned = self.learn(state, plan, targets, step)
    jax.block_until_ready(state.policy)
    clock.charge("update")
    found = {**measures.of_episodes(kept, scores), **measures.of_rollout(stats, lost),
             **about, **learned, **measures.of_sampler(plan, scored),
             "padding": plan.padding_share, "taught": float(np.mean(taught_B)),
             **clock.metrics()}
    host = state.host | {"cursor": cursor, "kl_coef": self.next_kl_coef(state, about, len(kept))}
    return dataclasses.replace(state, host=host), found, list(zip(kept, scores))

  def rollout(self, state: RunState, questions: Sequence[Question], step: int):
    """The episodes of a step; repeated where the search engine lost too many of them."""
    c = self.config
    tasks = [drive.Task(q, g, self.model.encode_prompt(q))
             for q in questions for g in range(c.algo.group_size)]
    key = jax.random.fold_in(jax.random.key(c.seed), step)
    for _ in range(c.limits.lost_batches):
      trajectories, stats = drive.rollout(
          self.model.engine, state.policy.params, tasks, self.model.rules, self.search,
          how=setup.training_sampling(c), key=key)
      lost = len(tasks) - len(self.survivors(trajectories)[0])
      if lost <= c.limits.lost_share * len(tasks):
        return trajectories, stats
    raise cli.RetrieverLost(
        f"the search engine lost {lost} of {len(tasks)} episodes, {c.limits.lost_batches} times in "
        f"a row, at step {step}; mend it and repeat the command: the run resumes where it stopped")

  def survivors(self, trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], int]:
    """The episodes to learn from, and how many a failing search took: with too few left, a group goes."""
    failed = [t.stop_reason is StopReason.RETRIEVAL_ERROR for t in trajectories]
    alive: dict[tuple[str, str], int] = {}
    for t, bad in zip(trajectories, failed):
      alive[t.question.key] = alive.get(t.question.key, 0) + (not bad)
    least = min(2, self.config.algo.group_size)
    kept = [t for t, bad in zip(trajectories, failed) if not bad and alive[t.question.key] >= least]
    return kept, len(trajectories) - len(kept)

  @property
  def minibatches(self) -> int:
    return self.config.algo.updates_per_batch // self.config.algo.epochs

  def compare(self, kept: Sequence[Trajectory], rewards_B: np.ndarray
              ) -> tuple[np.ndarray, np.ndarray]:
    """Advantages by group, and which rows teach anything; PPO's come later, from values."""
    a = self.config.algo
    everyone = np.ones(len(kept), bool)
    if a.name == "ppo":
      return np.zeros(len(kept), np.float32), everyone
    keys = [t.question.key for t in kept]
    if a.name == "rloo":
      advantages_B, _ = advantages.rloo_advantages(rewards_B, keys, everyone)
    else:
      advantages_B, _ = advantages.grpo_advantages(rewards_B, keys, everyone, use_std=a.group_std)
    return advantages_B, advantages_B != 0 if a.drop_flat_groups else everyone

  def score(self, state: RunState, batch) -> update.Scored:
    """Log-probs and values of a batch's tokens before any update."""
    old = self.score_tokens(state.policy.params, batch)
    ref = old if self.reference is None else self.score_tokens(self.reference, batch)
    values = (self.score_values(state.value.params, batch) if state.value
              else jnp.zeros_like(old))
    return update.Scored(old, ref, values)

  def targets(self, plan, scored, kl_coef: float):
    """What the updates learn from."""
    a = self.config.algo
    if self.needs_value:
      return update.ppo_targets(
          plan, scored, kl_coef=kl_coef if a.kl_in == "reward" else 0.0, gamma=a.gamma, lam=a.lam,
          kl_kind=a.kl_kind, compat=bool(a.compat))
    return update.group_targets(plan, scored, kl_kind=a.kl_kind)

  def learn(self, state: RunState, plan, targets, step: int) -> tuple[RunState, dict]:
    """All epochs of updates on a rollout batch; the value first, alone where so configured."""
    policy, value_state, found = state.policy, state.value, {}
    policy_rate, value_rate = float(self.policy_rate(step)), float(self.value_rate(step))
    for _ in range(self.config.algo.epochs):
      for batches, goals in zip(plan.minibatches, targets, strict=True):
        if value_state:
          value_state, learned = self.value_learner.learn(value_state, batches, goals, value_rate)
          found = update.add_metrics(found, {f"value/{k}": v for k, v in learned.items()})
        if step >= self.config.algo.value_only_steps:
          policy, learned = self.policy_learner.learn(policy, batches, goals, policy_rate)
          found = update.add_metrics(found, {f"policy/{k}": v for k, v in learned.items()})
    found["policy/lr"] = policy_rate
    return dataclasses.replace(state, policy=policy, value=value_state), found

  def next_kl_coef(self, state: RunState, about: dict, episodes: int) -> float:
    """The KL coefficient of the next step."""
    a, coef = self.config.algo, state.host["kl_coef"]
    if a.kl_controller == "fixed" or "kl_ref" not in about:
      return coef
    kl = writers.divide({"kl": about["kl_ref"]})["kl"]
    return advantages.adaptive_kl(coef, kl or 0.0, a.kl_target, a.kl_horizon, episodes)

  def evaluate(self, params, temperature: float) -> list[evaluation.Answered]:
    """The test questions, all of them, at a temperature (0: greedy)."""
    key = jax.random.fold_in(jax.random.key(self.config.seed), EVALUATION_DRAW)
    return evaluation.answer_all(
        self.model.engine, params, self.test_questions, self.model.rules, self.search,
        encode_prompt=self.model.encode_prompt, score=self.model.score,
        how=sampler.sampling(temperature), key=key)


def train(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
  """Trains until `config.steps`, resuming what the workdir holds; returns the summary."""
  setup.check(config)
  workdir.mkdir(parents=True, exist_ok=True)
  if (workdir / cli.CONFIG_FILE).is_file():
    _refuse_other_run(config, workdir)
  console, stop = rich.console.Console(), checkpoint.StopFlag().install()
  trainer = Trainer(config, workdir)
  cli.save_config(workdir, config)
  c = trainer.config
  saves = checkpoint.Checkpointer(workdir / "checkpoints", c.checkpoint.keep, c.checkpoint.best)
  state, first = _restore(trainer, saves)
  diary = Diary(workdir, c, trainer, first)
  if first == 0 and "before" not in state.host:
    state = dataclasses.replace(state, host=state.host | {"before": _measure(trainer, state, c)})
  began, spent = time.monotonic(), measures.Clock()
  for step in range(first, c.steps):
    if stop:
      saves.save(step, state.to_checkpoint())
      raise cli.Stopped(f"stopped by a signal at step {step}; the same command resumes there")
    try:
      state, found, episodes = trainer.step(state, step)
    except cli.RetrieverLost:
      if step not in saves.steps():
        saves.save(step, state.to_checkpoint())
      raise
    state = _guard(state, c, step)
    done, metric = step + 1, None
    if c.eval.every and done % c.eval.every == 0 and done < c.steps and trainer.test_questions:
      greedy = evaluation.summarise(trainer.evaluate(state.policy.params, 0.0))
      found["eval/em"] = metric = greedy["em"]
      found["eval/searches"] = greedy["searches"]
    diary.write(step, found, episodes)
    if done % c.checkpoint.every == 0 or done == c.steps:
      saves.save(done, state.to_checkpoint(), metric)
    spent.add(found)
  seconds = time.monotonic() - began
  summary = _summary(trainer, state, c, seconds, spent)
  diary.close()
  (workdir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
  _show(console, summary, workdir)
  return summary


class Diary:
  """Where a run's numbers and sample episodes go."""

  def __init__(self, workdir: pathlib.Path, c, trainer: Trainer, first: int):
    board = ([writers.TensorBoardWriter(workdir / "tensorboard", first)]
             if c.log.tensorboard else [])
    self._numbers = writers.MultiWriter(
        writers.JsonlWriter(workdir / "metrics.jsonl", first), *board,
        writers.ProgressWriter(c.steps, SHOWN))
    self._episodes = writers.TrajectoryWriter(workdir, trainer.model.tokenizer.decode, first)
    self._count = c.log.trajectories

  def write(self, step: int, found: dict, episodes: list[tuple[Trajectory, Score]]) -> None:
    self._numbers.write(step, found)
    shown = episodes[: self._count]
    self._episodes.write(step, [t for t, _ in shown], [s for _, s in shown])

  def close(self) -> None:
    self._numbers.close()
    self._episodes.close()


def _restore(trainer: Trainer, saves: checkpoint.Checkpointer) -> tuple[RunState, int]:
  """The newest whole checkpoint, or the beginning."""
  state = trainer.initial_state()
  found = saves.restore_newest_whole(
      {"arrays": jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                              state.to_checkpoint()["arrays"])})
  if found is None:
    return state, 0
  step, saved = found
  for name, now in trainer.fingerprints().items():
    if (then := saved["host"]["fingerprints"][name]) != now:
      raise UserError(f"the run was started with another {name} ({then[:12]}, now {now[:12]}); put "
                      "the old one back, or start in an empty workdir")
  return RunState.from_checkpoint(saved), step


def _refuse_other_run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
  """A workdir belongs to one run: only its length and its records may change on the way."""
  free = ("steps", "eval", "checkpoint", "log", "limits")
  then, now = cli.load_config(workdir).to_dict(), config.to_dict()
  differ = [k for k in now if k not in free and then.get(k) != now[k]]
  if differ:
    raise UserError(f"{workdir} holds a run with another config ({', '.join(differ)}); repeat its "
                    "settings to resume it, or name another workdir")


def _guard(state: RunState, c, step: int) -> RunState:
  """Counts updates refused for a non-finite gradient; too many in a row end the run."""
  skipped = int(state.policy.skipped) + (int(state.value.skipped) if state.value else 0)
  bad = state.host["bad_updates"] + 1 if skipped > state.host["skipped"] else 0
  if bad >= c.limits.bad_updates:
    raise cli.NumericError(f"{bad} steps in a row had a non-finite gradient, up to step {step}; "
                           "the parameters are as before; lower the learning rate")
  return dataclasses.replace(state, host=state.host | {"bad_updates": bad, "skipped": skipped})


def _measure(trainer: Trainer, state: RunState, c) -> dict[str, Any] | None:
  """Greedy and sampled scores on the test questions."""
  if not trainer.test_questions or not c.eval.around:
    return None
  measure = lambda t: evaluation.by_dataset(trainer.evaluate(state.policy.params, t))
  out = {"greedy": measure(0.0)}
  if c.eval.sampled:
    out["sampled"] = measure(c.rollout.temperature if c.rollout.temperature > 0 else 1.0)
  return out


def _summary(trainer: Trainer, state: RunState, c, seconds: float,
             spent: measures.Clock) -> dict[str, Any]:
  """What the run came to."""
  out: dict[str, Any] = {"steps": c.steps, "seconds": seconds, "seconds_by_phase": spent.seconds}
  for when, measured in (("before", state.host["before"]), ("after", _measure(trainer, state, c))):
    for how, prefix in (("greedy", ""), ("sampled", "sampled_")):
      if measured is None or how not in measured:
        continue
      total = measured[how]["all"]
      out[f"{prefix}em_{when}"] = total["em"]
      out[f"{prefix}em_{when}_interval"] = total["em_interval"]
      out[f"{prefix}searches_per_episode_{when}"] = total["searches"]
      out["n"] = total["n"]
      out[f"{prefix}by_dataset_{when}"] = measured[how]
  return out


def _show(console: rich.console.Console, summary: dict[str, Any], workdir: pathlib.Path) -> None:
  """The table before and after, and where everything is."""
  if "n" in summary:
    for prefix, title in (("", "greedy"), ("sampled_", "sampled")):
      if f"{prefix}em_before" in summary:
        rows = {w: summary[f"{prefix}by_dataset_{w}"]["all"] for w in ("before", "after")}
        console.print(evaluation.table(rows, f"held-out questions, {title}"))
  console.print(f"{summary['steps']} steps in {summary['seconds']:.0f} s", highlight=False)
  console.print(f"run folder: {workdir}", soft_wrap=True, highlight=False)


def main(words: Sequence[str]) -> None:
  def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", None, "the run's folder; resumed if it holds a run",
                        flag_values=values)
    cli.define_config(values, words)

  values, _ = cli.parse(words, define)
  if values.workdir is None:
    raise UserError("no folder for the run; give one as --workdir=runs/NAME")
  train(values.config, pathlib.Path(values.workdir))


if __name__ == "__main__":
  cli.run_program(main)
