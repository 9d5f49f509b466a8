"""The files of a Hugging Face model folder: what they hold, and how a new one takes its place."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import pathlib
import shutil
from typing import Any

import numpy as np
import safetensors

from searchr1_jax.types import UserError

# What goes along with the weights, from the folder that they began in.
COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
          "chat_template.jinja", "generation_config.json", "vocab.json", "merges.txt")
INDEX = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor as the header of its file describes it."""

  file: pathlib.Path
  shape: tuple[int, ...]
  dtype: str


def find_tensors(folder: pathlib.Path) -> dict[str, Tensor]:
  """All tensors of a folder's files, from their headers alone."""
  found: dict[str, Tensor] = {}
  for path in _files(folder):
    with _opened(path) as file:
      for name in file.keys():
        if name in found:
          raise UserError(f"{folder}: {name} is in {found[name].file.name} and in {path.name}; "
                          "remove the file that does not belong to this model")
        head = file.get_slice(name)
        found[name] = Tensor(path, tuple(head.get_shape()), head.get_dtype())
  return found


def read(file: pathlib.Path, name: str, index: tuple[slice, ...]) -> np.ndarray:
  """A piece of a tensor. The file is closed again, so that what was read of it takes no memory."""
  with _opened(file) as f:
    return f.get_slice(name)[index]


def _opened(path: pathlib.Path) -> Any:
  try:
    return safetensors.safe_open(str(path), framework="numpy")
  except (safetensors.SafetensorError, OSError) as e:  # cut, or a link to nothing, or a folder
    raise UserError(f"{path} is not a whole safetensors file ({e}); download it again") from e


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  """The files that the index names, or else all of them."""
  files = sorted(folder.glob("*.safetensors"))
  index, single = folder / INDEX, "model.safetensors"
  if index.is_file():
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
      raise UserError(f"{index} has no weight_map; download the folder again")
    names = sorted(set(map(str, weight_map.values())))
    if any(pathlib.PurePath(n).name != n for n in names):
      raise UserError(f"{index} names a file outside its folder; refused")
    if single not in names and (folder / single).exists():
      raise UserError(f"{folder} holds {single} and {INDEX}, which doesn't name it; remove the one "
                      "that does not belong to this model")
    files = [folder / n for n in names]
    if absent := [f.name for f in files if not f.is_file()]:
      raise UserError(f"{folder}: {', '.join(absent)} named in {index.name} but not there; "
                      "download the folder again")
  if not files:
    raise UserError(f"{folder} has no .safetensors file; convert the weights to safetensors first")
  return files


def refuse(folder: str | pathlib.Path) -> None:
  """Refuses to write over what is more than a model; programs ask before their work, too."""
  folder = pathlib.Path(folder).resolve()
  if folder == pathlib.Path.cwd():
    raise UserError(f"{folder} is the working folder itself; name another folder")
  if not folder.is_dir():
    if folder.exists():
      raise UserError(f"{folder} is a file, wanted a folder; name another")
    return
  held = sorted(folder.iterdir())
  whole = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
  if held and not whole:
    raise UserError(f"{folder} is not empty and holds no model; name another folder")
  if foreign := [entry.name for entry in held if not _ours(entry)]:
    raise UserError(f"{folder} is to be replaced, but it holds {foreign[0]}, which is no part of a "
                    "model; move that, or name another folder")


def _ours(entry: pathlib.Path) -> bool:
  """Whether it is a file of a name that models are written under."""
  named = entry.name in (*COPIED, "config.json", INDEX) or entry.match("model*.safetensors")
  return named and entry.is_file()


def install(partial: pathlib.Path, folder: pathlib.Path) -> None:
  """The finished folder takes its name; an older one there goes, and at no moment both are gone."""
  if not folder.exists():
    partial.rename(folder)
  elif _exchange(partial, folder):
    shutil.rmtree(partial, ignore_errors=True)
  else:
    replaced = partial.with_name(partial.name + "-replaced")
    folder.rename(replaced)  # a kill here leaves both, under other names
    partial.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def _exchange(one: pathlib.Path, other: pathlib.Path) -> bool:
  """Two folders exchange their names in one step; False where the system can't (Linux can)."""
  rename = getattr(ctypes.CDLL(None), "renameat2", None)
  here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
  return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other),
                                       exchange) == 0


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """The object that a JSON file holds."""
  try:
    read = json.loads(path.read_text())
  except ValueError as e:  # bytes that are no text, text that is no JSON
    raise UserError(f"{path} is not valid JSON ({e}); download it again") from e
  if not isinstance(read, dict):
    raise UserError(f"{path} holds a {type(read).__name__}, wanted an object; download it again")
  return read
