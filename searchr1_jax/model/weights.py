"""Hugging Face folders in and out: safetensors tensors ↔ parameters, tensor by tensor.

Neither way holds more of the model on the host than the parameters themselves, if they live there:
`load` fills each device's part of a parameter from pieces of its tensors; `save` fetches tensors
until a file is full.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import shutil
import tempfile
from typing import Any, Callable, Iterator, Mapping

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import safetensors
import safetensors.numpy

from retriever import model_files
from searchr1_jax.model import decoder, folders, shapes, sharding
from searchr1_jax.run import disk
from searchr1_jax.types import UserError

PIECE_BYTES = 2**27  # of a tensor that are read at once

_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"


@dataclasses.dataclass(frozen=True)
class Entry:
  """One tensor of a folder: the parameter (of a layer) that it is, and how that one lies in it.

  `target`: the parameter's shape. `joins`: for each axis of the tensor, the axes of the parameter
  that it joins.
  """

  path: tuple[str, ...]
  layer: int | None
  target: tuple[int, ...]
  joins: tuple[tuple[int, ...], ...]

  @property
  def stored(self) -> tuple[int, ...]:
    """The tensor's shape in the folder."""
    return tuple(math.prod(self.target[a] for a in axes) for axes in self.joins)


def entries(shape: shapes.DecoderShape) -> dict[str, Entry]:
  """Every tensor that a folder of this shape holds, by its Hugging Face name."""
  s = shape
  plain, kernel = ((0,), (1,)), ((1,), (0,))  # folders keep outputs first, kernels inputs first
  into_heads, from_heads = ((1, 2), (0,)), ((2,), (0, 1))  # heads and their size are one axis there
  table = {
      _EMBED: Entry(("embed",), None, (s.vocab_size, s.width), plain),
      "model.norm.weight": Entry(("norm", "scale"), None, (s.width,), ((0,),)),
  }
  if not s.tied_embeddings:
    table[_HEAD] = Entry(("head",), None, (s.width, s.vocab_size), kernel)
  for layer in range(s.layers):
    prefix = f"model.layers.{layer}."
    add = lambda name, path, target, joins=((0,),): table.__setitem__(
        prefix + name + (".bias" if path[-1] == "bias" else ".weight"),
        Entry(("layers",) + path, layer, target, joins))
    for ours, heads in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads)):
      name = f"self_attn.{ours}_proj"
      add(name, ("attention", ours, "kernel"), (s.width, heads, s.head_size), into_heads)
      if s.qkv_bias:
        add(name, ("attention", ours, "bias"), (heads, s.head_size), ((0, 1),))
    add("self_attn.o_proj", ("attention", "o", "kernel"), (s.heads, s.head_size, s.width),
        from_heads)
    if s.qk_norm:
      for ours in ("q_norm", "k_norm"):
        add(f"self_attn.{ours}", ("attention", ours, "scale"), (s.head_size,))
    for ours in ("gate", "up"):
      add(f"mlp.{ours}_proj", ("mlp", ours, "kernel"), (s.width, s.mlp_width), kernel)
    add("mlp.down_proj", ("mlp", "down", "kernel"), (s.mlp_width, s.width), kernel)
    add("input_layernorm", ("attention_norm", "scale"), (s.width,))
    add("post_attention_layernorm", ("mlp_norm", "scale"), (s.width,))
  return table


def abstract_params(shape: shapes.DecoderShape, dtype: Any = jnp.float32,
                    mesh: Mesh | None = None) -> decoder.Params:
  """Shape, dtype and place of every parameter, nothing allocated; no place if there is no mesh."""
  layered = lambda e: e.target if e.layer is None else (shape.layers,) + e.target
  params = _nest({e.path: jax.ShapeDtypeStruct(layered(e), dtype)
                  for e in entries(shape).values()})
  if mesh is None:
    return params
  return jax.tree.map(lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=place),
                      params, sharding.parameter_shardings(mesh, params))


