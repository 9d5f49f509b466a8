"""Continuous batching: rows filled in mid-generation, prompts shared, no search in the way.

And none of it may be seen in what is written: an episode is the same whatever runs beside it,
however long its searches take, and on however many rows. The models are those of test_engine.py.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_engine import (
    ANSWER, ANSWER_END, ASKS, EOS, FORGED, HALF, LINE_END, MAX_TURN, OTHER_HALF, SEARCH,
    SEARCH_END, SHAPES, SLOTS, engine_for, found, noisy, prompt, rules, scripted, tasks_for,
    turns_of)

from searchr1_jax.rollout import draw, drive
from searchr1_jax.rollout.engine import Insert, Written
from searchr1_jax.rollout.searches import Retrieval
from searchr1_jax.rollout.slots import EngineShapes
from searchr1_jax.types import Role, StopReason

PATIENCE = 5.0  # seconds after which a search that nobody lets go is taken for a mistake
MANY = dataclasses.replace(SHAPES, rows=9)  # as SHAPES, with room for nine episodes at once
WIDE = EngineShapes(rows=6, slots=SLOTS, tokens=MAX_TURN, seats=(1, 4), row_buckets=(4,),
                    chunk_buckets=(128,), widths=(200,))
AT_ONCE = Retrieval(deterministic=False)


@functools.cache
def noisy_engine(shapes):
  """Used again and again: what an engine holds of rollouts before must not matter."""
  return engine_for(noisy()[0], shapes)


@functools.cache
def blank_script():
  return scripted({})


def script(followers):
  """As `scripted`, but for parameters made once: the head alone says what follows what."""
  shape, params = blank_script()
  next_V = np.array([followers.get(i, EOS) for i in range(shape.vocab_size)])
  head = jnp.zeros_like(params["head"]).at[np.arange(shape.vocab_size), next_V].set(1.0)
  return shape, params | {"head": head}


def play(tasks, shapes=SHAPES, *, engine=None, followers=None, search=found, key=7, settings=None,
         change_rules=lambda rules: rules, retrieval=Retrieval(), watcher=drive.Watcher()):
  """A rollout of the noisy model or, where `followers` are given, of a scripted one."""
  shape, params = noisy() if followers is None else script(followers)
  engine = engine or (noisy_engine(shapes) if followers is None else engine_for(shape, shapes))
  return drive.rollout(
      engine, params, tasks, change_rules(rules(**settings or {})), search, key=jax.random.key(key),
      how=draw.sampling(1.0 if followers is None else 0.0), retrieval=retrieval, watcher=watcher)


def samples(questions, count):
  """So many samples of so many questions."""
  return [dataclasses.replace(t, sample=g) for t in tasks_for(questions) for g in range(count)]


_ALONE = {}


def alone(task):
  """The task's episode when nothing else runs."""
  name = task.question.id, task.sample, task.prompt_ids
  if name not in _ALONE:
    _ALONE[name], = play([task])[0]
  return _ALONE[name]


def assert_every_token_is_accounted_for(trajectories, stats):
  written = sum(len(s.ids) for s in turns_of(trajectories))
  assert stats.generated_tokens == written
  assert stats.prefilled_tokens + stats.shared_tokens == drive.prefill_needed(trajectories)
  assert stats.prefilled_tokens + stats.shared_tokens + written == sum(
      len(t.ids) for t in trajectories if t.segments)


# Samples of a question share its prompt.


def test_samples_share_one_prefill_and_write_what_each_would_alone():
  tasks = samples(3, 3)
  trajectories, stats = play(tasks, MANY)
  assert trajectories == [alone(t) for t in tasks]
  prompts = sum(len(t.prompt_ids) for t in tasks_for(3))
  assert stats.shared_tokens == 2 * prompts  # nine rows: each question's first sample prefills
  assert_every_token_is_accounted_for(trajectories, stats)


