"""BERT in Flax Linen, used purely: `apply` on parameters read from a Hugging Face folder.

Axes: B texts, L and M tokens, D width, H heads, E a head's size.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retriever import model_files
from retriever.protocol import CorpusError

Params = Mapping[str, Any]

# Optional keys of config.json whose other values change the network, and the only value known.
_ONLY = {"hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False,
         "add_cross_attention": False}
_FAR = np.float32(-1e9)  # added to the score of a token that is padding: its weight becomes 0
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}


@dataclasses.dataclass(frozen=True)
class BertShape:
  """The sizes of a BERT, as its config.json gives them."""

  vocab_size: int
  hidden_size: int
  num_hidden_layers: int
  num_attention_heads: int
  intermediate_size: int
  max_position_embeddings: int
  type_vocab_size: int
  layer_norm_eps: float

  @classmethod
  def from_config(cls, config: Mapping[str, Any], where: str) -> BertShape:
    """Reads config.json's object; what this network lacks is refused by name."""
    if config.get("model_type") != "bert":
      raise CorpusError(f"{where} is of model_type {config.get('model_type')!r}, wanted 'bert' "
                        "(E5, BGE, MiniLM, Contriever and their like in English)")
    for key, only in _ONLY.items():
      if config.get(key, only) != only:
        raise CorpusError(f"{where} has {key} {config[key]!r}, only {only!r} is known; choose "
                          "another model")
    read = {}
    for field in dataclasses.fields(cls):
      value, whole = config.get(field.name), field.name != "layer_norm_eps"
      kinds = int if whole else (int, float)
      if not isinstance(value, kinds) or isinstance(value, bool) or not value > 0:
        raise CorpusError(f"{where} has {field.name} {value!r}, wanted a positive "
                          f"{'integer' if whole else 'number'}; download it again")
      read[field.name] = value if whole else float(value)
    if read["hidden_size"] % read["num_attention_heads"]:
      raise CorpusError(f"{where} has hidden_size {read['hidden_size']}, which its "
                        f"{read['num_attention_heads']} attention heads do not divide")
    return cls(**read)


class Layer(nn.Module):
  """Attention, then a network a token, each added to what it read and normalised."""

  shape: BertShape
  dtype: Any

  @nn.compact
  def __call__(self, x_BLD: Float[Array, "B L D"], far_BL: Float[Array, "B L"]):
    s, (rows, length, width) = self.shape, x_BLD.shape
    dense, norm = _makers(self.shape, self.dtype)
    heads, size = s.num_attention_heads, width // s.num_attention_heads
    # One product for queries, keys and values; heads in front, so that the products that follow
    # read whole blocks (on CPUs, letting the compiler order the axes takes up to twice as long).
    qkv_BL3HE = dense(3 * width, "qkv")(x_BLD).reshape(rows, length, 3, heads, size)
    q_BHLE, k_BHLE, v_BHLE = qkv_BL3HE.transpose(2, 0, 3, 1, 4)
    precision = _precision(self.dtype)
    scores_BHLM = jnp.einsum("bhle,bhme->bhlm", q_BHLE, k_BHLE, precision=precision,
                             preferred_element_type=jnp.float32)
    weights_BHLM = nn.softmax(scores_BHLM * np.float32(size**-0.5) + far_BL[:, None, None, :])
    read_BHLE = jnp.einsum("bhlm,bhme->bhle", weights_BHLM.astype(self.dtype), v_BHLE,
                           precision=precision)
    read_BLD = read_BHLE.transpose(0, 2, 1, 3).reshape(x_BLD.shape)
    x_BLD = norm("attention_norm")(x_BLD + _f32(dense(width, "out")(read_BLD)))
    inner = nn.gelu(dense(s.intermediate_size, "up")(x_BLD), approximate=False)
    return norm("mlp_norm")(x_BLD + _f32(dense(width, "down")(inner))), None


