"""The files of a Hugging Face model folder: found by name, read without running any code."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

import numpy as np
import safetensors

from retriever.protocol import CorpusError

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
INDEX = "model.safetensors.index.json"
MODULES, POOLING = "modules.json", "1_Pooling/config.json"
LIMITS, PROMPTS = "sentence_bert_config.json", "config_sentence_transformers.json"
_DOWNLOADED = ["*.safetensors", INDEX, CONFIG, TOKENIZER, MODULES, POOLING, LIMITS, PROMPTS]
_DTYPES = ("F32", "BF16", "F16")


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor as the header of its file describes it; `read` maps the file and copies it out."""

  file: pathlib.Path
  name: str
  shape: tuple[int, ...]
  dtype: str

  def read(self) -> np.ndarray:
    """Its numbers in float32; a number that is none is a CorpusError."""
    with _opened(self.file) as f:
      numbers = np.asarray(f.get_tensor(self.name), np.float32)
    if not np.isfinite(numbers).all():
      raise CorpusError(f"{self.file}: {self.name} holds NaN or infinity; download it again")
    return numbers


def find(name: str) -> pathlib.Path:
  """The folder itself, or the cached download of a hub id such as `intfloat/e5-base-v2`."""
  folder = pathlib.Path(name)
  if folder.is_dir():
    return folder
  if name.count("/") != 1 or name.startswith((".", "/")):
    raise CorpusError(f"model {name!r} is neither a folder nor a hub id; wanted a folder with "
                      f"{CONFIG}, or owner/name")
  import huggingface_hub
  from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
  try:
    return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=_DOWNLOADED))
  except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as e:
    raise CorpusError(f"model {name!r} is no folder here and could not be downloaded "
                      f"({type(e).__name__}); check the name, or download it and give the folder"
                      ) from e


def read_json(path: pathlib.Path, kind: type = dict) -> Any:
  """What a JSON file holds, which must be of that kind."""
  try:
    read = json.loads(path.read_bytes())
  except (OSError, ValueError, RecursionError) as e:  # no file, no text, no JSON, too deep
    raise CorpusError(f"{path} can't be read as JSON ({e}); wanted a whole Hugging Face model "
                      "folder, download it again") from e
  if not isinstance(read, kind):
    raise CorpusError(f"{path} holds a {type(read).__name__}, wanted a {kind.__name__}; download "
                      "it again")
  return read


def digest(folder: pathlib.Path) -> str:
  """A SHA-256 over configuration, tokenizer and weights: the same wherever the folder lies."""
  whole = hashlib.sha256()
  for path in (folder / CONFIG, folder / TOKENIZER, *_weight_files(folder)):
    try:
      with path.open("rb") as f:
        whole.update(path.name.encode() + hashlib.file_digest(f, "sha256").digest())
    except OSError as e:
      raise CorpusError(f"{path} can't be read ({e.strerror}); wanted a whole Hugging Face model "
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
          raise CorpusError(f"{folder}: {name} is in {found[name].file.name} and in {path.name}; "
                            "remove the file that does not belong to this model")
        found[name] = Tensor(path, name, tuple(head.get_shape()), head.get_dtype())
  return found


def problems(found: dict[str, Tensor], wanted: dict[str, tuple[int, ...]]) -> list[str]:
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
    raise CorpusError(f"{path} is not a whole safetensors file ({e}); download it again") from e


def _weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
  """The files that the index names, or else all of them."""
  index = folder / INDEX
  if not index.is_file():
    files = sorted(folder.glob("*.safetensors"))
    if not files:
      raise CorpusError(f"{folder} has no .safetensors file; load the model with transformers and "
                        "save it again, which writes one")
    return files
  weight_map = read_json(index).get("weight_map")
  if not isinstance(weight_map, dict):
    raise CorpusError(f"{index} has no weight_map; download the folder again")
  names = sorted(set(map(str, weight_map.values())))
  if any(pathlib.PurePath(n).name != n for n in names):
    raise CorpusError(f"{index} names a file outside its folder; refused")
  return [folder / n for n in names]