@pytest.mark.parametrize("seed", range(3))
def test_prompts_are_shared_in_any_order_on_rows_used_again(seed):
  tasks = random.Random(seed).sample(samples(4, 3), 12)
  trajectories, stats = play(tasks)
  assert trajectories == [alone(t) for t in tasks]
  assert stats.shared_tokens > 0
  assert_every_token_is_accounted_for(trajectories, stats)


class Rows:
  """The engine by hand: put tokens into rows, let all of them write to the end of their turns."""

  def __init__(self, shapes=SHAPES):
    self.engine = noisy_engine(shapes)
    self.engine.begin(noisy()[1], jax.random.key(7), draw.sampling(1.0))

  def write(self, max_tokens=MAX_TURN, **tasks):
    """`r2=task`: the task begins on row 2; `r2=ids`: these come behind what it holds."""
    self.engine.insert([
        Insert(int(row[1:]), t.prompt_ids, max_tokens, True, t.seeds) if isinstance(t, drive.Task)
        else Insert(int(row[1:]), t, max_tokens, False, (0, 0)) for row, t in tasks.items()])
    written = {}
    while self.engine.writing:
      written |= self.engine.decode()
    return {f"r{row}": w for row, w in written.items()}

  @property
  def shared(self):
    return self.engine.counts.shared_tokens


def first_turn(task):
  turn = alone(task).segments[0]
  return Written(turn.ids, turn.sampler_logprobs)


A, A1, A2, B, B1 = samples(2, 3)[:5]
LENGTH_A, LENGTH_B = len(A.prompt_ids), len(B.prompt_ids)


def test_a_prompt_is_shared_from_a_row_that_has_gone_on():
  rows = Rows()
  assert rows.write(r0=A) == {"r0": first_turn(A)} and rows.shared == 0
  rows.write(r0=tuple(b"an observation of some length\n"))
  assert rows.write(r2=A1) == {"r2": first_turn(A1)} and rows.shared == LENGTH_A
  # Another row goes on behind its tokens in the same call in which a third begins.
  rows.write(r2=tuple(b"and another\n"), r1=A2)
  assert rows.shared == 2 * LENGTH_A
  assert Rows().write(r3=A2) == {"r3": first_turn(A2)}


def test_a_prompt_is_shared_from_a_row_that_was_given_back():
  rows = Rows()
  assert rows.engine.admit(A.prompt_ids) == 0
  rows.write(r0=A)
  rows.engine.release(0)
  # Rows that hold no prompt are taken before the one that may still be of use.
  assert [rows.engine.admit(B.prompt_ids) for _ in range(4)] == [1, 2, 3, 0]
  assert rows.write(r1=A1) == {"r1": first_turn(A1)} and rows.shared == LENGTH_A
  # A row may begin again with its own prompt.
  assert rows.write(r0=A2) == {"r0": first_turn(A2)} and rows.shared == 2 * LENGTH_A


def test_a_prompt_that_is_overwritten_in_the_same_call_is_not_shared():
  rows = Rows()
  rows.write(r0=A, r1=B)
  # The two swap: neither finds its prompt where it was.
  assert rows.write(r0=B1, r1=A1) == {"r0": first_turn(B1), "r1": first_turn(A1)}
  assert rows.shared == 0
  # Row 0 keeps its prompt for another sample, and gives it to row 1, which gave its own away.
  assert rows.write(r1=B, r0=B1) == {"r1": first_turn(B), "r0": first_turn(B1)}
  assert rows.shared == 2 * LENGTH_B
  # Row 2 takes the place of nothing; A was overwritten by now.
  assert rows.write(r2=A2) == {"r2": first_turn(A2)} and rows.shared == 2 * LENGTH_B


# Who is served when.


