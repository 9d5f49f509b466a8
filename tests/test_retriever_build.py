"""Builds: every kind opens as what it is, a kill costs little, a foreign or damaged file is refused."""

from __future__ import annotations

import gzip
import os
import random
import signal
import subprocess
import sys
import time

import faiss
import numpy as np
import pytest
from test_retriever_engine import PEOPLE, rows, write

from retriever import build as build_lib
from retriever import stages
from retriever.build import build
from retriever.encoders import HashingEncoder
from retriever.engine import open_index
from retriever.protocol import CorpusError

DIM = 256
KINDS = ("flat", "mesh", "ivf", "hnsw", "pq", "bm25")


@pytest.fixture
def corpus(tmp_path):
  return write(tmp_path / "corpus.jsonl", rows())


def options(kind):
  return {} if kind == "bm25" else {"dim": DIM}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_finds_names_and_says_what_it_is(tmp_path, corpus, kind):
  manifest = build(corpus, tmp_path / kind, index=kind, quiet=True, **options(kind))
  assert manifest.index["kind"] == kind and manifest.rows == 360
  assert {p.name for p in (tmp_path / kind).iterdir()} == {"manifest.json", *manifest.files}
  assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
  with open_index(tmp_path / kind) as engine:
    found = engine.search([f"birthplace {p}" for p in PEOPLE[:50]], 3)
    assert engine.search([], 3) == []
  assert sum(any(x.title == p for x in xs) for p, xs in zip(PEOPLE, found)) >= 47
  again = build(corpus, tmp_path / kind, index=kind, quiet=True, **options(kind))
  assert again.fingerprint == manifest.fingerprint


def test_kinds_have_different_fingerprints_and_options_change_them(tmp_path, corpus):
  prints = set()
  for kind in KINDS:
    build(corpus, tmp_path / kind, index=kind, quiet=True, **options(kind))
    prints.add(open_index(tmp_path / kind).fingerprint)
  assert len(prints) == len(KINDS)
  for kind, asked in (("ivf", {"probes": 1}), ("pq", {"probes": 1, "fetch": 9}),
                      ("hnsw", {"ef_search": 9}), ("flat", {"kind": "mesh"}),
                      ("mesh", {"dtype": "bfloat16"})):
    with open_index(tmp_path / kind, **asked) as engine:
      assert engine.fingerprint not in prints
      prints.add(engine.fingerprint)


@pytest.mark.parametrize("kind, asked, said", [
    ("flat", {"probes": 3}, "means nothing to an index of kind 'flat'"),
    ("flat", {"dtype": "bfloat16"}, "dtype means nothing"),
    ("flat", {"model": "nowhere"}, "leave the option model out"),
    ("mesh", {"gpu": True}, "means nothing to an index of kind 'mesh'"),
    ("bm25", {"model": "x"}, "model means nothing to an index of kind 'bm25'"),
    ("ivf", {"ef_search": 3}, "ef_search means nothing"),
    ("ivf", {"kind": "flat"}, "can't be opened as 'flat'"),
    ("flat", {"kind": "bm25"}, "can't be opened as 'bm25'")])
def test_options_that_mean_nothing_are_refused(tmp_path, corpus, kind, asked, said):
  build(corpus, tmp_path / kind, index=kind, quiet=True, **options(kind))
  with pytest.raises(CorpusError, match=said):
    open_index(tmp_path / kind, **asked)


@pytest.mark.parametrize("wrong, said", [
    ({"index": "lsh"}, "index 'lsh' is not known, choose one of flat"),
    ({"index": "flat", "factory": "IVF1,Flat"}, "--factory"),
    ({"index": "hnsw", "faiss_file": "x"}, "leave out --index"),
    ({"index": "bm25", "dim": 9}, "--dim is of the hashing encoder"),
    ({"index": "bm25", "encoder": "e5"}, "leave out --encoder"),
    ({"rule": "e5"}, "--rule and --dtype are of sentence encoders"),
    ({"index": "ivf", "factory": "nonsense"}, "can't make 'nonsense'")])
def test_builds_that_can_not_be_are_refused(tmp_path, corpus, wrong, said):
  with pytest.raises(CorpusError, match=said):
    build(corpus, tmp_path / "i", quiet=True, **wrong)
  assert not (tmp_path / "i").exists()


def test_a_factory_is_taken_at_its_word(tmp_path, corpus):
  manifest = build(corpus, tmp_path / "i", index="ivf", factory="IVF4,SQ8", dim=DIM, quiet=True)
  assert manifest.index["factory"] == "IVF4,SQ8"
  assert isinstance(faiss.read_index(str(tmp_path / "i" / "index.faiss")),
                    faiss.IndexIVFScalarQuantizer)


