"""The three tokenizers of the tests, each loaded once: bytes, Qwen2.5's and SmolLM2's."""

from __future__ import annotations

import functools
import os
import pathlib

import pytest

from searchr1_jax.testing import ByteTokenizer
from searchr1_jax.text.tokenizer import Tokenizer

NAMES = ("bytes", "qwen2.5-tokenizer", "smollm2-135m")


@functools.cache
def load(name: str) -> Tokenizer:
  """The tokenizer of that name; skips the test where the real ones have not been built."""
  if name == "bytes":
    return ByteTokenizer()
  folder = os.environ.get("SEARCHR1_ASSETS")
  if not folder:
    pytest.skip("SEARCHR1_ASSETS is unset: `make assets` builds the real tokenizers")
  return Tokenizer.load(pathlib.Path(folder) / name)
