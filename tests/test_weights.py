"""Model folders in and out: bit for bit where they are whole, refused by name where they aren't."""

from __future__ import annotations

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import tiny_models as tiny

from retriever.model_files import Tensor
from searchr1_jax.model import folders, shapes, weights
from searchr1_jax.run import disk
from searchr1_jax.types import UserError

TIED = tiny.random_shape("qwen3", 1)
UNTIED = tiny.random_shape("qwen2", 0)
FAMILIES = list(zip(tiny.KINDS, (0, 1, 0, 1)))  # odd seeds tie their head


def write(folder, shape=TIED, **how):
  """A folder of random weights; what went in."""
  params = tiny.random_params(shape, 0)
  weights.save(folder, params, shape, **how)
  return params


def tensors_of(folder):
  return safetensors.numpy.load_file(folder / "model.safetensors")


def rewrite(folder, tensors):
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def split(folder, names_of_files):
  """Spreads the one file over several, with an index; `names_of_files` are dealt in turn."""
  tensors = tensors_of(folder)
  (folder / "model.safetensors").unlink()
  where = {t: names_of_files[i % len(names_of_files)] for i, t in enumerate(sorted(tensors))}
  for file in names_of_files:
    path = folder / file
    safetensors.numpy.save_file({t: tensors[t] for t, f in where.items() if f == file}, path)
  write_index(folder, where)
  return where