def test_skipped_lines_are_in_the_manifest_and_wanted_there(tmp_path, corpus):
  with corpus.open("a") as f:
    f.write("no json\n\n")
  with pytest.raises(CorpusError, match=":361: not JSON"):
    build(corpus, tmp_path / "i", dim=DIM, quiet=True)
  manifest = build(corpus, tmp_path / "i", dim=DIM, skip_bad=True, quiet=True)
  assert (manifest.rows, manifest.skipped) == (360, 2)
  assert open_index(tmp_path / "i").search([PEOPLE[359 % 300]], 1)
  with pytest.raises(CorpusError, match="--overwrite"):  # who did not ask for it is told
    build(corpus, tmp_path / "i", dim=DIM, quiet=True)


# Going on


SLOW = """
import sys, time
from retriever import build, hashing, stages
stages.ENCODE_BATCH = stages.KEEP_ROWS = 20
encode = hashing.HashingEncoder.encode_passages
def slowly(self, passages):
  time.sleep(0.1)
  return encode(self, passages)
hashing.HashingEncoder.encode_passages = slowly
sys.exit(build.main(sys.argv[1:]))
"""


def test_a_killed_build_goes_on_where_it_stopped(tmp_path, corpus, monkeypatch):
  """Killed with SIGKILL at whatever moment, and at last repeated: no kept row is encoded again."""
  out, part = tmp_path / "i", tmp_path / ".i.part"
  command = [sys.executable, "-c", SLOW, str(corpus), "--out", str(out), "--index", "ivf",
             "--dim", str(DIM)]
  kept = []
  for rows_before in (20, 120):
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    vectors, deadline = part / "vectors.float16", time.monotonic() + 60
    while not (vectors.is_file() and vectors.stat().st_size > rows_before * 2 * DIM):
      assert child.poll() is None and time.monotonic() < deadline
      time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    kept.append(int((part / ".vectors.float16.rows").read_text()))
  assert not out.exists() and kept[1] >= 120 > kept[0] >= 20
  encoded, encode = [], HashingEncoder.encode_passages
  monkeypatch.setattr(HashingEncoder, "encode_passages",
                      lambda self, texts: encoded.extend(texts) or encode(self, texts))
  manifest = build(corpus, out, index="ivf", dim=DIM, quiet=True)
  assert len(encoded) == 360 - kept[1] and not part.exists()
  undisturbed = build(corpus, tmp_path / "u", index="ivf", dim=DIM, quiet=True)
  assert manifest.fingerprint == undisturbed.fingerprint


