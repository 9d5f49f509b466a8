"""The table of sentence encoders: each rule by hand, and which one a model is read with."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import tiny_berts

from retriever import encoders, sentences
from retriever.protocol import CorpusError

# The rows of tiny_berts.BY_HAND: [CLS] (1,1,-1,-1), [SEP] (1,-1,1,-1), query (1,-1,-1,1),
# passage (-1,1,1,-1), : (-1,1,-1,1), a (-1,-1,1,1).
HAND = {
    # query: [CLS] query : a [SEP] add up to (1,-1,-1,1), of length 2;
    # passage: passage in the place of query makes it (-1,1,1,-1).
    "e5": ((.5, -.5, -.5, .5), (-.5, .5, .5, -.5)),
    # [CLS] alone, of length 2, whatever follows.
    "bge": ((.5, .5, -.5, -.5), (.5, .5, -.5, -.5)),
    # [CLS] a [SEP] add up to (1,-1,1,-1), of length 2; for Contriever a third of it, as it is.
    "minilm": ((.5, -.5, .5, -.5), (.5, -.5, .5, -.5)),
    "contriever": ((1 / 3, -1 / 3, 1 / 3, -1 / 3), (1 / 3, -1 / 3, 1 / 3, -1 / 3)),
}


@pytest.mark.parametrize("rule", sentences.RULES)
def test_each_rule_by_hand(rule, tmp_path):
  encoder = tiny_berts.opened(tiny_berts.by_hand(tmp_path), rule=rule)
  query_D, passage_D = HAND[rule]
  np.testing.assert_allclose(encoder.encode_queries(["a"]), [query_D], atol=1e-6)
  np.testing.assert_allclose(encoder.encode_passages(["a"]), [passage_D], atol=1e-6)


def test_bge_instructs_queries_alone(tmp_path):
  tiny_berts.random_bert(tmp_path)
  bge, plain = tiny_berts.opened(tmp_path, rule="bge"), "long"
  told = "Represent this sentence for searching relevant passages: " + plain
  np.testing.assert_allclose(bge.encode_queries([plain]), bge.encode_passages([told]), atol=1e-5)
  assert np.abs(bge.encode_queries([plain]) - bge.encode_passages([plain])).max() > 0.01


@pytest.mark.parametrize("name, rule", [
    ("e5-base-v2", "e5"), ("intfloat_E5-small", "e5"), ("bge-small-en-v1.5", "bge"),
    ("all-MiniLM-L6-v2", "minilm"), ("minilm-l6", "minilm"), ("contriever-msmarco", "contriever")])
def test_the_name_says_which_rule(name, rule, tmp_path):
  folder = tiny_berts.by_hand(tmp_path / name)
  assert sentences.choose_rule(str(folder), folder) == sentences.RULES[rule]
  assert sentences.choose_rule(f"owner/{name}", folder) == sentences.RULES[rule]
  in_cache = tmp_path / f"models--owner--{name}" / "snapshots" / "0123abcd"
  shutil.copytree(folder, in_cache)
  assert sentences.choose_rule(str(in_cache), in_cache) == sentences.RULES[rule]


@pytest.mark.parametrize("name", ["mine", "glove50", "bge-base-zh", "e50", "e5-minilm"])
def test_a_name_that_says_nothing_is_an_error_that_lists_the_choices(name, tmp_path):
  folder = tiny_berts.by_hand(tmp_path / name)
  with pytest.raises(CorpusError, match="name a rule: e5, bge, minilm, contriever, or own"):
    encoders.wanted_spec(str(folder))
  with pytest.raises(CorpusError, match="rule 'E5' is not known; name a rule"):
    encoders.wanted_spec(str(folder), rule="E5")


def own_files(folder, steps=("Transformer", "Pooling", "Normalize"), pooling=None, prompts=None):
  """What sentence-transformers writes beside a model."""
  pooling = pooling or {"word_embedding_dimension": 4, "pooling_mode_cls_token": True,
                        "pooling_mode_mean_tokens": False}
  modules = [{"idx": i, "type": f"sentence_transformers.models.{s}"} for i, s in enumerate(steps)]
  (folder / "modules.json").write_text(json.dumps(modules))
  (folder / "1_Pooling").mkdir(exist_ok=True)
  (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
  (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 9}))
  if prompts:
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))


def test_its_own_files_say_which_rule(tmp_path):
  folder = tiny_berts.by_hand(tmp_path / "mine")
  own_files(folder)
  spec = encoders.wanted_spec(str(folder))
  assert spec["rule"] == {"pooling": "cls", "normalize": True, "query_prefix": "",
                          "passage_prefix": ""}
  assert spec["max_tokens"] == 9 and json.loads(json.dumps(spec)) == spec
  own_files(folder, ("Transformer", "Pooling"), {"pooling_mode": "mean"},
            {"query": "query: ", "document": "a "})
  encoder = tiny_berts.opened(folder)
  # [CLS] query : a [SEP] add up to (1,-1,-1,1), [CLS] a a [SEP] to (0,-2,2,0): means of 5 and of 4.
  np.testing.assert_allclose(encoder.encode_queries(["a"]), [(.2, -.2, -.2, .2)], atol=1e-6)
  np.testing.assert_allclose(encoder.encode_passages(["a"]), [(0, -.5, .5, 0)], atol=1e-6)


def test_own_files_that_contradict_or_ask_for_more_are_errors(tmp_path):
  folder = tiny_berts.by_hand(tmp_path / "e5")
  own_files(folder)  # cls; e5 is a mean
  with pytest.raises(CorpusError, match="called like e5 .*own files say pooling cls.*name a rule"):
    encoders.wanted_spec(str(folder))
  assert encoders.wanted_spec(str(folder), rule="e5")["rule"]["pooling"] == "mean"
  assert encoders.wanted_spec(str(folder), rule="own")["rule"]["pooling"] == "cls"
  own_files(folder, pooling={"pooling_mode_max_tokens": True})
  with pytest.raises(CorpusError, match=r"asks for pooling \['max'\], known are mean, cls"):
    encoders.wanted_spec(str(folder))
  own_files(folder, steps=("Transformer", "Pooling", "Dense"))
  with pytest.raises(CorpusError, match="lists Transformer, Pooling, Dense"):
    encoders.wanted_spec(str(folder))