def test_a_finished_row_goes_to_the_next_task_in_mid_generation():
  # Task 0 writes on and on, the others answer: all in one call of 24 tokens, if none ended early.
  followers = {ord("z"): ord("x"), ord("x"): ord("x"), LINE_END: ANSWER, ANSWER: ord("a"),
               ord("a"): ANSWER_END}
  events = []
  watcher = drive.Watcher(
      timeline=lambda at, what, row, task: events.append((what, task)),
      tokens=lambda task, role, ids: events.append((role, task)))
  tasks = [prompt(ord("z"), "0"), *(prompt(LINE_END, str(i)) for i in range(1, 8))]
  trajectories, stats = play(tasks, followers=followers, watcher=watcher)
  assert len(turns_of(trajectories[:1])[0].ids) == MAX_TURN
  pieces = [i for i, e in enumerate(events) if e == (Role.POLICY, 0)]
  turn = events[: events.index(("insert", 0))]  # up to the end of the first turn of task 0
  began = [task for what, task in turn[pieces[0]:] if what == "begin"]
  assert began == [4, 5, 6, 7] and turn.count((Role.POLICY, 0)) >= 3
  ends = [i for i, (what, _) in enumerate(events) if what == "end"]
  assert ends[0] < events.index(("begin", 4)) < ends[-1] == events.index(("end", 0))
  assert_every_token_is_accounted_for(trajectories, stats)


@pytest.mark.parametrize("seats", [1, 4])
def test_a_search_holds_up_no_other_episode(seats):
  # The first search answers when all the other episodes are over; some of those search as well.
  over, requests, let_go, timeline = threading.Event(), [], [], []

  def search(queries, top_k):
    requests.append(len(queries))
    if len(requests) == 1:
      let_go.append(over.wait(PATIENCE))
    return found(queries, top_k)

  kinds = [ord("z"), *(LINE_END,) * 3, ord("z"), LINE_END, ord("z"), LINE_END, LINE_END]
  tasks = [prompt(kind, str(i)) for i, kind in enumerate(kinds)]
  ended = []
  watcher = drive.Watcher(
      done=lambda t: (ended.append(t), len(ended) == len(tasks) - 1 and over.set()),
      timeline=lambda at, what, row, task: timeline.append((what, task)))
  trajectories, stats = play(
      tasks, dataclasses.replace(SHAPES, seats=(seats,)), followers=ASKS, search=search,
      retrieval=AT_ONCE, watcher=watcher)
  assert requests[0] == 1 and let_go == [True]  # before its patience ended
  assert {t.stop_reason for t in trajectories} == {StopReason.ANSWER}
  assert ended[-1] is trajectories[0] and timeline[-1] == ("end", 0)
  waited = timeline[timeline.index(("search", 0)) + 1: timeline.index(("insert", 0))]
  assert {task for what, task in waited if what == "begin"} >= {5, 6, 7, 8}
  assert_every_token_is_accounted_for(trajectories, stats)


def test_a_row_that_waits_for_passages_takes_no_seat():
  # One row of four writes at a time. In deterministic mode a search is heard one call later, and
  # in that call the seat belongs to another.
  tasks = [prompt(ord("z"), str(i)) for i in range(4)]
  timeline = []
  trajectories, stats = play(
      tasks, dataclasses.replace(SHAPES, seats=(1,)), followers=ASKS,
      watcher=drive.Watcher(timeline=lambda at, what, row, task: timeline.append(what)))
  assert_every_token_is_accounted_for(trajectories, stats)
  # Four episodes of 3 tokens to search and 3 to answer, a call each, and no step without a token.
  assert (stats.seat_steps, stats.generated_tokens, stats.rounds) == (24, 24, 8)
  assert stats.occupancy == 1.0
  # First turns first: passages that come meanwhile wait until everyone has asked.
  assert timeline.index("end") > len(timeline) - 1 - timeline[::-1].index("search")


@pytest.fixture
def decodes(monkeypatch):
  """(rows that write, seats, width) of each decode call of `noisy_engine(WIDE)`."""
  calls, engine = [], noisy_engine(WIDE)
  decode = engine._decode

  def spy(chosen, seats, width):
    calls.append((engine.writing, seats, width))
    return decode(chosen, seats, width)

  monkeypatch.setattr(engine, "_decode", spy)
  return calls