class Bert(nn.Module):
  """The hidden state of every token after the last layer, in float32.

  dtype: of the products, float32 (with full precision on every device) or bfloat16; sums, norms
  and softmax are in float32 in either.
  """

  shape: BertShape
  dtype: Any

  @nn.compact
  def __call__(self, ids_BL: Int[Array, "B L"], lengths_B: Int[Array, "B"],
               seconds_B: Int[Array, "B"]) -> Float[Array, "B L D"]:
    """ids: tokens, then padding; lengths: how many are tokens; seconds: where each text's second
    part begins (tokens of type 1), its length if it has none. Padding changes nothing."""
    s, length = self.shape, ids_BL.shape[1]
    table = lambda name, n: self.param(name, nn.initializers.normal(0.02), (n, s.hidden_size))
    at_1L = jnp.arange(length, dtype=jnp.int32)[None]
    types_BL = (at_1L >= seconds_B[:, None]).astype(jnp.int32)
    x_BLD = (_f32(table("word", s.vocab_size)[ids_BL])
             + _f32(table("position", s.max_position_embeddings)[:length])[None]
             + _f32(table("type", s.type_vocab_size)[types_BL]))
    x_BLD = _makers(s, self.dtype)[1]("norm")(x_BLD)
    far_BL = jnp.where(at_1L < lengths_B[:, None], np.float32(0), _FAR)
    layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True},
                     length=s.num_hidden_layers, in_axes=nn.broadcast)
    return layers(s, self.dtype, name="layers")(x_BLD, far_BL)[0]


class BertScorer(nn.Module):
  """The one number that BERT gives a pair of texts: tanh(h_0 · W + b) · w + c, in float32."""

  shape: BertShape
  dtype: Any

  @nn.compact
  def __call__(self, ids_BL: Int[Array, "B L"], lengths_B: Int[Array, "B"],
               seconds_B: Int[Array, "B"]) -> Float[Array, "B"]:
    hidden_BLD = Bert(self.shape, self.dtype, name="bert")(ids_BL, lengths_B, seconds_B)
    dense, _ = _makers(self.shape, self.dtype)
    pooled_BD = jnp.tanh(dense(self.shape.hidden_size, "pooler")(hidden_BLD[:, 0]))
    return _f32(dense(1, "classifier")(pooled_BD))[:, 0]


def read_shape(folder: pathlib.Path) -> BertShape:
  """The sizes of the model in a Hugging Face folder."""
  path = folder / model_files.CONFIG
  return BertShape.from_config(model_files.read_json(path), str(path))


def load(folder: pathlib.Path, shape: BertShape, scorer: bool, dtype: Any) -> Params:
  """The parameters of a `Bert`, or of a `BertScorer`, from a folder's safetensors files.

  Names with or without the `bert.` in front, and with the old `gamma` and `beta`; heads that play
  no part are passed over. What the headers show to be wrong is listed before any tensor is read.
  """
  table = _entries(shape)
  found = {}
  for tensor in model_files.find_tensors(folder).values():
    name = _today(tensor.name)
    if name in found:
      raise CorpusError(f"{folder} holds {name} twice, as {found[name].name} and {tensor.name}")
    found[name] = tensor
  head = {n: t for n, t in found.items() if n.startswith(("pooler.", "classifier."))}
  if not scorer:
    if "classifier.weight" in head:
      raise CorpusError(f"{folder} holds a classifier: it scores pairs of texts (rerank), and is "
                        "no encoder; choose another model")
    table = {n: e for n, e in table.items() if not n.startswith(("pooler.", "classifier."))}
    found = {n: t for n, t in found.items() if n not in head}
  # Left by the training task, or a mere count of positions.
  found = {n: t for n, t in found.items() if not n.startswith("cls.") and "position_ids" not in n}
  if wrong := model_files.problems(found, {n: e.stored for n, e in table.items()}):
    raise CorpusError(f"{folder} is not the BERT that its {model_files.CONFIG} describes: "
                      f"{'; '.join(wrong[:8])}{' …' if len(wrong) > 8 else ''}")
  tree: dict[str, Any] = {}
  for name, entry in table.items():
    entry.put(tree, found[name].floats(), dtype)
  return {"params": {"bert": tree.pop("bert"), **tree} if scorer else tree["bert"]}


