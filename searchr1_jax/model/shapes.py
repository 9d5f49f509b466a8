"""The families this decoder speaks, as data: one `DecoderShape` a model, read from its config.json."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Mapping

from searchr1_jax.types import UserError


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Llama 3's stretch of the rotary wavelengths (Llama 3.1 model card; numbers without unit)."""

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_positions: int


@dataclasses.dataclass(frozen=True)
class DecoderShape:
  """Sizes and switches of a decoder; everything in which Qwen2.5, Qwen3 and Llama differ."""

  vocab_size: int
  width: int
  mlp_width: int
  layers: int
  heads: int
  kv_heads: int
  head_size: int
  rope_theta: float
  norm_eps: float
  tied_embeddings: bool
  qkv_bias: bool = False
  qk_norm: bool = False
  rope_scaling: RopeScaling | None = None
  max_positions: int = 32768
  family: str = "qwen2"

  def __post_init__(self):
    if self.heads % self.kv_heads:
      raise UserError(f"{self.heads} attention heads cannot share {self.kv_heads} key-value heads "
                      "evenly; the number of heads must be a multiple of it")
    if self.head_size % 2:
      raise UserError(f"head size {self.head_size} is odd; rotary positions need an even one")


# What each family switches on, beyond the sizes that its config.json spells out.
_FAMILIES: Mapping[str, Mapping[str, bool]] = {
    "qwen2": dict(qkv_bias=True, qk_norm=False),
    "qwen3": dict(qkv_bias=False, qk_norm=True),
    "llama": dict(qkv_bias=False, qk_norm=False),
}


def _qwen2(width: int, mlp_width: int, layers: int, heads: int, kv_heads: int, *,
           tied: bool = False, eps: float = 1e-6, positions: int = 131072) -> DecoderShape:
  return DecoderShape(
      vocab_size=151936 if tied else 152064, width=width, mlp_width=mlp_width, layers=layers,
      heads=heads, kv_heads=kv_heads, head_size=width // heads, rope_theta=1e6, norm_eps=eps,
      tied_embeddings=tied, max_positions=positions, family="qwen2", **_FAMILIES["qwen2"])


def _qwen3(width: int, mlp_width: int, layers: int, heads: int, *,
           tied: bool = False) -> DecoderShape:
  return DecoderShape(
      vocab_size=151936, width=width, mlp_width=mlp_width, layers=layers, heads=heads, kv_heads=8,
      head_size=128, rope_theta=1e6, norm_eps=1e-6, tied_embeddings=tied, max_positions=40960,
      family="qwen3", **_FAMILIES["qwen3"])


def _llama3(width: int, mlp_width: int, layers: int, heads: int, *, head_size: int = 128,
            tied: bool = False, factor: float) -> DecoderShape:
  return DecoderShape(
      vocab_size=128256, width=width, mlp_width=mlp_width, layers=layers, heads=heads, kv_heads=8,
      head_size=head_size, rope_theta=5e5, norm_eps=1e-5, tied_embeddings=tied,
      rope_scaling=RopeScaling(factor, 1.0, 4.0, 8192), max_positions=131072, family="llama",
      **_FAMILIES["llama"])


# What config.json says in the published repository of that very name.
NAMED: Mapping[str, DecoderShape] = {
    "Qwen2.5-0.5B": _qwen2(896, 4864, 24, 14, 2, tied=True, positions=32768),
    "Qwen2.5-1.5B": _qwen2(1536, 8960, 28, 12, 2, tied=True),
    "Qwen2.5-3B": _qwen2(2048, 11008, 36, 16, 2, tied=True, positions=32768),
    "Qwen2.5-7B": _qwen2(3584, 18944, 28, 28, 4),
    "Qwen2.5-14B": _qwen2(5120, 13824, 48, 40, 8, eps=1e-5),
    "Qwen2.5-32B": _qwen2(5120, 27648, 64, 40, 8, eps=1e-5),
    "Qwen2.5-72B": _qwen2(8192, 29568, 80, 64, 8, eps=1e-5),
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32),
    "Qwen3-14B": _qwen3(5120, 17408, 40, 40),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64),
    "Llama-3.2-1B": _llama3(2048, 8192, 16, 32, head_size=64, tied=True, factor=32.0),
    "Llama-3.2-3B": _llama3(3072, 8192, 28, 24, tied=True, factor=32.0),
    "Llama-3.1-8B": _llama3(4096, 14336, 32, 32, factor=8.0),
}