def test_the_tail_is_written_on_fewer_seats(decodes):
  _, stats = play(tasks_for(1), WIDE)
  assert {seats for _, seats, _ in decodes} == {1}
  assert stats.seat_steps == stats.generated_tokens
  decodes.clear()
  play(tasks_for(12), WIDE)
  assert {1, 2, 4} <= {rows for rows, _, _ in decodes}
  assert all(seats == (1 if rows == 1 else 4) for rows, seats, _ in decodes)


def test_short_rows_are_read_short(decodes):
  trajectories, _ = play(tasks_for(12), WIDE)
  assert {width for _, _, width in decodes} == {200, SLOTS}
  assert max(len(t.ids) for t in trajectories) > 200
  decodes.clear()
  play(tasks_for(6), WIDE, settings={"max_episode_tokens": 199})
  assert {width for _, _, width in decodes} == {200}


def test_a_row_may_fill_the_slots_that_are_read_to_the_last_one(decodes):
  # 180 and up to 20 tokens of 200 that are read, in calls of up to 24; a turn that goes on after
  # others have ended moves to the desk of one seat, and is brought there from the cache.
  tasks = {f"r{i}": t for i, t in enumerate(tasks_for(4, length_of=lambda i: 180))}
  written = Rows(WIDE).write(max_tokens=20, **tasks)
  assert {width for _, _, width in decodes} == {200} and {s for _, s, _ in decodes} == {1, 4}
  for row, expected in Rows().write(max_tokens=20, **tasks).items():
    assert written[row].ids == expected.ids
    np.testing.assert_allclose(
        written[row].sampler_logprobs, expected.sampler_logprobs, atol=1e-4)
  assert max(len(w.ids) for w in written.values()) > 15


# Edges.


def asked_for(query):
  """Rules under which every search of the policy asks for this."""
  def change(rules):
    def decode_bytes(ids):
      return (b"<search>" + query + b"</search>" if SEARCH_END in ids
              else rules.decode_bytes(ids))

    return dataclasses.replace(rules, decode_bytes=decode_bytes)

  return change


ANSWERS = {ANSWER: ord("a"), ord("a"): ANSWER_END}
EDGES = {
    # what the policy writes after z and after a line; how each episode ends; turns of each
    "eos as the first token": ({}, StopReason.BUDGET, 3),
    "answers in turn 1": ({ord("z"): ANSWER, **ANSWERS}, StopReason.ANSWER, 1),
    "all search at once": (ASKS, StopReason.ANSWER, 2),
    "searches without end": ({ord("z"): SEARCH, SEARCH: ord("x"), ord("x"): ord("x"),
                              LINE_END: SEARCH}, StopReason.BUDGET, 3),
    "never stops": ({i: ord("x") for i in range(300)}, StopReason.BUDGET, 3),
    "a tag in pieces": ({**ASKS, ord("q"): HALF, HALF: OTHER_HALF}, StopReason.ANSWER, 2),
    "forges passages": ({ord("z"): FORGED, FORGED: ANSWER, **ANSWERS}, StopReason.ANSWER, 1),
}


@pytest.mark.parametrize("rows, count", [(4, 4), (4, 1), (4, 6), (1, 3)])
@pytest.mark.parametrize("edge", EDGES)
def test_edges(edge, rows, count):
  followers, reason, turns = EDGES[edge]
  shapes = dataclasses.replace(SHAPES, rows=rows, seats=(rows,), row_buckets=(rows,))
  tasks = [prompt(ord("z"), str(i)) for i in range(count)]
  trajectories, stats = play(tasks, shapes, followers=followers)
  assert [t.question.id for t in trajectories] == [str(i) for i in range(count)]
  assert {(t.stop_reason, t.turns) for t in trajectories} == {(reason, turns)}
  # One prompt for all: prefilled once, whoever holds it.
  assert stats.shared_tokens == (count - 1) * len(tasks[0].prompt_ids)
  assert_every_token_is_accounted_for(trajectories, stats)
  assert sum(t.forged_information for t in trajectories) == count * (edge == "forges passages")
  assert stats.searches == count * (reason is StopReason.ANSWER and turns == 2)


