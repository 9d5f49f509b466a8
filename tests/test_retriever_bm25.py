"""Words: scores by hand and by bm25s, queries that find nothing, ties, damaged files."""

from __future__ import annotations

import json
import math
import random
import shutil

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from retriever import bm25, inverted
from retriever.bm25 import BM25
from retriever.protocol import CorpusError

PASSAGES = ['"Cat"\nthe cat sat on the mat', '"Dog"\nthe dog ran', '"Mat"\na mat is a mat']


def made(count, seed=0):
  """Passages of made-up words, a few of them in most passages."""
  rng = random.Random(seed)
  words = [f"w{int(rng.paretovariate(0.6))}" for _ in range(4000)]
  return [" ".join(rng.choices(words, k=rng.randint(1, 60))) for _ in range(count)]


def build(folder, passages=PASSAGES, **options):
  return BM25.build(iter(passages), folder, **options)


def by_definition(passages, query, k1=0.9, b=0.4):
  """Every passage's score, the sum written out."""
  split = [inverted.split(p) for p in passages]
  mean = sum(map(len, split)) / len(split)
  scores = []
  for words in split:
    score = 0.0
    for word in inverted.split(query):
      df = sum(word in other for other in split)
      idf = math.log(1 + (len(split) - df + 0.5) / (df + 0.5))
      tf = words.count(word)
      score += idf * tf / (tf + k1 * (1 - b + b * len(words) / mean))
    scores.append(score)
  return scores


# Scores


def test_a_score_by_hand(tmp_path):
  """"mat" stands in two of three passages: idf = ln(1 + 1.5/2.5) = ln 1.6 = 0.470004.

  Passages have 7, 4 and 6 words, 17/3 on average. In the first "mat" stands once:
  0.470004 * 1 / (1 + 0.9 * (0.6 + 0.4 * 7 * 3/17)) = 0.470004 / 1.984706 = 0.236813.
  In the third three times: 0.470004 * 3 / (3 + 0.9 * (0.6 + 0.4 * 6 * 3/17)) = 0.359568.
  """
  found = build(tmp_path).rank(["mat"], 3)[0]
  assert [row for row, _ in found] == [2, 0]
  assert found[0][1] == pytest.approx(1.410011 / 3.921176, abs=1e-6)
  assert found[1][1] == pytest.approx(0.470004 / 1.984706, abs=1e-6)


def test_idf_is_above_nothing_for_a_word_of_every_passage():
  idf = bm25.inverted.lucene_idf(np.array([1, 3]), 3)
  np.testing.assert_allclose(idf, [math.log(1 + 2.5 / 1.5), math.log(1 + 0.5 / 3.5)])
  assert idf[1] > 0


def test_scores_are_the_definition_whatever_the_batches(tmp_path, monkeypatch):
  monkeypatch.setattr(inverted, "BATCH", 7)
  monkeypatch.setattr(inverted, "PART", 50)
  monkeypatch.setattr(bm25, "BLOCK", 16)
  passages = made(100)
  index = build(tmp_path, passages, k1=1.2, b=0.75)
  for query in ("w1 w2 w3", "w2", "w7 w1 w7 w99999 the", passages[5]):
    wanted = by_definition(passages, query, 1.2, 0.75)
    best = sorted((r for r in range(100) if wanted[r] > 0), key=lambda r: -wanted[r])[:10]
    found = index.rank([query], 10)[0]
    np.testing.assert_allclose([s for _, s in found], [wanted[r] for r in best], rtol=1e-5)


def test_bm25s_writes_the_same_arrays_and_opens_these_files(tmp_path):
  """The library as the reference: its words in another order, everything else to the bit."""
  import bm25s
  passages = made(300)
  index = build(tmp_path, passages)
  theirs = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
  theirs.index([inverted.split(p) for p in passages], show_progress=False)
  opened = bm25s.BM25.load(tmp_path, load_vocab=False, mmap=True)
  words = (tmp_path / inverted.WORDS).read_text().splitlines()
  assert set(words) == set(theirs.vocab_dict) - {""}
  for number, word in enumerate(words):
    start, end = theirs.scores["indptr"][theirs.vocab_dict[word]:][:2]
    ours = slice(*opened.scores["indptr"][number:][:2])
    np.testing.assert_array_equal(opened.scores["indices"][ours],
                                  theirs.scores["indices"][start:end])
    np.testing.assert_array_equal(opened.scores["data"][ours], theirs.scores["data"][start:end])
  query = ["w1", "w5", "w2"]
  scores = opened.get_scores_from_ids([words.index(w) for w in query])
  assert index.rank([" ".join(query)], 300)[0] == bm25.best(scores, 300)


