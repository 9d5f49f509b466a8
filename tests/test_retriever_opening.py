"""Specs: each opens what it names, and what is wrong with one is said."""

from __future__ import annotations

import json

import pytest
from test_retriever_engine import PEOPLE, rows, write

from retriever.build import build
from retriever.opening import open_engine
from retriever.protocol import CorpusError, RetrievalError, UserError


@pytest.fixture(scope="module")
def index(tmp_path_factory):
  folder = tmp_path_factory.mktemp("opening")
  build(write(folder / "corpus.jsonl", rows()), folder / "dense", dim=256, quiet=True)
  build(folder / "corpus.jsonl", folder / "words", index="bm25", quiet=True)
  return folder


def titles(engine, query, top_k=3):
  return [p.title for p in engine.search([query], top_k)[0]]


def test_a_folder_opens_as_path_text_and_mapping(index):
  asked = f"friend {PEOPLE[3]}"
  engines = [open_engine(spec) for spec in (
      index / "dense", str(index / "dense"), {"index": str(index / "dense")},
      json.dumps({"index": str(index / "dense")}))]
  assert len({e.fingerprint for e in engines}) == 1
  assert titles(engines[0], asked)[0] == PEOPLE[3]
  assert all(titles(e, asked) == titles(engines[0], asked) for e in engines)
  mesh = open_engine({"index": str(index / "dense"), "kind": "mesh"})
  assert titles(mesh, asked) == titles(engines[0], asked)
  assert open_engine("empty").search(["q"], 3) == [[]]


def test_engines_are_put_together(index, tmp_path):
  parts = [str(index / "dense"), {"index": str(index / "words")}]
  asked = f"friend {PEOPLE[3]}"
  fused = open_engine({"fuse": parts, "fetch": 20})
  assert titles(fused, asked)[0] == PEOPLE[3]
  assert fused.fingerprint not in {open_engine(p).fingerprint for p in parts}
  random = open_engine({"random": parts[0], "seed": 1})
  assert titles(random, asked) != titles(open_engine(parts[0]), asked)
  noisy = open_engine({"noisy": parts[1], "p": 0.0})
  assert titles(noisy, asked) == titles(open_engine(parts[1]), asked)
  tape = str(tmp_path / "tape")
  with open_engine({"record": {"fuse": parts}, "file": tape}) as recorder:
    found = recorder.search([asked], 3)
  with open_engine({"replay": tape}) as replay:
    assert replay.search([asked], 3) == found
    named = open_engine({"replay": tape, "fingerprint": replay.fingerprint})
    assert named.search([asked], 3) == found
    with pytest.raises(RetrievalError):
      replay.search(["another"], 3)


@pytest.mark.parametrize("spec, said", [
    ("nowhere", "nowhere holds no index"),
    ("{", "is not JSON"),
    ({}, "names 0 engines, wanted exactly one of index, empty, url"),
    ({"index": "a", "url": "b"}, "names 2 engines"),
    ({"index": "a", "prboes": 3}, "'index' has no option 'prboes', choose from kind, model"),
    ({"index": 5}, "index"),
    ({"fuse": 5}, "fuse"),
    ({"noisy": "empty"}, "'p'"),
    ({"online": "serper", "blocked": "com"}, "wanted a list of domains"),
    ({"random": "empty"}, "no corpus to draw from"),
    ({"noisy": "empty", "p": 2}, "no corpus to draw from"),
    ({"rerank": "empty"}, "wants a model"),
    ({"fuse": ["empty"]}, "wanted two or more"),
    ({"url": "ftp://localhost"}, "no address of a search server"),
    ({"url": "http://localhost:1", "token_env": "NO_SUCH_TOKEN"}, "NO_SUCH_TOKEN holds no token"),
    ("online:yahoo", "yahoo")])
def test_what_is_wrong_with_a_spec_is_said(spec, said):
  with pytest.raises(CorpusError, match=said) as caught:
    open_engine(spec)
  assert "\n" not in str(caught.value)


def test_an_encoder_that_is_nowhere_is_named():
  with pytest.raises(UserError, match="no-e5") as caught:
    open_engine({"qdrant": "wiki", "url": "http://localhost:1", "encoder": "nowhere/no-e5"})
  assert "\n" not in str(caught.value)
