"""Small BERT folders for the tests: random ones that PyTorch saved, and one worked out by hand."""

from __future__ import annotations

import json
import pathlib
import string
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from retriever import encoders, sentences

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["query", "passage", "the", "of", "river", "city", "long", "flows"]
VOCAB = [*SPECIAL, *string.ascii_lowercase, *("##" + c for c in string.ascii_lowercase),
         *":.,\"'", *WORDS]


def config(**changed: Any) -> dict[str, Any]:
  """config.json of a small BERT."""
  return {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": len(VOCAB),
          "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
          "intermediate_size": 40, "max_position_embeddings": 64, "type_vocab_size": 2,
          "layer_norm_eps": 1e-7, "hidden_act": "gelu", "pad_token_id": 0} | changed


def write_tokenizer(folder: pathlib.Path, vocab: list[str] = VOCAB) -> None:
  """A WordPiece tokenizer in BERT's manner; like MiniLM's own it asks for padding and for a cut."""
  import tokenizers
  from tokenizers import models, normalizers, pre_tokenizers, processors
  ids = {word: i for i, word in enumerate(vocab)}
  tokenizer = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
  tokenizer.normalizer = normalizers.BertNormalizer()
  tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  tokenizer.post_processor = processors.TemplateProcessing(
      single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
      special_tokens=[(t, ids[t]) for t in ("[CLS]", "[SEP]")])
  tokenizer.enable_truncation(12)
  tokenizer.enable_padding(length=12)
  tokenizer.save(str(folder / "tokenizer.json"))


def random_bert(folder: pathlib.Path, kind: str = "BertModel", seed: int = 0,
                **changed: Any) -> Any:
  """Writes a folder of that class of transformers, every parameter of which counts; the model."""
  torch = pytest.importorskip("torch", reason="PyTorch is the reference here: pip install .[dev]")
  import transformers
  torch.manual_seed(seed)
  sizes = {k: v for k, v in config(**changed).items() if k not in ("model_type", "architectures")}
  model = getattr(transformers, kind)(transformers.BertConfig(**sizes)).eval()
  with torch.no_grad():
    for name, p in model.named_parameters():
      noise = torch.randn_like(p)
      inputs = p.shape[1] if p.ndim == 2 and "embeddings" not in name else 1
      p.copy_(1 + 0.3 * noise if "LayerNorm.weight" in name else
              2 * noise / inputs**0.5 if p.ndim == 2 else 0.5 * noise)
  model.save_pretrained(folder)
  write_tokenizer(folder)
  return model


def opened(folder: pathlib.Path, **options: Any) -> sentences.SentenceEncoder:
  """The encoder of a folder."""
  return encoders.fit(encoders.wanted_spec(str(folder), **options), [])


def rewrite(folder: pathlib.Path, change: Any) -> None:
  """The folder's tensors, changed: `change` takes and gives a dictionary of them."""
  path = folder / "model.safetensors"
  tensors = change(dict(safetensors.numpy.load_file(path)))
  safetensors.numpy.save_file(tensors, path)


# Each has mean 0 and variance 1, so that a norm leaves it as it is.
BY_HAND = {"[CLS]": (1, 1, -1, -1), "[SEP]": (1, -1, 1, -1), "query": (1, -1, -1, 1),
           "passage": (-1, 1, 1, -1), ":": (-1, 1, -1, 1), "a": (-1, -1, 1, 1)}


def by_hand(folder: pathlib.Path) -> pathlib.Path:
  """A BERT whose every hidden state is its token's own row of BY_HAND: all else in it is 0."""
  vocab = [*SPECIAL, *(w for w in BY_HAND if w not in SPECIAL)]
  sizes = config(vocab_size=len(vocab), hidden_size=4, num_hidden_layers=1, num_attention_heads=2,
                 intermediate_size=4, max_position_embeddings=16, layer_norm_eps=1e-12)
  zeros = lambda *shape: np.zeros(shape, np.float32)
  tensors = {
      "embeddings.word_embeddings.weight": np.array(
          [BY_HAND.get(w, (1, 1, -1, -1)) for w in vocab], np.float32),
      "embeddings.position_embeddings.weight": zeros(16, 4),
      "embeddings.token_type_embeddings.weight": zeros(2, 4)}
  layer = "encoder.layer.0."
  for name in ("attention.self.query", "attention.self.key", "attention.self.value",
               "attention.output.dense", "intermediate.dense", "output.dense"):
    tensors |= {f"{layer}{name}.weight": zeros(4, 4), f"{layer}{name}.bias": zeros(4)}
  for name in ("embeddings", f"{layer}attention.output", f"{layer}output"):
    tensors |= {f"{name}.LayerNorm.weight": zeros(4) + 1, f"{name}.LayerNorm.bias": zeros(4)}
  folder.mkdir(exist_ok=True)
  (folder / "config.json").write_text(json.dumps(sizes))
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")
  write_tokenizer(folder, vocab)
  return folder
