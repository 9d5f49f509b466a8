"""The files of a Hugging Face model folder: found by name, read without running any code.

The retriever's models and the policies that are trained come through here alike.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import safetensors

from retriever.protocol import UserError

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
INDEX = "model.safetensors.index.json"
MODULES, POOLING = "modules.json", "1_Pooling/config.json"
LIMITS, PROMPTS = "sentence_bert_config.json", "config_sentence_transformers.json"
WEIGHTS = ("*.safetensors", INDEX, CONFIG)
ENCODER = (*WEIGHTS, TOKENIZER, MODULES, POOLING, LIMITS, PROMPTS)
_DTYPES = ("F32", "BF16", "F16")


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor as the header of its file describes it."""

  file: pathlib.Path
  name: str
  shape: tuple[int, ...]
  dtype: str

  def piece(self, index: tuple[slice, ...] = ()) -> np.ndarray:
    """A part, or all. The file is closed again, so that what was read of it takes no memory."""
    with _opened(self.file) as f:
      return f.get_slice(self.name)[index] if index else f.get_tensor(self.name)

  def floats(self) -> np.ndarray:
    """All its numbers in float32; a number that is none is a UserError."""
    numbers = np.asarray(self.piece(), np.float32)
    if not np.isfinite(numbers).all():
      raise UserError(f"{self.file}: {self.name} holds NaN or infinity; download it again")
    return numbers


def find(name: str, wanted: Sequence[str] = ENCODER) -> pathlib.Path:
  """The folder itself, or the cached download of a hub id such as `intfloat/e5-base-v2`.

  wanted: patterns of the files to download.
  """
  folder = pathlib.Path(name)
  if folder.is_dir():
    return folder
  if name.count("/") != 1 or name.startswith((".", "/")):
    raise UserError(f"model {name!r} is neither a folder nor a hub id; wanted a folder with "
                    f"{CONFIG}, or owner/name")
  import huggingface_hub
  from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
  try:
    return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=list(wanted)))
  except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as e:
    raise UserError(f"model {name!r} is no folder here and could not be downloaded "
                    f"({type(e).__name__}); check the name, or download it and give the folder"
                    ) from e


def read_json(path: pathlib.Path, kind: type = dict) -> Any:
  """What a JSON file holds, which must be of that kind."""
  try:
    read = json.loads(path.read_bytes())
  except OSError as e:
    raise UserError(f"{path} can't be read ({e.strerror}); wanted a whole Hugging Face model "
                    "folder, download it again") from e
  except (ValueError, RecursionError) as e:  # bytes that are no text, no JSON, or nested too deep
    raise UserError(f"{path} is not valid JSON ({e}); download it again") from e
  if not isinstance(read, kind):
    wanted = {dict: "an object", list: "a list"}[kind]
    raise UserError(f"{path} holds a {type(read).__name__}, wanted {wanted}; download it again")
  return read


def digest(folder: pathlib.Path) -> str:
  """A SHA-256 over configuration, tokenizer and weights: the same wherever the folder lies."""
  whole = hashlib.sha256()
  for path in (folder / CONFIG, folder / TOKENIZER, *_weight_files(folder)):
    try:
      with path.open("rb") as f:
        whole.update(path.name.encode() + hashlib.file_digest(f, "sha256").digest())
    except OSError as e:
      raise UserError(f"{path} can't be read ({e.strerror}); wanted a whole Hugging Face model "
                      "folder, download it again") from e
  return whole.hexdigest()


def find_tensors(folder: pathlib.Path) -> dict[str, Tensor]:
  """All tensors of a folder's files, from their headers alone."""
  found: dict[str, Tensor] = {}
  for path in _weight_files(folder):
    with _opened(path) as file:
      for name in file.keys():
        head = file.get_slice(name)
        if name in found:
          raise UserError(f"{folder}: {name} is in {found[name].file.name} and in {path.name}; "
                          "remove the file that does not belong to this model")
        found[name] = Tensor(path, name, tuple(head.get_shape()), head.get_dtype())
  return found


def problems(found: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
  """What is wrong with the tensors found, each named: missing, unknown, other shape or type."""
  wrong = [f"unexpected tensor {name}" for name in found if name not in wanted]
  for name, shape in wanted.items():
    if name not in found:
      wrong.append(f"missing tensor {name}")
    elif found[name].shape != shape:
      wrong.append(f"{name} has shape {found[name].shape}, wanted {shape}")
    elif found[name].dtype not in _DTYPES:
      wrong.append(f"{name} is {found[name].dtype}, wanted one of {', '.join(_DTYPES)}")
  return wrong


def _opened(path: pathlib.Path) -> Any:
  try:
    return safetensors.safe_open(str(path), framework="numpy")
  except (safetensors.SafetensorError, OSError) as e:  # cut, or a link to nothing, or a folder
    raise UserError(f"{path} is not a whole safetensors file ({e}); download it again") from e


def _weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
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
    raise UserError(f"{folder} has no .safetensors file; load the model with transformers and save "
                    "it again, which writes one")
  return files
