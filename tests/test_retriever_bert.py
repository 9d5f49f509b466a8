"""Sentence encoders: equal to transformers; neighbours, padding and devices change nothing."""

from __future__ import annotations

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny_berts
from hypothesis import given, strategies as st

from retriever import batches, bert, encoders, model_files, sentences
from retriever.protocol import CorpusError, UserError

CLOSE = 1e-5  # what a text's vector may owe to its neighbours
TEXTS = ["", "the river", "a long river flows of the city " * 3, "x", "the", "zebra quilt, jumps.",
         'the "city" of long: ' * 8, "of", "query passage", "long " * 30]


@pytest.fixture(scope="module")
def e5(tmp_path_factory) -> pathlib.Path:
  """A random small BERT that is called like an E5."""
  folder = tmp_path_factory.mktemp("models") / "e5-tiny"
  tiny_berts.random_bert(folder)
  return folder


@pytest.fixture(scope="module")
def encoder(e5) -> sentences.SentenceEncoder:
  """The same, opened; its programs compiled once for all tests."""
  return tiny_berts.opened(e5)


def hidden(folder, ids_BL, lengths_B, dtype=jnp.float32):
  shape = bert.read_shape(folder)
  params = bert.load(folder, shape, False, dtype)
  lengths_B = np.asarray(lengths_B, np.int32)
  return np.asarray(jax.jit(bert.Bert(shape, dtype).apply)(params, ids_BL, lengths_B, lengths_B))


def reference_hidden(model, ids_BL, lengths_B):
  import torch
  mask_BL = torch.arange(ids_BL.shape[1])[None] < torch.as_tensor(lengths_B)[:, None]
  with torch.inference_mode():
    return model(torch.as_tensor(ids_BL), attention_mask=mask_BL).last_hidden_state.numpy()


# The network.


@pytest.mark.parametrize("seed, sizes", list(enumerate([
    {}, {"num_attention_heads": 1, "num_hidden_layers": 1},
    {"hidden_size": 36, "type_vocab_size": 1},
    {"layer_norm_eps": 1e-2, "intermediate_size": 8}])))
def test_hidden_states_equal_those_of_transformers(seed, sizes, tmp_path):
  model = tiny_berts.random_bert(tmp_path, seed=seed, **sizes)
  rng = np.random.default_rng(seed)
  lengths_B = [17, 1, 9, 2]
  ids_BL = rng.integers(0, len(tiny_berts.VOCAB), (4, 17)).astype(np.int32)
  ours_BLD = hidden(tmp_path, ids_BL, lengths_B)
  theirs_BLD = reference_hidden(model, ids_BL, lengths_B)
  for ours, theirs, n in zip(ours_BLD, theirs_BLD, lengths_B):
    np.testing.assert_allclose(ours[:n], theirs[:n], atol=1e-4)


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertForPreTraining"])
def test_other_names_of_the_same_tensors(kind, tmp_path):
  """`bert.` in front, the heads of pretraining, a buffer of positions, gamma and beta."""
  model = tiny_berts.random_bert(tmp_path, kind)

  def as_of_old(tensors):
    old = lambda n: n.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
        "LayerNorm.bias", "LayerNorm.beta")
    assert any(n.startswith("bert.") for n in tensors)
    return {old(n): x for n, x in tensors.items()} | {
        "bert.embeddings.position_ids": np.arange(64)[None]}

  tiny_berts.rewrite(tmp_path, as_of_old)
  ids_BL = np.arange(20, dtype=np.int32).reshape(2, 10)
  np.testing.assert_allclose(hidden(tmp_path, ids_BL, [10, 10]),
                             reference_hidden(model.bert, ids_BL, [10, 10]), atol=1e-4)