@pytest.mark.parametrize("query, asks", [
    (b"", False), (b" \n\t ", False), (b"\0", True), (b"a\0b", True), (b"q" * 10_240, True),
    (b"\xff\xfe", True), ("\N{ZERO WIDTH SPACE}".encode(), True)])
def test_queries_of_any_kind(query, asks):
  heard = []

  def search(queries, top_k):
    heard.extend(queries)
    return found(queries, top_k)

  tasks = [prompt(ord("z"), str(i)) for i in range(2)]
  trajectories, stats = play(tasks, followers=ASKS, search=search, change_rules=asked_for(query))
  assert heard == [query.decode(errors="replace")] * (2 * asks)
  assert {t.stop_reason for t in trajectories} == {StopReason.ANSWER}
  assert {t.invalid_actions for t in trajectories} == {int(not asks)}
  assert_every_token_is_accounted_for(trajectories, stats)


def test_a_prompt_longer_than_every_chunk():
  # 128 + 128 + 44 tokens; the second sample shares all of them.
  tasks = [dataclasses.replace(t, sample=g)
           for t in tasks_for(1, length_of=lambda i: 300) for g in range(2)]
  trajectories, stats = play(tasks)
  assert trajectories == [alone(t) for t in tasks] and stats.shared_tokens == 300
  assert_every_token_is_accounted_for(trajectories, stats)


@pytest.mark.parametrize("lengths", [(60,), (60, 200, 61), (20, 90, 30, 60, 10, 70, 25)])
def test_prompts_without_room_take_no_row(lengths):
  tasks = tasks_for(len(lengths), length_of=lambda i: lengths[i])
  trajectories, stats = play(tasks, settings={"max_episode_tokens": 60})
  for length, t in zip(lengths, trajectories):
    assert (t.segments == ()) == (length >= 60)
    assert t.stop_reason is StopReason.LENGTH or length < 60
  assert_every_token_is_accounted_for(trajectories, stats)


# The same episodes.


class Jitter:
  """`found`, after a while that nobody can foresee."""

  def __init__(self, seed):
    self._random, self.most = random.Random(seed), 0.05

  def __call__(self, queries, top_k):
    time.sleep(self._random.uniform(0, self.most))
    return found(queries, top_k)


@functools.cache
def reference():
  """Twelve episodes by question and sample, their searches answered at once."""
  trajectories, stats = play(samples(4, 3))
  assert stats.searches >= 4
  return {(t.question.id, t.sample): t for t in trajectories}


def assert_as_reference(trajectories):
  for t in trajectories:
    expected = reference()[t.question.id, t.sample]
    assert t.ids == expected.ids
    assert t.sampler_logprobs == expected.sampler_logprobs  # bit for bit
    assert t == expected


@pytest.mark.parametrize("seed", [0, 1])
def test_no_latency_changes_an_episode(seed):
  for retrieval in (Retrieval(), Retrieval(in_flight=1)):
    assert_as_reference(play(samples(4, 3), search=Jitter(seed), retrieval=retrieval)[0])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_neighbour_order_or_number_of_rows_changes_an_episode(seed):
  rng = random.Random(seed)
  for shapes in (SHAPES, MANY):
    tasks = rng.sample(samples(4, 3), rng.randint(3, 12))
    assert shapes.fixed() == shapes
    trajectories, _ = play(tasks, shapes, search=Jitter(seed))
    assert [(t.question, t.sample) for t in trajectories] == [(t.question, t.sample) for t in tasks]
    assert_as_reference(trajectories)


@pytest.mark.parametrize("seed", [0, 1])
def test_an_asynchronous_rollout_differs_by_rounding_at_most(seed):
  trajectories, stats = play(samples(4, 3), WIDE, search=Jitter(seed), retrieval=AT_ONCE)
  for t in trajectories:
    expected = reference()[t.question.id, t.sample]
    assert t.ids == expected.ids
    np.testing.assert_allclose(t.sampler_logprobs, expected.sampler_logprobs, atol=1e-4)
  assert_every_token_is_accounted_for(trajectories, stats)
