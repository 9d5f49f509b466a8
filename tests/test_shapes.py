"""The published sizes by name, and configs that describe something else refused by name."""

from __future__ import annotations

import math

import pytest
import tiny_models as tiny

from searchr1_jax.model import shapes, weights
from searchr1_jax.types import UserError

# What the models' own pages say, tied heads counted once.
PUBLISHED = {
    "Qwen2.5-0.5B": 494_032_768, "Qwen2.5-1.5B": 1_543_714_304, "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512, "Qwen2.5-14B": 14_770_033_664, "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920, "Qwen3-1.7B": 1_720_574_976, "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360, "Qwen3-14B": 14_768_307_200, "Qwen3-32B": 32_762_123_264,
    "Llama-3.2-1B": 1_235_814_400, "Llama-3.2-3B": 3_212_749_824, "Llama-3.1-8B": 8_030_261_248,
}


def test_every_published_count_has_its_shape():
  assert shapes.NAMED.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_named_shape_has_the_published_size_and_survives_its_config(name):
  shape = shapes.NAMED[name]
  assert shapes.count_parameters(shape) == PUBLISHED[name]
  assert sum(math.prod(e.stored) for e in weights.entries(shape).values()) == PUBLISHED[name]
  assert shapes.from_hugging_face(shapes.to_hugging_face(shape)) == shape


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen3-4B", "Llama-3.2-3B"])
def test_transformers_builds_the_same_tensors(name):
  torch = tiny.torch_here()
  import transformers

  config = shapes.to_hugging_face(shapes.NAMED[name])
  with torch.device("meta"):
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config))
  theirs = {n: tuple(p.shape) for n, p in model.named_parameters()}
  assert theirs == {n: e.stored for n, e in weights.entries(shapes.NAMED[name]).items()}


@pytest.mark.parametrize("start, expected", [
    ("Qwen2.5-0.5B", (1e6, 1e-6, 32768, 64, None)),
    ("Qwen2.5-1.5B", (1e6, 1e-6, 131072, 128, None)),
    ("Qwen2.5-3B", (1e6, 1e-6, 32768, 128, None)),
    ("Qwen2.5-7B", (1e6, 1e-6, 131072, 128, None)),
    ("Qwen2.5-14B", (1e6, 1e-5, 131072, 128, None)),
    ("Qwen2.5-32B", (1e6, 1e-5, 131072, 128, None)),
    ("Qwen2.5-72B", (1e6, 1e-5, 131072, 128, None)),
    ("Qwen3-", (1e6, 1e-6, 40960, 128, None)),
    ("Llama-3.2-1B", (5e5, 1e-5, 131072, 64, shapes.RopeScaling(32.0, 1.0, 4.0, 8192))),
    ("Llama-3.2-3B", (5e5, 1e-5, 131072, 128, shapes.RopeScaling(32.0, 1.0, 4.0, 8192))),
    ("Llama-3.1-8B", (5e5, 1e-5, 131072, 128, shapes.RopeScaling(8.0, 1.0, 4.0, 8192))),
])
def test_the_numbers_that_no_count_shows_are_the_published_ones(start, expected):
  found = {(s.rope_theta, s.norm_eps, s.max_positions, s.head_size, s.rope_scaling)
           for name, s in shapes.NAMED.items() if name.startswith(start)}
  assert found == {expected}


def test_a_published_config_is_read():
  """Qwen2.5-7B's config.json key by key: it names a window and uses none."""
  published = {
      "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu",
      "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
      "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2",
      "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
      "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
      "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
      "use_mrope": False, "use_sliding_window": False, "vocab_size": 152064}
  assert shapes.from_hugging_face(published) == shapes.NAMED["Qwen2.5-7B"]