def test_sharded_files_are_read_by_their_index(e5, encoder, tmp_path):
  tensors = safetensors.numpy.load_file(e5 / "model.safetensors")
  names, folder = sorted(tensors), tmp_path / "e5"
  shutil.copytree(e5, folder)
  (folder / "model.safetensors").unlink()
  halves = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
  for file, held in halves.items():
    safetensors.numpy.save_file({n: tensors[n] for n in held}, folder / file)
  index = {"weight_map": {n: file for file, held in halves.items() for n in held}}
  (folder / model_files.INDEX).write_text(json.dumps(index))
  few = TEXTS[:4]
  assert (tiny_berts.opened(folder).encode_queries(few) == encoder.encode_queries(few)).all()
  index["weight_map"][names[0]] = "../model.safetensors"
  (folder / model_files.INDEX).write_text(json.dumps(index))
  with pytest.raises(UserError, match="outside its folder"):
    tiny_berts.opened(folder)


@pytest.mark.parametrize("junk", [0, 7, 50])
def test_padding_changes_nothing(e5, junk):
  """Whatever stands in the padding, and however long it is."""
  ids_BL = np.random.default_rng(1).integers(5, 60, (2, 9)).astype(np.int32)
  alone_BLD = hidden(e5, ids_BL, [9, 9])
  padded_BL = np.full((2, 40), junk, np.int32)
  padded_BL[:, :9] = ids_BL
  np.testing.assert_allclose(hidden(e5, padded_BL, [9, 9])[:, :9], alone_BLD, atol=CLOSE)


def test_bfloat16_is_close(e5, encoder):
  exact_PD = encoder.encode_passages(TEXTS)
  rough_PD = tiny_berts.opened(e5, dtype="bfloat16").encode_passages(TEXTS)
  assert rough_PD.dtype == np.float32 and (rough_PD != exact_PD).any()
  # bfloat16 keeps 8 bits: 0.004 in each product of two layers.
  assert (exact_PD * rough_PD).sum(axis=1).min() > 0.999


# Batches.


@given(st.lists(st.integers(2, 256), min_size=0, max_size=300), st.sampled_from([1, 3, 8]),
       st.sampled_from([64, 512, 2048]))
def test_every_text_is_in_one_batch_of_an_allowed_shape(lengths, devices, tokens):
  lengths_M, seen = np.array(lengths, np.int64), []
  for rows, length, members_M in batches.plan(lengths_M, (16, 64, 256), tokens, devices):
    assert length in (16, 64, 256) and rows in batches.row_counts(length, tokens, devices)
    assert lengths_M[members_M].max() <= length and 0 < len(members_M) <= rows
    assert rows % devices == 0 and rows * length <= devices * max(tokens, length)
    seen += members_M.tolist()
  assert sorted(seen) == list(range(len(lengths)))


def test_order_and_neighbours_change_nothing(encoder):
  together_PD = encoder.encode_passages(TEXTS)
  alone_PD = np.concatenate([encoder.encode_passages([t]) for t in TEXTS])
  np.testing.assert_allclose(together_PD, alone_PD, atol=CLOSE)
  order = np.random.default_rng(0).permutation(len(TEXTS))
  shuffled_PD = encoder.encode_passages([TEXTS[i] for i in order])
  np.testing.assert_allclose(shuffled_PD, together_PD[order], atol=CLOSE)
  twice_PD = encoder.encode_passages(TEXTS + TEXTS[::-1])
  np.testing.assert_allclose(twice_PD[len(TEXTS):], together_PD[::-1], atol=CLOSE)


def test_a_stream_gives_what_its_batches_give(encoder):
  stream = [TEXTS[:3], TEXTS[3:], [], TEXTS[:1]]
  found = list(encoder.encode_stream(iter(stream)))
  assert [len(f) for f in found] == [3, 7, 0, 1]
  for vectors_PD, passages in zip(found, stream):
    np.testing.assert_allclose(vectors_PD, encoder.encode_passages(passages), atol=CLOSE)
  next(encoder.encode_stream(iter(stream)))  # left after its first batch: ends, and in time


