"""Sentence encoders of the BERT family: E5, BGE, MiniLM, Contriever and their like."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from retriever import batches, bert, model_files
from retriever.protocol import CorpusError
from retriever.vectors import Encoder

MAX_TOKENS = 256  # of a text, unless the folder says otherwise: a passage has some 140
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
_POOLINGS = ("mean", "cls")
_OWN = "own"


@dataclasses.dataclass(frozen=True)
class Rule:
  """How hidden states become a vector: `pooling` is the mean over a text's tokens, special ones
  included, or the state of the first one (`cls`); then, if `normalize`, it gets length 1."""

  pooling: str
  normalize: bool
  query_prefix: str = ""
  passage_prefix: str = ""


RULES = {
    "e5": Rule("mean", True, "query: ", "passage: "),
    "bge": Rule("cls", True, "Represent this sentence for searching relevant passages: "),
    "minilm": Rule("mean", True),
    "contriever": Rule("mean", False),
}
# What a model is called where the rule is its own; BGE's instruction is that of its English models.
_CALLED = {"e5": r"(?<![a-z0-9])e5(?![a-z0-9])", "bge": r"(?<![a-z])bge(?!.*(-zh|-m3))",
           "minilm": r"minilm", "contriever": r"contriever"}


class SentenceEncoder(Encoder):
  """A pretrained BERT and its rule; batches are spread over all devices given.

  A text's vector does not depend on the texts beside it, but for rounding: in float32 at most 1e-5
  in any number of a vector of length 1.
  """

  NAME, VERSION = "bert", 1

  def __init__(self, spec: Mapping[str, Any], model: str | None = None,
               devices: Sequence[jax.Device] | None = None):
    """Loads what `wanted_spec` described; `model` is where it lies now, if it was moved."""
    self._spec = dict(spec)
    if spec["version"] != self.VERSION:
      raise CorpusError(f"encoder {spec['model']!r} was used by version {spec['version']} of this "
                        f"encoder, here is {self.VERSION}; build the index again with --overwrite")
    folder = model_files.find(model or spec["model"])
    if model_files.digest(folder) != spec["digest"]:
      raise CorpusError(f"{folder} is not the model that the index was built with (SHA-256 of "
                        f"weights, tokenizer and configuration differs); name the folder of "
                        f"{spec['model']}, or build the index again with --overwrite")
    shape, self._rule, dtype = bert.read_shape(folder), Rule(**spec["rule"]), DTYPES[spec["dtype"]]
    self.dim = shape.hidden_size
    self._tokenizer = batches.Tokenizer(folder, shape.vocab_size, spec["max_tokens"])
    network, rule = bert.Bert(shape, dtype), self._rule

    def forward(params, ids_BL, lengths_B, seconds_B):
      return pool(network.apply(params, ids_BL, lengths_B, seconds_B), lengths_B, rule)

    self._run = batches.Runner(forward, bert.load(folder, shape, False, dtype),
                               spec["max_tokens"], devices)

  @classmethod
  def wanted_spec(cls, name: str, dim: int | None = None, *, rule: str | None = None,
                  max_tokens: int | None = None, dtype: str | None = None) -> dict[str, Any]:
    """All that decides its vectors, and `model`, where it was found; no tensor is read.

    rule: one of RULES, or `own` for what sentence-transformers' files in the folder say; None
    chooses by the model's name, then by those files.
    """
    folder, dtype = model_files.find(name), dtype or "float32"
    shape = bert.read_shape(folder)
    if dim is not None and dim != shape.hidden_size:
      raise CorpusError(f"{name} makes vectors of {shape.hidden_size} numbers, not {dim}; leave "
                        "dim out")
    if dtype not in DTYPES:
      raise CorpusError(f"dtype is {dtype!r}, choose one of {', '.join(DTYPES)}")
    limit = shape.max_position_embeddings
    if max_tokens is None:
      max_tokens = min(_own_max_tokens(folder) or MAX_TOKENS, limit)
    if not batches.FEWEST <= max_tokens <= limit:
      raise CorpusError(f"max_tokens is {max_tokens}, wanted {batches.FEWEST} to {limit}, the "
                        "model's positions")
    local = pathlib.Path(name).is_dir()
    return {"name": cls.NAME, "version": cls.VERSION, "dim": shape.hidden_size,
            "model": str(folder.resolve()) if local else name,
            "digest": model_files.digest(folder), "max_tokens": max_tokens, "dtype": dtype,
            "rule": dataclasses.asdict(choose_rule(name, folder, rule))}

  @property
  def shapes(self) -> set[tuple[int, int]]:
    """Every (rows, length) that a batch can have."""
    return self._run.shapes

  def encode_queries(self, queries: Sequence[str]) -> Float32[np.ndarray, "Q D"]:
    return self._run(self._tokenize(queries, self._rule.query_prefix), self.dim)

  def encode_passages(self, passages: Sequence[str]) -> Float32[np.ndarray, "P D"]:
    return self._run(self._tokenize(passages, self._rule.passage_prefix), self.dim)

  def encode_stream(
      self, stream: Iterable[Sequence[str]]) -> Iterator[Float32[np.ndarray, "P D"]]:
    """Tokenizes the next batch while the devices work on one."""
    with futures.ThreadPoolExecutor(1) as ahead:
      waiting = None
      for passages in stream:
        following = ahead.submit(self._tokenize, passages, self._rule.passage_prefix)
        if waiting is not None:
          yield self._run(waiting.result(), self.dim)
        waiting = following
      if waiting is not None:
        yield self._run(waiting.result(), self.dim)

  def spec(self) -> dict[str, Any]:
    return dict(self._spec)

  def save(self, folder: pathlib.Path) -> list[str]:
    return []

  def _tokenize(self, texts: Sequence[str], prefix: str) -> batches.Tokens:
    return self._tokenizer([prefix + text for text in texts])


def pool(hidden_BLD: Float[Array, "B L D"], lengths_B: Int[Array, "B"],
         rule: Rule) -> Float[Array, "B D"]:
  r"""The vector of each text.

  v = h_1 (cls) or \sum_{t <= length} h_t / length (mean); then v / |v| if the rule normalizes.

  hidden_BLD: the last layer's states, padding included, which plays no part; lengths_B: tokens of
  each text, at least 1. Source: Wang et al., arXiv:2212.03533, section 3 (E5's masked mean).
  """
  if rule.pooling == "cls":
    pooled_BD = hidden_BLD[:, 0]
  else:
    inside_BL = jnp.arange(hidden_BLD.shape[1], dtype=jnp.int32)[None] < lengths_B[:, None]
    kept_BLD = jnp.where(inside_BL[:, :, None], hidden_BLD, np.float32(0))
    pooled_BD = kept_BLD.sum(axis=1) / lengths_B[:, None].astype(jnp.float32)
  if not rule.normalize:
    return pooled_BD
  norms_B1 = jnp.sqrt(jnp.square(pooled_BD).sum(axis=1, keepdims=True))
  return pooled_BD / jnp.maximum(norms_B1, np.float32(1e-12))


def choose_rule(name: str, folder: pathlib.Path, asked: str | None = None) -> Rule:
  """The rule asked for, else the one of the model's name, else the one of its own files."""
  choices = f"name a rule: {', '.join(RULES)}, or {_OWN} for what the folder's own files say"
  if asked in RULES:
    return RULES[asked]
  if asked not in (None, _OWN):
    raise CorpusError(f"rule {asked!r} is not known; {choices}")
  own, called = _own_rule(folder), _called(name)
  named = [rule for rule, pattern in _CALLED.items() if re.search(pattern, called.lower())]
  if asked is None and len(named) == 1:
    rule = RULES[named[0]]
    if own and (own.pooling, own.normalize) != (rule.pooling, rule.normalize):
      raise CorpusError(f"{called} is called like {named[0]} (pooling {rule.pooling}, normalize "
                        f"{rule.normalize}), its own files say pooling {own.pooling}, normalize "
                        f"{own.normalize}; {choices}")
    return rule
  if own is None:
    raise CorpusError(f"nothing says how {called!r} makes a vector: its name is no known one and "
                      f"{folder} has no {model_files.MODULES}; {choices}")
  return own


def _called(name: str) -> str:
  """A folder's or hub id's last part; in the hub's cache, the part that has the model's name."""
  path = pathlib.Path(name)
  parts = path.resolve().parts if path.is_dir() else path.parts
  return parts[-3] if "snapshots" in parts[-2:-1] and len(parts) > 2 else parts[-1]


def _own_rule(folder: pathlib.Path) -> Rule | None:
  """What the files of sentence-transformers say, or None without them; steps unknown are errors."""
  path = folder / model_files.MODULES
  if not path.is_file():
    return None
  steps = [str(step.get("type")).rpartition(".")[2] if isinstance(step, dict) else repr(step)
           for step in model_files.read_json(path, list)]
  if steps not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
    raise CorpusError(f"{path} lists {', '.join(steps)}; wanted Transformer, Pooling and perhaps "
                      "Normalize, choose another model")
  pooling = model_files.read_json(folder / model_files.POOLING)
  modes = [key.removeprefix("pooling_mode_").removesuffix("_token").removesuffix("_tokens")
           for key, on in pooling.items() if key.startswith("pooling_mode_") and on]
  modes = modes or [pooling.get("pooling_mode")]
  if len(modes) != 1 or modes[0] not in _POOLINGS:
    raise CorpusError(f"{folder / model_files.POOLING} asks for pooling {modes}, known are "
                      f"{', '.join(_POOLINGS)}; choose another model")
  prompts = {}
  if (folder / model_files.PROMPTS).is_file():
    prompts = model_files.read_json(folder / model_files.PROMPTS).get("prompts") or {}
  said = lambda *keys: next((str(prompts[k]) for k in keys if prompts.get(k)), "")
  return Rule(modes[0], "Normalize" in steps, said("query"), said("document", "passage"))


def _own_max_tokens(folder: pathlib.Path) -> int | None:
  path = folder / model_files.LIMITS
  limit = model_files.read_json(path).get("max_seq_length") if path.is_file() else None
  return limit if isinstance(limit, int) and limit > 0 else None
