"""run/data.py: every row is used or named, and the order is a pure function of seed and cursor."""

from __future__ import annotations

import dataclasses
import gzip
import json

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow_datasets as tfds

from searchr1_jax.run import data, setup
from searchr1_jax.types import Question, UserError

GOOD = {"id": "7", "question": "Who?", "golden_answers": ["Ada", "Ada Lovelace"]}


def write(path, *rows, encode=json.dumps):
  opened = gzip.open if path.suffix == ".gz" else open
  with opened(path, "wb") as f:
    for row in rows:
      f.write(row if isinstance(row, bytes) else encode(row).encode() + b"\n")
  return path


def test_a_row_becomes_a_question(tmp_path):
  row = GOOD | {"hops": 2, "prompt": [{"role": "user", "content": "Answer: Who?"}]}
  wanted = Question("nq", "7", "Who?", ("Ada", "Ada Lovelace"),
                    ({"role": "user", "content": "Answer: Who?"},), {"hops": 2})
  for name in ("nq.jsonl", "nq.jsonl.gz"):
    assert data.load_questions(write(tmp_path / name, row)) == [wanted]
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "nq.parquet")
  assert data.load_questions(tmp_path / "nq.parquet") == [wanted]


def test_published_parquet_files_are_read_as_they_are(tmp_path):
  # Two sources in one file, whose ids start again; answers as a column, or inside reward_model.
  target = lambda *a: {"style": "rule", "ground_truth": {"target": list(a)}}
  rows = [{"id": "train_0", "question": "q1", "data_source": "nq", "golden_answers": ["a"],
           "reward_model": target("a"), "extra_info": {"index": 0, "split": "train"}},
          {"id": "train_0", "question": "q2", "data_source": "hotpotqa", "golden_answers": None,
           "reward_model": target("b", "c"), "extra_info": {"index": 0, "split": "train"}}]
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
  first, second = data.load_questions(tmp_path / "train.parquet")
  assert first.key == ("nq", "train_0") and second.key == ("hotpotqa", "train_0")
  assert first.golden_answers == ("a",) and second.golden_answers == ("b", "c")
  assert second.meta == {"extra_info": {"index": 0, "split": "train"}}


def test_small_irregularities_are_no_errors(tmp_path):
  path = write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n", b"\n",
               GOOD | {"id": 8}, json.dumps(GOOD | {"id": "9"}).encode())
  # A byte order mark, CRLF, a blank line, a whole number for an id, no line end at the end.
  assert [q.id for q in data.load_questions(path)] == ["7", "8", "9"]


BAD_ROWS = [
    (GOOD | {"id": None}, "'id' is missing"), (GOOD | {"id": ""}, "'id' is ''"),
    (GOOD | {"id": True}, "'id' is True"), (GOOD | {"id": 1.5}, "'id' is 1.5"),
    ({"id": "1", "golden_answers": ["a"]}, "'question' is missing"),
    (GOOD | {"question": " "}, "'question' is ' '"),
    (GOOD | {"question": ["Who?"]}, r"'question' is \['Who\?'\]"),
    (GOOD | {"question": "\ud800"}, r"'question' is '\\ud800'"),
    ({"id": "1", "question": "q"}, "'golden_answers' is missing"),
    (GOOD | {"golden_answers": []}, r"'golden_answers' is \[\]"),
    (GOOD | {"golden_answers": "Ada"}, "'golden_answers' is 'Ada'"),
    (GOOD | {"golden_answers": ["Ada", ""]}, r"'golden_answers' is \['Ada', ''\]"),
    (GOOD | {"golden_answers": ["Ada", 3]}, r"'golden_answers' is \['Ada', 3\]"),
    ({"id": "1", "question": "q", "reward_model": {"ground_truth": "a"}},
     "'reward_model.ground_truth.target' is missing"),
    (GOOD | {"prompt": "Answer"}, "'prompt' is 'Answer'"),
    (GOOD | {"prompt": [{"role": "user"}]}, "'prompt' is"),
    (GOOD | {"data_source": 3}, "'data_source' is 3"),
    (GOOD, r"'id' is '7', wanted another one than at .*a.jsonl:1"),
    ([1, 2], r"got \[1, 2\], wanted an object"),
    (b"{\"id\": \n", "not one JSON object"), (b"\xff\xfe\n", "not one JSON object"),
    (b"[" * 100_000 + b"\n", "not one JSON object"),
    (b'{"id": ' + b"1" * 5000 + b"}\n", "not one JSON object"),
]


