"""A tokenizer for the generated worlds: byte-level BPE whose tokens are syllables, words and tags."""

from __future__ import annotations

import json
import pathlib
import re

from searchr1_jax.text import actions, prompts
from searchr1_jax.worlds import grammar, names

EOS = "<|end|>"
_TAGS = tuple(f"<{slash}{name}>" for name in actions.TAGS
              for slash in ("", "/"))
_TEMPLATE_WORDS = ("What", "is", "the", "of", "need", "found")
# In this order a text falls into pre-tokens: tags, a passage's head, line breaks, words, the rest.
_PATTERN = "|".join([
    *_TAGS, r'Doc \d+\(Title: "', r'"\)', r"\n+", r" ?[A-Za-z]+", r" ?[^\sA-Za-z]", r"\s"])


def words() -> tuple[str, ...]:
  """Every ordinary word that a world can say, in a fixed order."""
  texts = [prompts.INVALID_NOTICE, prompts.NO_SEARCH_LEFT_NOTICE, *_TEMPLATE_WORDS,
           *grammar.COMPANY_WORDS, *grammar.PERFUME_WORDS, *grammar.BY_NAME]
  for relation in grammar.RELATIONS:
    texts += relation.nouns + relation.sentences
  for ways in grammar.DISTRACTIONS.values():
    texts += ways
  found = re.findall(r"[A-Za-z]+", " ".join(re.sub(r"\{\w+\}", "", t) for t in texts))
  return tuple(dict.fromkeys(found))


def build_tokenizer(folder: str | pathlib.Path) -> None:
  """Writes tokenizer.json and tokenizer_config.json as a Hugging Face folder has them."""
  from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

  vocab: dict[str, int] = {}
  add = lambda token: vocab.setdefault(token, len(vocab))
  for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
    add(byte)
  merges = []
  for syllable in names.SYLLABLES:
    for first, second in ((syllable[0], syllable[1]), (syllable[0].upper(), syllable[1])):
      add(first + second)
      merges.append((first, second))
  for syllable in names.SYLLABLES:
    add("Ġ" + syllable.capitalize())
    merges.append(("Ġ", syllable.capitalize()))
  # Whole pre-tokens are looked up before any merge, so words and tags need none.
  for whole in (*_TAGS, *(f'DocĠ{i}(Title:Ġ"' for i in range(1, 6)), '")', "ĊĊ"):
    add(whole)
  for word in words():
    add("Ġ" + word)
  add("What")
  tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
      pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(json.dumps({
      "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": EOS,
      "model_max_length": 1024}, indent=2) + "\n")