def write_index(folder, where):
  (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def assert_same(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("kind, seed", FAMILIES)
def test_what_is_saved_is_what_is_loaded_bit_for_bit(kind, seed, tmp_path):
  shape = tiny.random_shape(kind, seed)
  params = write(tmp_path / "model", shape)
  assert weights.read_config(tmp_path / "model")[0] == shape
  assert_same(weights.load(tmp_path / "model"), params)
  assert [p.name for p in tmp_path.iterdir()] == ["model"]  # nothing half-written is left
  assert {p.stat().st_mode & 0o777 for p in (tmp_path / "model").iterdir()} == {0o644}


def test_a_bfloat16_folder_is_read_and_says_so(tmp_path):
  params = write(tmp_path / "model", dtype=jnp.bfloat16)
  rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  config = json.loads((tmp_path / "model" / "config.json").read_text())
  assert config["torch_dtype"] == "bfloat16"
  assert_same(weights.load(tmp_path / "model"),
              jax.tree.map(lambda x: x.astype(jnp.float32), rounded))
  kept = weights.load(tmp_path / "model", jnp.bfloat16)
  assert {x.dtype for x in jax.tree.leaves(kept)} == {jnp.dtype(jnp.bfloat16)}
  assert_same(kept, rounded)
  weights.save(tmp_path / "again", kept, TIED, dtype=jnp.bfloat16)
  for file in ("model.safetensors", "config.json"):
    assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "model" / file).read_bytes()
  # Two bytes a number, and a header of a few kilobytes.
  numbers = shapes.count_parameters(TIED)
  size = (tmp_path / "model" / "model.safetensors").stat().st_size
  assert 2 * numbers < size < 2 * numbers + 10_000


def test_a_given_config_stays_but_for_the_dtype(tmp_path):
  config = shapes.to_hugging_face(TIED) | {"dtype": "bfloat16", "bos_token_id": 7}
  write(tmp_path / "model", config=config)
  read = json.loads((tmp_path / "model" / "config.json").read_text())
  del config["dtype"]
  assert read == config | {"torch_dtype": "float32"}


def test_saving_replaces_a_folder_and_takes_the_tokenizer_along(tmp_path):
  source = tmp_path / "source"
  source.mkdir()
  for name in ("tokenizer.json", "chat_template.jinja", "added_tokens.json"):
    (source / name).write_text("{}")
  (source / "pytorch_model.bin").write_text("")
  write(tmp_path / "model", UNTIED)
  params = write(tmp_path / "model", copy_from=source)
  assert_same(weights.load(tmp_path / "model"), params)
  assert sorted(p.name for p in (tmp_path / "model").iterdir()) == [
      "added_tokens.json", "chat_template.jinja", "config.json", "model.safetensors",
      "tokenizer.json"]
  write(tmp_path / "model")  # a folder that holds them all is one to replace, too


def test_several_files_with_an_index(tmp_path):
  params = write(tmp_path / "model", UNTIED)
  split(tmp_path / "model", ["a.safetensors", "b.safetensors", "c.safetensors"])
  # A file that the index doesn't name is not read.
  safetensors.numpy.save_file({"stray": np.zeros(1, np.float32)},
                              tmp_path / "model" / "stray.safetensors")
  assert_same(weights.load(tmp_path / "model"), params)


def test_several_files_without_an_index(tmp_path):
  params = write(tmp_path / "model", UNTIED)
  split(tmp_path / "model", ["a.safetensors", "b.safetensors"])
  (tmp_path / "model" / "model.safetensors.index.json").unlink()
  assert_same(weights.load(tmp_path / "model"), params)


def test_a_missing_file_is_named(tmp_path):
  write(tmp_path / "model")
  split(tmp_path / "model", ["a.safetensors", "b.safetensors"])
  (tmp_path / "model" / "b.safetensors").unlink()
  with pytest.raises(UserError, match="b.safetensors named in .* but not there"):
    weights.load(tmp_path / "model")


@pytest.mark.parametrize("name", [
    "../outside.safetensors", "/tmp/outside.safetensors", "sub/../../outside.safetensors"])
def test_an_index_never_leads_out_of_its_folder(name, tmp_path):
  write(tmp_path / "model")
  where = split(tmp_path / "model", ["a.safetensors", "b.safetensors"])
  shutil.copy(tmp_path / "model" / "b.safetensors", tmp_path / "outside.safetensors")
  write_index(tmp_path / "model",
              {t: name if f == "b.safetensors" else f for t, f in where.items()})
  with pytest.raises(UserError, match="outside its folder"):
    weights.load(tmp_path / "model")


def test_every_wrong_tensor_is_named_at_once_and_before_any_is_read(tmp_path, monkeypatch):
  write(tmp_path / "model")
  tensors = tensors_of(tmp_path / "model")
  del tensors["model.layers.1.mlp.up_proj.weight"]
  tensors["model.layers.0.self_attn.q_proj.weight"] = (
      tensors["model.layers.0.self_attn.q_proj.weight"].T.copy()[:, :-1].copy())
  tensors["model.layers.9.input_layernorm.weight"] = np.zeros(TIED.width, np.float32)
  tensors["model.norm.weight"] = np.ones(TIED.width, np.int32)
  rewrite(tmp_path / "model", tensors)
  monkeypatch.setattr(Tensor, "piece", lambda *_: pytest.fail("read a tensor"))
  with pytest.raises(UserError) as error:
    weights.load(tmp_path / "model")
  q = f"({TIED.width}, {TIED.heads * TIED.head_size - 1})"
  wanted = f"({TIED.heads * TIED.head_size}, {TIED.width})"
  for part in ("missing tensor model.layers.1.mlp.up_proj.weight",
               f"model.layers.0.self_attn.q_proj.weight has shape {q}, wanted {wanted}",
               "unexpected tensor model.layers.9.input_layernorm.weight",
               "model.norm.weight is I32, wanted one of F32, BF16, F16", str(tmp_path)):
    assert part in str(error.value)


@pytest.mark.parametrize("name, bad", [
    ("model.norm.weight", np.nan), ("model.embed_tokens.weight", -np.inf),
    ("model.layers.1.self_attn.o_proj.weight", np.inf),
    ("model.layers.1.mlp.down_proj.weight", 3.4e38)])
def test_a_number_that_is_none_is_named_by_its_tensor(name, bad, tmp_path):
  write(tmp_path / "model")
  tensors = tensors_of(tmp_path / "model")
  tensors[name] = tensors[name].copy()
  tensors[name].flat[-1] = bad
  rewrite(tmp_path / "model", tensors)
  if bad == 3.4e38:  # a number in float32, and infinity in bfloat16
    weights.load(tmp_path / "model")
  with pytest.raises(UserError, match=f"model: {name} holds NaN or infinity"):
    weights.load(tmp_path / "model", jnp.bfloat16)


def test_a_tensor_in_two_files_is_refused(tmp_path):
  write(tmp_path / "model")
  name = "model.norm.weight"
  safetensors.numpy.save_file({name: tensors_of(tmp_path / "model")[name]},
                              tmp_path / "model" / "other.safetensors")
  with pytest.raises(UserError, match=f"{name} is in model.safetensors and in other.safetensors"):
    weights.load(tmp_path / "model")


def test_a_long_list_of_wrong_tensors_is_cut(tmp_path):
  write(tmp_path / "model")
  tensors = tensors_of(tmp_path / "model")
  rewrite(tmp_path / "model", {f"other.{name}": x for name, x in tensors.items()})
  with pytest.raises(UserError, match=rf"and {2 * len(tensors) - 8} more"):
    weights.load(tmp_path / "model")


def test_a_tied_head_written_out_once_more_is_read_over(tmp_path):
  params = write(tmp_path / "model")
  tensors = tensors_of(tmp_path / "model")
  head = tensors["model.embed_tokens.weight"].copy()
  rewrite(tmp_path / "model", tensors | {"lm_head.weight": head})
  assert_same(weights.load(tmp_path / "model"), params)
  # But one that says something else is not: config.json would then describe another model.
  head[0, 0] += 1
  rewrite(tmp_path / "model", tensors | {"lm_head.weight": head})
  with pytest.raises(UserError, match="lm_head.weight differs from model.embed_tokens.weight"):
    weights.load(tmp_path / "model")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_cut_file_is_named(keep, tmp_path):
  write(tmp_path / "model")
  path = tmp_path / "model" / "model.safetensors"
  path.write_bytes(path.read_bytes()[:keep])
  with pytest.raises(UserError, match="model.safetensors is not a whole safetensors file"):
    weights.load(tmp_path / "model")


def test_a_header_as_long_as_the_universe_is_refused(tmp_path):
  write(tmp_path / "model")
  (tmp_path / "model" / "model.safetensors").write_bytes(
      (2**63).to_bytes(8, "little") + b"{}" * 100)
  with pytest.raises(UserError, match="not a whole safetensors file"):
    weights.load(tmp_path / "model")


@pytest.mark.parametrize("file, text, says", [
    ("config.json", "{", "not valid JSON"),
    ("config.json", "[]", "wanted an object"),
    ("model.safetensors.index.json", "{", "not valid JSON"),
    ("model.safetensors.index.json", "{}", "no weight_map")])
def test_broken_json_is_named(file, text, says, tmp_path):
  write(tmp_path / "model")
  (tmp_path / "model" / file).write_text(text)
  with pytest.raises(UserError, match=f"{file}.*{says}"):
    weights.load(tmp_path / "model")


def test_no_folder_no_config_no_weights(tmp_path):
  with pytest.raises(UserError, match="no config.json"):
    weights.load(tmp_path)
  write(tmp_path / "model")
  (tmp_path / "model" / "model.safetensors").unlink()
  with pytest.raises(UserError, match="no .safetensors file"):
    weights.load(tmp_path / "model")
  with pytest.raises(UserError, match="neither a folder nor a hub id"):
    weights.local_folder(str(tmp_path / "nowhere"))


def test_other_sizes_in_the_config_are_noticed(tmp_path):
  write(tmp_path / "model")
  path = tmp_path / "model" / "config.json"
  config = json.loads(path.read_text())
  path.write_text(json.dumps(config | {"num_hidden_layers": TIED.layers - 1}))
  with pytest.raises(UserError, match=f"unexpected tensor model.layers.{TIED.layers - 1}."):
    weights.load(tmp_path / "model")
  path.write_text(json.dumps(config | {"vocab_size": TIED.vocab_size + 1}))
  with pytest.raises(UserError, match="model.embed_tokens.weight has shape"):
    weights.load(tmp_path / "model")


def test_a_folder_of_something_else_is_never_replaced(tmp_path):
  # A mistyped --out must not cost the user anything.
  (tmp_path / "thesis").mkdir()
  (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
  with pytest.raises(UserError, match="not empty and holds no model"):
    write(tmp_path / "thesis")
  assert (tmp_path / "thesis" / "chapter1.txt").read_text() == "years of work"
  assert [p.name for p in tmp_path.iterdir()] == ["thesis"]


def test_a_file_and_a_run_are_never_replaced(tmp_path):
  (tmp_path / "model").write_text("mine")
  with pytest.raises(UserError, match="model is a file, wanted a folder"):
    write(tmp_path / "model")
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "config.json").write_text("{}")  # runs have one too
  with pytest.raises(UserError, match="not empty and holds no model"):
    write(tmp_path / "run")
  assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "run"]
  assert (tmp_path / "model").read_text() == "mine"