def test_no_texts_and_empty_texts(encoder):
  assert encoder.encode_queries([]).shape == (0, 24)
  assert np.linalg.norm(encoder.encode_queries(["", " \n\t "]), axis=1) == pytest.approx([1, 1])


def test_text_is_cut_before_its_last_token(tmp_path):
  """At most 8 tokens, the first and the last of them special."""
  encoder = tiny_berts.opened(tiny_berts.by_hand(tmp_path), rule="contriever", max_tokens=8)
  # [CLS], 6 times a, [SEP]: (1,1,-1,-1) + 6 (-1,-1,1,1) + (1,-1,1,-1) = (-4,-6,6,4), an eighth.
  np.testing.assert_allclose(encoder.encode_passages(["a " * 9]), [(-.5, -.75, .75, .5)], atol=1e-6)
  with pytest.raises(CorpusError, match="max_tokens is 17, wanted 8 to 16"):
    tiny_berts.opened(tmp_path, rule="contriever", max_tokens=17)


def test_hostile_texts_are_encoded_like_others(encoder):
  hostile = ["\x00", "\ud800 the", "[SEP] [PAD]", "́" * 10_000, "a" * 1_000_000, "﷽" * 300,
             " " * 100_000 + "river", "<search>"]
  vectors_PD = encoder.encode_passages(hostile)
  assert np.isfinite(vectors_PD).all()
  np.testing.assert_allclose(np.linalg.norm(vectors_PD, axis=1), 1, atol=1e-5)


def test_programs_come_from_a_closed_list(e5, monkeypatch):
  monkeypatch.setattr("retriever.batches.TOKENS", {"cpu": 1024})  # else by the number of cores
  compiled: list[str] = []

  def listen(event: str, seconds: float, **kwargs) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
      compiled.append(str(kwargs))

  encoder = tiny_berts.opened(e5, max_tokens=20)
  # 12, 16, 20 tokens; 1, 4, 16 rows each, up to as many as 1,024 tokens fill: 85, 64 and 51.
  assert encoder.shapes == {(r, n) for n, full in ((12, 85), (16, 64), (20, 51))
                            for r in (1, 4, 16, 64, full) if r <= full}
  rng = np.random.default_rng(0)
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    for _ in range(20):
      count = int(rng.integers(1, 200))
      encoder.encode_passages(["of " * int(n) for n in rng.integers(0, 30, count)])
    assert 3 <= len(compiled) <= len(encoder.shapes) == 13
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


ENCODE = """
import sys, numpy as np, jax
from retriever import encoders
folder, texts, out = {0!r}, {1!r}, {2!r}
encoder = encoders.fit(encoders.wanted_spec(folder), [])
assert len(encoder._run.devices) == len(jax.devices()) == 8
assert all(rows % 8 == 0 for rows, _ in encoder.shapes)
np.save(out, encoder.encode_passages(texts))
"""


def test_eight_devices_give_the_same_vectors(e5, encoder, tmp_path, run_python):
  out = str(tmp_path / "out.npy")
  run_python(ENCODE.format(str(e5), TEXTS, out), devices=8)
  np.testing.assert_allclose(np.load(out), encoder.encode_passages(TEXTS), atol=CLOSE)


# What a manifest says, and folders that are not what they should be.


