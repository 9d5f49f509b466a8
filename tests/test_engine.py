"""Rollouts on tiny models: every token accounted for, stopped where it should, the same each time.

Two models write here. `noisy()` is a random transformer whose logits lean towards tags, so that
searches, answers, forged passages and nonsense all occur; `scripted()` is a chain in which each
token has one follower, so that a test can say what will be written. Their tokenizer knows bytes
and a few longer tokens: whole tags, and halves of one that carry something past the `>`.
"""

from __future__ import annotations

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

from retriever.protocol import Passage, RetrievalError
from searchr1_jax.model import decoder, sharding
from searchr1_jax.model.shapes import DecoderShape
from searchr1_jax.rollout import draw, drive
from searchr1_jax.rollout.engine import Counts, Engine, Insert
from searchr1_jax.rollout.episode import EpisodeSettings, make_rules
from searchr1_jax.rollout.slots import EngineShapes, plan_prefill
from searchr1_jax.rollout.stops import build_automaton, cut_at_stop
from searchr1_jax.testing import ByteTokenizer
from searchr1_jax.text import actions
from searchr1_jax.text.tokenizer import Tokenizer
from searchr1_jax.types import Question, Role, StopReason, UserError

EOS, PAD = 256, 257
LONG = ("<search>", "</search>", "<answer>", "</answer>", "<information>", "</sea", "rch>\n")
SEARCH, SEARCH_END, ANSWER, ANSWER_END, FORGED, HALF, OTHER_HALF = range(258, 258 + len(LONG))
UNUSED = 7  # the model's output is this much wider than its tokenizer
SLOTS, MAX_TURN = 640, 24
SHAPES = EngineShapes(rows=4, slots=SLOTS, tokens=MAX_TURN, seats=(4,), row_buckets=(4,),
                      chunk_buckets=(32, 128))


@functools.cache
def tokenizer():
  backend = ByteTokenizer()._full
  backend.add_tokens(list(LONG))
  return Tokenizer(backend, name="bytes and tags", eos_ids={EOS}, pad_id=PAD)


@functools.cache
def automaton():
  return build_automaton(tokenizer().token_bytes, [t.encode() for t in actions.STOP_TAGS],
                         tokenizer().size + UNUSED)


def rules(**settings):
  t = tokenizer()
  sizes = dict(max_turns=2, max_turn_tokens=MAX_TURN, max_episode_tokens=SLOTS,
               max_observation_tokens=100, top_k=2)
  return make_rules(EpisodeSettings(**sizes | settings), t.encode_plain, t.decode_bytes)


@functools.cache
def noisy():
  """A random transformer that likes tags and a few letters: its shape and parameters."""
  shape = dataclasses.replace(
      tiny.random_shape("qwen3", 0), vocab_size=tokenizer().size + UNUSED, width=32,
      tied_embeddings=False)
  params = tiny.random_params(shape, 3)
  # The first feature is large in every token, hence about the same in every final state: a row
  # of the head then works as a bias. Ids beyond the tokenizer get the largest one.
  lean_V = np.full(shape.vocab_size, -9.0, np.float32)
  lean_V[[*b"abcdef ", ANSWER]] = 0.0
  lean_V[SEARCH] = 0.8
  lean_V[[SEARCH_END, ANSWER_END, EOS]] = -0.5
  lean_V[[FORGED, HALF, OTHER_HALF]] = -1.0
  lean_V[tokenizer().size:] = 9.0
  params["embed"] = params["embed"].at[:, 0].set(20.0)
  params["norm"]["scale"] = params["norm"]["scale"].at[0].set(1.0)
  params["head"] = params["head"].at[0].set(lean_V / 3)
  return shape, params


def scripted(followers):
  """A chain, greedy: after token i comes followers[i], or EOS where it names none."""
  size = tokenizer().size + UNUSED
  shape = DecoderShape(vocab_size=size, width=size + size % 2, mlp_width=8, layers=1, heads=1,
                       kv_heads=1, head_size=4, rope_theta=1e4, norm_eps=1e-6,
                       tied_embeddings=False)
  params = jax.tree.map(jnp.zeros_like, decoder.init_params(shape, jax.random.key(0)))
  params["norm"]["scale"] = jnp.ones(shape.width)
  params["embed"] = jnp.eye(size, shape.width)
  next_V = np.array([followers.get(i, EOS) for i in range(size)])
  params["head"] = jnp.zeros((shape.width, size)).at[np.arange(size), next_V].set(1.0)
  return shape, params