def test_an_older_model_is_replaced_and_nothing_else_is_left(tmp_path):
  write(tmp_path / "model")
  params = tiny.random_params(TIED, 1)
  weights.save(tmp_path / "model", params, TIED)
  assert_same(weights.load(tmp_path / "model"), params)
  assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["notes.txt", "README.md", ".gitattributes", "optimizer.npz",
                                  "other.safetensors", "runs/log.txt", "tokenizer.json/mine"])
def test_a_model_with_something_beside_it_is_never_replaced(name, tmp_path):
  write(tmp_path / "model")
  mine = tmp_path / "model" / name
  mine.parent.mkdir(exist_ok=True)
  mine.write_text("mine")
  with pytest.raises(UserError, match=f"holds {name.split('/')[0]}, which is no part of a model"):
    write(tmp_path / "model")
  assert mine.read_text() == "mine"
  assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_the_working_folder_is_never_replaced(tmp_path, monkeypatch):
  write(tmp_path / "model")
  monkeypatch.chdir(tmp_path / "model")
  for name in (".", "../model"):
    with pytest.raises(UserError, match="model is the working folder itself"):
      write(name)


def test_a_link_to_a_model_stays_and_what_it_points_to_is_replaced(tmp_path):
  write(tmp_path / "model")
  (tmp_path / "link").symlink_to("model")
  params = tiny.random_params(TIED, 1)
  weights.save(tmp_path / "link", params, TIED)
  assert (tmp_path / "link").is_symlink()
  assert_same(weights.load(tmp_path / "model"), params)
  assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "model"]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"),
                                     safetensors.SafetensorError("No space left on device")])
