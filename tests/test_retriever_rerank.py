"""Reranking: the head equal to transformers, each query with its own passages, errors pass."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_berts
from hypothesis import given, strategies as st

from retriever import rerank
from retriever.hashing import HashingEncoder
from retriever.protocol import CorpusError, Found, Passage, RetrievalError, SearchEngine

PAIRS = [("the river", "a long river flows"), ("", ""), ("city", "the " * 200), ("of " * 90, "x"),
         ("query", "passage of the city: long")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A cross-encoder with random weights, as transformers saves one, and the model itself."""
  folder = tmp_path_factory.mktemp("cross-encoder")
  return folder, tiny_berts.random_bert(folder, "BertForSequenceClassification", num_labels=1)


@pytest.fixture(scope="module")
def cross_encoder(folder) -> rerank.CrossEncoder:
  return rerank.CrossEncoder.load(folder[0])


def test_logits_equal_those_of_transformers(folder, cross_encoder):
  """Pairs cut to 64 tokens, the longer text first; types tell passage from query."""
  import torch
  import transformers
  path, model = folder
  tokenizer = transformers.PreTrainedTokenizerFast(
      tokenizer_file=str(path / "tokenizer.json"), pad_token="[PAD]", cls_token="[CLS]",
      sep_token="[SEP]", model_input_names=["input_ids", "token_type_ids", "attention_mask"])
  batch = tokenizer([q for q, _ in PAIRS], [p for _, p in PAIRS], padding=True, truncation=True,
                    max_length=64, return_tensors="pt")
  assert batch["token_type_ids"].sum() > 0 and batch["input_ids"].shape[1] == 64
  with torch.inference_mode():
    theirs_M = model(**batch).logits[:, 0].numpy()
  ours_M = cross_encoder.scores(PAIRS)
  assert ours_M.shape == (5,) and ours_M.dtype == np.float32
  np.testing.assert_allclose(ours_M, theirs_M, atol=1e-4)
  assert np.ptp(theirs_M) > 0.1  # the pairs do differ


def test_a_score_does_not_depend_on_the_pairs_beside_it(cross_encoder):
  together_M = cross_encoder.scores(PAIRS)
  alone_M = np.concatenate([cross_encoder.scores([pair]) for pair in PAIRS])
  np.testing.assert_allclose(together_M, alone_M, atol=1e-4)
  np.testing.assert_allclose(cross_encoder.scores(PAIRS[::-1]), together_M[::-1], atol=1e-4)
  assert cross_encoder.scores([]).shape == (0,)
  swapped_M = cross_encoder.scores([(p, q) for q, p in PAIRS])
  assert np.abs(swapped_M - together_M).max() > 0.01


def test_what_is_no_cross_encoder_is_refused(folder, tmp_path):
  tiny_berts.random_bert(tmp_path / "plain")
  with pytest.raises(CorpusError, match="missing tensor classifier.weight"):
    rerank.CrossEncoder.load(str(tmp_path / "plain"))
  tiny_berts.random_bert(tmp_path / "two", "BertForSequenceClassification", num_labels=2)
  with pytest.raises(CorpusError, match=r"classifier.weight has shape \(2, 24\), wanted \(1, 24\)"):
    rerank.CrossEncoder.load(str(tmp_path / "two"))
  tiny_berts.random_bert(tmp_path / "one", "BertForSequenceClassification", num_labels=1,
                         type_vocab_size=1)
  with pytest.raises(CorpusError, match="one token type"):
    rerank.CrossEncoder.load(str(tmp_path / "one"))
  with pytest.raises(CorpusError, match="max_tokens is 65, wanted 8 to 64"):
    rerank.CrossEncoder.load(str(folder[0]), max_tokens=65)
  with pytest.raises(CorpusError, match="dtype is 'float16'"):
    rerank.CrossEncoder.load(str(folder[0]), dtype="float16")


# The engine, on a scorer that the test writes.


class First(SearchEngine):
  """A first stage that answers from a dictionary."""

  def __init__(self, answers: dict[str, Found], fingerprint: str = "first"):
    self.answers, self.fingerprint, self.asked, self.closed = answers, fingerprint, [], False

  def search(self, queries, top_k):
    raise AssertionError("one query's failure is not the others'")

  def search_each(self, queries, top_k):
    self.asked.append((list(queries), top_k))
    cut = lambda found: found if isinstance(found, RetrievalError) else found[:top_k]
    return [cut(self.answers[q]) for q in queries]

  def close(self):
    self.closed = True


class Table:
  """A scorer that looks its scores up, and says what it was asked."""

  fingerprint = "table"

  def __init__(self, scores: dict[tuple[str, str], float]):
    self.table, self.asked = scores, []

  def scores(self, pairs):
    self.asked.append(list(pairs))
    return np.array([self.table[pair] for pair in pairs], np.float32)