def engine_for(shape, shapes=SHAPES, dtype=jnp.float32):
  return Engine(shape, shapes, automaton(), tokenizer().eos_ids, tokenizer().size, dtype)


def tasks_for(count, sample_of=lambda i: 0, length_of=lambda i: 5 + 11 * i % 60):
  """Tasks with prompts of several lengths."""
  rng = random.Random(1)
  return [
      drive.Task(Question("toy", str(i), "Who?", ("a",)), sample_of(i),
                 tuple(rng.choices(b"abcdefgh ", k=length_of(i))))
      for i in range(count)]


def found(queries, top_k):
  """Passages that depend on the query and vary in length."""
  return [[Passage(str(n), f'"T{n}"\n{q.strip()} ' + "fact " * (len(q) + 3 * n), 1.0)
           for n in range(top_k)] for q in queries]


def play(tasks, *, engine=None, search=found, temperature=1.0, key=7, settings=None, model=None,
         **how):
  shape, params = model or noisy()
  engine = engine or engine_for(shape)
  return drive.rollout(engine, params, tasks, rules(**settings or {}), search,
                       how=draw.sampling(temperature, **how), key=jax.random.key(key))


@functools.cache
def usual():
  """Twelve episodes on four rows; the tests below look at them from several sides."""
  return play(tasks_for(12))


def turns_of(trajectories):
  return [s for t in trajectories for s in t.segments if s.role is Role.POLICY]


def full_logprobs(trajectories, temperature, model=None):
  """log softmax at every position of the whole trajectories, from one forward without a cache."""
  shape, params = model or noisy()
  ids_BL = np.zeros((12, SLOTS), np.int32)  # one shape for all
  for ids_L, t in zip(ids_BL, trajectories):
    ids_L[: len(t.ids)] = t.ids
  logits = tiny.our_logits(shape, params, ids_BL)[..., : tokenizer().size]
  return np.asarray(jax.nn.log_softmax(jnp.asarray(logits) / temperature, axis=-1))


# Every token is accounted for.


def test_these_episodes_hold_what_the_tests_are_about():
  trajectories, stats = usual()
  reasons = {t.stop_reason for t in trajectories}
  assert StopReason.ANSWER in reasons and StopReason.BUDGET in reasons
  assert stats.searches == sum(len(t.searches) for t in trajectories) >= 3
  assert sum(t.invalid_actions for t in trajectories) >= 3
  assert any(EOS in s.ids for s in turns_of(trajectories))


@pytest.mark.parametrize("rows, tasks", [(4, 12), (4, 1), (1, 3)])
def test_the_device_counts_each_token_once(rows, tasks):
  shapes = dataclasses.replace(SHAPES, rows=rows, seats=(rows,), row_buckets=(rows,))
  engine = engine_for(noisy()[0], shapes)
  for key in (0, 1):  # the counters begin anew with each rollout
    trajectories, stats = play(tasks_for(tasks), engine=engine, key=key)
    assert [t.question.id for t in trajectories] == [str(i) for i in range(tasks)]
    assert stats.prefilled_tokens == drive.prefill_needed(trajectories)
    assert stats.generated_tokens == sum(len(s.ids) for s in turns_of(trajectories))
    # Every token of every episode was either written by one side or inserted by the other.
    assert stats.prefilled_tokens + stats.generated_tokens == sum(len(t.ids) for t in trajectories)


def test_the_counts_leave_out_a_prompt_without_room():
  tasks = tasks_for(3, length_of=lambda i: (20, 80, 30)[i])
  trajectories, stats = play(tasks, settings={"max_episode_tokens": 60})
  assert trajectories[1].stop_reason is StopReason.LENGTH and trajectories[1].segments == ()
  assert stats.prefilled_tokens == drive.prefill_needed(trajectories)
  assert len(trajectories[0].ids) <= 60 >= len(trajectories[2].ids)


