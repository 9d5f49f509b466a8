"""Hugging Face folders in and out: safetensors tensors ↔ parameters, tensor by tensor."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import tempfile
from typing import Any, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from searchr1_jax.model import decoder, shapes
from searchr1_jax.types import UserError


@dataclasses.dataclass(frozen=True)
class Entry:
  """One tensor of a folder: where it goes, and the shape of its transpose there."""

  path: tuple[str, ...]
  layer: int | None
  target: tuple[int, ...]
  transpose: bool

  def to_param(self, tensor: np.ndarray) -> np.ndarray:
    return (tensor.T if self.transpose else tensor).reshape(self.target)

  def to_tensor(self, param: np.ndarray, stored: tuple[int, ...]) -> np.ndarray:
    flat = param.reshape(stored[::-1] if self.transpose else stored)
    return np.ascontiguousarray(flat.T if self.transpose else flat)

  @property
  def stored(self) -> tuple[int, ...]:
    """The tensor's shape in the folder."""
    if not self.transpose:
      return (int(np.prod(self.target)),) if self.path[-1] in ("scale", "bias") else self.target
    rows = 2 if "o" in self.path else 1  # o joins heads and head size on its input side
    return (int(np.prod(self.target[rows:])), int(np.prod(self.target[:rows])))


def entries(shape: shapes.DecoderShape) -> dict[str, Entry]:
  """Every tensor that a folder of this shape holds, by its Hugging Face name."""
  s = shape
  table = {
      "model.embed_tokens.weight": Entry(("embed",), None, (s.vocab_size, s.width), False),
      "model.norm.weight": Entry(("norm", "scale"), None, (s.width,), False),
  }
  if not s.tied_embeddings:
    table["lm_head.weight"] = Entry(("head",), None, (s.width, s.vocab_size), True)
  for layer in range(s.layers):
    prefix = f"model.layers.{layer}."
    add = lambda name, path, target, transpose=False: table.__setitem__(
        prefix + name + (".bias" if path[-1] == "bias" else ".weight"),
        Entry(("layers",) + path, layer, target, transpose))
    for ours, heads in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads)):
      name = f"self_attn.{ours}_proj"
      add(name, ("attention", ours, "kernel"), (s.width, heads, s.head_size), True)
      if s.qkv_bias:
        add(name, ("attention", ours, "bias"), (heads, s.head_size))
    add("self_attn.o_proj", ("attention", "o", "kernel"), (s.heads, s.head_size, s.width), True)
    if s.qk_norm:
      for ours in ("q_norm", "k_norm"):
        add(f"self_attn.{ours}", ("attention", ours, "scale"), (s.head_size,))
    for ours in ("gate", "up"):
      add(f"mlp.{ours}_proj", ("mlp", ours, "kernel"), (s.width, s.mlp_width), True)
    add("mlp.down_proj", ("mlp", "down", "kernel"), (s.mlp_width, s.width), True)
    add("input_layernorm", ("attention_norm", "scale"), (s.width,))
    add("post_attention_layernorm", ("mlp_norm", "scale"), (s.width,))
  return table


def read_config(folder: str | pathlib.Path) -> tuple[shapes.DecoderShape, dict[str, Any]]:
  """The shape of a Hugging Face folder, and its config.json as it stands."""
  path = pathlib.Path(folder) / "config.json"
  if not path.is_file():
    raise UserError(f"{folder} has no config.json; wanted a Hugging Face model folder or a hub id")
  config = _read_json(path)
  return shapes.from_hugging_face(config, str(path)), config


def local_folder(name: str) -> pathlib.Path:
  """The folder itself, or the cached download of a hub id such as `Qwen/Qwen2.5-3B`."""
  folder = pathlib.Path(name)
  if folder.is_dir():
    return folder
  if name.count("/") != 1 or name.startswith((".", "/")):
    raise UserError(f"model {name!r} is neither a folder nor a hub id; wanted a folder with "
                    "config.json, or owner/name")
  import huggingface_hub
  from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
  patterns = ["*.safetensors", "*.safetensors.index.json", "config.json", "tokenizer*",
              "generation_config.json", "vocab.json", "merges.txt"]
  try:
    return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
  except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as e:
    raise UserError(f"model {name!r} is no folder here and could not be downloaded "
                    f"({type(e).__name__}); check the name, or download it and give the folder"
                    ) from e