def test_what_another_build_left_is_not_gone_on_with(tmp_path, corpus, monkeypatch):
  def fail(*_):
    raise OSError("no space")

  with monkeypatch.context() as m, pytest.raises(OSError):
    m.setattr(stages.faiss_index, "build", fail)
    build(corpus, tmp_path / "i", index="ivf", dim=DIM, quiet=True)
  assert (tmp_path / ".i.part" / "vectors.float16").is_file()
  manifest = build(corpus, tmp_path / "i", index="ivf", dim=DIM // 2, quiet=True)
  assert manifest.encoder["dim"] == DIM // 2
  assert (tmp_path / "i" / "vectors.float16").stat().st_size == 360 * DIM
  assert not (tmp_path / ".i.part").exists()


def test_a_finished_build_waits_where_it_could_not_be_put_in_place(tmp_path, corpus, monkeypatch):
  def fail(*_):
    raise OSError("busy")

  with monkeypatch.context() as m, pytest.raises(OSError, match="busy"):
    m.setattr("pathlib.Path.rename", fail)
    build(corpus, tmp_path / "i", dim=DIM, quiet=True)
  monkeypatch.setattr(HashingEncoder, "encode_passages", fail)  # nothing is done again
  monkeypatch.chdir(corpus.parent)  # and from wherever the command is repeated
  build(corpus.name, tmp_path / "i", dim=DIM, quiet=True)
  assert open_index(tmp_path / "i").search([PEOPLE[0]], 1)[0][0].title == PEOPLE[0]
  assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
  assert not list((tmp_path / "i").glob(".*"))


def test_an_index_is_back_where_its_replacement_was_killed_halfway(tmp_path, corpus):
  fingerprint = build(corpus, tmp_path / "i", dim=DIM, quiet=True).fingerprint
  (tmp_path / "i").rename(tmp_path / ".i.old")  # as after the first of the two renames
  with pytest.raises(CorpusError, match="not JSON"):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("x")
    build(bad, tmp_path / "i", dim=DIM, overwrite=True, quiet=True)
  assert open_index(tmp_path / "i").fingerprint == fingerprint


def test_what_others_put_into_the_folder_meanwhile_stays(tmp_path, corpus, monkeypatch):
  encode = HashingEncoder.encode_passages

  def meanwhile(self, passages):
    (tmp_path / "i").mkdir(exist_ok=True)
    (tmp_path / "i" / "precious.txt").write_text("mine")
    return encode(self, passages)

  monkeypatch.setattr(HashingEncoder, "encode_passages", meanwhile)
  with pytest.raises(CorpusError, match="not empty any more"):
    build(corpus, tmp_path / "i", dim=DIM, quiet=True)
  assert (tmp_path / "i" / "precious.txt").read_text() == "mine"


def test_a_folder_that_holds_its_own_source_is_not_replaced(tmp_path, corpus):
  build(corpus, tmp_path / "i", dim=DIM, quiet=True)
  inside = corpus.rename(tmp_path / "i" / "corpus.jsonl")
  with pytest.raises(CorpusError, match="lies in the folder that is to be written"):
    build(inside, tmp_path / "i", dim=DIM, overwrite=True, quiet=True)
  assert inside.is_file()


def test_a_mount_point_is_refused_before_anything_is_built(tmp_path, corpus, monkeypatch):
  monkeypatch.setattr("pathlib.Path.is_mount", lambda self: self.name == "volume")
  with pytest.raises(CorpusError, match="name a folder in it"):
    build(corpus, tmp_path / "volume", dim=DIM, quiet=True)


def test_the_lost_text_of_a_packed_corpus_is_unpacked_again(tmp_path, corpus):
  packed = tmp_path / "corpus.jsonl.gz"
  packed.write_bytes(gzip.compress(corpus.read_bytes()))
  build(packed, tmp_path / "i", dim=DIM, quiet=True)
  (tmp_path / "i" / "corpus.jsonl").unlink()
  with pytest.raises(CorpusError, match="corpus.jsonl is missing"):
    build(packed, tmp_path / "i", dim=DIM, quiet=True)
  build(packed, tmp_path / "i", dim=DIM, overwrite=True, quiet=True)
  assert len(open_index(tmp_path / "i")) == 360


def test_two_builders_do_not_write_one_folder(tmp_path, corpus):
  recipe = build_lib.make_recipe(corpus, encoder="hashing", dim=DIM, rule=None, dtype=None,
                                 index=None, factory=None, faiss_file=None, skip_bad=False)
  with stages.Workshop(tmp_path / "i", recipe, quiet=True):
    with pytest.raises(CorpusError, match="at work already"):
      build(corpus, tmp_path / "i", dim=DIM, quiet=True)


# Taking in what is finished


def published(path, corpus_rows, dim=DIM, metric=faiss.IndexFlatIP):
  """An index file as others publish it: FAISS's Flat, in the order of the corpus."""
  encoder = HashingEncoder.fit(corpus_rows, dim)
  index = metric(dim)
  index.add(encoder.encode_passages(corpus_rows))
  faiss.write_index(index, str(path))
  return path


def test_a_finished_index_is_taken_in_as_it_is(tmp_path, corpus):
  path = published(tmp_path / "e5_Flat.index", rows())
  before = path.stat().st_mtime_ns
  build(corpus, tmp_path / "own", dim=DIM, quiet=True)
  manifest = build(corpus, tmp_path / "in", dim=DIM, faiss_file=path, quiet=True)
  assert manifest.index == {"kind": "faiss", "file": "e5_Flat.index"}
  assert path.stat().st_mtime_ns == before and not list((tmp_path / "in").glob("*.float*"))
  own, taken = open_index(tmp_path / "own"), open_index(tmp_path / "in")
  queries = [f"friend {p}" for p in PEOPLE[:40]]
  assert own.search(queries, 5) == taken.search(queries, 5)
  path.write_bytes(path.read_bytes()[:-1] + b"?")
  with pytest.raises(CorpusError, match="e5_Flat.index is not the file"):
    open_index(tmp_path / "in")


def test_a_finished_index_of_other_passages_is_refused(tmp_path, corpus):
  for made, said in ((published(tmp_path / "short", rows()[:-1]), "holds 359 vectors"),
                     (published(tmp_path / "narrow", rows(), 64), "of 64 numbers"),
                     (published(tmp_path / "l2", rows(), DIM, faiss.IndexFlatL2), "inner product"),
                     (corpus, "can't be read")):
    with pytest.raises(CorpusError, match=said):
      build(corpus, tmp_path / "in", dim=DIM, faiss_file=made, quiet=True)
  assert not (tmp_path / "in").exists()


def test_another_finished_index_of_the_same_name_is_another(tmp_path, corpus):
  for name in ("a", "b"):
    (tmp_path / name).mkdir()
    published(tmp_path / name / "e.index", rows())
  build(corpus, tmp_path / "in", dim=DIM, faiss_file=tmp_path / "a" / "e.index", quiet=True)
  with pytest.raises(CorpusError, match="--overwrite"):
    build(corpus, tmp_path / "in", dim=DIM, faiss_file=tmp_path / "b" / "e.index", quiet=True)


def test_an_index_that_does_not_give_back_its_vectors_is_refused(tmp_path, corpus):
  encoder = HashingEncoder.fit(rows(), DIM)
  index = faiss.index_factory(DIM, "IDMap,Flat", faiss.METRIC_INNER_PRODUCT)
  index.add_with_ids(encoder.encode_passages(rows()), np.arange(360))
  faiss.write_index(index, str(tmp_path / "e.index"))
  with pytest.raises(CorpusError, match="does not give back its vectors"):
    build(corpus, tmp_path / "in", dim=DIM, faiss_file=tmp_path / "e.index", quiet=True)


@pytest.mark.parametrize("count", [20, 360])
def test_few_passages_of_many_numbers_can_be_coded(tmp_path, count):
  """Fewer than a rotation needs, which FAISS answers with a crash."""
  corpus = write(tmp_path / "few.jsonl", rows()[:count])
  build(corpus, tmp_path / "i", index="pq", dim=1024, quiet=True)
  assert open_index(tmp_path / "i").search([PEOPLE[0]], 1)[0][0].title == PEOPLE[0]
  with pytest.raises(CorpusError, match="a rotation needs as many"):
    build(corpus, tmp_path / "j", index="pq", factory="OPQ8,PQ8x4", dim=1024, quiet=True)


# Damage


@pytest.mark.parametrize("kind", KINDS)
def test_no_flip_or_cut_in_any_file_goes_unnoticed(tmp_path, corpus, kind):
  """Every file of every kind: refused by the manifest's digests, before anything is asked."""
  folder = tmp_path / kind
  manifest = build(corpus, folder, index=kind, quiet=True, **options(kind))
  rng = random.Random(kind)
  for name in manifest.files:
    path = folder / name
    whole = path.read_bytes()
    for _ in range(6):
      damaged = bytearray(whole)
      damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
      path.write_bytes(damaged if rng.random() < 0.7 else whole[:rng.randrange(len(whole))])
      began = time.monotonic()
      with pytest.raises(CorpusError, match=name):
        open_index(folder)
      assert time.monotonic() - began < 2
    path.write_bytes(whole)
  open_index(folder).close()


def test_files_of_another_index_are_refused(tmp_path, corpus):
  other = write(tmp_path / "other.jsonl", list(reversed(rows())))  # the same passages, shuffled
  for name, source in (("a", corpus), ("b", other)):
    build(source, tmp_path / name, index="ivf", dim=DIM, quiet=True)
  for file in ("index.faiss", "vectors.float16", "manifest.json"):
    whole = (tmp_path / "a" / file).read_bytes()
    (tmp_path / "a" / file).write_bytes((tmp_path / "b" / file).read_bytes())
    with pytest.raises(CorpusError):
      open_index(tmp_path / "a")
    (tmp_path / "a" / file).write_bytes(whole)


def test_large_files_are_checked_by_a_sample(tmp_path, corpus, monkeypatch):
  """Above a gigabyte: blocks all over the file, so that opening stays quick."""
  build(corpus, tmp_path / "i", dim=DIM, quiet=True)
  monkeypatch.setattr("retriever.manifest.WHOLE_BYTES", 100)
  monkeypatch.setattr("retriever.manifest.BLOCK_BYTES", 64)
  manifest = build(corpus, tmp_path / "j", dim=DIM, quiet=True)  # its samples are of such blocks
  path = tmp_path / "j" / "vectors.float32"
  whole = np.fromfile(path, np.uint8)
  for at in (0, path.stat().st_size - 1):
    whole[at] ^= 1
    whole.tofile(path)
    with pytest.raises(CorpusError, match="SHA-256 differs"):
      open_index(tmp_path / "j")
    whole[at] ^= 1
  os.truncate(path, manifest.files["vectors.float32"].bytes - 1)
  with pytest.raises(CorpusError, match="bytes"):
    open_index(tmp_path / "j")


# The program


def test_the_program_says_one_line(tmp_path, corpus, capsys):
  out = tmp_path / "index"
  command = [str(corpus), "--out", str(out), "--dim", "64"]
  assert build_lib.main(command) == 0
  said = capsys.readouterr().out
  assert said.count("\n") == 1 and "360 passages, hashing 64, flat" in said
  assert build_lib.main(command) == 0
  assert "already built" in capsys.readouterr().out
  for wrong in ([str(corpus), "--out", str(out), "--dim", "65"],
                [str(corpus), "--out", str(out), "--dim", "0"],
                [str(corpus), "--out", str(out), "--encoder", str(tmp_path / "nowhere")],
                [str(corpus), "--out", str(corpus)],
                [str(tmp_path / "none.jsonl"), "--out", str(out)]):
    assert build_lib.main(wrong) == 2
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.count("\n") == 1, streams.err
