"""Whether seats are busy: turns of very different lengths, and searches that take a second.

  python -m benchmarks.schedule --cpus 0

Long tail: --questions episodes of one turn whose lengths differ tenfold, on --seats rows; the share
of the seats' steps that wrote a token while questions were waiting. Slow search: as many episodes of
two searches that take --latency seconds each, against the same load with instant searches, and
against a loop that writes, searches and inserts in step. One JSON line.
"""

from __future__ import annotations

import dataclasses
import time

from benchmarks import common

p = common.parser(__doc__)
for name, default in dict(questions=64, seats=16, prompt=32, shortest=20, turn=150).items():
  p.add_argument(f"--{name}", type=int, default=default)
p.add_argument("--latency", type=float, default=1.0)
args = p.parse_args()
common.pin(args.cpus)

import jax

from retriever.protocol import Passage
from searchr1_jax.rollout import draw, drive
from searchr1_jax.rollout.engine import Engine
from searchr1_jax.rollout.episode import EpisodeSettings, make_rules
from searchr1_jax.rollout.searches import Retrieval
from searchr1_jax.rollout.slots import EngineShapes
from searchr1_jax.testing import ByteTokenizer
from searchr1_jax.types import Question

shape, params = common.random_model(args)
tokenizer = ByteTokenizer()
PASSAGE = Passage("0", '"Nile"\nThe Nile is a river.', 1.0)


def engine_of(rows: int, slots: int) -> Engine:
  some = lambda *sizes: tuple(n for n in sizes if n < args.seats) + (args.seats,)
  shapes = EngineShapes(rows, slots, 32, some(4), some(2, 8), (128, slots),
                        (slots // 4, slots // 2))
  return Engine(shape, shapes, common.never(args.vocab), (), args.vocab)


def tasks_of(lengths: list[int]) -> list[drive.Task]:
  return [drive.Task(Question("bench", str(i), "?", ()), 0, tuple(b"%d?" % i + b"x" * n)[:n])
          for i, n in enumerate(lengths)]


def play(engine: Engine, tasks: list[drive.Task], search, settings: EpisodeSettings, said: bytes,
         retrieval: Retrieval) -> tuple[drive.RolloutStats, float]:
  """The rollout of tasks in which each turn says the same; what it cost, and its seconds."""
  rules = make_rules(settings, tokenizer.encode_plain, tokenizer.decode_bytes)
  rules = dataclasses.replace(rules, decode_bytes=lambda ids: said)
  began = time.perf_counter()
  done, stats = drive.rollout(engine, params, tasks, rules, search, how=draw.sampling(1.0),
                              key=jax.random.key(args.seed), retrieval=retrieval)
  assert len(done) == len(tasks)
  return stats, time.perf_counter() - began


def long_tail() -> dict:
  """Lengths from `shortest` to ten times that, in no order; a prompt's length leaves that room."""
  longest = 10 * args.shortest
  lengths = [args.shortest + (longest - args.shortest) * (37 * i % args.questions)
             // (args.questions - 1) for i in range(args.questions)]
  episode = args.prompt + longest
  engine = engine_of(args.seats, episode)
  tasks = tasks_of([episode - n for n in lengths])
  settings = EpisodeSettings(max_turns=0, max_turn_tokens=longest, max_episode_tokens=episode)
  for _ in range(2):  # the first one compiles
    stats, seconds = play(engine, tasks, None, settings, b"", Retrieval())
  assert stats.generated_tokens == sum(lengths)
  return dict(occupancy=round(stats.occupancy, 3),
              occupancy_with_tail=round(stats.generated_tokens / stats.seat_steps, 3),
              calls=stats.rounds, seconds=round(seconds, 2),
              by_phase={k: round(v, 2) for k, v in stats.seconds.items()})


def slow_search() -> dict:
  """Two searches an episode: instant, slow behind decoding, slow in step."""
  episode = args.prompt + 3 * args.turn + 2 * 100
  tasks = tasks_of([args.prompt] * args.questions)
  said = b"<search>river</search>"
  searches = [0]

  def instant(queries, top_k):
    searches[0] += len(queries)
    return [[PASSAGE] * top_k for _ in queries]

  def slow(queries, top_k):
    time.sleep(args.latency)
    return instant(queries, top_k)

  how = Retrieval(in_flight=64, deterministic=False)
  engine = engine_of(4 * args.seats, episode)
  settings = EpisodeSettings(2, args.turn, episode, max_observation_tokens=100)
  run = lambda engine, search, how: play(engine, tasks, search, settings, said, how)
  run(engine, instant, how)  # compiles
  _, compute = run(engine, instant, how)
  searches[0] = 0
  stats, hidden = run(engine, slow, how)
  assert searches[0] == 2 * args.questions
  # As many rows as seats and every answer waited for: nobody writes while others search.
  in_step = [run(engine_of(args.seats, episode), s, Retrieval()) for s in (instant, instant, slow)]
  lost = lambda whole, of: round(1 - of / whole, 3)
  return dict(compute_s=round(compute, 2), seconds=round(hidden, 2), lost=lost(hidden, compute),
              search_wait=round(stats.search_wait, 3), occupancy=round(stats.occupancy, 3),
              in_step_compute_s=round(in_step[1][1], 2), in_step_s=round(in_step[2][1], 2),
              in_step_lost=lost(in_step[2][1], in_step[1][1]))


common.report(bench="schedule", questions=args.questions, seats=args.seats, turn=args.turn,
              latency_s=args.latency, long_tail=long_tail(), slow_search=slow_search())