@dataclasses.dataclass(frozen=True)
class _Entry:
  """Where a tensor of the folder goes: the parameter, its layer and its part of the last axis."""

  path: tuple[str, ...]
  stored: tuple[int, ...]
  layer: int | None = None
  layers: int = 0
  part: int = 0
  parts: int = 1

  def put(self, tree: dict[str, Any], numbers: np.ndarray, dtype: Any) -> None:
    """Copies the tensor to its place, making the parameter if it is the first; kernels turn."""
    if self.path[-1] == "kernel":
      numbers = numbers.T
    for key in self.path[:-1]:
      tree = tree.setdefault(key, {})
    size = numbers.shape[-1]
    if self.path[-1] not in tree:
      stack = () if self.layer is None else (self.layers,)
      kept = np.float32 if self.path[-2].endswith("norm") else dtype
      tree[self.path[-1]] = np.empty(
          (*stack, *numbers.shape[:-1], size * self.parts), np.dtype(kept))
    place = tree[self.path[-1]] if self.layer is None else tree[self.path[-1]][self.layer]
    place[..., self.part * size:(self.part + 1) * size] = numbers


def _entries(shape: BertShape) -> dict[str, _Entry]:
  """Every tensor that a folder of this shape holds, by its Hugging Face name."""
  s, width = shape, shape.hidden_size
  table: dict[str, _Entry] = {}

  def dense(name, path, inputs, outputs, **place):
    table[f"{name}.weight"] = _Entry((*path, "kernel"), (outputs, inputs), **place)
    table[f"{name}.bias"] = _Entry((*path, "bias"), (outputs,), **place)

  def norm(name, path, **place):
    table[f"{name}.weight"] = _Entry((*path, "scale"), (width,), **place)
    table[f"{name}.bias"] = _Entry((*path, "bias"), (width,), **place)

  for kind, ours, n in (("word", "word", s.vocab_size), ("token_type", "type", s.type_vocab_size),
                        ("position", "position", s.max_position_embeddings)):
    table[f"embeddings.{kind}_embeddings.weight"] = _Entry(("bert", ours), (n, width))
  norm("embeddings.LayerNorm", ("bert", "norm"))
  for i in range(s.num_hidden_layers):
    name, path = f"encoder.layer.{i}", ("bert", "layers")
    place = {"layer": i, "layers": s.num_hidden_layers}
    for part, kind in enumerate(("query", "key", "value")):
      dense(f"{name}.attention.self.{kind}", (*path, "qkv"), width, width, part=part, parts=3,
            **place)
    dense(f"{name}.attention.output.dense", (*path, "out"), width, width, **place)
    norm(f"{name}.attention.output.LayerNorm", (*path, "attention_norm"), **place)
    dense(f"{name}.intermediate.dense", (*path, "up"), width, s.intermediate_size, **place)
    dense(f"{name}.output.dense", (*path, "down"), s.intermediate_size, width, **place)
    norm(f"{name}.output.LayerNorm", (*path, "mlp_norm"), **place)
  dense("pooler.dense", ("pooler",), width, width)
  dense("classifier", ("classifier",), width, 1)
  return table


def _today(name: str) -> str:
  """A tensor's name as it is written today, without the `bert.` in front."""
  stem, _, last = name.removeprefix("bert.").rpartition(".")
  return f"{stem}.{_OLD_NAMES.get(last, last)}" if "LayerNorm" in stem else f"{stem}.{last}"


def _makers(shape: BertShape, dtype: Any):
  """How a dense layer and a norm are made here."""
  dense = lambda outputs, name: nn.Dense(outputs, dtype=dtype, param_dtype=dtype, name=name,
                                         precision=_precision(dtype))
  norm = lambda name: nn.LayerNorm(epsilon=shape.layer_norm_eps, dtype=jnp.float32, name=name,
                                   use_fast_variance=False)
  return dense, norm


def _precision(dtype: Any) -> jax.lax.Precision:
  """Accelerators round float32 products to fewer bits unless told otherwise."""
  return (jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32
          else jax.lax.Precision.DEFAULT)


def _f32(x):
  return x.astype(jnp.float32)