@pytest.mark.parametrize("row, told", BAD_ROWS, ids=lambda x: str(x)[:30])
def test_a_bad_row_is_named_by_line_and_field(tmp_path, row, told):
  path = write(tmp_path / "a.jsonl", GOOD, row, GOOD | {"id": "8"})
  with pytest.raises(UserError, match=f"a.jsonl:2: .*{told}") as error:
    data.load_questions(path)
  assert len(str(error.value)) < 400
  bad = []
  assert [q.id for q in data.load_questions(path, on_bad=bad.append)] == ["7", "8"]
  assert len(bad) == 1  # rows in = used + bad


def test_a_bad_parquet_row_is_named(tmp_path):
  rows = [GOOD, GOOD | {"id": "8", "question": None}]
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
  with pytest.raises(UserError, match="a.parquet: row 2: field 'question' is missing"):
    data.load_questions(tmp_path / "a.parquet")


def test_a_bad_file_is_named(tmp_path):
  whole = write(tmp_path / "a.jsonl.gz", *(GOOD | {"id": str(i)} for i in range(999))).read_bytes()
  (tmp_path / "a.jsonl.gz").write_bytes(whole[:len(whole) // 2])
  with pytest.raises(UserError, match="a.jsonl.gz:.*cut off or damaged"):
    data.load_questions(tmp_path / "a.jsonl.gz")
  (tmp_path / "a.parquet").write_bytes(b"PAR1 no more")
  with pytest.raises(UserError, match="a.parquet: not a whole parquet file"):
    data.load_questions(tmp_path / "a.parquet")
  for name, told in (("absent.jsonl", "there is no file"), ("a.csv", "ends in '.csv'"),
                     ("empty.jsonl", "holds no question")):
    if told != "there is no file":
      (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=told):
      data.load_questions(tmp_path / name)


def test_merged_datasets_keep_their_names(tmp_path):
  specs = {"nq": str(write(tmp_path / "a.jsonl", GOOD)),
           "hotpotqa": str(write(tmp_path / "b.jsonl", GOOD))}
  assert [q.key for q in data.load_datasets(specs)] == [("nq", "7"), ("hotpotqa", "7")]


def test_two_files_of_one_name_are_not_merged(tmp_path):
  paths = []
  for name in ("nq", "hotpot"):
    (tmp_path / name).mkdir()
    paths.append(str(write(tmp_path / name / "train.jsonl", GOOD)))
  with pytest.raises(UserError, match="hotpot/train.jsonl:1: .*nq/train.jsonl:1.*data_source"):
    setup.load_questions(tuple(paths))
  write(tmp_path / "hotpot" / "train.jsonl", GOOD | {"data_source": "hotpot"})
  assert [q.key for q in setup.load_questions(tuple(paths))] == [("train", "7"), ("hotpot", "7")]


def test_a_fingerprint_tells_any_change_and_the_order():
  q = Question("nq", "7", "Who?", ("Ada",))
  changes = [dict(dataset="pop"), dict(id="8"), dict(question="Who"), dict(golden_answers=("Bob",)),
             dict(prompt=({"role": "user", "content": "Who?"},))]
  sets = [[q], [q, q], []] + [[dataclasses.replace(q, **c)] for c in changes]
  sets += [[q, dataclasses.replace(q, id="8")], [dataclasses.replace(q, id="8"), q]]
  found = [data.fingerprint(s) for s in sets]
  assert len(set(found)) == len(found) and data.fingerprint([q]) == found[0]


def test_the_name_is_the_one_given_else_the_rows_own_else_the_files(tmp_path):
  plain = write(tmp_path / "a.jsonl", GOOD)
  named = write(tmp_path / "b.jsonl", GOOD | {"data_source": "nq"})
  names = [data.load_questions(path, given)[0].dataset
           for path in (plain, named) for given in (None, "mine")]
  assert names == ["a", "mine", "nq", "mine"]


class TinyQa(tfds.core.GeneratorBasedBuilder):
  """Three questions, prepared on the spot."""

  VERSION = tfds.core.Version("1.0.0")

  def _info(self):
    features = {"id": tfds.features.Text(), "question": tfds.features.Text(),
                "golden_answers": tfds.features.Sequence(tfds.features.Text()),
                "hops": tfds.features.Scalar(np.int32)}
    return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

  def _split_generators(self, dl_manager):
    return {"train": self._generate_examples()}

  def _generate_examples(self):
    for i in range(3):
      yield i, {"id": str(i), "question": f"q{i} – é?", "golden_answers": ["a", "b"][:1 + i % 2],
                "hops": i}


def test_tensorflow_datasets_are_read_without_tensorflow(tmp_path, run_python):
  TinyQa(data_dir=str(tmp_path), file_format="array_record").download_and_prepare()
  found = data.load_questions(f"tfds:tiny_qa/train@{tmp_path}")
  assert {q.id: (q.dataset, q.question, q.golden_answers, q.meta) for q in found} == {
      "0": ("tiny_qa", "q0 – é?", ("a",), {"hops": 0}),
      "1": ("tiny_qa", "q1 – é?", ("a", "b"), {"hops": 1}),
      "2": ("tiny_qa", "q2 – é?", ("a",), {"hops": 2})}
  run_python("import sys\nfrom searchr1_jax.run import data\n"
             f"assert len(data.load_questions('tfds:tiny_qa/train@{tmp_path}')) == 3\n"
             "assert 'tensorflow' not in sys.modules", devices=1)


def test_an_unusable_tfds_name_says_what_to_do(tmp_path):
  for spec, told in (("tfds:tiny_qa", "wanted tfds:NAME/SPLIT"),
                     (f"tfds:no_such_set/train@{tmp_path}", "no_such_set.*not found"),
                     (f"tfds:trivia_qa/rc/train@{tmp_path}", "file_format=array_record")):
    with pytest.raises(UserError, match=f"(?s){told}"):
      data.load_questions(spec)


def some(count: int) -> list[Question]:
  return [Question("d", str(i), f"q{i}", ("a",)) for i in range(count)]


@hypothesis.given(count=st.integers(2, 60), seed=st.integers(0, 2**64 - 1), data_=st.data())
def test_every_epoch_holds_every_question_once_and_no_batch_one_twice(count, seed, data_):
  n = data_.draw(st.integers(1, count // 2))
  cursor, handed = 0, []
  while len(handed) < 3 * count:
    batch, cursor = data.questions_at(some(count), seed, cursor, n)
    ids = [q.id for q in batch]
    assert len(ids) == n == len(set(ids))
    handed += ids
  for epoch in range(3):
    assert len(set(handed[epoch * count:(epoch + 1) * count])) == count


@hypothesis.given(seed=st.integers(0, 9), cursor=st.integers(0, 90), n=st.integers(1, 15))
def test_the_cursor_is_all_there_is(seed, cursor, n):
  """A batch is the same questions that batches of one would have given from the same cursor."""
  batch, after = data.questions_at(some(30), seed, cursor, n)
  singles = [data.questions_at(some(30), seed, c, 1)[0][0] for c in range(cursor, cursor + n)]
  assert batch == singles and after == cursor + n


def test_seeds_and_epochs_have_orders_of_their_own():
  orders = {tuple(q.id for q in data.questions_at(some(40), seed, cursor, 40)[0])
            for seed in (0, 1, 2**64 - 1) for cursor in (0, 40, 80)}
  assert len(orders) == 9


def test_a_batch_that_would_hold_a_question_twice_is_refused():
  # 10 questions: 1 to 5 always fit; 10 does where it begins an epoch; 6 and 11 never do.
  data.questions_at(some(10), 0, 7, 5)
  data.questions_at(some(10), 0, 20, 10)
  for cursor, n in ((0, 6), (0, 11), (5, 10), (0, 0)):
    with pytest.raises(UserError, match=f"a batch of {n} out of 10 questions"):
      data.questions_at(some(10), 0, cursor, n)
