"""Program: trains a policy to search. Read `step` downward for the method.

python -m searchr1_jax.train --config=configs/grpo_tiny.py --workdir=runs/tiny

Any key of the config can be overridden: --config.algo.kl_coef=0.01; configs/base.py has them all.
The same command again resumes from the newest whole checkpoint in the workdir, on other devices too
(--config.mesh). Several processes share a run and its workdir: start the command in each, with
--coordinator=HOST:PORT --processes=2 --process=0 (and 1), or with --distributed under Slurm, Open
MPI or on a TPU pod.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import time
from typing import Any, Sequence

from absl import flags
import jax
import ml_collections
import numpy as np
import rich.console

from retriever.protocol import RetrievalError, SearchEngine
from searchr1_jax.algo import advantages, collate, schedules, update
from searchr1_jax.model import sharding, value
from searchr1_jax.rollout import draw, drive
from searchr1_jax.run import (checkpoint, cli, data, disk, distributed, evaluation,
                              learning, metrics as measures, setup, writers)
from searchr1_jax.types import Question, StopReason, Trajectory, UserError

EVALUATION_DRAW = 2**31 - 1  # the "step" that addresses the randomness of sampled evaluations


@dataclasses.dataclass(frozen=True)
class RunState:
  """Everything that a resumed run needs. `host` is plain JSON: cursor, controllers, guards."""

  policy: update.TrainState
  value: update.TrainState | None
  host: dict[str, Any]

  def to_checkpoint(self) -> dict[str, Any]:
    arrays = {"policy": self.policy} | ({"value": self.value} if self.value else {})
    return {"arrays": arrays, "host": self.host}

  def noting(self, **host: Any) -> RunState:
    """The same with these entries in `host`."""
    return dataclasses.replace(self, host=self.host | host)

  @classmethod
  def from_checkpoint(cls, saved: dict[str, Any]) -> RunState:
    return cls(saved["arrays"]["policy"], saved["arrays"].get("value"), saved["host"])


class Trainer:
  """The parts of a run, put together once: nothing here changes from step to step."""

  def __init__(self, config: ml_collections.ConfigDict, workdir: pathlib.Path):
    self.mesh = setup.mesh(config)
    self.shapes, self.weighting = setup.batch_shapes(config), setup.weighting(config)
    distributed.on_leader(lambda: setup.prepare_world(config, workdir))
    self.config = c = setup.prepare_world(config, workdir)  # finds what the leader has made
    self.model = setup.open_policy(c)
    self.search: SearchEngine = setup.open_search(c)
    self.train_questions = setup.load_questions(tuple(c.data.train))
    data.questions_at(self.train_questions, c.seed, 0, c.data.questions)  # too many? say so now
    self.test_questions = (setup.load_questions(tuple(c.data.test), c.eval.questions)
                           if c.data.test else [])
    self.learning = learning.Learning(c, self.model.shape, self.model.tokenizer.size, self.mesh)
    self.base = self.model.load_params(self.mesh)
    self.reference = self.learning.reference(self.base)
    # What a resumed run must find unchanged.
    self.fingerprints = {
        "search engine": self.search.fingerprint, "tokenizer": self.model.tokenizer.fingerprint,
        "base model": checkpoint.fingerprint(self.base, str(self.model.shape)),
        "set of questions": data.fingerprint(self.train_questions)}
    distributed.refuse_differences(self.fingerprints)

  def initial_state(self) -> RunState:
    """Step 0: the base model; a value model, where there is one, with the same backbone."""
    c, start = self.config, self.learning.start
    warmup = {name: schedules.warmup_steps(share, c.steps) for name, share in (
        ("policy", c.optimizer.policy_warmup), ("value", c.optimizer.value_warmup))}
    host = {"cursor": 0, "kl_coef": float(c.algo.kl_coef), "bad_updates": 0, "skipped": 0,
            "warmup_steps": warmup, "fingerprints": self.fingerprints}
    critic = start(value.from_policy(self.base)) if self.learning.needs_value else None
    return RunState(start(self.base), critic, host)

  def step(self, state: RunState, step: int) -> tuple[RunState, dict, list]:
    """One training step: questions → rollout → score → advantages → update."""
    c, clock = self.config, measures.Clock()
    questions, cursor = data.questions_at(
        self.train_questions, c.seed, state.host["cursor"], c.data.questions)
    trajectories, stats = self.rollout(state, questions, step)
    clock.take(stats.seconds)
    scores = [self.model.score(t) for t in trajectories]
    rewards_B = np.array([s.reward for s in scores], np.float32)
    advantages_B, rows = self.compare(trajectories, rewards_B)
    kept, scores = [trajectories[i] for i in rows], [scores[i] for i in rows]
    taught_B = advantages_B != 0 if c.algo.drop_flat_groups else np.ones(len(rows), bool)
    plan = collate.collate(
        kept, rewards_B[rows], advantages_B, shapes=self.shapes, weighting=self.weighting,
        updates=min(self.minibatches, len(rows)), taught_B=taught_B)
    clock.charge("host")
    minibatches = [[sharding.put_batch(self.mesh, b) for b in m] for m in plan.minibatches]
    plan = dataclasses.replace(plan, minibatches=tuple(map(tuple, minibatches)))
    score = functools.partial(self.learning.score, state.policy.params,
                              state.value and state.value.params, self.reference)
    scored = [[score(b) for b in m] for m in plan.minibatches]
    jax.block_until_ready(scored)
    clock.charge("score")
    targets, about = self.targets(plan, scored, state.host["kl_coef"])
    state, learned = self.learn(state, plan, targets, step)
    jax.block_until_ready(state.policy)
    clock.charge("update")
    lost = len(trajectories) - len(kept)
    found = {**measures.of_episodes(kept, scores), **measures.of_rollout(stats, lost),
             **about, **learned, **measures.of_sampler(plan, scored),
             "padding": plan.padding_share, "taught": float(np.mean(taught_B)),
             **clock.metrics()}
    state = state.noting(cursor=cursor, kl_coef=self.next_kl_coef(state, about, len(kept)))
    return state, found, list(zip(kept, scores))

  def rollout(self, state: RunState, questions: Sequence[Question], step: int):
    """The episodes of a step; repeated where the search engine lost too many of them."""
    c = self.config
    tasks = [drive.Task(q, g, self.model.encode_prompt(q))
             for q in questions for g in range(c.algo.group_size)]
    key = jax.random.fold_in(jax.random.key(c.seed), step)
    for _ in range(c.limits.lost_batches):
      trajectories, stats = distributed.rollout(
          self.model.engine, state.policy.params, tasks, self.model.rules, self.search,
          how=setup.training_sampling(c), key=key, retrieval=setup.retrieval(c))
      _, rows = self.compare(trajectories, np.zeros(len(tasks), np.float32))
      lost = len(tasks) - len(rows)  # which rows are left does not depend on rewards
      if lost <= c.limits.lost_share * len(tasks) and lost < len(tasks):
        return trajectories, stats
    raise cli.RetrieverLost(
        f"the search engine lost {lost} of {len(tasks)} episodes, {c.limits.lost_batches} times in "
        f"a row, at step {step} ({stats.search_failure or 'in another process'}); mend it and "
        "repeat the command: the run resumes where it stopped")

  @property
  def minibatches(self) -> int:
    return self.config.algo.updates_per_batch // self.config.algo.epochs

  def compare(self, trajectories: Sequence[Trajectory], rewards_B: np.ndarray
              ) -> tuple[np.ndarray, np.ndarray]:
    """Advantages by group, and the rows that they are of; PPO's come later, from values.

    A failing search takes its episode away, and with too few left to compare, the whole group.
    """
    a = self.config.algo
    keep_B = np.array([t.stop_reason is not StopReason.RETRIEVAL_ERROR for t in trajectories])
    keys = [t.question.key for t in trajectories]
    advantages_B = np.zeros(len(trajectories), np.float32)
    if a.name == "rloo":
      advantages_B, keep_B = advantages.rloo_advantages(
          rewards_B, keys, keep_B, group_size=a.group_size)
    elif a.name == "grpo":
      advantages_B, keep_B = advantages.grpo_advantages(
          rewards_B, keys, keep_B, use_std=a.group_std, group_size=a.group_size)
    rows = np.flatnonzero(keep_B)
    return advantages_B[rows], rows

  def targets(self, plan, scored, kl_coef: float):
    """What the updates learn from."""
    a = self.config.algo
    if self.learning.needs_value:
      return update.ppo_targets(
          plan, scored, kl_coef=kl_coef if a.kl_in == "reward" else 0.0, gamma=a.gamma, lam=a.lam,
          kl_kind=a.kl_kind, compat=bool(a.compat))
    return update.group_targets(plan, scored, kl_kind=a.kl_kind)

  def learn(self, state: RunState, plan, targets, step: int) -> tuple[RunState, dict]:
    """All epochs of updates on a rollout batch; the value first, alone where so configured."""
    policy, value_state, found = state.policy, state.value, {}
    policy_rate, value_rate = self.rate(state, "policy", step), self.rate(state, "value", step)
    for _ in range(self.config.algo.epochs):
      for batches, goals in zip(plan.minibatches, targets, strict=True):
        if value_state:
          value_state, learned = self.learning.value_learner.learn(value_state, batches, goals, value_rate)
          found = update.add_metrics(found, {f"value/{k}": v for k, v in learned.items()})
        if step >= self.config.algo.value_only_steps:
          policy, learned = self.learning.policy_learner.learn(policy, batches, goals, policy_rate)
          found = update.add_metrics(found, {f"policy/{k}": v for k, v in learned.items()})
    found["policy/lr"] = policy_rate
    return dataclasses.replace(state, policy=policy, value=value_state), found

  def rate(self, state: RunState, name: str, step: int) -> float:
    """The learning rate of policy or value; a run keeps its warm-up when it is prolonged."""
    c, steps = self.config, state.host["warmup_steps"][name]
    return float(schedules.warmup(c.optimizer[f"{name}_lr"], steps, bool(c.algo.compat))(step))

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
        how=draw.sampling(temperature), key=key, retrieval=setup.retrieval(self.config))


def train(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
  """Trains until `config.steps`, resuming what the workdir holds; returns the summary.

  Every process calls it on the same config, and a workdir that they share.
  """
  distributed.refuse_differences({"config": config.to_json(), "workdir": str(workdir)})
  setup.check(config)
  with contextlib.ExitStack() as held:
    distributed.on_leader(lambda: held.enter_context(disk.locked(workdir)))
    distributed.on_leader(lambda: _refuse_other_run(config, workdir))
    stop = checkpoint.StopFlag().install()
    trainer = Trainer(config, workdir)
    held.callback(trainer.search.close)
    distributed.on_leader(lambda: cli.save_config(workdir, config))
    summary = _run(trainer, workdir, stop)
    distributed.on_leader(lambda: disk.write_json(workdir / "summary.json", summary))
  if distributed.is_leader():
    _show(rich.console.Console(), summary, workdir)
  return summary


def _run(trainer: Trainer, workdir: pathlib.Path, stop: checkpoint.StopFlag) -> dict[str, Any]:
  """The steps that are left, with what is measured, written and saved between them."""
  c = trainer.config
  saves = checkpoint.Checkpointer(workdir / "checkpoints", c.checkpoint.keep, c.checkpoint.best)
  state, done = _restore(trainer, saves)
  trainer.base = None  # only the first state is made of it
  if distributed.is_leader():
    print(f"rollouts: {trainer.model.engine.memory}", flush=True)
  if "before" not in state.host:
    state = state.noting(before=_measure(trainer, state, c))
  began, spent, metric = time.monotonic(), measures.Clock(), None
  with contextlib.ExitStack() as held:
    diary = distributed.on_leader(lambda: held.enter_context(contextlib.closing(writers.Diary(
        workdir, c, trainer.model.tokenizer.decode, done))))
    for earlier in diary.earlier if diary else ():  # steps, before the run was resumed
      spent.add(earlier)
    resumed_after = spent.seconds.get("step", 0.0)
    try:
      while done < c.steps:
        _heed(stop, done)
        state, found, episodes = trainer.step(state, done)
        done += 1  # from here on `state` is that of the next step
        state, failed = _guard(state, c, done), None
        try:
          found |= _evaluate_between(trainer, state, c, done)
        except RetrievalError as error:
          failed = error
        # The step has been taken, whatever became of the evaluation.
        distributed.on_leader(lambda: diary.write(done - 1, found, episodes))
        if failed:
          raise failed
        metric = found.get("eval/em")
        if done % c.checkpoint.every == 0 and done < c.steps:
          saves.save(done, state.to_checkpoint(), metric)
        spent.add(found)
      seconds = resumed_after + time.monotonic() - began
      if "after" not in state.host:
        _heed(stop, done)
        after = _measure(trainer, state, c)
        state = state.noting(after=after)
        saves.save(done, state.to_checkpoint(), after["greedy"]["all"]["em"] if after else metric)
    except (cli.Stopped, cli.RetrieverLost, RetrievalError):
      if done not in saves.steps():
        saves.save(done, state.to_checkpoint())
      raise
  return _summary(state, c, seconds, spent)


def _restore(trainer: Trainer, saves: checkpoint.CheckpointReader) -> tuple[RunState, int]:
  """The newest whole checkpoint, or the beginning."""
  state = trainer.initial_state()
  if not saves.steps():
    return state, 0
  wanted = {"arrays": jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      state.to_checkpoint()["arrays"])}
  del state  # makes room for the one that is read
  step, saved = saves.restore_newest_whole(wanted)
  host, steps = saved["host"], trainer.config.steps
  if step > steps:
    raise UserError(f"the run has done {step} steps already, config.steps is {steps}; set it to "
                    f"{step} or more, or start in an empty workdir")
  if set(host["fingerprints"]) != set(trainer.fingerprints):
    raise UserError("the run was started by another version of this program, which did not note "
                    "all that must stay the same; resume it with that version, or start in an "
                    "empty workdir")
  for name, now in trainer.fingerprints.items():
    if (then := host["fingerprints"][name]) != now:
      raise UserError(f"the run was started with another {name} ({then[:12]}, now {now[:12]}); put "
                      "the old one back, or start in an empty workdir")
  if step < steps:
    host.pop("after", None)  # a finished run goes on: what it came to is measured again
  if distributed.is_leader():
    print(f"found a checkpoint after step {step}; going on from there", flush=True)
  return RunState.from_checkpoint(saved), step


def _heed(stop: checkpoint.StopFlag, done: int) -> None:
  if distributed.any_process(bool(stop)):  # all of them then stop here
    raise cli.Stopped(f"stopped by a signal after step {done}; the same command goes on from there")


def _refuse_other_run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
  """A workdir belongs to one run: only its length, records, devices and memory may change."""
  if not (workdir / cli.CONFIG_FILE).is_file():
    return
  free = {"steps", "machine", "eval", "checkpoint", "log", "limits", "mesh", "model.remat",
          "model.reference_memory", "model.logits_tokens", "model.scan_layers",
          "optimizer.moments_memory"}
  differ = [f"{key} {change}" for key, change in
            cli.differences(cli.load_config(workdir), config).items()
            if not free & {key.split(".")[1], key.removeprefix("config.")}]
  if differ:
    raise UserError(f"{workdir} holds a run with another config: {'; '.join(differ)}; repeat its "
                    "settings to resume it, or name another workdir")


def _guard(state: RunState, c, done: int) -> RunState:
  """Counts updates refused for a non-finite gradient; too many in a row end the run."""
  skipped = int(state.policy.skipped) + (int(state.value.skipped) if state.value else 0)
  bad = state.host["bad_updates"] + 1 if skipped > state.host["skipped"] else 0
  if bad >= c.limits.bad_updates:
    raise cli.NumericError(f"{bad} steps in a row had a non-finite gradient, up to step {done}; "
                           "the parameters are as before; lower the learning rate")
  return state.noting(bad_updates=bad, skipped=skipped)


def _evaluate_between(trainer: Trainer, state: RunState, c, done: int) -> dict[str, float]:
  """Greedy scores on the test questions, where it is time; `_measure` has them at the end."""
  due = c.eval.every and done % c.eval.every == 0 and (done < c.steps or not c.eval.around)
  if not due or not trainer.test_questions:
    return {}
  greedy = evaluation.summarise(trainer.evaluate(state.policy.params, 0.0))
  return {"eval/em": greedy["em"], "eval/searches": greedy["searches"]}


def _measure(trainer: Trainer, state: RunState, c) -> dict[str, Any] | None:
  """Greedy and sampled scores on the test questions."""
  if not trainer.test_questions or not c.eval.around:
    return None
  measure = lambda t: evaluation.by_dataset(trainer.evaluate(state.policy.params, t))
  out = {"greedy": measure(0.0)}
  if c.eval.sampled:
    out["sampled"] = measure(c.rollout.temperature)
  return out


def _summary(state: RunState, c, seconds: float, spent: measures.Clock) -> dict[str, Any]:
  """What the run came to."""
  out: dict[str, Any] = {"steps": c.steps, "seconds": seconds, "seconds_by_phase": spent.seconds}
  for when in ("before", "after"):
    measured = state.host[when]
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
  for prefix, title in (("", "greedy"), ("sampled_", "sampled")):
    # Either may be missing: `eval.around` may change from one part of a run to the next.
    rows = {when: summary[key]["all"] for when in ("before", "after")
            if (key := f"{prefix}by_dataset_{when}") in summary}
    if rows:
      console.print(evaluation.table(rows, f"held-out questions, {title}"))
  console.print(f"{summary['steps']} steps in {summary['seconds']:.0f} s", highlight=False)
  console.print(f"run folder: {workdir}", soft_wrap=True, highlight=False)


def main(words: Sequence[str]) -> None:
  def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", None, "the run's folder; resumed if it holds a run",
                        flag_values=values)
    distributed.define_flags(values)
    cli.define_config(values, words, cli.base_config())

  values, _ = cli.parse(words, define)
  if not values.workdir:
    raise UserError("no folder for the run; give one as --workdir=runs/NAME")
  distributed.start(values)
  train(values.config, pathlib.Path(values.workdir))


if __name__ == "__main__":
  cli.run_program(main)