def test_a_full_disk_is_named_and_leaves_nothing_half_written(failure, tmp_path, monkeypatch):
  params = write(tmp_path / "model")

  def full(_, path, **__):
    pathlib.Path(path).write_bytes(b"half")
    raise failure

  with monkeypatch.context() as patch:
    patch.setattr(safetensors.numpy, "save_file", full)
    with pytest.raises(disk.StorageError, match="model could not be written .*No space left"):
      write(tmp_path / "model")
  assert [p.name for p in tmp_path.iterdir()] == ["model"]
  assert_same(weights.load(tmp_path / "model"), params)


@pytest.mark.parametrize("dtype, most", [(np.float16, 1e5), (jnp.bfloat16, 3.4e38),
                                         (np.float32, np.nan)])
def test_a_number_that_the_dtype_cannot_hold_is_never_written(dtype, most, tmp_path):
  before = write(tmp_path / "model")
  params = before | {"norm": {"scale": before["norm"]["scale"].at[0].set(most)}}
  with pytest.raises(UserError, match="model.norm.weight holds NaN or infinity as"):
    weights.save(tmp_path / "model", params, TIED, dtype=dtype)
  assert [p.name for p in tmp_path.iterdir()] == ["model"]
  assert_same(weights.load(tmp_path / "model"), before)


def test_an_index_that_does_not_name_the_single_file_beside_it_is_refused(tmp_path):
  write(tmp_path / "model")
  shutil.copytree(tmp_path / "model", tmp_path / "new")
  split(tmp_path / "model", ["a.safetensors", "b.safetensors"])
  shutil.copy(tmp_path / "new" / "model.safetensors", tmp_path / "model")
  with pytest.raises(UserError, match="holds model.safetensors and model.safetensors.index.json"):
    weights.load(tmp_path / "model")


def test_a_link_to_nothing_and_a_folder_are_no_weights(tmp_path):
  write(tmp_path / "model")
  path = tmp_path / "model" / "more.safetensors"
  path.symlink_to("nowhere")
  with pytest.raises(UserError, match="more.safetensors is not a whole safetensors file"):
    weights.load(tmp_path / "model")
  path.unlink()
  path.mkdir()
  with pytest.raises(UserError, match="more.safetensors is not a whole safetensors file"):
    weights.load(tmp_path / "model")


def test_a_download_takes_all_of_a_tokenizer_and_a_name_that_is_none_is_refused(monkeypatch):
  import huggingface_hub

  with pytest.raises(UserError, match="'owner/a--b' .* could not be downloaded"):
    weights.local_folder("owner/a--b")  # no hub id holds two dashes
  names = [*folders.COPIED, "config.json", "model.safetensors", "model.safetensors.index.json"]
  asked = {}
  monkeypatch.setattr(huggingface_hub, "snapshot_download",
                      lambda name, **how: asked.update(how) or "there")
  assert weights.local_folder("owner/model") == pathlib.Path("there")
  kept = list(huggingface_hub.utils.filter_repo_objects([*names, "pytorch_model.bin"], **asked))
  assert kept == names and {"chat_template.jinja", "added_tokens.json"} < set(kept)