@pytest.mark.assets
def test_answers_are_found_in_the_real_passages(assets, tmp_path):
  """1,205 questions, three passages each of 10,033: measured .4398, of whole words in order."""
  from retriever.protocol import Passage
  from retriever.quality import first_hit
  read = lambda path: [json.loads(line) for line in path.read_text().splitlines()]
  passages = [p["contents"] for p in read(assets / "wiki-vital" / "corpus.jsonl")]
  questions = [q for name in ("train", "test") for q in read(assets / "trivia" / f"{name}.jsonl")]
  ranked = build(tmp_path, passages).rank([q["question"] for q in questions], 3)
  hits = [first_hit(q["golden_answers"], [Passage(str(r), passages[r], s) for r, s in rows])
          is not None for q, rows in zip(questions, ranked, strict=True)]
  assert len(hits) == 1205 and np.mean(hits) >= 0.43


# What comes and what does not


def test_a_query_without_a_known_word_finds_nothing(tmp_path):
  index = build(tmp_path)
  unknown = ["aardvark", "bird", "zebra", "ca", "cats", "", "?!", "\ud800", " \0 "]
  assert index.rank(unknown, 3) == [[]] * len(unknown)
  assert [row for row, _ in index.rank(["zebra dog"], 3)[0]] == [1]
  assert index.rank([], 3) == []


def test_only_passages_with_a_word_come_however_many_are_asked_for(tmp_path):
  assert len(build(tmp_path).rank(["dog ran"], 100)[0]) == 1


def test_words_are_known_whatever_their_case_and_form(tmp_path):
  index = build(tmp_path, ["Straße 42 naïve snake_case", "ＦＵＬＬ width", "ﬁsh"])
  rows = lambda query: [row for row, _ in index.rank([query], 3)[0]]
  assert rows("STRASSE") == rows("42") == rows("NAÏVE") == rows("Snake_Case") == [0]
  assert rows("full") == rows("Width") == [1] and rows("FISH") == [2]


@hypothesis.given(words=st.lists(st.text("abz_9éß\u0300鶴\U00020000", min_size=1), min_size=1))
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_every_word_is_found_where_it_stands(tmp_path, words):
  index = build(tmp_path, ["other", *words], stop_words=False)
  for row, word in enumerate(words, 1):
    found = dict(index.rank([word], len(words))[0])
    assert set(found) == {n for n, other in enumerate(words, 1)
                          if set(inverted.split(other)) & set(inverted.split(word))}
    assert row in found or not inverted.split(word)


def test_stop_words_are_left_out_of_queries_that_have_others(tmp_path):
  (tmp_path / "all").mkdir()
  index, all_words = build(tmp_path), build(tmp_path / "all", stop_words=False)
  assert index.rank(["the dog"], 3) == index.rank(["dog"], 3)
  assert [row for row, _ in all_words.rank(["the dog"], 3)[0]] == [1, 0]
  assert [row for row, _ in index.rank(["the"], 3)[0]] == [0, 1]  # has no others, so it is asked


@hypothesis.given(scores=st.lists(st.integers(0, 3), min_size=1, max_size=80),
                  top_k=st.integers(1, 90), block=st.integers(1, 20))
def test_the_best_come_first_and_equal_ones_by_row(scores, top_k, block):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(bm25, "BLOCK", block)
    found = bm25.best(np.array(scores, np.float32), top_k)
  wanted = sorted((r for r, s in enumerate(scores) if s > 0), key=lambda r: (-scores[r], r))
  assert found == [(r, float(scores[r])) for r in wanted[:top_k]]


def test_passages_alike_come_by_row(tmp_path):
  rows = [row for row, _ in build(tmp_path, ["x y"] * 5000).rank(["y x"], 7)[0]]
  assert rows == [0, 1, 2, 3, 4, 5, 6]


# Files