def read_config(folder: str | pathlib.Path) -> tuple[shapes.DecoderShape, dict[str, Any]]:
  """The shape of a Hugging Face folder, and its config.json as it stands."""
  path = pathlib.Path(folder) / model_files.CONFIG
  if not path.is_file():
    raise UserError(f"{folder} has no {path.name}; wanted a Hugging Face model folder or a hub id")
  config = model_files.read_json(path)
  return shapes.from_hugging_face(config, str(path)), config


def local_folder(name: str) -> pathlib.Path:
  """The folder itself, or the cached download of a hub id such as `Qwen/Qwen2.5-3B`."""
  return model_files.find(name, (*model_files.WEIGHTS, "tokenizer*", "*.jinja", *folders.COPIED))


def load(folder: str | pathlib.Path, dtype: Any = jnp.float32,
         mesh: Mesh | None = None) -> decoder.Params:
  """Parameters, layers stacked, from one or many safetensors files, laid out over the mesh.

  What the files' headers show to be wrong is listed before any tensor is read. Of several processes
  each reads what its own devices hold.
  """
  folder = pathlib.Path(folder)
  shape, _ = read_config(folder)
  table, found = entries(shape), model_files.find_tensors(folder)
  _check_headers(folder, shape, table, found)
  leaves = _flatten(abstract_params(shape, dtype, mesh))
  params = {path: _blank(leaf.sharding)(leaf.shape, leaf.dtype) for path, leaf in leaves.items()}
  for name, entry in table.items():
    params[entry.path] = _fill(params.pop(entry.path), found[name], entry,
                               leaves[entry.path].sharding)
  return _nest(params)


def save(folder: str | pathlib.Path, params: decoder.Params, shape: shapes.DecoderShape, *,
         dtype: Any = np.float32, config: Mapping[str, Any] | None = None,
         copy_from: str | pathlib.Path | None = None, max_file_bytes: int = 2**29) -> None:
  """Writes a folder that `load` and transformers read; it appears whole or not at all.

  An older model of that name is replaced (a link stays, what it points to is); a folder that holds
  anything else is refused, and so is a number that is none, or none in this dtype. `config`:
  the config.json to write, in place of the shape's. `copy_from`: a folder whose tokenizer and
  generation files go along. `max_file_bytes`: the tensors of a file, which is also what is held on
  the host at once. Of several processes all must call it, and the first one writes.
  """
  folders.refuse(folder)  # every process: none may wait for one that gave up
  folder, dtype = pathlib.Path(folder).resolve(), np.dtype(dtype)
  fetched = _fetch(params, shape, dtype)
  if jax.process_index():
    for _, tensor in fetched:  # each takes part in gathering what no process holds alone
      tensor.block_until_ready()
  else:
    disk.make_folder(folder.parent)
    with disk.writing(folder), _replacing(folder) as partial:
      _write_tensors(partial, fetched, _deal(shape, dtype.itemsize, max_file_bytes))
      written = dict(config) if config is not None else shapes.to_hugging_face(shape)
      written.pop("dtype", None)  # what newer writers call it; two keys must not disagree
      written["torch_dtype"] = dtype.name
      (partial / "config.json").write_text(json.dumps(written, indent=2) + "\n")
      sources = [] if copy_from is None else [pathlib.Path(copy_from) / n for n in folders.COPIED]
      for source in filter(pathlib.Path.is_file, sources):
        shutil.copy(source, partial)
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(f"saved {folder}")


# Reading.


def _check_headers(folder: pathlib.Path, shape: shapes.DecoderShape, table: Mapping[str, Entry],
                   found: Mapping[str, model_files.Tensor]) -> None:
  """Refuses tensors that are missing, unknown or not what config.json says, all at once."""
  wanted = {name: entry.stored for name, entry in table.items()}
  if shape.tied_embeddings and _HEAD in found:
    wanted[_HEAD] = wanted[_EMBED]  # tied models are often saved with the head written out too
  problems = model_files.problems(found, wanted)
  if not problems and shape.tied_embeddings and _HEAD in found and not _same(
      found[_HEAD], found[_EMBED]):
    problems.append(f"{_HEAD} differs from {_EMBED}, config.json ties them")
  if problems:
    more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
    raise UserError(f"{folder}: {'; '.join(problems[:8])}{more}. Is config.json the one of these "
                    "weights?")


