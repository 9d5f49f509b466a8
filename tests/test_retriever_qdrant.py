"""A Qdrant collection, played by the client's embedded engine: the same passages as Flat's."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

pytest.importorskip("qdrant_client", reason="needs the extra: pip install 'searchr1-jax[qdrant]'")

from fake_web import Web, reply
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from retriever.corpus import Corpus
from retriever.encoders import HashingEncoder
from retriever.faiss_index import FlatIndex
from retriever.protocol import CorpusError, RetrievalError
from retriever.qdrant import QdrantEngine, connect, fill, open_collection

WORDS = [c + v + d for c in "bdfgkl" for v in "aeiou" for d in "mnrst"]


def contents(count, seed=0):
  rng = random.Random(seed)
  return [f'"{rng.choice(WORDS)} {n}"\n{" ".join(rng.choices(WORDS, k=12))}' for n in range(count)]


def write(path, texts):
  path.write_text("".join(json.dumps({"id": f"d{n}", "contents": c}) + "\n"
                          for n, c in enumerate(texts)))
  return path


@pytest.fixture
def corpus(tmp_path):
  with Corpus.open(write(tmp_path / "corpus.jsonl", contents(300))) as corpus:
    yield corpus


@pytest.fixture
def encoder(corpus):
  return HashingEncoder.fit([text for _, text in corpus], 64)


@pytest.fixture
def client():
  client = connect(":memory:")
  yield client
  client.close()


def test_the_passages_and_scores_are_flats(corpus, encoder, client):
  assert fill(client, "wiki", corpus, encoder, batch=64) == 300
  engine = QdrantEngine(client, "wiki", encoder)
  index = FlatIndex(encoder.encode_passages([text for _, text in corpus]))
  queries = [" ".join(random.Random(n).choices(WORDS, k=3)) for n in range(150)]
  wanted = index.search(encoder.encode_queries(queries), 5)
  found = engine.search(queries, 5)
  assert len(engine) == 300 and len(found) == 150
  for rows, passages in zip(wanted, found):
    assert [f"d{row}" for row, _ in rows] == [p.id for p in passages]
    assert [corpus[row][1] for row, _ in rows] == [p.contents for p in passages]
    np.testing.assert_allclose([s for _, s in rows], [p.score for p in passages], atol=1e-5)
  assert engine.passage(7, 0.5).id == "d7" and engine.passage(7, 0.5).score == 0.5
  with pytest.raises(ValueError, match="top_k is 0"):
    engine.search(["q"], 0)


def test_equal_scores_come_by_row(tmp_path, client):
  texts = contents(20) + ['"same"\nthe same words'] * 4
  with Corpus.open(write(tmp_path / "same.jsonl", texts)) as corpus:
    encoder = HashingEncoder.fit(texts, 64)
    fill(client, "same", corpus, encoder)
  found = QdrantEngine(client, "same", encoder).search(["same words"], 3)
  assert [p.id for p in found[0]] == ["d20", "d21", "d22"]


def test_a_filling_that_was_killed_goes_on(corpus, encoder, client, monkeypatch):
  class Killed(BaseException):
    pass

  def on_rows(done):
    if done >= 128:
      raise Killed

  with pytest.raises(Killed):
    fill(client, "wiki", corpus, encoder, batch=64, on_rows=on_rows)
  with pytest.raises(CorpusError, match="holds 128 of 300 passages; go on"):
    QdrantEngine(client, "wiki", encoder)
  client.delete("wiki", [5, 70])  # a hole, as a lost batch leaves one
  encoded = []
  encode = encoder.encode_passages
  monkeypatch.setattr(encoder, "encode_passages",
                      lambda texts: encoded.extend(texts) or encode(texts))
  heard = []
  assert fill(client, "wiki", corpus, encoder, batch=64, on_rows=heard.append) == 174
  assert len(encoded) == 174 and heard == [64, 128, 192, 256, 300]
  assert fill(client, "wiki", corpus, encoder) == 0 and len(encoded) == 174
  assert len(QdrantEngine(client, "wiki", encoder)) == 300


def test_another_corpus_or_encoder_is_refused(tmp_path, corpus, encoder, client):
  fill(client, "wiki", corpus, encoder)
  other_texts = contents(300, seed=1)
  foreign = HashingEncoder.fit(other_texts, 64)
  with pytest.raises(CorpusError, match="other weights"):
    QdrantEngine(client, "wiki", foreign)
  with pytest.raises(CorpusError, match="'dim': 64.*this one is .*'dim': 32"):
    QdrantEngine(client, "wiki", HashingEncoder.fit(other_texts, 32))
  with Corpus.open(write(tmp_path / "other.jsonl", other_texts)) as other:
    with pytest.raises(CorpusError, match="holds something else"):
      fill(client, "wiki", other, encoder)
  with pytest.raises(CorpusError, match="no collection 'none'"):
    QdrantEngine(client, "none", encoder)
  client.create_collection("bare", vectors_config={})
  with pytest.raises(CorpusError, match="no collection 'bare' that"):
    QdrantEngine(client, "bare", encoder)
  with pytest.raises(CorpusError, match="holds something else"):
    fill(client, "bare", corpus, encoder)


def test_a_folder_keeps_the_collection_and_its_fingerprint(tmp_path, encoder):
  place = str(tmp_path / "qdrant")
  client = connect(place)
  with Corpus.open(write(tmp_path / "small.jsonl", contents(9))) as small:
    fill(client, "wiki", small, encoder)
  client.close()
  found = []
  for settings in ({}, {}, {"ef": 256}, {"exact": True}):
    with open_collection(place, "wiki", encoder, **settings) as engine:
      found.append(engine.fingerprint)
  assert found[0] == found[1] and len(set(found)) == 3
  with pytest.raises(CorpusError, match="no collection 'none'"):
    open_collection(place, "none", encoder)
  open_collection(place, "wiki", encoder).close()  # a refusal leaves no lock behind


def test_one_querys_damaged_point_is_its_own_failure(corpus, encoder, client):
  fill(client, "wiki", corpus, encoder)
  engine = QdrantEngine(client, "wiki", encoder)
  first, second = [corpus[n][1].partition("\n")[2] for n in (3, 200)]
  client.delete_payload("wiki", ["contents"], [3])
  found = engine.search_each([first, second], 1)
  assert isinstance(found[0], RetrievalError) and "fill it again" in str(found[0])
  assert found[1][0].id == "d200"
  client.delete("wiki", [4])
  with pytest.raises(RetrievalError, match="lost row 4"):
    engine.passage(4, 0.0)
  client.delete_collection("wiki")
  with pytest.raises(RetrievalError, match="did not answer .*not found"):
    engine.search(["q"], 1)


class Flaky:
  """A client of which the next requests fail, as a server's would."""

  def __init__(self, client, *errors):
    self._client, self.errors, self.requests = client, list(errors), []

  def __getattr__(self, name):
    return getattr(self._client, name)

  def query_batch_points(self, collection, requests):
    self.requests.append(requests)
    if self.errors:
      raise self.errors.pop(0)
    return self._client.query_batch_points(collection, [
        request.model_copy(update={"params": None}) for request in requests])