@pytest.mark.parametrize("name, change, named", [
    ("Qwen3-0.6B", {"model_type": "qwen3_moe", "num_experts": 128}, "qwen3_moe"),
    ("Qwen2.5-3B", {"model_type": "qwen2_vl", "vision_config": {}}, "qwen2_vl"),
    ("Qwen2.5-3B", {"model_type": "qwen2_5_vl", "vision_config": {}}, "qwen2_5_vl"),
    ("Llama-3.2-3B", {"model_type": "mllama", "vision_config": {}}, "mllama"),
    ("Qwen2.5-3B", {"vision_config": {"depth": 32}}, "vision_config"),
    ("Qwen2.5-3B", {"use_sliding_window": True, "max_window_layers": 28, "sliding_window": 4096},
     "use_sliding_window"),
    ("Qwen3-0.6B", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ("Llama-3.1-8B", {"layer_types": ["chunked_attention"]}, "chunked_attention"),
    ("Qwen2.5-3B", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
    ("Qwen2.5-3B", {"rope_scaling": {"type": "mrope", "mrope_section": [16]}}, "mrope"),
    ("Qwen2.5-3B", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
])
def test_what_only_resembles_these_models_is_refused_by_name(name, change, named):
  config = shapes.to_hugging_face(shapes.NAMED[name]) | change
  with pytest.raises(UserError, match=named):
    shapes.from_hugging_face(config)


LLAMA3 = shapes.to_hugging_face(shapes.NAMED["Llama-3.1-8B"])["rope_scaling"]


@pytest.mark.parametrize("key, bad", [
    *((key, bad) for bad in (0, -1, True, "8", 8.0, [8]) for key in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")),
    *((key, bad) for bad in (0, -1.0, True, "1e-6", math.inf, math.nan, 10**400) for key in (
        "rope_theta", "rms_norm_eps")),
    ("tie_word_embeddings", "false"), ("tie_word_embeddings", 1),
    ("rope_scaling", "llama3"), ("rope_parameters", [1]), ("layer_types", 3),
    ("model_type", ["llama"]), ("model_type", None)])
def test_a_value_of_another_kind_is_named_with_what_was_wanted(key, bad):
  config = shapes.to_hugging_face(shapes.NAMED["Llama-3.1-8B"]) | {key: bad}
  with pytest.raises(UserError) as error:
    shapes.from_hugging_face(config, "mine/config.json")
  for part in ("mine/config.json", key, repr(bad), "wanted"):
    assert part in str(error.value)


@pytest.mark.parametrize("change, says", [
    ({"factor": "8"}, "factor is '8', wanted a finite number above 0"),
    ({"original_max_position_embeddings": 0.5}, "is 0.5, wanted a whole number above 0"),
    ({"low_freq_factor": 4.0}, "low_freq_factor is 4.0 and high_freq_factor is 4.0"),
    ({"factor": None}, "lacks factor"),
    ({"full_attention": {"rope_theta": 1e6}}, "rope_parameters.full_attention is {'rope_theta'")])
def test_rotary_positions_that_mean_nothing_are_refused_by_name(change, says):
  config = shapes.to_hugging_face(shapes.NAMED["Llama-3.1-8B"]) | {
      "rope_scaling": None, "rope_parameters": LLAMA3 | {"rope_theta": 5e5} | change}
  with pytest.raises(UserError, match=says):
    shapes.from_hugging_face(config)


def test_null_says_as_little_as_no_key_at_all():
  config = shapes.to_hugging_face(shapes.NAMED["Qwen2.5-3B"])
  optional = ("num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps", "rope_scaling",
              "tie_word_embeddings", "max_position_embeddings", "layer_types")
  absent = {k: v for k, v in config.items() if k not in optional}
  assert shapes.from_hugging_face(absent | dict.fromkeys(optional)) == (
      shapes.from_hugging_face(absent))
  with pytest.raises(UserError, match="missing vocab_size"):
    shapes.from_hugging_face(config | {"vocab_size": None})
  # Sixteen heads in a width of eight leave none of it to each.
  with pytest.raises(UserError, match="head_dim is 0, wanted a whole number above 0"):
    shapes.from_hugging_face(absent | {"hidden_size": 8})
