"""The corpus on disk: any row at once, bad lines named, packed or not."""

from __future__ import annotations

import gzip
import json
import os

import numpy as np
import pytest

from retriever import corpus as corpus_lib
from retriever.corpus import Corpus, zstd
from retriever.manifest import Fingerprint
from retriever.protocol import CorpusError

ROWS = [("0", '"Zopo Dase"\nborn in Mira'), ("x-1", '"Ünïcödé \U0001f600"\nline\nline'),
        ("2", "no title, no newline")]


def write(path, rows=ROWS, end="\n"):
  lines = [json.dumps({"id": i, "contents": c}, ensure_ascii=False) for i, c in rows]
  path.write_bytes((end.join(lines) + end).encode())
  return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_any_row_in_any_order(tmp_path, end):
  corpus = Corpus.open(write(tmp_path / "c.jsonl", end=end))
  assert len(corpus) == 3
  assert [corpus[row] for row in (2, 0, 1)] == [ROWS[2], ROWS[0], ROWS[1]]
  assert list(corpus) == ROWS
  for row in (-1, 3):
    with pytest.raises(IndexError):
      corpus[row]


def test_last_line_may_lack_its_newline(tmp_path):
  path = tmp_path / "c.jsonl"
  path.write_bytes(write(path).read_bytes().rstrip(b"\n"))
  assert list(Corpus.open(path)) == ROWS


@pytest.mark.parametrize("suffix, pack", [("gz", gzip.compress), ("zst", zstd.compress)])
def test_packed_and_plain_hold_the_same_rows(tmp_path, suffix, pack):
  text = write(tmp_path / "c.jsonl").read_bytes()
  packed = tmp_path / f"c.jsonl.{suffix}"
  packed.write_bytes(pack(text[:50]) + pack(text[50:]))  # both formats allow several parts
  assert list(Corpus.open(packed)) == list(Corpus.open(tmp_path / "c.jsonl")) == ROWS


def test_offsets_survive_their_flushes(tmp_path, monkeypatch):
  monkeypatch.setattr(corpus_lib, "FLUSH_ROWS", 2)
  rows = [(str(i), "é" * i + "z") for i in range(7)]
  path = write(tmp_path / "c.jsonl", rows)
  assert list(Corpus.open(path)) == rows
  # {"id": "0", "contents": "z"} has 28 bytes, its newline one; each é adds two.
  starts = np.fromfile(tmp_path / "c.jsonl.rows" / "offsets.u64", "<u8")
  assert starts.tolist() == [0, 29, 60, 93, 128, 165, 204, 245]


def test_a_changed_corpus_is_scanned_again(tmp_path):
  path = write(tmp_path / "c.jsonl")
  Corpus.open(path)
  write(path, ROWS[:1])
  assert list(Corpus.open(path)) == ROWS[:1]


def test_a_packed_corpus_put_in_anothers_place_is_unpacked_again(tmp_path):
  """Even one that is older than what was unpacked before."""
  for name, kept in (("a", ROWS), ("b", ROWS[:1])):
    text = write(tmp_path / "plain", kept).read_bytes()
    (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(text))
  os.utime(tmp_path / "b.jsonl.gz", (1, 1))
  assert len(Corpus.open(tmp_path / "a.jsonl.gz")) == 3
  (tmp_path / "b.jsonl.gz").replace(tmp_path / "a.jsonl.gz")
  assert len(Corpus.open(tmp_path / "a.jsonl.gz")) == 1


def test_offsets_of_another_file_are_refused(tmp_path):
  path = write(tmp_path / "c.jsonl")
  Corpus.open(path)
  offsets = tmp_path / "c.jsonl.rows" / "offsets.u64"
  other = write(tmp_path / "d.jsonl", ROWS[:2])
  with pytest.raises(CorpusError, match="was made for"):
    Corpus(other, offsets)
  offsets.write_bytes(offsets.read_bytes()[:-3])
  with pytest.raises(CorpusError, match="cut short"):
    Corpus(path, offsets)


@pytest.mark.parametrize("line, said", [
    (b"{not json", "not JSON"),
    (b"", "the line is empty"),
    (b"   ", "the line is empty"),
    (b'["0", "text"]', "not an object"),
    (b'{"contents": "text"}', "no 'id'"),
    (b'{"id": "1"}', "no 'contents'"),
    (b'{"id": "1", "contents": 5}', "'contents' is a int"),
    (b'{"id": null, "contents": "text"}', "'id' is a NoneType"),
    (b'{"id": true, "contents": "text"}', "'id' is a bool"),
    (b'{"id": "1", "contents": " \\n"}', "'contents' is empty"),
    (b'{"id": "1", "contents": "\xff"}', "byte 26 is not UTF-8"),
    (b'{"id": "1", "contents": "\\ud83d"}', "half a surrogate pair"),
    (b"[" * 100_000, "not JSON"),
    (b'{"id": ' + b"9" * 5000 + b', "contents": "text"}', "not JSON"),
    (b'\xef\xbb\xbf{"id": "1", "contents": "text"}', "not JSON"),
])
def test_a_bad_line_is_named_with_its_number(tmp_path, line, said):
  good = b'{"id": "0", "contents": "text"}\n'
  path = tmp_path / "c.jsonl"
  path.write_bytes(good + line + b"\n" + good)
  with pytest.raises(CorpusError) as caught:
    Corpus.open(path)
  message = str(caught.value)
  assert message.startswith(f"{path}:2: ") and said in message and "wanted {" in message
  assert "\n" not in message and len(message) < 600
  assert not list((tmp_path / "c.jsonl.rows").iterdir())  # nothing half-made is left to be used


