"""From a corpus to passages: the encoder, the index folder, the engine, its controls."""

from __future__ import annotations

import concurrent.futures
import gzip
import json
import random
import threading

import numpy as np
import pytest

from retriever import build as build_lib
from retriever.build import build
from retriever.encoders import FEATURES, HashingEncoder
from retriever.controls import RandomEngine
from retriever.engine import open_index
from retriever.protocol import CorpusError

DIM = 1024


def names(count, seed):
  """Made-up names of two words of two syllables, no two alike whatever the order of the words."""
  rng = random.Random(seed)
  syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
  word = lambda: "".join(rng.sample(syllables, 2)).capitalize()
  unordered = {}
  while len(unordered) < count:
    name = (word(), word())
    unordered.setdefault(frozenset(name), " ".join(name))
  return list(unordered.values())


PEOPLE, CITIES = names(300, 1), names(60, 2)


def rows():
  rng = random.Random(0)
  people = [f'"{p}"\n{p} is a person. birthplace {rng.choice(CITIES)}. friend '
            f"{rng.choice(PEOPLE)}." for p in PEOPLE]
  cities = [f'"{c}"\n{c} is a city. mayor {rng.choice(PEOPLE)}.' for c in CITIES]
  return people + cities


def write(path, contents):
  path.write_text("".join(json.dumps({"id": f"d{i}", "contents": c}) + "\n"
                          for i, c in enumerate(contents)))
  return path


@pytest.fixture
def corpus(tmp_path):
  return write(tmp_path / "corpus.jsonl", rows())


@pytest.fixture
def folder(tmp_path, corpus):
  build(corpus, tmp_path / "index", dim=DIM, quiet=True)
  return tmp_path / "index"


@pytest.fixture
def engine(folder):
  return open_index(folder)


# The encoder


def test_vectors_are_float32_of_length_one_and_nothing_is_a_zero_vector():
  encoder = HashingEncoder.fit(rows(), DIM)
  vectors_MD = encoder.encode_queries(["birthplace Zopo Dase", "a", "?!", ""])
  assert vectors_MD.dtype == np.float32 and vectors_MD.shape == (4, DIM)
  np.testing.assert_allclose(np.linalg.norm(vectors_MD, axis=1), [1, 1, 0, 0], atol=1e-6)
  assert encoder.encode_queries([]).shape == (0, DIM)


def test_a_row_does_not_depend_on_its_batch():
  encoder = HashingEncoder.fit(rows(), DIM)
  texts = [*PEOPLE[:40], "", "\ud800", "straße ÉCLAIR"]
  together_MD = encoder.encode_passages(texts)
  for i, text in enumerate(texts):
    np.testing.assert_array_equal(together_MD[i], encoder.encode_passages([text])[0])


def test_case_width_and_punctuation_do_not_matter_but_word_order_does():
  encoder = HashingEncoder.fit(rows(), DIM)
  a_D, b_D, c_D = encoder.encode_queries(["Zopo Dase!", "  ＺＯＰＯ \"dase\"", "dase zopo"])
  np.testing.assert_array_equal(a_D, b_D)
  assert a_D @ c_D < 0.99


def test_the_numbers_of_one_word():
  # Over the passages "q" and "r", "q" has the word q (df 1 of 2: idf ln(3 / 1.5) = ln 2) and the
  # trigram " q " (df 1, ln 2): two features of one size, so each is 1 / sqrt 2 of the vector.
  encoder = HashingEncoder.fit(["q", "r"], 4096)
  found = sorted(np.abs(encoder.encode_queries(["q"])[0]))[-3:]
  np.testing.assert_allclose(found, [0, 0.5 ** 0.5, 0.5 ** 0.5], atol=1e-6)


def test_collisions_cancel_on_average():
  # 40 unlike texts in 64 slots collide all the time: without signs every product would be
  # positive; with them their mean is near 0 (shared syllables leave a little).
  words = names(40, 3)
  vectors_MD = HashingEncoder.fit(words, 64).encode_queries(words)
  products_M = (vectors_MD @ vectors_MD.T)[np.triu_indices(40, 1)]
  assert abs(products_M.mean()) < 0.05 and products_M.min() < -0.1


def test_rare_words_weigh_more_and_titles_count_twice():
  encoder = HashingEncoder.fit(["common rare"] + ["common thing"] * 9, DIM)
  rare_D, common_D, both_D = encoder.encode_queries(["rare", "common", "common rare"])
  assert both_D @ rare_D > both_D @ common_D
  # Either word once and the other, as the title, twice: the same words, and the title wins.
  query_D = encoder.encode_queries(["mira"])[0]
  titled_D, plain_D = encoder.encode_passages(["mira\nlomo", "lomo\nmira"])
  assert query_D @ titled_D > query_D @ plain_D


