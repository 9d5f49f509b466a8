"""Model folders at real sizes: pieces, several files, devices and processes, kills, benchmarks."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from conftest import ROOT
from test_weights import FAMILIES, TIED, UNTIED, assert_same, tensors_of, write
import tiny_models as tiny

from retriever.model_files import Tensor
from searchr1_jax.model import decoder, shapes, weights
from searchr1_jax.rollout import draw


@pytest.mark.parametrize("kind, seed", FAMILIES)
@pytest.mark.parametrize("piece_bytes", [1, 3000])
def test_tensors_are_read_in_small_pieces(kind, seed, piece_bytes, tmp_path, monkeypatch):
  shape = tiny.random_shape(kind, seed)
  params = write(tmp_path / "model", shape)
  piece, seen = Tensor.piece, []
  monkeypatch.setattr(Tensor, "piece", lambda *a: seen.append(piece(*a)) or seen[-1])
  monkeypatch.setattr(weights, "PIECE_BYTES", piece_bytes)
  assert_same(weights.load(tmp_path / "model"), params)
  # One head is the smallest piece: its rows join one axis of the parameter.
  one_head = 4 * shape.head_size * shape.width
  assert max(x.nbytes for x in seen) <= max(piece_bytes, one_head)
  assert sum(x.size for x in seen) == shapes.count_parameters(shape)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_model_too_large_for_one_file_is_dealt_over_several(dtype, tmp_path):
  most = np.dtype(dtype).itemsize * shapes.count_parameters(UNTIED) // 5
  params = write(tmp_path / "model", UNTIED, dtype=dtype, max_file_bytes=most)
  files = sorted((tmp_path / "model").glob("*.safetensors"))
  assert len(files) > 3
  assert [f.name for f in files] == [
      f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
  held = {f.name: safetensors.numpy.load_file(f) for f in files}
  sizes = {name: [x.nbytes for x in tensors.values()] for name, tensors in held.items()}
  assert all(sum(s) <= most or len(s) == 1 for s in sizes.values())
  index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
  assert index["weight_map"] == {t: name for name, tensors in held.items() for t in tensors}
  assert index["metadata"]["total_size"] == sum(map(sum, sizes.values())) == (
      np.dtype(dtype).itemsize * shapes.count_parameters(UNTIED))
  write(tmp_path / "one", UNTIED, dtype=dtype)
  one = tensors_of(tmp_path / "one")
  for name, x in {t: x for tensors in held.values() for t, x in tensors.items()}.items():
    assert x.tobytes() == one.pop(name).tobytes()
  assert not one
  assert_same(weights.load(tmp_path / "model", dtype),
              jax.tree.map(lambda x: x.astype(dtype), params))


def test_transformers_reads_several_files(tmp_path):
  params = write(tmp_path / "model", UNTIED, max_file_bytes=12_000)
  assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
  model = tiny.reference_model(tmp_path / "model")
  ids_BL = np.random.default_rng(0).integers(0, UNTIED.vocab_size, (2, 9))
  np.testing.assert_allclose(tiny.our_logits(UNTIED, params, ids_BL),
                             tiny.reference_logits(model, ids_BL), atol=2e-4)


MESHES = """
import sys
sys.path.insert(0, "tests")
import filecmp, pathlib, jax, jax.numpy as jnp, numpy as np
import tiny_models as tiny
from retriever.model_files import Tensor
from searchr1_jax.model import shapes, sharding, weights

out = pathlib.Path(sys.argv[1])
assert len(jax.devices()) == 8
for kind, seed, sizes in (("qwen2", 0, (2, 2, 2)), ("llama", 1, (1, 8, 1))):
  shape = tiny.random_shape(kind, seed)
  weights.save(out / kind, tiny.random_params(shape, 0), shape, max_file_bytes=12_000)
  plain = weights.load(out / kind)
  mesh = sharding.make_mesh(*sizes)
  piece, sizes_read = Tensor.piece, []
  Tensor.piece = lambda *a: sizes_read.append((x := piece(*a)).size) or x
  spread = weights.load(out / kind, mesh=mesh)
  Tensor.piece = piece
  # What several devices hold alike is read once.
  assert sum(sizes_read) == shapes.count_parameters(shape)
  jax.tree.map(np.testing.assert_array_equal, spread, plain)
  abstract = weights.abstract_params(shape, jnp.float32, mesh)
  for x, told, wanted in zip(*map(jax.tree.leaves, (
      spread, abstract, sharding.parameter_shardings(mesh, plain)))):
    assert x.sharding == told.sharding == wanted and len(x.addressable_shards) == 8
    assert (x.shape, x.dtype) == (told.shape, told.dtype)
  assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(spread))
  weights.save(out / "spread", spread, shape, max_file_bytes=12_000)
  files = sorted(p.name for p in (out / kind).iterdir())
  assert len(files) > 4
  assert filecmp.cmpfiles(out / kind, out / "spread", files, False) == (files, [], [])
print("agreed")
"""


def test_a_mesh_of_devices_holds_and_writes_the_same_bits(run_python, tmp_path):
  code = f"import sys; sys.argv = ['', {str(tmp_path)!r}]\n{MESHES}"
  assert "agreed" in run_python(code, devices=8, timeout=300).stdout


PROCESSES = """
import sys
sys.path.insert(0, "tests")
import pathlib, jax, numpy as np
import tiny_models as tiny
from searchr1_jax.model import folders, sharding, weights
from searchr1_jax.types import UserError

folder, address, me = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if me:
  folders.install = None  # the second process writes nothing