def status(code):
  return UnexpectedResponse(code, "no", b"", {})


def test_a_fault_that_passes_is_not_seen_and_one_that_stays_is_an_error(corpus, encoder, client):
  fill(client, "wiki", corpus, encoder)
  flaky = Flaky(client, ResponseHandlingException(OSError("refused")), status(503))
  engine = QdrantEngine(flaky, "wiki", encoder, exact=True, ef=99, seconds=10.0)
  assert len(engine.search(["q"], 2)[0]) == 2 and len(flaky.requests) == 3
  (request,) = flaky.requests[0]
  assert request.params.exact and request.params.hnsw_ef == 99 and request.limit == 10
  flaky.errors, flaky.requests = [status(403)], []
  with pytest.raises(RetrievalError, match="did not answer .*403"):
    engine.search(["q"], 2)
  assert len(flaky.requests) == 1
  # A request's failure is that of its own 64 queries.
  flaky.errors = [status(400)]
  found = engine.search_each([str(n) for n in range(70)], 2)
  assert [isinstance(f, RetrievalError) for f in found] == [True] * 64 + [False] * 6


@pytest.mark.filterwarnings("ignore:Api key is used with an insecure connection")
def test_a_server_that_is_down_is_said_so(encoder):
  with Web(lambda asked: reply({"status": "no"}, 401)) as web:
    with pytest.raises(CorpusError, match="could not be asked .*401"):
      open_collection(web.url("").rstrip("/"), "wiki", encoder, token="canary", seconds=1.0)
    assert web.asked[0].headers["api-key"] == "canary"
  with pytest.raises(CorpusError, match="could not be asked"):
    open_collection(web.url("").rstrip("/"), "wiki", encoder, seconds=1.0)