def test_the_same_numbers_in_every_process():
  # Guards the hash: crc32("q") = 0xf500ae27, of which the lower 17 bits are the word's feature.
  idf_F = np.zeros(FEATURES, np.float32)
  idf_F[0xf500ae27 % 2 ** 17] = 1
  assert np.abs(HashingEncoder(DIM, idf_F).encode_queries(["q"])).max() == 1


# The engine


def test_questions_about_made_up_names_find_their_passage(engine):
  found = engine.search([f"birthplace {p}" for p in PEOPLE], 3)
  first = sum(passages[0].title == p for p, passages in zip(PEOPLE, found))
  among = sum(any(x.title == p for x in passages) for p, passages in zip(PEOPLE, found))
  assert first >= 0.98 * len(PEOPLE) and among == len(PEOPLE)


def test_passages_come_whole_best_first(engine):
  contents = rows()
  (found,) = engine.search([PEOPLE[7]], 5)
  assert found[0].id == "d7"
  assert all(p.contents == contents[int(p.id[1:])] for p in found)
  assert [p.score for p in found] == sorted((p.score for p in found), reverse=True)
  assert len(engine) == len(contents) == len(engine.search([PEOPLE[7]], 10_000)[0])


def test_an_answer_does_not_depend_on_what_is_asked_beside(folder):
  queries = [f"mayor {c}" for c in CITIES]
  together = open_index(folder).search(queries, 3)
  alone = open_index(folder)
  assert together == [alone.search([q], 3)[0] for q in queries]


def test_many_threads_get_the_answers_one_gets(folder):
  queries = PEOPLE[:50]
  wanted = open_index(folder).search(queries, 2)
  engine = open_index(folder)
  together = threading.Barrier(4)

  def ask(seed):
    together.wait()
    order = random.Random(seed).sample(range(50), 50)
    return [engine.search([queries[i]], 2)[0] == wanted[i] for i in order]

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert all(all(right) for right in pool.map(ask, range(4)))


def test_no_top_k_below_one(engine):
  for search in (engine, RandomEngine(engine, 0)):
    with pytest.raises(ValueError, match="top_k is 0"):
      search.search(["q"], 0)


# The folder


def test_a_missing_folder_names_the_command_that_builds_it(tmp_path):
  with pytest.raises(CorpusError, match=r"python -m retriever\.build .* --out .*none"):
    open_index(tmp_path / "none")


def test_a_changed_corpus_is_refused(corpus, folder):
  text = corpus.read_text()
  corpus.write_text(text.replace("person", "parson", 1))
  with pytest.raises(CorpusError, match="SHA-256 differs.*--overwrite"):
    open_index(folder)
  corpus.write_text(text[:-2])
  with pytest.raises(CorpusError, match="bytes"):
    open_index(folder)
  corpus.unlink()
  with pytest.raises(CorpusError, match="corpus.jsonl is missing"):
    open_index(folder)


@pytest.mark.parametrize("name", ["vectors.float32", "offsets.u64", "idf.npy", "manifest.json"])
def test_no_flipped_bit_goes_unnoticed(folder, name):
  path = folder / name
  whole = path.read_bytes()
  rng = random.Random(name)
  for at in [0, len(whole) - 2] + [rng.randrange(len(whole)) for _ in range(8)]:
    flipped = bytearray(whole)
    flipped[at] ^= 1 << rng.randrange(8)
    path.write_bytes(flipped)
    try:
      engine = open_index(folder)
    except CorpusError:
      continue
    # The manifest's white space, and where the source lay, change no answer.
    assert name == "manifest.json" and len(engine) == len(rows())
    assert engine.search(PEOPLE[:1], 1)[0][0].title == PEOPLE[0]


def test_a_manifest_changed_by_hand_is_refused(folder):
  path = folder / "manifest.json"
  text = path.read_text()
  assert '"rows": 360' in text
  path.write_text(text.replace('"rows": 360', '"rows": 361'))
  with pytest.raises(CorpusError, match="its own fingerprint"):
    open_index(folder)


def test_folder_and_corpus_move_together(tmp_path, corpus, folder):
  fingerprint = open_index(folder).fingerprint
  (tmp_path / "there").mkdir()
  corpus.rename(tmp_path / "there" / "corpus.jsonl")
  folder.rename(tmp_path / "there" / "index")
  assert open_index(tmp_path / "there" / "index").fingerprint == fingerprint