def test_each_logprob_is_that_of_the_whole_trajectory():
  for temperature in (1.0, 0.6):
    trajectories, _ = usual() if temperature == 1.0 else play(tasks_for(6), temperature=0.6)
    logprobs = full_logprobs(trajectories, temperature)
    for row, t in enumerate(trajectories):
      at = np.flatnonzero(t.policy_mask)
      ids = np.array(t.ids)[at]
      np.testing.assert_allclose(
          np.array(t.sampler_logprobs)[at], logprobs[row, at - 1, ids], atol=1e-4)


def test_top_p_and_top_k_leave_the_reported_logprob_alone():
  trajectories, _ = play(tasks_for(6), top_p=0.7, top_k=5)
  logprobs = full_logprobs(trajectories, 1.0)
  for row, t in enumerate(trajectories):
    for at in np.flatnonzero(t.policy_mask):
      own = logprobs[row, at - 1]
      assert abs(t.sampler_logprobs[at] - own[t.ids[at]]) < 1e-4
      assert np.sum(own > own[t.ids[at]] + 1e-4) < 5  # among the five likeliest


def test_greedy_takes_the_likeliest():
  trajectories, _ = play(tasks_for(6), temperature=0.0)
  logprobs = full_logprobs(trajectories, 1.0)
  for row, t in enumerate(trajectories):
    for at in np.flatnonzero(t.policy_mask):
      own = logprobs[row, at - 1]
      assert own[t.ids[at]] >= own.max() - 1e-4
      assert abs(t.sampler_logprobs[at] - own[t.ids[at]]) < 1e-4


def test_half_precision_reports_what_it_drew_with():
  trajectories, stats = play(tasks_for(4), engine=engine_for(noisy()[0], dtype=jnp.bfloat16))
  assert stats.generated_tokens == sum(len(s.ids) for s in turns_of(trajectories))
  logprobs = full_logprobs(trajectories, 1.0)
  gaps = [abs(t.sampler_logprobs[at] - logprobs[row, at - 1, t.ids[at]])
          for row, t in enumerate(trajectories) for at in np.flatnonzero(t.policy_mask)]
  assert 0 < np.mean(gaps) < 0.1  # close to float32, and not float32 in disguise


# A turn ends where it should.


def test_a_turn_ends_at_the_first_reason_to_end():
  trajectories, _ = usual()
  ends = set()
  for t in trajectories:
    length = len(t.prompt_ids)
    for s in t.segments:
      if s.role is Role.POLICY:
        stop = cut_at_stop(automaton(), s.ids)
        assert stop in (None, len(s.ids) - 1)
        assert EOS not in s.ids[:-1]
        if stop is None and s.ids[-1] != EOS:
          assert len(s.ids) == min(MAX_TURN, SLOTS - length)
        ends.add("stop" if stop is not None else "eos" if s.ids[-1] == EOS else "length")
      length += len(s.ids)
    assert max(t.ids) < tokenizer().size
  assert ends == {"stop", "eos", "length"}


def prompt(last, question="q", sample=0):
  return drive.Task(Question("toy", question, "Who?", ("a",)), sample, (*b"hi", last))


LINE_END = ord("\n")  # observations and notices end with it


def test_a_tag_spread_over_tokens_stops_where_it_is_complete():
  # "<search>q</sea" + "rch>\n": the token that completes the tag stays whole; nothing follows.
  # After the observation: "<answer>a</answer>".
  script = {ord("i"): SEARCH, SEARCH: ord("q"), ord("q"): HALF, HALF: OTHER_HALF,
            OTHER_HALF: ord("x"), LINE_END: ANSWER, ANSWER: ord("a"), ord("a"): ANSWER_END}
  model = scripted(script)
  (t,), stats = play([drive.Task(Question("toy", "1", "Who?", ("a",)), 0, tuple(b"hi"))],
                     model=model, temperature=0.0)
  turns = turns_of([t])
  assert turns[0].ids == (SEARCH, ord("q"), HALF, OTHER_HALF)
  assert turns[1].ids == (ANSWER, ord("a"), ANSWER_END)
  assert [s.query for s in t.searches] == ["q"]
  assert t.stop_reason is StopReason.ANSWER
  # 2 of the prompt and the observation; 4 and 3 written; one search.
  assert stats.prefilled_tokens == 2 + len(t.segments[1].ids)
  assert (stats.generated_tokens, stats.searches, stats.rounds) == (7, 1, 2)