def load(folder: str | pathlib.Path, dtype: Any = jnp.float32) -> decoder.Params:
  """Parameters, layers stacked, from one or many safetensors files; wrong tensors are listed."""
  folder = pathlib.Path(folder)
  shape, _ = read_config(folder)
  table = entries(shape)
  params: dict[tuple[str, ...], np.ndarray] = {}
  seen, problems, repeated_head = set(), [], None
  for name, tensor in _tensors(folder):
    if name == "lm_head.weight" and shape.tied_embeddings:
      repeated_head = tensor  # tied models are often saved with the head written out once more
      continue
    entry = table.get(name)
    if entry is None:
      problems.append(f"unexpected tensor {name}")
      continue
    seen.add(name)
    if tensor.shape != entry.stored:
      problems.append(f"{name} has shape {tensor.shape}, wanted {entry.stored}")
      continue
    value = entry.to_param(tensor).astype(dtype)
    if not np.isfinite(value).all():
      problems.append(f"{name} holds NaN or infinity")
    if entry.layer is None:
      params[entry.path] = value
    else:
      full = params.setdefault(entry.path, np.empty((shape.layers,) + entry.target, dtype))
      full[entry.layer] = value
  embed = params.get(("embed",))
  if repeated_head is not None and embed is not None and not np.array_equal(
      repeated_head.astype(dtype), embed):
    problems.append("lm_head.weight differs from model.embed_tokens.weight, config.json ties them")
  problems += [f"missing tensor {name}" for name in table if name not in seen]
  if problems:
    more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
    raise UserError(f"{folder}: {'; '.join(problems[:8])}{more}. Is config.json the one of these "
                    "weights?")
  return _nest({path: jnp.asarray(value) for path, value in params.items()})


def save(folder: str | pathlib.Path, params: decoder.Params, shape: shapes.DecoderShape, *,
         dtype: Any = np.float32, config: Mapping[str, Any] | None = None,
         copy_from: str | pathlib.Path | None = None) -> None:
  """Writes a folder that `load` and transformers read; it appears whole or not at all.

  An older model of that name is replaced; a folder that holds anything else is refused.
  `copy_from`: a folder whose tokenizer and generation files go along.
  """
  folder = pathlib.Path(folder)
  refuse_folder(folder)
  folder.parent.mkdir(parents=True, exist_ok=True)
  partial = pathlib.Path(tempfile.mkdtemp(prefix=folder.name + ".partial-", dir=folder.parent))
  flat = _flatten(params)
  tensors = {}
  for name, entry in entries(shape).items():
    value = flat[entry.path]
    value = np.asarray(value if entry.layer is None else value[entry.layer]).astype(dtype)
    tensors[name] = entry.to_tensor(value, entry.stored)
  # Bytes rather than save_file: the file then has the modes of any other.
  (partial / "model.safetensors").write_bytes(
      safetensors.numpy.save(tensors, metadata={"format": "pt"}))
  written = dict(config) if config is not None else shapes.to_hugging_face(shape)
  written.pop("dtype", None)  # what newer writers call it; two keys must not disagree
  written["torch_dtype"] = np.dtype(dtype).name
  (partial / "config.json").write_text(json.dumps(written, indent=2) + "\n")
  if copy_from is not None:
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                 "generation_config.json", "vocab.json", "merges.txt"):
      if (source := pathlib.Path(copy_from) / name).is_file():
        shutil.copy(source, partial / name)
  partial.chmod(0o755)
  replaced = partial.with_name(partial.name + "-replaced")
  if folder.exists():
    folder.rename(replaced)  # a kill from here on loses neither
  partial.rename(folder)
  shutil.rmtree(replaced, ignore_errors=True)


def refuse_folder(folder: str | pathlib.Path) -> None:
  """Refuses to `save` over what is no model; for programs to ask before their work, too."""
  folder = pathlib.Path(folder)
  if folder.exists() and not folder.is_dir():
    raise UserError(f"{folder} is a file, wanted a folder; name another")
  whole = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
  if folder.is_dir() and any(folder.iterdir()) and not whole:
    raise UserError(f"{folder} is not empty and holds no model; name another folder")


def _tensors(folder: pathlib.Path) -> Iterator[tuple[str, np.ndarray]]:
  files = sorted(folder.glob("*.safetensors"))
  index = folder / "model.safetensors.index.json"
  if index.is_file():
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
      raise UserError(f"{index} has no weight_map; download the folder again")
    names = sorted(set(map(str, weight_map.values())))
    if any(pathlib.PurePath(n).name != n for n in names):
      raise UserError(f"{index} names a file outside its folder; refused")
    files = [folder / n for n in names]
    if absent := [f.name for f in files if not f.is_file()]:
      raise UserError(f"{folder}: {', '.join(absent)} named in {index.name} but not there; "
                      "download the folder again")
  if not files:
    raise UserError(f"{folder} has no .safetensors file; convert the weights to safetensors first")
  for file in files:
    try:
      with safetensors.safe_open(str(file), framework="numpy") as f:
        for name in f.keys():
          yield name, f.get_tensor(name)
    except safetensors.SafetensorError as e:
      raise UserError(f"{file} is not a whole safetensors file ({e}); download it again") from e


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  try:
    read = json.loads(path.read_text())
  except ValueError as e:  # bytes that are no text, text that is no JSON
    raise UserError(f"{path} is not valid JSON ({e}); download it again") from e
  if not isinstance(read, dict):
    raise UserError(f"{path} holds a {type(read).__name__}, wanted an object; download it again")
  return read


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