def _same(one: model_files.Tensor, other: model_files.Tensor) -> bool:
  """Whether two matrices of one shape are equal, read in pieces."""
  rows, columns = one.shape
  step = max(1, PIECE_BYTES // (4 * columns))
  pieces = [(slice(at, min(at + step, rows)), slice(0, columns)) for at in range(0, rows, step)]
  return all(np.array_equal(one.piece(p), other.piece(p)) for p in pieces)


@functools.cache
def _blank(place: NamedSharding | None) -> Callable[..., jax.Array]:
  """Zeros of a shape and dtype, allocated where they are to be."""
  return jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=place)


def _fill(param: jax.Array, tensor: model_files.Tensor, entry: Entry,
          place: NamedSharding | None) -> jax.Array:
  """Copies a tensor to where it belongs in its parameter, piece by piece.

  A piece is cut along the tensor's first axis, from what each device of this process holds of it,
  and read once for all that hold the same. All processes cut alike, as each step is one of all.
  """
  layer = [] if entry.layer is None else [entry.layer]
  held = _held(param, place)
  share = param.shape if place is None else place.shard_shape(param.shape)
  axis = len(layer) + entry.joins[0][0]
  devices = 1 if place is None else place.mesh.size
  row_bytes = 4 * devices * math.prod(share[len(layer):]) // share[axis]
  step = max(1, PIECE_BYTES // row_bytes)
  for at in range(0, share[axis], step):
    pieces, read = [], {}
    for device, index in held.items():
      if (key := str(index)) not in read:
        first = index[axis].start
        rows = slice(first + at, min(first + at + step, index[axis].stop))
        piece = _piece(tensor, entry, (*index[:axis], rows, *index[axis + 1:])[len(layer):])
        read[key] = piece.reshape([1] * len(layer) + list(piece.shape))
      pieces.append(jax.device_put(read[key], device))
    value = pieces[0] if place is None else jax.make_array_from_single_device_arrays(
        tuple(n * whole // part for n, whole, part in zip(pieces[0].shape, param.shape, share)),
        place, pieces)
    start = np.array(layer + [0] * len(entry.target), np.int32)
    start[axis] = at
    param, finite = _put(param, value, start, place)
    if not finite:  # waiting for it also keeps the pieces from piling up
      raise UserError(f"{tensor.file.parent}: {tensor.name} holds NaN or infinity; download it "
                      "again, or give an older checkpoint")
  return param


def _held(param: jax.Array,
          place: NamedSharding | None) -> dict[jax.Device | None, tuple[slice, ...]]:
  """What each device of this process holds of a parameter; None: the default device."""
  if place is None:
    return {None: tuple(slice(0, n) for n in param.shape)}
  return {device: tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, param.shape))
          for device, index in place.addressable_devices_indices_map(param.shape).items()}


def _piece(tensor: model_files.Tensor, entry: Entry, index: tuple[slice, ...]) -> np.ndarray:
  """Part of a parameter (of a layer), read from its tensor."""
  inner = [math.prod(entry.target[a] for a in axes[1:]) for axes in entry.joins]
  stored = tuple(slice(index[axes[0]].start * n, index[axes[0]].stop * n)  # minor axes are whole
                 for axes, n in zip(entry.joins, inner))
  order = [a for axes in entry.joins for a in axes]
  sizes = [index[a].stop - index[a].start for a in order]
  return tensor.piece(stored).reshape(sizes).transpose(np.argsort(order))


@functools.partial(jax.jit, static_argnames="place", donate_argnames="param")
def _put(param: jax.Array, value: jax.Array, start: jax.Array,
         place: NamedSharding | None) -> tuple[jax.Array, jax.Array]:
  """Writes a piece into each device's share, and tells whether all of it is finite there."""
  value = value.astype(param.dtype)
  write = lambda param, value, start: jax.lax.dynamic_update_slice(param, value, tuple(start))
  if place is not None:
    write = jax.shard_map(write, mesh=place.mesh, out_specs=place.spec,
                          in_specs=(place.spec, place.spec, PartitionSpec()))
  return write(param, value, start), jnp.isfinite(value).all()


# Writing.