def from_hugging_face(config: Mapping[str, Any], where: str = "config.json") -> DecoderShape:
  """The shape a Hugging Face `config.json` describes; what it asks for and we lack is refused."""
  family = config.get("model_type")
  if not isinstance(family, str) or family not in _FAMILIES:
    raise UserError(f"{where}: model_type {family!r} is not supported; wanted one of "
                    f"{sorted(_FAMILIES)}")
  rope = _rope_parameters(config, where)
  _refuse_unsupported(config, rope, where)
  wanted = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads")
  if missing := [k for k in wanted if config.get(k) is None]:
    raise UserError(f"{where}: missing {', '.join(missing)}; is this a whole Hugging Face folder?")
  count = functools.partial(_value, config, where, _COUNT)
  width, heads = count("hidden_size"), count("num_attention_heads")
  return DecoderShape(
      vocab_size=count("vocab_size"),
      width=width,
      mlp_width=count("intermediate_size"),
      layers=count("num_hidden_layers"),
      heads=heads,
      kv_heads=count("num_key_value_heads", heads),
      head_size=count("head_dim", width // heads),
      rope_theta=float(_value(rope, where, _NUMBER, "rope_theta", 10000.0)),
      norm_eps=float(_value(config, where, _NUMBER, "rms_norm_eps", 1e-6)),
      tied_embeddings=_value(config, where, _SWITCH, "tie_word_embeddings", False),
      rope_scaling=_rope_scaling(rope, where),
      max_positions=count("max_position_embeddings", 32768),
      family=family,
      **_FAMILIES[family],
  )


def to_hugging_face(shape: DecoderShape, **extra: Any) -> dict[str, Any]:
  """The `config.json` that `from_hugging_face` reads back as `shape`."""
  name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}[shape.family]
  scaling = shape.rope_scaling
  return {
      "architectures": [f"{name}ForCausalLM"],
      "model_type": shape.family,
      "vocab_size": shape.vocab_size,
      "hidden_size": shape.width,
      "intermediate_size": shape.mlp_width,
      "num_hidden_layers": shape.layers,
      "num_attention_heads": shape.heads,
      "num_key_value_heads": shape.kv_heads,
      "head_dim": shape.head_size,
      "rope_theta": shape.rope_theta,
      "rope_scaling": None if scaling is None else {
          "rope_type": "llama3",
          "factor": scaling.factor,
          "low_freq_factor": scaling.low_freq_factor,
          "high_freq_factor": scaling.high_freq_factor,
          "original_max_position_embeddings": scaling.original_max_positions,
      },
      "rms_norm_eps": shape.norm_eps,
      "tie_word_embeddings": shape.tied_embeddings,
      "attention_bias": False,
      "hidden_act": "silu",
      "max_position_embeddings": shape.max_positions,
      **extra,
  }


def count_parameters(shape: DecoderShape) -> int:
  """Number of parameters of the policy, the output head counted once if it is tied."""
  heads = (shape.heads + 2 * shape.kv_heads) * shape.head_size
  attention = shape.width * heads + shape.heads * shape.head_size * shape.width
  bias = heads if shape.qkv_bias else 0
  norms = 2 * shape.width + (2 * shape.head_size if shape.qk_norm else 0)
  layer = attention + bias + norms + 3 * shape.width * shape.mlp_width
  embeddings = shape.vocab_size * shape.width * (1 if shape.tied_embeddings else 2)
  return shape.layers * layer + embeddings + shape.width


