"""Whole episodes of a real model: real questions, a real index, three searches each.

  SEARCHR1_ASSETS=... python -m benchmarks.episodes --cpus 0,1

SmolLM2-135M in float32, --questions x --samples episodes, turns of exactly --T tokens each; what a
turn wrote is searched for in `wiki-vital/index` of the assets (build it with retriever.build), so
that queries and observations are as many and as long as they come. One JSON line.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time

from benchmarks import common

p = common.parser(__doc__)
for name, default in dict(questions=16, samples=2, searches=3, T=64, seats=32).items():
  p.add_argument(f"--{name}", type=int, default=default)
p.set_defaults(repeats=1)
args = p.parse_args()
common.pin(args.cpus)

import jax

from retriever.opening import open_engine
from searchr1_jax.model import weights
from searchr1_jax.rollout import draw, drive
from searchr1_jax.rollout.engine import Engine
from searchr1_jax.rollout.episode import EpisodeSettings, make_rules
from searchr1_jax.rollout.searches import Retrieval
from searchr1_jax.rollout.slots import EngineShapes
from searchr1_jax.run import data
from searchr1_jax.text import prompts
from searchr1_jax.text.tokenizer import Tokenizer
from searchr1_jax.types import Role

assets = pathlib.Path(os.environ["SEARCHR1_ASSETS"])
shape, _ = weights.read_config(assets / "smollm2-135m")
params = weights.load(assets / "smollm2-135m")
tokenizer = Tokenizer.load(assets / "smollm2-135m")
search = open_engine(assets / "wiki-vital" / "index")
questions = data.load_questions(str(assets / "trivia" / "test.jsonl"))[: args.questions]
ids = [tuple(tokenizer.prompt_ids(prompts.SEARCH_PROMPT, q.question, False)) for q in questions]
tasks = [drive.Task(q, g, i) for q, i in zip(questions, ids) for g in range(args.samples)]
length = max(map(len, ids)) + (args.searches + 1) * args.T + args.searches * 256
rules = make_rules(
    EpisodeSettings(args.searches, args.T, length, 256), tokenizer.encode_plain,
    lambda ids: b"<search>" + tokenizer.decode_bytes(ids)[-100:].replace(b"<", b"") + b"</search>")
rows, seats = len(tasks), min(args.seats, len(tasks))
# Four rows fill the matrix units; scores of more would not fit a core's cache.
engine = Engine(
    shape, EngineShapes(rows, length, args.T, (seats,), (min(4, rows),), (160, 256),
                        (length // 2, 3 * length // 4)),
    common.never(shape.vocab_size), (), tokenizer.size)


def timed(seed: int):
  began = time.perf_counter()
  done, stats = drive.rollout(engine, params, tasks, rules, search, how=draw.sampling(1.0),
                              key=jax.random.key(seed), retrieval=Retrieval(deterministic=False))
  return time.perf_counter() - began, done, stats


first, _, _ = timed(0)
runs = [timed(i + 1) for i in range(args.repeats)]
seconds, done, stats = runs[-1]
inserted = [len(s.ids) for t in done for s in t.segments if s.role is Role.ENVIRONMENT]
median = common.spread([r[0] for r in runs])
common.report(
    bench="episodes", episodes=len(tasks), searches=stats.searches, T=args.T,
    mean_prompt=round(sum(map(len, ids)) / len(ids), 1),
    mean_inserted=round(sum(inserted) / len(inserted), 1), first_rollout_s=round(first, 2),
    rollout_s=median, trajectories_s=round(len(tasks) / median["median"], 3),
    occupancy=round(stats.occupancy, 3),
    by_phase={k: round(v, 2) for k, v in stats.seconds.items()},
    **{k: v for k, v in dataclasses.asdict(stats).items() if k.endswith("_tokens")})