def test_eos_as_the_first_token_is_a_turn_of_one():
  model = scripted({LINE_END: EOS})
  (t,), _ = play([prompt(ord("z"))], model=model, temperature=0.0)
  # max_turns = 2: two invalid turns, then the last one.
  assert [s.ids for s in turns_of([t])] == [(EOS,)] * 3
  assert t.stop_reason is StopReason.BUDGET and t.invalid_actions == 3


def test_a_model_that_never_stops_is_stopped():
  model = scripted({i: ord("x") for i in range(300)})
  (t,), _ = play([prompt(ord("z"))], model=model, temperature=0.0,
                 settings={"max_turns": 20})
  assert all(set(s.ids) == {ord("x")} and len(s.ids) <= MAX_TURN for s in turns_of([t]))
  assert t.stop_reason is StopReason.LENGTH
  assert SLOTS - MAX_TURN - len(rules().invalid_notice) < len(t.ids) <= SLOTS


def test_forged_passages_are_counted():
  model = scripted({ord("z"): FORGED, FORGED: ANSWER, ANSWER: ord("a"), ord("a"): ANSWER_END})
  (t,), _ = play([prompt(ord("z"))], model=model, temperature=0.0)
  assert t.forged_information == 1 and t.searches == ()
  trajectories, _ = usual()
  written = [tokenizer().decode(s.ids).count("<information>") for s in turns_of(trajectories)]
  assert sum(t.forged_information for t in trajectories) == sum(written) > 0


# Searches.


ASKS = {ord("z"): SEARCH, SEARCH: ord("q"), ord("q"): SEARCH_END, LINE_END: ANSWER,
        ANSWER: ord("a"), ord("a"): ANSWER_END}


def test_all_rows_search_in_one_batch():
  batches = []

  def search(queries, top_k):
    batches.append((list(queries), top_k))
    return found(queries, top_k)

  tasks = [prompt(ord("z"), str(i)) for i in range(6)]
  trajectories, stats = play(tasks, model=scripted(ASKS), temperature=0.0, search=search)
  # Four rows: four episodes ask at once, then the other two.
  assert batches == [(["q"] * 4, 2), (["q"] * 2, 2)]
  assert {t.stop_reason for t in trajectories} == {StopReason.ANSWER}
  assert stats.searches == 6


def test_a_failing_engine_ends_the_episodes_that_asked_and_leaves_no_trace():
  calls = []

  def search(queries, top_k):
    calls.append(len(queries))
    raise RetrievalError("SECRET: the engine is down")

  # The third answers at once; the last task runs on a row that a failed episode gave back.
  tasks = [prompt(ord("z"), "0"), prompt(ord("z"), "1"), prompt(LINE_END, "2"),
           prompt(ord("z"), "3"), prompt(LINE_END, "4")]
  trajectories, stats = play(tasks, model=scripted(ASKS), temperature=0.0, search=search)
  failed, answered = StopReason.RETRIEVAL_ERROR, StopReason.ANSWER
  assert [t.stop_reason for t in trajectories] == [failed, failed, answered, failed, answered]
  assert calls == [3]
  for t in trajectories:
    assert "SECRET" not in tokenizer().decode(t.ids)
    assert [s.role for s in t.segments] == [Role.POLICY] and t.searches == ()
  assert stats.prefilled_tokens + stats.shared_tokens == drive.prefill_needed(trajectories) == 15
  assert stats.shared_tokens == 9  # there are two prompts among the five


@pytest.mark.parametrize("answers", [0, 1, 3])
def test_an_engine_that_answers_another_number_of_queries_has_failed(answers):
  tasks = [prompt(ord("z"), "0"), prompt(ord("z"), "1")]
  trajectories, _ = play(tasks, model=scripted(ASKS), temperature=0.0,
                         search=lambda queries, top_k: [[]] * answers)
  assert {t.stop_reason for t in trajectories} == {StopReason.RETRIEVAL_ERROR}


