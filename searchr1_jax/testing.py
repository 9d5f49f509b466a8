"""Small stand-ins for tests and notebooks: a byte tokenizer, a dictionary search."""

from __future__ import annotations

from typing import Callable, Mapping, Sequence

import tokenizers

from retriever.protocol import Passage, RetrievalError, Search
from searchr1_jax.text.tokenizer import Messages, Tokenizer


class ByteTokenizer(Tokenizer):
  """A real `Tokenizer` without merges: ids 0 to 255 are the bytes, 256 is <eos>, 257 is <pad>."""

  def __init__(self, render_chat: Callable[[Messages], str] | None = None):
    # Byte-level BPE writes byte b as one printable character; its own alphabet, sorted, lists
    # them with the hidden bytes last.
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    shown = {c: ord(c) for c in alphabet if ord(c) < 256}
    hidden = zip((c for c in alphabet if ord(c) >= 256),
                 (b for b in range(256) if chr(b) not in shown))
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=shown | dict(hidden), merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", "<pad>"])
    super().__init__(
        backend, name="bytes", eos_ids={256}, pad_id=257, render_chat=render_chat)


def dictionary_search(passages: Mapping[str, Sequence[Passage]]) -> Search:
  """A search that knows its queries by heart; one that it doesn't know is an engine's failure."""

  def search(queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    unknown = [q for q in queries if q not in passages]
    if unknown:
      raise RetrievalError(f"the dictionary holds no entry for {unknown[0]!r}")
    return [list(passages[q][:top_k]) for q in queries]

  return search
