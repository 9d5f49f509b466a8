"""Episodes on the engine: fill rows, let them write, search for those that ask, insert, go on."""

from __future__ import annotations

import dataclasses
import time
import zlib
from typing import Callable, Iterator, Sequence

from jaxtyping import Array

from retriever.protocol import Passage, RetrievalError, Search
from searchr1_jax.model.decoder import Params
from searchr1_jax.rollout import episode as ep
from searchr1_jax.rollout.engine import Engine, Insert
from searchr1_jax.rollout.sampler import Sampling
from searchr1_jax.types import Question, Role, Trajectory


@dataclasses.dataclass(frozen=True)
class Task:
  """An episode to run: sample number `sample` of a question, behind these prompt ids."""

  question: Question
  sample: int
  prompt_ids: tuple[int, ...]

  @property
  def seeds(self) -> tuple[int, int]:
    """What the episode's randomness is addressed by, wherever and whenever it runs."""
    return zlib.crc32("\n".join(self.question.key).encode()), self.sample


@dataclasses.dataclass
class RolloutStats:
  """What a rollout cost: seconds by phase, tokens as the device counted them, searches run."""

  seconds: dict[str, float] = dataclasses.field(
      default_factory=lambda: {"prefill": 0.0, "decode": 0.0, "search": 0.0, "host": 0.0})
  prefilled_tokens: int = 0
  generated_tokens: int = 0
  searches: int = 0
  rounds: int = 0


def rollout(engine: Engine, params: Params, tasks: Sequence[Task], rules: ep.Rules,
            search: Search, *, how: Sampling, key: Array,
            on_done: Callable[[Trajectory], None] = lambda t: None,
            ) -> tuple[list[Trajectory], RolloutStats]:
  """Runs every task to its end; trajectories come back in the order of `tasks`.

  `key` belongs to the seed and the training step. More tasks than rows wait for a free one. A
  search that fails ends its episodes with `retrieval_error`; it never becomes their text.
  """
  stats, clock = RolloutStats(), _Clock()
  done: dict[int, Trajectory] = {}
  waiting = iter(range(len(tasks)))
  running: dict[int, tuple[int, ep.Episode]] = {}  # row -> (task, episode)
  inserts: list[Insert] = []
  engine.begin(params, key, how)

  def settle(row: int, task: int, episode: ep.Episode, effect: ep.Effect) -> ep.Search | None:
    """Books an effect; hands back a search that has to run first."""
    if isinstance(effect, ep.Search):
      running[row] = (task, episode)
      return effect
    if isinstance(effect, ep.Finish):
      running.pop(row, None)
      done[task] = effect.trajectory
      on_done(effect.trajectory)
      return None
    fresh = row not in running
    running[row] = (task, episode)
    ids = tasks[task].prompt_ids if fresh else effect.insert
    inserts.append(Insert(row, ids, effect.max_tokens, fresh, tasks[task].seeds))
    return None

  def fill_rows() -> None:
    free = (r for r in range(engine.shapes.rows) if r not in running)
    for row, task in zip(free, waiting):
      t = tasks[task]
      settle(row, task, *ep.start(rules, t.question, t.sample, t.prompt_ids))

  while len(done) < len(tasks):
    fill_rows()
    clock.charge(stats, "host")
    if inserts:
      engine.insert(inserts)
      inserts.clear()
      engine.wait()
      clock.charge(stats, "prefill")
    if not running:
      continue
    written = engine.decode()
    if not written:
      raise RuntimeError(f"no turn ended in rows {sorted(running)}: the engine lost them")
    stats.rounds += 1
    clock.charge(stats, "decode")
    asked: dict[int, ep.Search] = {}
    for row, turn in written.items():
      task, episode = running[row]
      event = ep.TurnWritten(turn.ids, turn.sampler_logprobs)
      if (wanted := settle(row, task, *ep.advance(episode, event))) is not None:
        asked[row] = wanted
    clock.charge(stats, "host")
    for row, event in _search_all(search, asked):
      settle(row, running[row][0], *ep.advance(running[row][1], event))
    stats.searches += len(asked)
    clock.charge(stats, "search")
  for name, count in engine.counters().items():
    setattr(stats, name, count)
  engine.end()
  return [done[i] for i in range(len(tasks))], stats


def prefill_needed(trajectories: Sequence[Trajectory]) -> int:
  """Tokens that had to be prefilled: the prompts and what the environment inserted, once each.

  A prompt that left no room for a turn never reached the device.
  """
  return sum(len(t.prompt_ids) + sum(len(s.ids) for s in t.segments if s.role is Role.ENVIRONMENT)
             for t in trajectories if t.segments)


def _search_all(search: Search, asked: dict[int, ep.Search]) -> Iterator[tuple[int, ep.Event]]:
  """One batch for all rows that ask; an engine that fails fails them all."""
  if not asked:
    return
  top_k = next(iter(asked.values())).top_k
  try:
    found: list[list[Passage]] = search([e.query for e in asked.values()], top_k)
  except RetrievalError as e:
    yield from ((row, ep.SearchFailed(str(e))) for row in asked)
    return
  if len(found) != len(asked):
    reason = f"the engine answered {len(found)} queries of {len(asked)}"
    yield from ((row, ep.SearchFailed(reason)) for row in asked)
    return
  yield from ((row, ep.SearchDone(tuple(p))) for row, p in zip(asked, found))


class _Clock:
  """Charges the time since the last charge to a phase."""

  def __init__(self):
    self._last = time.monotonic()

  def charge(self, stats: RolloutStats, phase: str) -> None:
    now = time.monotonic()
    stats.seconds[phase] += now - self._last
    self._last = now