def test_an_engine_that_finds_nothing_is_no_failure():
  (t,), _ = play([prompt(ord("z"))], model=scripted(ASKS), temperature=0.0,
                 search=lambda queries, top_k: [[] for _ in queries])
  assert t.stop_reason is StopReason.ANSWER and t.searches[0].passages == ()


def test_other_errors_of_a_search_are_not_swallowed_and_the_engine_stays_usable():
  def search(queries, top_k):
    raise ZeroDivisionError

  engine = engine_for(noisy()[0])
  with pytest.raises(ZeroDivisionError):
    play(tasks_for(12), engine=engine, search=search)
  assert play(tasks_for(12), engine=engine)[0] == usual()[0]


def test_an_engine_outlives_what_goes_wrong():
  shape, params = noisy()
  engine = engine_for(shape)
  # Parameters that overflow leave their traces in every slot; nobody reads them afterwards.
  play(tasks_for(12), engine=engine, model=(shape, jax.tree.map(lambda x: x * np.nan, params)))
  assert play(tasks_for(12), engine=engine)[0] == usual()[0]
  # A program that fails takes the state with it that it was given.
  engine.begin(params, jax.random.key(0), draw.sampling(1.0))
  programs = engine._programs

  def out_of_memory(params, state, *rest, **how):
    jax.tree.map(lambda x: x.delete(), state)
    raise MemoryError("no room")

  for name in ("prefill", "decode"):
    engine._programs = programs._replace(**{name: out_of_memory})
    with pytest.raises(MemoryError):
      play(tasks_for(2), engine=engine)
    assert engine._params is None
    engine._programs = programs
    assert play(tasks_for(12), engine=engine)[0] == usual()[0]


def test_groups_do_not_crowd_one_device_while_others_are_idle(run_python):
  run_python("""
import sys
sys.path.insert(0, "tests")
import dataclasses, jax
import test_engine as te
from searchr1_jax.model import sharding
from searchr1_jax.rollout import draw

shape, params = te.noisy()
mesh = sharding.make_mesh(4, 1, 1)
params = jax.device_put(params, sharding.parameter_shardings(mesh, params))
engine = te.engine_for(shape, dataclasses.replace(te.SHAPES, rows=6, seats=(2,)))
for groups, samples, most in ((2, 4, 2), (4, 3, 4), (1, 1, 1)):
  engine.begin(params, jax.random.key(0), draw.sampling(1.0))
  rows = [engine.admit((g,)) for g in range(groups) for _ in range(samples)]
  held = [sum(r // 6 == d for r in rows) for d in range(4)]
  assert sum(held) == groups * samples and max(held) <= most, held
""", devices=4)


# The same whatever runs beside it.


def test_an_episode_depends_on_nothing_that_runs_beside_it():
  everything, tasks = usual()[0], tasks_for(12)
  order = random.Random(2).sample(range(12), 12)
  engine = engine_for(noisy()[0])  # used again and again: what it holds of before must not matter
  shuffled, _ = play([tasks[i] for i in order], engine=engine)
  assert shuffled == [everything[i] for i in order]
  few, _ = play([tasks[9], tasks[2]], engine=engine)
  assert few == [everything[9], everything[2]]
  alone, _ = play([tasks[7]], engine=engine)
  assert alone == [everything[7]]


def test_other_shapes_give_the_same_episodes():
  # Other row and chunk buckets round differently, which a draw all but never notices.
  shapes = EngineShapes(rows=7, slots=SLOTS + 20, tokens=5, seats=(2, 3), row_buckets=(1, 3),
                        chunk_buckets=(16,), widths=(60, 200))
  trajectories, stats = play(tasks_for(12), engine=engine_for(noisy()[0], shapes))
  assert [t.ids for t in trajectories] == [t.ids for t in usual()[0]]
  assert stats.prefilled_tokens == drive.prefill_needed(trajectories)


