"""Retrieval quality: figures worked out by hand, and the program."""

from __future__ import annotations

import json

import pytest
from test_retriever_engine import PEOPLE, rows, write

from retriever import evaluate, quality
from retriever.build import build
from retriever.evaluate import Measured, Question
from retriever.protocol import CorpusError, Passage, SearchEngine


def passages(*contents):
  return [Passage(str(i), c, 1.0) for i, c in enumerate(contents)]


def test_a_gold_is_looked_for_in_whole_words():
  found = passages("a party of artists", "The Art, of War!", "art")
  assert quality.first_hit(["art"], found) == 1  # not in "party", nor in "artists"
  assert quality.first_hit(["the art of war"], found) == 1
  assert quality.first_hit(["nothing", "artists"], found) == 0
  assert quality.first_hit(["music"], found) is None
  assert quality.first_hit(["the", "!", ""], found) is None  # golds that normalise to nothing
  assert quality.contains("a party", "art") and not quality.contains("a party", "the")


def test_recall_and_reciprocal_rank_by_hand():
  m = Measured("m", (0, 2, None, 4), (0.001, 0.002, 0.003, 0.01))
  assert m.recall(1) == [1, 0, 0, 0] and m.recall(3) == [1, 1, 0, 0] and m.recall(5) == [1, 1, 0, 1]
  assert m.reciprocal() == [1, 1 / 3, 0, 1 / 5]
  other = Measured("n", (0, None, None, None), (0.001,) * 4)
  figures = evaluate.summary([m, other], [1, 3])
  first, second = figures["engines"]
  assert first["recall@3"]["mean"] == 0.5 and second["recall@3"]["mean"] == 0.25
  assert first["mrr"]["mean"] == pytest.approx((1 + 1 / 3 + 1 / 5) / 4)
  assert first["ms_p50"] == pytest.approx(2.5)
  # One of four questions is gained at 3, none at 1: the paired interval of the latter is a point.
  (lead,) = figures["leads"]
  assert lead["recall@3"]["mean"] == 0.25 and lead["recall@1"] == {"mean": 0.0, "interval": [0, 0]}


def test_a_paired_interval_is_narrower_than_its_parts():
  """Two engines that agree on most questions: their difference is known better than either."""
  a = [float(i % 2) for i in range(400)]
  b = [1.0 if i < 20 else x for i, x in enumerate(a)]  # gains 10 of 400
  low, high = quality.interval([y - x for x, y in zip(a, b)])
  assert 0 < low < 10 / 400 < high and high - low < 0.04
  assert quality.interval(b)[0] < quality.interval(a)[1]  # unpaired, they overlap


class Fixed(SearchEngine):
  fingerprint = "fixed"

  def search(self, queries, top_k):
    assert len(queries) == 1  # alone, as one who waits would ask
    return [passages("x", f"answer to {queries[0]}")[:top_k]]


def test_every_question_is_asked_alone():
  questions = [Question("one", ("answer one", "to one")), Question("two", ("three",))]
  found = evaluate.measure("fixed", Fixed(), questions, 2)
  assert found.places == (1, None) and len(found.seconds) == 2
  assert evaluate.measure("fixed", Fixed(), questions, 1).places == (None, None)


def test_the_program_compares_engines(tmp_path, capsys):
  corpus = write(tmp_path / "corpus.jsonl", rows())
  build(corpus, tmp_path / "dense", dim=256, quiet=True)
  build(corpus, tmp_path / "words", index="bm25", quiet=True)
  questions = tmp_path / "q.jsonl"
  questions.write_text("".join(json.dumps({"question": f"friend {p}", "golden_answers": [p]}) + "\n"
                               for p in PEOPLE[:30]))
  command = ["--index", str(tmp_path / "dense"), "--index", str(tmp_path / "words"),
             "--questions", str(questions), "--k", "3,1"]
  assert evaluate.main([*command, "--json"]) == 0
  out = capsys.readouterr().out
  found = json.loads(out.splitlines()[-1])
  assert found["engines"][0]["recall@3"]["mean"] == 1.0 and found["engines"][1]["questions"] == 30
  assert "points: recall@1" in out and "recall@3" in out
  assert evaluate.main([*command, "--limit", "5"]) == 0
  assert "5 questions" in capsys.readouterr().out
  for wrong, said in ((["--k", "0"], "above 0"), (["--k", "x"], "numbers with commas"),
                      (["--index", str(tmp_path)], "holds no index"),
                      (["--questions", str(tmp_path / "none")], "none")):
    assert evaluate.main([*command, *wrong]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("row", ["no json", "[]", '{"question": "q"}',
                                 '{"question": "q", "golden_answers": []}',
                                 '{"question": " ", "golden_answers": ["a"]}',
                                 '{"question": "q", "golden_answers": "a"}',
                                 '{"question": "q", "golden_answers": [1]}'])
def test_a_row_that_is_no_question_is_named(tmp_path, row):
  path = tmp_path / "q.jsonl"
  path.write_text('{"question": "q", "golden_answers": ["a"]}\n' + row + "\n")
  with pytest.raises(CorpusError, match="q.jsonl:2: no question"):
    evaluate.read_questions(path)
  path.write_text("")
  with pytest.raises(CorpusError, match="is empty"):
    evaluate.read_questions(path)