def test_a_packed_corpus_gives_the_same_engine(tmp_path, corpus, folder):
  packed = tmp_path / "corpus.jsonl.gz"
  packed.write_bytes(gzip.compress(corpus.read_bytes()))
  build(packed, tmp_path / "packed", dim=DIM, quiet=True)
  packed.unlink()  # the folder holds the text
  a, b = open_index(folder), open_index(tmp_path / "packed")
  assert a.fingerprint == b.fingerprint
  assert a.search(PEOPLE[:5], 3) == b.search(PEOPLE[:5], 3)


def test_the_fingerprint_follows_corpus_and_encoder(tmp_path, corpus, engine):
  other = write(tmp_path / "other.jsonl", rows()[:-1])
  prints = {engine.fingerprint, build(other, tmp_path / "o", dim=DIM, quiet=True).fingerprint,
            build(corpus, tmp_path / "d", dim=DIM // 2, quiet=True).fingerprint}
  assert len(prints) == 3


def test_built_twice_is_built_once_and_nothing_else_is_replaced_unasked(tmp_path, corpus, folder):
  before = (folder / "vectors.float32").stat().st_mtime_ns
  build(corpus, folder, dim=DIM, quiet=True)
  assert (folder / "vectors.float32").stat().st_mtime_ns == before
  with pytest.raises(CorpusError, match="encoder .*--overwrite"):
    build(corpus, folder, dim=DIM // 2, quiet=True)
  other = write(tmp_path / "other.jsonl", rows()[:9])
  with pytest.raises(CorpusError, match="another corpus.*--overwrite"):
    build(other, folder, dim=DIM, quiet=True)
  build(other, folder, dim=DIM, overwrite=True, quiet=True)
  assert len(open_index(folder)) == 9
  foreign = tmp_path / "foreign"
  foreign.mkdir()
  (foreign / "thesis.txt").write_text("mine")
  with pytest.raises(CorpusError, match="holds no index"):
    build(corpus, foreign, overwrite=True, quiet=True)
  assert (foreign / "thesis.txt").read_text() == "mine"


def test_a_moved_corpus_is_found_again_by_building_again(tmp_path, corpus, folder):
  moved = corpus.rename(tmp_path / "moved.jsonl")
  with pytest.raises(CorpusError, match="missing"):
    open_index(folder)
  before = (folder / "vectors.float32").stat().st_mtime_ns
  build(moved, folder, dim=DIM, quiet=True)
  assert len(open_index(folder)) == len(rows())
  assert (folder / "vectors.float32").stat().st_mtime_ns == before


def test_a_build_that_fails_leaves_what_was_there(tmp_path, folder, monkeypatch):
  fingerprint = open_index(folder).fingerprint
  bad = tmp_path / "bad.jsonl"
  bad.write_text('{"id": "0", "contents": "text"}\n{"id": "1"}\n')
  with pytest.raises(CorpusError, match="bad.jsonl:2"):
    build(bad, folder, dim=DIM, overwrite=True, quiet=True)
  with pytest.raises(CorpusError, match="bad.jsonl:2"):
    build(bad, tmp_path / "new", dim=DIM, quiet=True)
  assert open_index(folder).fingerprint == fingerprint
  assert {p.name for p in tmp_path.iterdir()} == {"corpus.jsonl", "index", "bad.jsonl"}


def test_the_program_says_one_line(tmp_path, corpus, capsys):
  out = tmp_path / "index"
  command = [str(corpus), "--out", str(out), "--dim", "64"]
  assert build_lib.main(command) == 0
  said = capsys.readouterr().out
  assert said.count("\n") == 1 and "360 passages" in said
  assert build_lib.main(command) == 0
  assert "already built" in capsys.readouterr().out
  for wrong in ([str(corpus), "--out", str(out), "--dim", "65"],
                [str(corpus), "--out", str(out), "--dim", "0"],
                [str(corpus), "--out", str(corpus)],
                [str(tmp_path / "none.jsonl"), "--out", str(out)]):
    assert build_lib.main(wrong) == 2
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.count("\n") == 1


# Controls over a real index (more of them: tests/test_retriever_controls.py)


def test_random_passages_depend_on_seed_and_query_alone(engine):
  a, b = RandomEngine(engine, 1), RandomEngine(engine, 2)
  queries = [f"birthplace {p}" for p in PEOPLE[:100]]
  found = a.search(queries, 3)
  assert found == [a.search([q], 3)[0] for q in queries]
  assert found != b.search(queries, 3) and a.fingerprint != b.fingerprint
  assert all(len({p.id for p in passages}) == 3 for passages in found)
  assert len({p.id for passages in found for p in passages}) > 100
  # 100 queries for 3 of 360 passages would meet their own 0.83 times on average.
  assert sum(p in {x.title for x in xs} for p, xs in zip(PEOPLE, found)) < 8
  assert len(a.search(["q"], 10_000)[0]) == len(engine)