def test_a_seed_says_everything_and_another_says_something_else():
  tasks = tasks_for(12)
  assert play(tasks)[0] == usual()[0]
  other = play(tasks, key=1)[0]
  assert sum(a.ids != b.ids for a, b in zip(other, usual()[0])) >= 11
  # Samples of one question differ, and so do questions with one prompt.
  same = dataclasses.replace
  samples, _ = play([same(tasks[3], sample=i) for i in range(4)])
  assert len({t.ids for t in samples}) == 4
  twins, _ = play([same(tasks[3], question=Question("toy", str(i), "Who?", ())) for i in range(4)])
  assert len({t.ids for t in twins}) == 4


def test_finished_trajectories_are_told_as_they_come():
  told = []
  shape, params = noisy()
  trajectories, _ = drive.rollout(
      engine_for(shape), params, tasks_for(6), rules(), found, how=draw.sampling(1.0),
      key=jax.random.key(7), watcher=drive.Watcher(done=told.append))
  key = lambda t: t.question.id
  assert sorted(told, key=key) == sorted(trajectories, key=key)
  assert trajectories == usual()[0][:6]


def test_no_tasks_is_no_work():
  trajectories, stats = play([])
  assert trajectories == [] and (stats.prefilled_tokens, stats.generated_tokens) == (0, 0)


# The engine's own rules.


def test_turns_written_over_several_calls_are_the_same_turns():
  shape, params = noisy()
  tasks, turns = tasks_for(4), []
  for tokens in (MAX_TURN, 3):
    engine, written, calls = engine_for(shape, dataclasses.replace(SHAPES, tokens=tokens)), {}, 0
    engine.begin(params, jax.random.key(7), draw.sampling(1.0))
    rows = [engine.admit(t.prompt_ids) for t in tasks]
    assert rows == [0, 1, 2, 3] and engine.admit((1,)) is None
    engine.insert([Insert(row, t.prompt_ids, MAX_TURN, True, t.seeds)
                   for row, t in zip(rows, tasks)])
    pieces = {row: [] for row in rows}
    while engine.writing:
      came, calls = engine.decode(lambda row, ids: pieces[row].extend(ids)), calls + 1
      assert not came.keys() & written.keys()
      written |= came
    assert tokens == MAX_TURN or calls > 3
    assert {row: tuple(ids) for row, ids in pieces.items()} == {
        row: w.ids for row, w in written.items()}
    turns.append(written)
  assert turns[0].keys() == turns[1].keys() == {0, 1, 2, 3}
  for row in range(4):
    assert turns[0][row].ids == turns[1][row].ids == usual()[0][row].segments[0].ids
    np.testing.assert_allclose(turns[0][row].sampler_logprobs, turns[1][row].sampler_logprobs,
                               atol=1e-5)


def test_a_prompt_of_several_chunks_equals_one_of_one():
  # 128 + 128 + 20 tokens in chunks of at most 128; in one of 300.
  task = tasks_for(1, length_of=lambda i: 276)
  pieces, _ = play(task)
  whole, _ = play(task, engine=engine_for(
      noisy()[0], dataclasses.replace(SHAPES, chunk_buckets=(300,))))
  assert pieces[0].ids == whole[0].ids
  np.testing.assert_allclose(pieces[0].sampler_logprobs, whole[0].sampler_logprobs, atol=1e-4)


def test_what_does_not_fit_a_row_is_refused_before_anything_runs():
  with pytest.raises(UserError, match="needs 644 tokens, a row holds 640"):
    play(tasks_for(1, length_of=lambda i: 620), settings={"max_episode_tokens": 2000})
  engine = engine_for(noisy()[0])
  engine.begin(noisy()[1], jax.random.key(0), draw.sampling(1.0))
  with pytest.raises(ValueError, match="at least one token"):
    engine.insert([Insert(0, (), 5, True, (0, 0))])
  assert engine.writing == 0 and engine.counts == Counts()


def test_bad_shapes_are_refused():
  for change, says in (({"row_buckets": ()}, "row_buckets"), ({"row_buckets": (1, 5)}, "row_buckets"),
                       ({"seats": (0, 2)}, "seats"), ({"seats": (5,)}, "seats"),
                       ({"chunk_buckets": ()}, "chunk_buckets"), ({"tokens": 0}, "decode call"),
                       ({"widths": (0, 8)}, "widths")):
    with pytest.raises(UserError, match=says):
      dataclasses.replace(SHAPES, **change)