def test_a_loaded_index_answers_as_the_built_one_and_holds_only_its_files(tmp_path):
  built = build(tmp_path, made(50), k1=1.5, b=0.0, stop_words=False)
  assert sorted(p.name for p in tmp_path.iterdir()) == sorted(built.files)
  loaded = BM25.load(tmp_path, {"kind": "bm25", **built.spec()})
  assert len(loaded) == 50 and loaded.spec() == built.spec()
  queries = made(20, seed=1)
  assert loaded.rank(queries, 5) == built.rank(queries, 5) != [[]] * 20
  with pytest.raises(CorpusError, match="'k1': 0.9"):
    BM25.load(tmp_path, bm25.wanted_spec())
  with pytest.raises(CorpusError, match="'words': 'other'"):
    BM25.load(tmp_path, built.spec() | {"words": "other"})


def test_the_passages_are_streamed(tmp_path, monkeypatch):
  """No more than a batch is taken before the one before has gone to the disk."""
  monkeypatch.setattr(inverted, "BATCH", 10)

  def passages():
    for n in range(100):
      on_disk = (tmp_path / inverted.COUNTS).stat().st_size if n >= 20 else 1
      assert on_disk, "twenty passages were held"
      yield " ".join(f"w{i}" for i in range(n, n + 2000))

  build(tmp_path, passages())
  assert not (tmp_path / inverted.COUNTS).exists()


def test_nothing_to_count_is_an_error(tmp_path):
  for passages in ([], ["?!", "..."]):
    with pytest.raises(CorpusError, match="no passage has a word"):
      build(tmp_path, passages)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("k1, b", [(-0.1, 0.4), (0.9, 1.1), (math.nan, 0.4), (math.inf, 0.4)])
def test_parameters_out_of_range_are_refused(tmp_path, k1, b):
  with pytest.raises(CorpusError, match="wanted k1"):
    build(tmp_path, k1=k1, b=b)


def test_damaged_files_are_refused(tmp_path):
  whole, spec = tmp_path / "whole", bm25.wanted_spec()
  whole.mkdir()
  build(whole, made(40))
  for number, name in enumerate(BM25.files):
    text = (whole / name).read_bytes()
    for damaged in (None, b"", text[:3], text[: len(text) // 2], text[:-1], text + text[-8:]):
      folder = tmp_path / "damaged"
      shutil.rmtree(folder, ignore_errors=True)
      shutil.copytree(whole, folder)
      (folder / name).unlink() if damaged is None else (folder / name).write_bytes(damaged)
      if name.endswith(".npy") and damaged == text + text[-8:]:
        continue  # bytes after an array are not read; a manifest's digest sees them
      if name == bm25.PARAMS and damaged == text[:-1]:
        continue  # without its last line break: nothing is missing
      with pytest.raises(CorpusError, match="build"):
        BM25.load(folder, spec)


def test_rows_and_words_that_do_not_belong_are_refused(tmp_path):
  build(tmp_path, ["x y", "x z"])
  rows = np.load(tmp_path / inverted.ROWS, mmap_mode="r+")
  rows[1] = 2  # x stands in rows 0 and 1
  rows.flush()
  with pytest.raises(CorpusError, match="beyond 2 passages"):
    BM25.load(tmp_path).rank(["x"], 1)
  np.save(tmp_path / inverted.ROWS, np.zeros(4, np.int64))
  with pytest.raises(CorpusError, match="<i8"):
    BM25.load(tmp_path)
  np.save(tmp_path / inverted.ROWS, np.zeros(3, np.int32))
  with pytest.raises(CorpusError, match="have 4 and 3"):
    BM25.load(tmp_path)
  np.save(tmp_path / inverted.STARTS, np.array([0, 2, 4]))
  with pytest.raises(CorpusError, match="of 2 words, words.txt has 3"):
    BM25.load(tmp_path)
  np.array([0, 5, 4, 6], "<u8").tofile(tmp_path / inverted.WORD_STARTS)  # "x\n", "y\n", "z\n"
  with pytest.raises(CorpusError, match="made for another"):
    BM25.load(tmp_path)
  np.array([0, 2, 4, 6], "<u8").tofile(tmp_path / inverted.WORD_STARTS)
  np.save(tmp_path / inverted.STARTS, np.array([0, 3, 2, 4]))
  with pytest.raises(CorpusError, match="does not ascend"):
    BM25.load(tmp_path)