def passages(*names: str) -> list[Passage]:
  """One of each name, the first with score 1, the others with less."""
  return [Passage(n, f"text of {n}", 1 / (i + 1)) for i, n in enumerate(names)]


def test_each_query_is_scored_with_its_own_passages_in_one_call():
  first = First({"q": passages("a", "b", "c"), "r": passages("c", "a"), "none": []})
  scorer = Table({("q", "text of a"): 1, ("q", "text of b"): 3, ("q", "text of c"): 2,
                  ("r", "text of a"): 5, ("r", "text of c"): -1})
  engine = rerank.RerankEngine(first, scorer, fetch=10)
  found = engine.search(["q", "r", "none", "q"], 2)
  assert [[(p.id, p.score) for p in f] for f in found] == [
      [("b", 3), ("c", 2)], [("a", 5), ("c", -1)], [], [("b", 3), ("c", 2)]]
  assert found[0][0].contents == "text of b"
  assert len(scorer.asked) == 1 and sorted(scorer.asked[0]) == sorted(scorer.table)
  assert first.asked == [(["q", "r", "none", "q"], 10)]
  engine.close()
  assert first.closed


def test_equal_scores_keep_the_order_of_the_first_stage():
  first = First({"q": passages("d", "a", "c", "b")})
  scorer = Table({("q", f"text of {n}"): s for n, s in zip("dacb", (0, 7, 0, 0))})
  found = rerank.RerankEngine(first, scorer, fetch=4).search(["q"], 4)
  assert [p.id for p in found[0]] == ["a", "d", "c", "b"]


@pytest.mark.parametrize("fetch, top_k, asked", [(1, 3, 3), (2, 1, 2)])
def test_at_least_as_many_are_fetched_as_are_wanted(fetch, top_k, asked):
  first = First({"q": passages("a", "b", "c")})
  scorer = Table({("q", f"text of {n}"): s for n, s in zip("abc", (0, 1, 2))})
  found = rerank.RerankEngine(first, scorer, fetch).search(["q"], top_k)
  assert first.asked == [(["q"], asked)] and len(found[0]) == top_k


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_errors_are_the_query_s_own(score):
  failed = RetrievalError("down")
  first = First({"q": passages("a"), "down": failed, "bad": passages("a", "b")})
  scorer = Table({("q", "text of a"): 1, ("bad", "text of a"): 1, ("bad", "text of b"): score})
  engine = rerank.RerankEngine(first, scorer, fetch=5)
  found = engine.search_each(["q", "down", "bad"], 1)
  assert found[0][0].id == "a" and found[1] is failed
  assert isinstance(found[2], RetrievalError) and "passage 'b'" in str(found[2])
  with pytest.raises(RetrievalError, match="down"):
    engine.search(["q", "down"], 1)
  with pytest.raises(ValueError, match="top_k is 0"):
    engine.search_each(["q"], 0)


def test_a_scorer_that_loses_count_is_an_error():
  class Short(Table):
    def scores(self, pairs):
      return super().scores(pairs)[1:]

  scorer = Short({("q", "text of a"): 1, ("q", "text of b"): 1})
  with pytest.raises(ValueError):
    rerank.RerankEngine(First({"q": passages("a", "b")}), scorer, 5).search(["q"], 1)


def test_the_fingerprint_covers_both_stages(folder):
  make = lambda first="first", scorer="table", fetch=5: rerank.RerankEngine(
      First({}, first), type("S", (Table,), {"fingerprint": scorer})({}), fetch).fingerprint
  prints = [make(), make("other"), make(scorer="other"), make(fetch=6)]
  prints += [rerank.CrossEncoder.load(str(folder[0]), **options).fingerprint
             for options in ({}, {"max_tokens": 32}, {"dtype": "bfloat16"})]
  assert len(set(prints)) == 7 and make() == make()


@given(st.lists(st.tuples(
    st.sampled_from(["the river", "a city", ""]),
    st.sampled_from(["river\nlong", "city\nof the river", "x\n"])), max_size=8))
def test_an_encoder_scores_by_its_inner_product(pairs):
  encoder = HashingEncoder.fit(["river\nlong", "city\nof the river"], 64)
  scorer = rerank.EncoderScorer(encoder, "abc")
  scores_M = scorer.scores(pairs)
  assert scores_M.shape == (len(pairs),)
  for (query, passage), score in zip(pairs, scores_M):
    product = encoder.encode_queries([query])[0] @ encoder.encode_passages([passage])[0]
    assert score == pytest.approx(product, abs=1e-6)
  assert scorer.fingerprint != rerank.EncoderScorer(encoder, "abd").fingerprint