def test_a_spec_names_exactly_what_encoded(e5, tmp_path):
  spec, few = encoders.wanted_spec(str(e5)), TEXTS[:4]
  encoder = encoders.from_spec(json.loads(json.dumps(spec)), tmp_path)
  assert encoder.spec() == spec and encoder.save(tmp_path) == [] and encoder.dim == spec["dim"]
  moved = tmp_path / "elsewhere"
  shutil.copytree(e5, moved)
  again = encoders.from_spec(spec | {"model": "/gone/e5"}, tmp_path, model=str(moved))
  assert (again.encode_queries(few) == encoder.encode_queries(few)).all()
  there = encoders.wanted_spec(str(moved), rule="e5")
  assert there != spec and encoders.identity(there) == encoders.identity(spec)
  with pytest.raises(UserError, match="'/gone/e5' is neither a folder nor a hub id"):
    encoders.from_spec(spec | {"model": "/gone/e5"}, tmp_path)
  tiny_berts.rewrite(moved, lambda t: t | {"pooler.dense.bias": t["pooler.dense.bias"] + 1})
  with pytest.raises(CorpusError, match="is not the model that the index was built with"):
    encoders.from_spec(spec, tmp_path, model=str(moved))
  with pytest.raises(CorpusError, match="version 0 of this encoder, here is 1"):
    encoders.from_spec(spec | {"version": 0}, tmp_path)
  with pytest.raises(CorpusError, match="encoder 'magic', known are hashing, bert"):
    encoders.from_spec(spec | {"name": "magic"}, tmp_path)


def test_a_hub_id_is_downloaded_or_said_to_be_out_of_reach(e5, monkeypatch):
  import huggingface_hub
  from huggingface_hub.errors import LocalEntryNotFoundError
  asked = []
  monkeypatch.setattr(huggingface_hub, "snapshot_download",
                      lambda name, allow_patterns: asked.append((name, allow_patterns)) or str(e5))
  spec = encoders.wanted_spec("intfloat/e5-tiny")
  assert spec["model"] == "intfloat/e5-tiny" and asked[0][0] == "intfloat/e5-tiny"
  assert encoders.identity(spec) == encoders.identity(encoders.wanted_spec(str(e5)))
  assert not any(p.endswith((".bin", ".py", "*")) for p in asked[0][1])  # no code, no pickles

  def unreachable(name, allow_patterns):
    raise LocalEntryNotFoundError("offline")

  monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
  with pytest.raises(UserError, match="no folder here and could not be downloaded"):
    encoders.wanted_spec("intfloat/e5-tiny")


@pytest.mark.parametrize("changed, said", [
    ({"model_type": "xlm-roberta"}, "model_type 'xlm-roberta', wanted 'bert'"),
    ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
    ({"hidden_act": "gelu_new"}, "hidden_act 'gelu_new', only 'gelu'"),
    ({"is_decoder": True}, "is_decoder True"),
    ({"hidden_size": "24"}, "hidden_size '24', wanted a positive integer"),
    ({"num_hidden_layers": None}, "num_hidden_layers None"),
    ({"layer_norm_eps": float("nan")}, "layer_norm_eps nan"),
    ({"num_attention_heads": 5}, "attention heads do not divide"),
    ({"intermediate_size": 41}, r"dense.weight has shape \(40, 24\), wanted \(41, 24\)"),
    ({"num_hidden_layers": 3}, "missing tensor encoder.layer.2"),
    ({"num_hidden_layers": 1}, "unexpected tensor encoder.layer.1"),
    ({"vocab_size": 60}, r"word_embeddings.weight has shape \(\d+, 24\), wanted \(60, 24\)|tokens"),
])
def test_what_the_network_lacks_is_named(changed, said, e5, tmp_path):
  folder = tmp_path / "e5"
  shutil.copytree(e5, folder)
  (folder / "config.json").write_text(json.dumps(tiny_berts.config(**changed)))
  with pytest.raises(CorpusError, match=said):
    tiny_berts.opened(folder)


