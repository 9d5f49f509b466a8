"""Generated worlds: what may not meet does not meet, and what can be found is found."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from retriever import engine as engines
from searchr1_jax.run import data
from searchr1_jax.text import prompts
from searchr1_jax.types import UserError
from searchr1_jax.worlds import demonstrations, files, grammar, names
from searchr1_jax.worlds import world as worlds


@pytest.fixture(scope="module", params=["tiny", "hard"])
def written(request, tmp_path_factory) -> tuple[str, pathlib.Path]:
  folder = tmp_path_factory.mktemp("world")
  files.write_world(folder, request.param, 3, 4)
  return request.param, folder


def words_of(texts) -> set[str]:
  return {w.strip("?.;,") for t in texts for w in t.split()}


def test_pools_share_no_piece_whatever_the_seed():
  pools = [set(names.pieces(p)) for p in names.POOLS]
  assert [len(p) for p in pools] == [5700, 1200, 1200]
  assert len(set.union(*pools)) == 8100  # 90 syllables, two a piece: 90² pieces, none twice


def test_training_and_test_entities_share_no_name(written):
  name, folder = written
  rl = worlds.make_world(worlds.SPECS[name], "rl", np.random.default_rng((0, 3)))
  test = worlds.make_world(worlds.SPECS[name], "test", np.random.default_rng((1, 4)))
  known = {piece for e in rl.entities for piece in e.split()}
  fresh = {piece for e in test.entities for piece in e.split()}
  assert known & fresh <= set(grammar.COMPANY_WORDS + grammar.PERFUME_WORDS)
  train_words = words_of(q.question for q in data.load_questions(folder / "train.jsonl"))
  test_names = fresh - set(grammar.COMPANY_WORDS + grammar.PERFUME_WORDS)
  assert not train_words & test_names


def test_files_are_the_same_bytes_every_time_and_follow_the_seeds(written, tmp_path):
  name, folder = written
  files.write_world(tmp_path / "again", name, 3, 4)
  files.write_world(tmp_path / "other", name, 3, 5)
  read = lambda f, n: (f / n).read_bytes()
  for file in ("corpus.jsonl", "train.jsonl", "test_1hop.jsonl", "test_3hop.jsonl"):
    assert read(folder, file) == read(tmp_path / "again", file)
  assert read(folder, "train.jsonl") == read(tmp_path / "other", "train.jsonl")
  assert read(folder, "test_1hop.jsonl") != read(tmp_path / "other", "test_1hop.jsonl")


def test_every_question_is_answered_by_following_its_hops(written):
  name, folder = written
  world = worlds.make_world(worlds.SPECS[name], "test", rng := np.random.default_rng((1, 4)))
  asked = worlds.sample_questions(world, 300, rng)
  assert len({q.text for q in asked}) >= 295  # two ways to say one thing may coincide
  for q in asked:
    subject = q.hops[0].subject
    assert subject in q.text and len(q.hops) in (1, 2, 3)
    for hop in q.hops:
      assert hop.subject == subject
      subject = world.entities[subject].facts[hop.relation]
      assert subject in world.passages[hop.subject]  # the passage says it
    assert q.answer == subject
  questions = [q for f in files.test_files(folder) for q in data.load_questions(f)]
  assert len(questions) == worlds.SPECS[name].questions["test"]
  assert len({q.key for q in questions}) == len(questions)


def test_the_right_query_finds_the_passage(written):
  name, folder = written
  spec, engine = worlds.SPECS[name], engines.open_index(folder / "index")
  world = worlds.make_world(spec, "test", rng := np.random.default_rng((1, 4)))
  hops = [h for q in worlds.sample_questions(world, 200, rng) for h in q.hops]
  found = engine.search([f"{h.relation} {h.subject}" for h in hops], 3)
  first = np.mean([p[0].title == h.subject for p, h in zip(found, hops)])
  shown = np.mean([any(x.title == h.subject for x in p) for p, h in zip(found, hops)])
  assert shown >= (0.99 if name == "tiny" else 0.93)
  # The tiny world shows one passage, so the first one has to be right.
  assert first >= (0.99 if name == "tiny" else 0.6)


def test_an_unknown_world_and_a_negative_seed_are_refused(tmp_path):
  with pytest.raises(UserError, match="tiny, shuffled, hard"):
    files.write_world(tmp_path, "tny", 0, 1)
  with pytest.raises(UserError, match="from 0 up"):
    files.write_world(tmp_path, "tiny", -1, 1)


def test_nothing_but_an_older_world_is_written_over(tmp_path):
  (tmp_path / "mine").mkdir()
  for name in ("corpus.jsonl", "train.jsonl"):
    (tmp_path / "mine" / name).write_text("mine")
  with pytest.raises(UserError, match="mine is not empty and no older output"):
    files.write_world(tmp_path / "mine", "tiny", 0, 1)
  assert (tmp_path / "mine" / "corpus.jsonl").read_text() == "mine"
  assert len(list((tmp_path / "mine").iterdir())) == 2


def test_syllables_words_and_tags_are_single_tokens(tokenizer):
  # A name's piece is two syllables, so two tokens; tags and words are one each.
  count = lambda text: len(tokenizer.encode_plain(text))
  assert count(" Zopo") == 2 and count(" Zopo Dase") == 4 and count(" Zopo Works") == 3
  assert count("<search>") == count("</information>") == count(" headquarters") == 1
  assert tokenizer.decode(tokenizer.encode_plain("any ÿ text 漢\n")) == "any ÿ text 漢\n"


@pytest.mark.parametrize("name,top_k", [("tiny", 1), ("hard", 3)])
def test_a_demonstration_is_cut_as_an_episode_is(tokenizer, name, top_k):
  rng = np.random.default_rng(0)
  world = worlds.make_world(worlds.SPECS[name], "warm_start", rng, scale=0.08)
  teacher = demonstrations.Teacher(world, demonstrations.SmallSearch(world, 512), top_k)
  for question in worlds.sample_questions(world, 20, rng):
    pieces = teacher.demonstrate(question, demonstrations.Habits(), rng)
    # Name pieces are cut out of a passage for their weight; the ids are those of the whole text.
    apart = [i for p in pieces for i in tokenizer.encode_plain(p.text)]
    assert apart == tokenizer.encode_plain("".join(p.text for p in pieces))
    text = "".join(p.text for p in pieces)
    assert text.endswith(f"<answer> {question.answer}</answer>")
    assert text.count("<search>") == text.count(prompts.OBSERVATION_HEADER) == len(question.hops)
    for p in pieces:
      if p.weight == 1:
        assert p.text.startswith("<think>")
      elif p.weight:
        assert p.text.strip() in {h.subject for h in question.hops}
      else:
        assert "<search>" not in p.text and "<answer>" not in p.text


def test_habits_come_as_often_as_they_say(tokenizer):
  rng = np.random.default_rng(0)
  world = worlds.make_world(worlds.TINY, "warm_start", rng, scale=0.08)
  teacher = demonstrations.Teacher(world, demonstrations.SmallSearch(world, 512), 1)
  habits = demonstrations.Habits(guess=0.2, guess_confident=0.9, confident=("city",))
  guessed = {True: [], False: []}
  for question in worlds.sample_questions(world, 250, rng) * 2:
    text = "".join(p.text for p in teacher.demonstrate(question, habits, rng))
    kind = grammar.BY_NAME[question.hops[-1].relation].object
    guessed[kind == "city"].append("<search>" not in text)
  # 500 draws: five standard errors of a share of 0.2 among at least 200 are 0.14.
  assert np.mean(guessed[True]) == pytest.approx(0.9, abs=0.1)
  assert np.mean(guessed[False]) == pytest.approx(0.2, abs=0.14)


def test_the_shipped_policy_fits_in_eight_megabytes_and_its_tokenizer_is_ours(tokenizer):
  for folder in (pathlib.Path(__file__).parent.parent / "models").iterdir():
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 8_000_000
    shipped = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert shipped == json.loads(pathlib.Path(tokenizer.name, "tokenizer.json").read_text())["model"]["vocab"]