def test_a_line_without_end_is_not_read_into_memory(tmp_path, monkeypatch):
  monkeypatch.setattr(corpus_lib, "MAX_LINE_BYTES", 100)
  path = write(tmp_path / "c.jsonl", [("0", "short"), ("1", "x" * 200)])
  with pytest.raises(CorpusError, match=":2: the line is longer than 100 bytes"):
    Corpus.open(path)


BAD = b"not json\n"


@pytest.mark.parametrize("packed", [False, True])
def test_bad_lines_can_be_skipped_and_are_counted(tmp_path, packed, monkeypatch):
  monkeypatch.setattr(corpus_lib, "FLUSH_ROWS", 2)
  lines = [json.dumps({"id": i, "contents": c}).encode() + b"\n" for i, c in ROWS]
  text = BAD + lines[0] + BAD + BAD + lines[1] + lines[2] + b"\n" + BAD * 4
  path = tmp_path / ("c.jsonl.gz" if packed else "c.jsonl")
  path.write_bytes(gzip.compress(text) if packed else text)
  scan = corpus_lib.prepare(path, tmp_path, skip_bad=True)
  assert (scan.rows, scan.skipped) == (3, 8)
  # Five reasons of eight, by the numbers of their lines: 1, 3, 4, then the empty 7, and 8.
  assert [r.split(": ")[0] for r in scan.reasons] == [f"{path}:{n}" for n in (1, 3, 4, 7, 8)]
  corpus = Corpus(scan.path, tmp_path / corpus_lib.OFFSETS)
  assert list(corpus) == ROWS and len(corpus) == 3
  path.write_bytes(gzip.compress(BAD) if packed else BAD)
  with pytest.raises(CorpusError, match="no good line"):
    corpus_lib.prepare(path, tmp_path, skip_bad=True)


def test_two_passages_of_one_id_are_named(tmp_path, monkeypatch):
  monkeypatch.setattr(corpus_lib, "FLUSH_ROWS", 2)
  path = write(tmp_path / "c.jsonl", [(str(i % 6), "text") for i in range(7)])
  with pytest.raises(CorpusError, match=r"rows 0 and 6 .* the id '0'"):
    Corpus.open(path)
  assert not list((tmp_path / "c.jsonl.rows").iterdir())


def test_ids_that_only_hash_alike_are_no_twins(tmp_path, monkeypatch):
  class Coarse:
    """A hash that knows two values."""

    def __init__(self, data, digest_size):
      self._byte = len(data) % 2

    def digest(self):
      return bytes([self._byte] * 8)

  monkeypatch.setattr(corpus_lib.hashlib, "blake2b", Coarse)
  assert len(Corpus.open(write(tmp_path / "c.jsonl", [("a", "x"), ("cc", "x"), ("b", "x")]))) == 3


def test_numbers_serve_as_ids(tmp_path):
  path = tmp_path / "c.jsonl"
  path.write_text('{"id": 7, "contents": "text"}\n')
  assert Corpus.open(path)[0] == ("7", "text")


def test_empty_missing_cut_and_unknown_files(tmp_path):
  empty = tmp_path / "empty.jsonl"
  empty.write_bytes(b"")
  with pytest.raises(CorpusError, match="is empty"):
    Corpus.open(empty)
  with pytest.raises(CorpusError, match="can't be read"):
    Corpus.open(tmp_path / "none.jsonl")
  cut = tmp_path / "cut.jsonl.gz"
  cut.write_bytes(gzip.compress(b'{"id": "0", "contents": "text"}\n' * 99)[:-9])
  with pytest.raises(CorpusError, match="cut or damaged"):
    Corpus.open(cut)
  for cut_by in (9, 60):
    cut = tmp_path / f"cut{cut_by}.jsonl.zst"
    lines = b"".join(b'{"id": "%d", "contents": "text"}\n' % i for i in range(9999))
    cut.write_bytes(zstd.compress(lines)[:-cut_by])
    with pytest.raises(CorpusError, match="cut or damaged.*whole .zst file"):
      Corpus.open(cut)
  with pytest.raises(CorpusError, match="unpack it"):
    Corpus.open(write(tmp_path / "c.jsonl.xz"))


def test_a_fingerprint_notices_every_byte_and_a_sample_its_blocks(tmp_path, monkeypatch):
  path = tmp_path / "f"
  path.write_bytes(bytes(1000))
  before = Fingerprint.of(path)
  before.verify(path, "mend it")
  for at in (0, 500, 999):
    changed = bytearray(1000)
    changed[at] = 1
    path.write_bytes(changed)
    with pytest.raises(CorpusError, match="SHA-256 differs.*mend it"):
      before.verify(path, "mend it")
  # Above WHOLE_BYTES only the blocks are read: 64 blocks of 4 of 1000 bytes start at
  # 996 * i // 63 = 0, 15, 31, ..., 996, so byte 2 is seen and byte 7 is not.
  monkeypatch.setattr("retriever.manifest.WHOLE_BYTES", 10)
  monkeypatch.setattr("retriever.manifest.BLOCK_BYTES", 4)
  path.write_bytes(bytes(1000))
  before = Fingerprint.of(path)
  for at, seen in ((2, True), (7, False), (999, True)):
    changed = bytearray(1000)
    changed[at] = 1
    path.write_bytes(changed)
    if seen:
      with pytest.raises(CorpusError, match="SHA-256 differs"):
        before.verify(path, "mend it")
    else:
      before.verify(path, "mend it")