def test_the_plan_of_a_prefill_covers_each_token_once_in_order():
  shapes = EngineShapes(4, 1000, 10, (4,), (1, 2, 4), (8, 32), (40, 200))
  rng = random.Random(0)
  inserts = [Insert(row, range(rng.choice([1, 7, 8, 9, 31, 32, 33, 64, 100])), 1, True, (0, 0))
             for row in range(8)]
  lengths = [rng.choice([0, 0, 5, 300]) for _ in inserts]
  reached = {i.row: 0 for i in inserts}
  for call in plan_prefill(inserts, lengths, shapes, devices=2):
    assert call.rows in shapes.row_buckets and call.chunk in shapes.chunk_buckets
    assert max(map(len, call.parts)) <= call.rows
    for device, parts in enumerate(call.parts):
      assert len({p.insert.row for p in parts}) == len(parts)
      for p in parts:
        n, row = p.end - p.begin, p.insert.row
        assert p.begin == reached[row] and 0 < n <= call.chunk and row // 4 == device
        assert call.chunk == 8 or n > 8  # the smallest that holds it
        assert p.start == lengths[row] + p.begin
        assert p.start + n <= call.width  # the smallest that holds what they see
        assert call.width == 40 or p.start + n > {200: 40, 1000: 200}[call.width]
        reached[row] = p.end
  assert reached == {i.row: len(i.ids) for i in inserts}


# Compilations.


@pytest.fixture
def compilations():
  """Names of the programs that XLA compiles while the test runs."""
  names = []

  def listen(event, duration, **kwargs):
    if event == "/jax/core/compile/backend_compile_duration":
      names.append(kwargs.get("fun_name", "?"))

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield names
  jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("on_mesh", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_each_program_compiles_once_and_nothing_after_the_first_rollouts(compilations, on_mesh):
  # Slots of its own, so that no other test has compiled for these shapes.
  shapes = EngineShapes(rows=3, slots=SLOTS - 8 - on_mesh, tokens=8, seats=(1, 3),
                        row_buckets=(1, 3), chunk_buckets=(16, 256), widths=(128,))
  shape, params = noisy()
  if on_mesh:  # as a training loop hands them over
    params = jax.device_put(params, sharding.parameter_shardings(
        sharding.make_mesh(1, 1, 1), params))
  engine = engine_for(shape, shapes)

  def loads(engine):
    for count, how in ((7, {}), (1, {}), (2, {"temperature": 0.0}),
                       (5, {"temperature": 0.3, "top_p": 0.5}), (4, {"top_k": 3})):
      _, stats = play(tasks_for(count, length_of=lambda i: 9 + 23 * i % 90), engine=engine,
                      model=(shape, params), key=count, **how,
                      settings={"max_episode_tokens": SLOTS - 16, "max_turns": count % 3})
      yield stats.programs

  met = sum(loads(engine))
  ours = [n for n in compilations if n in ("jit(prefill)", "jit(decode)", "jit(share)")]
  assert 6 <= len(ours) == met <= shapes.programs() == 14
  assert compilations.count("jit(lay_out)") <= 1  # 0 where another test laid these out
  compilations.clear()
  assert sum(loads(engine)) == 0 and compilations == []
  # Another engine of the same shapes finds them all.
  list(loads(engine_for(shape, shapes)))
  assert compilations == []


# What is drawn.


def test_ids_beyond_the_tokenizer_are_never_drawn():
  # Their logits are the largest by far (see noisy), so an unmasked draw would show at once.
  shape, params = noisy()
  hidden_BD = jax.random.normal(jax.random.key(1), (100_000 // 50, shape.width))
  hidden_BD = hidden_BD.at[:, 0].set(3.0)
  run = jax.jit(lambda uniform_B, size: draw.draw(
      decoder.logits(params, hidden_BD, size), uniform_B, draw.sampling(1.5))[0],
                static_argnums=1)
  for key in range(50):
    uniform_B = jax.random.uniform(jax.random.key(key), (len(hidden_BD),))
    assert int(run(uniform_B, tokenizer().size).max()) < tokenizer().size
  assert int(run(uniform_B, shape.vocab_size).max()) >= tokenizer().size