_COUNT, _NUMBER = "a whole number above 0", "a finite number above 0"
_SWITCH, _OBJECT, _LIST = "true or false", "an object", "a list"
_MEANS = {
    _COUNT: lambda x: type(x) is int and x > 0,  # true and false are ints of another type
    _NUMBER: lambda x: type(x) in (int, float) and 0 < x < 3.4e38,  # what float32 holds
    _SWITCH: lambda x: type(x) is bool,
    _OBJECT: lambda x: isinstance(x, Mapping),
    _LIST: lambda x: isinstance(x, (list, tuple)),
}


def _value(config: Mapping[str, Any], where: str, wanted: str, key: str,
           default: Any = None) -> Any:
  """What a key holds, if that is what is wanted there; null says as little as no key at all."""
  value = default if config.get(key) is None else config[key]
  if not _MEANS[wanted](value):
    raise UserError(f"{where}: {key} is {value!r}, wanted {wanted}")
  return value


def _refuse_unsupported(config: Mapping[str, Any], rope: Mapping[str, Any], where: str) -> None:
  if config.get("use_sliding_window"):
    raise UserError(f"{where}: use_sliding_window is true; sliding-window attention is not "
                    "supported, wanted false")
  kinds = map(str, _value(config, where, _LIST, "layer_types", ()))
  others = sorted(set(kinds) - {"full_attention"})
  if others:
    raise UserError(f"{where}: layer_types names {', '.join(others)}; only full_attention is "
                    "supported")
  if config.get("hidden_act", "silu") != "silu":
    raise UserError(f"{where}: hidden_act {config['hidden_act']!r} is not supported, wanted 'silu'")
  if config.get("model_type") == "llama":
    for key in ("attention_bias", "mlp_bias"):
      if config.get(key):
        raise UserError(f"{where}: {key} is true; Llama with biases is not supported")
  if config.get("model_type") == "qwen3" and config.get("attention_bias"):
    raise UserError(f"{where}: attention_bias is true; Qwen3 with biases is not supported")
  if (part := rope.get("partial_rotary_factor", 1.0)) != 1.0:
    raise UserError(f"{where}: partial_rotary_factor is {part!r}; only whole heads are rotated, "
                    "wanted 1.0")
  if config.get("quantization_config"):
    raise UserError(f"{where}: quantization_config is set; only plain weights are supported")
  if config.get("vision_config") is not None:
    raise UserError(f"{where}: vision_config is set; only text models are supported")


def _rope_parameters(config: Mapping[str, Any], where: str) -> dict[str, Any]:
  """Old files keep rope_theta beside rope_scaling, new ones keep both in rope_parameters."""
  out = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
  for holder in ("rope_scaling", "rope_parameters"):
    for key, value in _value(config, where, _OBJECT, holder, {}).items():
      if isinstance(value, Mapping):
        raise UserError(f"{where}: {holder}.{key} is {value!r}; positions by layer type are not "
                        "supported, wanted one set for all layers")
      if value is not None:
        out[key] = value
  return {key: value for key, value in out.items() if value is not None}


_LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor",
                "original_max_position_embeddings")


def _rope_scaling(rope: Mapping[str, Any], where: str) -> RopeScaling | None:
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind == "default":
    return None
  if kind != "llama3":
    raise UserError(f"{where}: rope type {kind!r} is not supported; wanted 'default' or 'llama3'")
  missing = [k for k in _LLAMA3_ROPE if k not in rope]
  if missing:
    raise UserError(f"{where}: rope type 'llama3' lacks {', '.join(missing)}")
  factor, low, high = (float(_value(rope, where, _NUMBER, key)) for key in _LLAMA3_ROPE[:3])
  if low >= high:
    raise UserError(f"{where}: low_freq_factor is {low} and high_freq_factor is {high}; wanted the "
                    "low one below the high one")
  return RopeScaling(factor, low, high, _value(rope, where, _COUNT, _LLAMA3_ROPE[3]))