jax.distributed.initialize(address, 2, me)
assert len(jax.devices()) == 4 and len(jax.local_devices()) == 2
shape, _ = weights.read_config(folder)
plain = weights.load(folder)
spread = weights.load(folder, mesh=sharding.make_mesh(1, 2, 2))
assert not any(x.is_fully_addressable for x in jax.tree.leaves(spread))
for x, y in zip(jax.tree.leaves(spread), jax.tree.leaves(plain)):
  assert len(x.addressable_shards) == 2
  for shard in x.addressable_shards:
    np.testing.assert_array_equal(shard.data, np.asarray(y)[shard.index])
try:
  weights.save(folder.with_name("thesis"), spread, shape)
  raise SystemExit("wrote over a thesis")
except UserError:  # in both, so that none waits for the other
  pass
weights.save(folder.with_name("out"), spread, shape)
assert (folder.with_name("out") / "model.safetensors").is_file()  # for both, once `save` returns
"""


def test_processes_share_a_mesh_and_one_of_them_writes(tmp_path):
  (tmp_path / "thesis").mkdir()
  (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
  write(tmp_path / "model", UNTIED)
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"
  environ = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
  both = [subprocess.Popen(
      [sys.executable, "-c", PROCESSES, str(tmp_path / "model"), address, str(i)], cwd=ROOT,
      env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for i in range(2)]
  try:
    said = [process.communicate(timeout=90)[0] for process in both]
  finally:
    for process in both:
      process.kill()
  assert [process.returncode for process in both] == [0, 0], "\n".join(said)
  assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out", "thesis"]  # no half ones
  for file in ("config.json", "model.safetensors"):
    assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "model" / file).read_bytes()


# Exports in a fork that kills itself at the n-th thing it does to the folders (0: it lives).
KILLED = """
import os, pathlib, shutil, signal, sys
sys.path.insert(0, "tests")
import tiny_models as tiny
from searchr1_jax.model import weights

def export(folder, moment):
  count = 0

  def watch(event, arguments):
    nonlocal count
    if str(folder) in str(arguments):
      count += 1
      if count == moment:
        os.kill(os.getpid(), signal.SIGKILL)

  shape = tiny.random_shape("qwen3", 1)
  params = tiny.random_params(shape, 1)
  sys.addaudithook(watch)
  weights.save(folder, params, shape, max_file_bytes=60_000)
  return count

def end_of(moment):
  folder = base / str(moment) / "model"
  shutil.copytree(base / "old", folder)
  if (child := os.fork()) == 0:  # jax starts its threads only here
    os._exit(export(folder, moment))
  return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

base = pathlib.Path(sys.argv[1])
count = end_of(0)
assert count > 10
for moment in (2, 6, 8, *range(count - 5, count + 1)):
  assert end_of(moment) == -signal.SIGKILL, moment
"""


def test_a_kill_leaves_the_old_model_or_the_new_one(run_python, tmp_path):
  old, new = write(tmp_path / "old"), tiny.random_params(TIED, 1)
  run_python(f"import sys; sys.argv = ['', {str(tmp_path)!r}]\n{KILLED}", devices=1)
  found = {}
  for place in tmp_path.glob("[0-9]*"):
    params = weights.load(place / "model")
    which = "old" if np.array_equal(params["embed"], old["embed"]) else "new"
    assert_same(params, old if which == "old" else new)
    found[int(place.name)] = which
  assert len(found) == 10 and found.pop(0) == "new"  # nobody killed that one
  moments = [found[moment] for moment in sorted(found)]
  assert moments == sorted(moments, reverse=True)  # the old one up to some moment, then the new
  assert set(moments) == {"old", "new"}


def test_no_id_beyond_the_tokenizer_is_ever_drawn():
  # 10^5 draws at each of four settings; an output of 97 rows, a tokenizer of 61.
  shape = dataclasses.replace(tiny.random_shape("qwen2", 0), vocab_size=97)
  params = tiny.random_params(shape, 0)
  hidden_BD = jax.random.normal(jax.random.key(0), (100_000, shape.width))
  uniform_B = jax.random.uniform(jax.random.key(1), (100_000,))

  @jax.jit
  def drawn(hidden_BD, how):
    return draw.draw(decoder.logits(params, hidden_BD, 61), uniform_B, how)[0]

  for how in (draw.sampling(1.0), draw.sampling(50.0), draw.sampling(0.0),
              draw.sampling(5.0, top_p=0.99, top_k=80)):
    ids_B = np.asarray(drawn(hidden_BD, how))
    assert ids_B.min() >= 0 and ids_B.max() == 60  # and the last one that there is, is drawn


def test_the_benchmark_says_what_an_import_and_an_export_take(run_python):
  argv = "benchmarks.weights --gb 0.02 --width 128 --vocab 65536".split()
  done = run_python(f"import runpy, sys; sys.argv = {argv!r}\n"
                    "runpy.run_module('benchmarks.weights', run_name='__main__')", devices=1)
  found = json.loads(done.stdout)
  assert found["largest_tensor"] == 4 * 128 * 65536
  assert found["allowed"] == found["largest_tensor"] + 2**30
  # Read as bfloat16, held as float32.
  assert found["needed"] == pytest.approx(2 * found["folder_bytes"], rel=0.02)
  assert found["folder_bytes"] == pytest.approx(0.02e9, rel=0.1)
  for part in ("import", "export"):
    assert {"seconds", "gb_s", "beyond", "anonymous"} <= found[part].keys()
    assert 0 < found[part]["beyond"] < 2**28
