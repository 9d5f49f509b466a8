"""How a new Hugging Face model folder takes its place, and what it may replace."""

from __future__ import annotations

import ctypes
import os
import pathlib
import shutil

from retriever import model_files
from searchr1_jax.types import UserError

# What goes along with the weights, from the folder that they began in.
COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
          "chat_template.jinja", "generation_config.json", "vocab.json", "merges.txt")


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
  whole = (folder / model_files.CONFIG).is_file() and any(folder.glob("*.safetensors"))
  if held and not whole:
    raise UserError(f"{folder} is not empty and holds no model; name another folder")
  if foreign := [entry.name for entry in held if not _ours(entry)]:
    raise UserError(f"{folder} is to be replaced, but it holds {foreign[0]}, which is no part of a "
                    "model; move that, or name another folder")


def _ours(entry: pathlib.Path) -> bool:
  """Whether it is a file of a name that models are written under."""
  plain = entry.name in (*COPIED, model_files.CONFIG, model_files.INDEX)
  return (plain or entry.match("model*.safetensors")) and entry.is_file()


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