def _cut(path):
  path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize("damage, said", [
    (lambda f: (f / "config.json").unlink(), "config.json can't be read"),
    (lambda f: (f / "config.json").write_text("[]"), "holds a list, wanted an object"),
    (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json can't be read"),
    (lambda f: _cut(f / "model.safetensors"), "not a whole safetensors file"),
    (lambda f: (f / "model.safetensors").unlink(), "has no .safetensors file"),
    (lambda f: tiny_berts.rewrite(f, lambda t: t | {
        "encoder.layer.1.output.dense.bias": np.full(24, np.nan, "f")}), "bias holds NaN"),
])
def test_damaged_folders_are_named(damage, said, e5, tmp_path):
  _refused(e5, tmp_path / "e5", damage, UserError, said)


@pytest.mark.parametrize("damage, said", [
    (lambda f: _cut(f / "tokenizer.json"), "tokenizer.json is no tokenizer"),
    (lambda f: tiny_berts.rewrite(f, lambda t: t | {"extra": t["pooler.dense.bias"]}),
     "unexpected tensor .?extra"),
    (lambda f: tiny_berts.rewrite(f, lambda t: t | {"classifier.weight": np.ones((1, 24), "f")}),
     "holds a classifier"),
    (lambda f: tiny_berts.rewrite(f, lambda t: t | {
        "encoder.layer.1.output.dense.bias": np.zeros(24, np.int32)}), "is I32, wanted one of F32"),
    (lambda f: tiny_berts.rewrite(f, lambda t: t | {
        "bert.embeddings.LayerNorm.gamma": np.ones(24, "f")}), "LayerNorm.weight twice"),
])
def test_folders_of_another_model_are_named(damage, said, e5, tmp_path):
  _refused(e5, tmp_path / "e5", damage, CorpusError, said)


def _refused(e5, folder, damage, kind, said):
  shutil.copytree(e5, folder)
  damage(folder)
  with pytest.raises(kind, match=said):
    tiny_berts.opened(folder)


def test_options_that_have_no_part_are_refused(e5):
  with pytest.raises(CorpusError, match="makes vectors of 24 numbers, not 4096"):
    encoders.wanted_spec(str(e5), 4096)
  with pytest.raises(CorpusError, match="'hashing' has no option 'rule'"):
    encoders.wanted_spec("hashing", rule="e5")
  with pytest.raises(CorpusError, match="dtype is 'float16', choose one of float32, bfloat16"):
    encoders.wanted_spec(str(e5), dtype="float16")
  with pytest.raises(UserError, match="neither a folder nor a hub id"):
    encoders.wanted_spec("no-such-model")
  plain = {"name": "hashing", "version": 1, "dim": 4096}
  assert encoders.wanted_spec("hashing", rule=None) == plain


# The real one.


@pytest.mark.assets
def test_minilm_equals_transformers(assets):
  """Hidden states and vectors of 50 real passages of very different lengths, within 1e-4."""
  torch = pytest.importorskip("torch", reason="PyTorch is the reference here: pip install .[dev]")
  import transformers
  folder = assets / "minilm-l6"
  with (assets / "wiki-vital" / "corpus.jsonl").open() as f:
    passages = sorted((json.loads(line)["contents"] for line in f), key=len)
  passages = [*passages[:10], *passages[::300][:30], *passages[-10:]]
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  model = transformers.BertModel.from_pretrained(folder).eval()
  batch = tokenizer(passages, padding=True, truncation=True, max_length=256, return_tensors="pt")
  with torch.inference_mode():
    theirs_PLD = model(**batch).last_hidden_state
  mask_PL1 = batch["attention_mask"][:, :, None]
  pooled_PD = (theirs_PLD * mask_PL1).sum(1) / mask_PL1.sum(1)
  vectors_PD = torch.nn.functional.normalize(pooled_PD, dim=1).numpy()
  found_PD = tiny_berts.opened(folder).encode_passages(passages)
  assert len(passages) == 50 and np.abs(found_PD - vectors_PD).max() < 1e-4
  lengths_P = mask_PL1.sum(1)[:, 0].numpy()
  assert lengths_P.min() < 40 and lengths_P.max() == 256
  ours_PLD = hidden(folder, batch["input_ids"].numpy().astype(np.int32), lengths_P)
  inside_PL = batch["attention_mask"].numpy() > 0
  assert np.abs(ours_PLD - theirs_PLD.numpy())[inside_PL].max() < 1e-4