@contextlib.contextmanager
def _replacing(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """A new folder beside it that takes its place at the end, or goes again if that isn't reached."""
  partial = pathlib.Path(tempfile.mkdtemp(prefix=folder.name + ".partial-", dir=folder.parent))
  try:
    yield partial
    partial.chmod(0o755)
    folders.install(partial, folder)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _deal(shape: shapes.DecoderShape, itemsize: int, max_file_bytes: int) -> list[dict[str, int]]:
  """The bytes of each tensor, file by file, in the order of `entries`."""
  files: list[dict[str, int]] = [{}]
  for name, entry in entries(shape).items():
    size = itemsize * math.prod(entry.stored)
    if files[-1] and sum(files[-1].values()) + size > max_file_bytes:
      files.append({})
    files[-1][name] = size
  return files


def _fetch(params: decoder.Params, shape: shapes.DecoderShape,
           dtype: np.dtype) -> Iterator[tuple[str, jax.Array]]:
  """Every tensor as the folder has it, on the devices, whole on each where processes share it."""
  flat = _flatten(params)
  shared = [x.sharding.mesh for x in flat.values()
            if isinstance(x, jax.Array) and not x.is_fully_addressable]
  take = _taker(NamedSharding(shared[0], PartitionSpec()) if shared else None)
  for name, entry in entries(shape).items():
    param, layered = flat[entry.path], entry.layer is not None
    if layered or shared:
      param = take(param, entry.layer or 0, layered, dtype)
    tensor = _as_stored(param, entry.joins, dtype)
    if not _finite(tensor):  # on every process, so that all give up or none
      raise UserError(f"{name} holds NaN or infinity as {dtype.name}, nothing was written; write "
                      "float32, or an older checkpoint")
    yield name, tensor


@jax.jit
def _finite(tensor: jax.Array) -> jax.Array:
  return jnp.isfinite(tensor).all()


@functools.cache
def _taker(place: NamedSharding | None) -> Callable[..., jax.Array]:
  """`_take`, jitted; what it returns is laid out like this."""
  return jax.jit(_take, static_argnums=(2, 3), out_shardings=place)


def _take(param: jax.Array, layer: jax.Array, layered: bool, dtype: np.dtype) -> jax.Array:
  """A parameter, or what it is in a layer."""
  return (jax.lax.dynamic_index_in_dim(param, layer, keepdims=False) if layered
          else param).astype(dtype)


@functools.partial(jax.jit, static_argnames=("joins", "dtype"))
def _as_stored(param: jax.Array, joins: tuple[tuple[int, ...], ...],
               dtype: np.dtype) -> jax.Array:
  """The tensor that a parameter (of a layer) is; fused with `_take` it would be slow on CPUs."""
  sizes = [math.prod(param.shape[a] for a in axes) for axes in joins]
  return param.astype(dtype).transpose([a for axes in joins for a in axes]).reshape(sizes)


def _write_tensors(folder: pathlib.Path, fetched: Iterator[tuple[str, jax.Array]],
                   files: list[dict[str, int]]) -> None:
  """The files, one after another, and their index where they are several."""
  names = ["model.safetensors"] if len(files) == 1 else [
      f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
  for name, held in zip(names, files):
    _write_file(folder / name, itertools.islice(fetched, len(held)))
  if len(files) > 1:
    index = {"metadata": {"total_size": sum(sum(held.values()) for held in files)},
             "weight_map": {t: name for name, held in zip(names, files) for t in held}}
    (folder / model_files.INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_file(path: pathlib.Path, fetched: Iterator[tuple[str, jax.Array]]) -> None:
  tensors = {name: np.ascontiguousarray(x) for name, x in fetched}
  try:
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
  except safetensors.SafetensorError as e:  # so it calls a full disk
    raise OSError(str(e)) from e
  path.chmod(0o644)  # as any other file: the library's own are for their owner alone


def _nest(flat: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
  out: dict[str, Any] = {}
  for path, value in flat.items():
    node = out
    for key in path[:-1]:
      node = node.setdefault(key, {})
    node[path[-1]] = value
  return out


def _flatten(params: decoder.Params) -> dict[tuple[str, ...], Any]:
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  return {tuple(p.key for p in path): value for path, value in leaves}
