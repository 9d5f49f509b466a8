"""Episodes on the engine: fill rows, let them write, search behind their back, insert, go on."""

from __future__ import annotations

import dataclasses
import time
import zlib
from typing import Callable, Iterable, Sequence

from jaxtyping import Array

from retriever.protocol import Search
from searchr1_jax.model.decoder import Params
from searchr1_jax.rollout import episode as ep
from searchr1_jax.rollout.draw import Sampling
from searchr1_jax.rollout.engine import Counts, Engine, Insert
from searchr1_jax.rollout.searches import Retrieval, Searches
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
class RolloutStats(Counts):
  """What a rollout cost: the device's counts, and what is known of it outside the engine.

  `seconds`: prefill, decode, search (the device idle, every row waiting for passages) and host.
  `busy_...`: counts up to the moment when the last task had got its row. `search_failure`: why a
  search failed last, "" if none did.
  """

  seconds: dict[str, float] = dataclasses.field(
      default_factory=lambda: {"prefill": 0.0, "decode": 0.0, "search": 0.0, "host": 0.0})
  searches: int = 0
  busy_seat_steps: int = 0
  busy_generated_tokens: int = 0
  search_failure: str = ""

  @property
  def occupancy(self) -> float:
    """The share of the seats' steps that wrote a token, while tasks were waiting for rows."""
    steps = self.busy_seat_steps or self.seat_steps
    tokens = self.busy_generated_tokens if self.busy_seat_steps else self.generated_tokens
    return tokens / steps if steps else 1.0

  @property
  def search_wait(self) -> float:
    """The share of the time in which the device had nothing to do but wait for passages."""
    total = sum(self.seconds.values())
    return self.seconds["search"] / total if total else 0.0


@dataclasses.dataclass(frozen=True)
class Watcher:
  """Who wants to know while it happens; tasks are named by their place.

  `tokens`: ids that came into an episode, the policy's as they're written; `timeline`: (seconds,
  what, row, task) of "begin", "search", "insert" and "end".
  """

  done: Callable[[Trajectory], None] = lambda t: None
  tokens: Callable[[int, Role, Sequence[int]], None] = lambda task, role, ids: None
  timeline: Callable[[float, str, int, int], None] = lambda at, what, row, task: None


def rollout(engine: Engine, params: Params, tasks: Sequence[Task], rules: ep.Rules,
            search: Search, *, how: Sampling, key: Array, retrieval: Retrieval = Retrieval(),
            watcher: Watcher = Watcher()) -> tuple[list[Trajectory], RolloutStats]:
  """Runs every task to its end; trajectories come back in the order of `tasks`.

  `key` belongs to the seed and the training step. More tasks than rows wait for a free one. A
  search that fails ends its episodes with `retrieval_error`; it never becomes their text.
  """
  run = _Run(engine, tasks, rules, Searches(search, retrieval), watcher)
  try:
    engine.begin(params, key, how)
    run.charge("host")
    _play(run, engine, retrieval)
  finally:
    engine.end()
  return [run.done[i] for i in range(len(tasks))], run.stats


def _play(run: _Run, engine: Engine, retrieval: Retrieval) -> None:
  """The loop: fill rows, insert, let them write, hear what searches found."""
  while run.unfinished:
    run.fill_rows()
    run.charge("host")
    if run.inserts:
      engine.insert(run.inserts)
      run.inserts.clear()
      engine.wait()
      run.charge("prefill")
    if engine.writing:
      written = engine.decode(run.on_piece)
      run.book()
      run.charge("decode")
    elif run.searches:
      written = {}
    else:
      continue
    # In deterministic mode what the call before this one asked is heard now, whenever it came.
    answers = run.searches.heard(wait=retrieval.deterministic or not (engine.writing or written))
    run.charge("search")
    run.take(answers)
    run.take((row, ep.TurnWritten(w.ids, w.sampler_logprobs)) for row, w in written.items())
    run.searches.send()
    run.charge("host")
  run.book()


def prefill_needed(trajectories: Sequence[Trajectory]) -> int:
  """Tokens of prompts and of what the environment inserted, once each: to be prefilled or shared.

  A prompt that left no room for a turn never reached the device.
  """
  return sum(len(t.prompt_ids) + sum(len(s.ids) for s in t.segments if s.role is Role.ENVIRONMENT)
             for t in trajectories if t.segments)


class _Run:
  """A rollout under way: whose episode each row holds, what is due to be inserted, what it cost."""

  def __init__(self, engine: Engine, tasks: Sequence[Task], rules: ep.Rules, searches: Searches,
               watcher: Watcher):
    self.engine, self.tasks, self.rules = engine, tasks, rules
    self.searches, self.watcher, self.stats = searches, watcher, RolloutStats()
    self.done: dict[int, Trajectory] = {}
    self.inserts: list[Insert] = []
    self._running: dict[int, tuple[int, ep.Episode]] = {}  # row -> (task, episode)
    self._next = 0
    self._began = self._charged = time.monotonic()

  @property
  def unfinished(self) -> bool:
    return len(self.done) < len(self.tasks)

  def fill_rows(self) -> None:
    """Gives free rows to the next tasks; a prompt that leaves no room for a turn takes none."""
    while self._next < len(self.tasks):
      task = self.tasks[self._next]
      episode, effect = ep.start(self.rules, task.question, task.sample, task.prompt_ids)
      if isinstance(effect, ep.Finish):
        self._finish(self._next, effect)
      elif (row := self.engine.admit(task.prompt_ids)) is None:
        return
      else:
        self._running[row] = (self._next, episode)
        self._tell("begin", row)
        self.inserts.append(Insert(row, task.prompt_ids, effect.max_tokens, True, task.seeds))
      self._next += 1

  def take(self, events: Iterable[tuple[int, ep.Event]]) -> None:
    """Advances the episodes of these rows, and books what they want next."""
    for row, event in events:
      task, episode = self._running[row]
      if isinstance(event, ep.SearchFailed):
        self.stats.search_failure = event.reason
      episode, effect = ep.advance(episode, event)
      self._running[row] = (task, episode)
      if isinstance(effect, ep.Search):
        self.searches.ask(row, effect)
        self.stats.searches += 1
        self._tell("search", row)
      elif isinstance(effect, ep.Write):
        self._tell("insert", row)
        self.watcher.tokens(task, Role.ENVIRONMENT, effect.insert)
        self.inserts.append(Insert(row, effect.insert, effect.max_tokens, False,
                                   self.tasks[task].seeds))
      else:
        self._tell("end", row)
        self.engine.release(row)
        del self._running[row]
        self._finish(task, effect)

  def on_piece(self, row: int, ids: Sequence[int]) -> None:
    self.watcher.tokens(self._running[row][0], Role.POLICY, ids)

  def book(self) -> None:
    """Brings the engine's counts into the statistics."""
    s = self.stats
    vars(s).update(vars(self.engine.counts))
    if self._next < len(self.tasks):
      s.busy_seat_steps, s.busy_generated_tokens = s.seat_steps, s.generated_tokens

  def charge(self, phase: str) -> None:
    """Charges the time since the last charge to a phase."""
    now = time.monotonic()
    self.stats.seconds[phase] += now - self._charged
    self._charged = now

  def _finish(self, task: int, effect: ep.Finish) -> None:
    self.done[task] = effect.trajectory
    self.watcher.done(effect.trajectory)

  def _tell(self, what: str, row: int) -> None:
    self.watcher.timeline(time.monotonic() - self._began, what, row, self._running[row][0])
