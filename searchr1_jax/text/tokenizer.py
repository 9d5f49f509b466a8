"""Text to ids and back. Foreign text never becomes a control token, and ids are never re-encoded.

Two encoders share one byte-level BPE model. The full one knows the added vocabulary (control
tokens such as `<|im_end|>`, and others such as `<tool_call>`) and serves the parts of a prompt
that we or the chat template wrote. The plain one has no added vocabulary at all and serves
everything else: questions, passages, notices.
"""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
import re
from typing import Callable, Iterable, Mapping, Sequence
import unicodedata

import tokenizers

from searchr1_jax.text import actions, prompts
from searchr1_jax.types import UserError

Messages = Sequence[Mapping[str, str]]

_SUPPORTED = "byte-level BPE is supported (Qwen2.5, Qwen3, Llama 3, SmolLM2, GPT-2 and their kin)"
_OUR_TAGS = frozenset(f"<{slash}{tag}>" for tag in actions.TAGS for slash in ("", "/"))


class Tokenizer:
  """A byte-level BPE tokenizer with its byte table, its control tokens and its chat template.

  `token_bytes[i]`: the bytes that token i stands for; None for a control token. `size`: ids from
  here on belong to no token, however wide the model's output is. `eos_ids`: any of them ends a
  turn. `pad_id` only fills arrays and may equal an end token.
  """

  def __init__(
      self, backend: tokenizers.Tokenizer, *, name: str, eos_ids: Iterable[int],
      pad_id: int | None = None, render_chat: Callable[[Messages], str] | None = None,
      template_source: str = ""):
    _require_byte_level(backend, name)
    self.name = name
    self._full = backend
    self._plain = _without_added_tokens(backend)
    self._render_chat = render_chat
    self._template_source = template_source
    added = backend.get_added_tokens_decoder()
    self.token_bytes, self._names = _byte_tables(backend, added, name)
    self.size = len(self.token_bytes)
    self.eos_ids = frozenset(eos_ids)
    if not self.eos_ids:
      raise UserError(
          f"tokenizer {name!r} names no end-of-sequence token; set eos_token in its "
          "tokenizer_config.json or eos_token_id in generation_config.json")
    if beyond := sorted(i for i in self.eos_ids if not 0 <= i < self.size):
      raise UserError(f"tokenizer {name!r} has {self.size} tokens, its end tokens are {beyond}: its "
                      "generation_config.json belongs to another model")
    self.pad_id = min(self.eos_ids) if pad_id is None else pad_id
    self._added = frozenset(added)
    contents = sorted((t.content for t in added.values()), key=len, reverse=True)
    self._added_pattern = re.compile("|".join(map(re.escape, contents)) or r"(?!)")
    self._first_characters = sorted({c[0] for c in contents})
    self._check_plain(contents)

  @classmethod
  def load(cls, name: str | pathlib.Path) -> Tokenizer:
    """The tokenizer of a folder in Hugging Face's layout, or of a model on its hub."""
    import transformers  # takes more than a second: only where it is needed
    from transformers.utils import cached_file

    name = str(name)
    try:
      auto = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as e:
      raise UserError(
          f"no tokenizer could be read from {name!r} ({_first_line(e)}); name a folder with "
          "tokenizer.json and tokenizer_config.json, or a model of the hub") from e
    find = functools.partial(
        cached_file, name, _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False)
    # The file itself rather than what transformers rebuilds from it: some classes alter it.
    path = find("tokenizer.json")
    backend = (
        tokenizers.Tokenizer.from_file(path) if path is not None
        else getattr(auto, "backend_tokenizer", None))
    if backend is None:
      raise UserError(
          f"{name!r} has no tokenizer.json and {type(auto).__name__} is not a fast tokenizer; "
          "only byte-level BPE tokenizers in that format are supported")
    return cls(
        backend, name=name, pad_id=auto.pad_token_id,
        eos_ids=_end_ids(auto.eos_token_id, find("generation_config.json")),
        render_chat=_chat_renderer(auto, name) if auto.chat_template else None,
        template_source=str(auto.chat_template or ""))

  @property
  def has_chat_template(self) -> bool:
    return self._render_chat is not None

  @functools.cached_property
  def fingerprint(self) -> str:
    """SHA-256 over the vocabulary, the merges, the end tokens and the chat template."""
    tail = json.dumps([sorted(self.eos_ids), self._template_source])
    return hashlib.sha256((self._full.to_str() + tail).encode()).hexdigest()

  def encode(self, text: str) -> list[int]:
    """Ids of text that we wrote: the names of added tokens become those tokens."""
    return self._full.encode(_valid(text), add_special_tokens=False).ids

  def encode_plain(self, text: str) -> list[int]:
    """Ids of any text, with special and added tokens disabled: characters stay characters."""
    return self._plain.encode(_valid(text), add_special_tokens=False).ids

  def decode_bytes(self, ids: Iterable[int]) -> bytes:
    """The bytes of a span; a control token shows by its name, so that it parts what it parts."""
    table, names = self.token_bytes, self._names
    return b"".join([names[i] if table[i] is None else table[i] for i in ids])

  def decode(self, ids: Iterable[int]) -> str:
    """The text of a span, which is by definition the decode of its ids."""
    return self.decode_bytes(ids).decode("utf-8", "replace")

  def chat_prompt(self, messages: Messages) -> list[int]:
    """Ids of a chat up to where the assistant speaks; contents can't forge control tokens."""
    guard, restore = self._guards("".join(t for m in messages for t in m.values()))
    guarded = [{k: t.translate(guard) for k, t in m.items()} for m in messages]
    return self._encode_guarded(self._render(guarded), restore)

  def prompt_ids(
      self, template: str, question: str, chat_template: str | bool = "auto",
      messages: Messages | None = None) -> list[int]:
    """Ids of an episode's prompt: the row's own `messages` where it has them, else the template.

    `chat_template`: True and False say whether the tokenizer's chat template wraps it; "auto"
    wraps it wherever the tokenizer has one. The template may name control tokens; the question
    and the row's messages may not.
    """
    if chat_template not in ("auto", True, False):
      raise UserError(
          f"prompt.chat_template is {chat_template!r}; choose 'auto', True or False")
    wrap = self.has_chat_template if chat_template == "auto" else chat_template
    if messages is None:
      guard, restore = self._guards(template + question)
      text = prompts.fill_template(template, question.translate(guard))
    elif wrap:
      return self.chat_prompt(messages)
    else:
      text = "\n\n".join(m["content"] for m in messages)
      guard, restore = self._guards(text)
      text = text.translate(guard)
    if not wrap:
      return self._beginning + self._encode_guarded(text, restore)
    return self._encode_guarded(self._render([{"role": "user", "content": text}]), restore)

  def _render(self, messages: Messages) -> str:
    if self._render_chat is None:
      raise UserError(
          f"tokenizer {self.name!r} has no chat template; set prompt.chat_template to False or "
          "auto, or use an instruction-tuned model")
    return self._render_chat(messages)

  def _guards(self, text: str) -> tuple[dict[int, int], dict[int, int]]:
    """Tables that swap the first character of every added token for one that `text` lacks.

    So the chat template may trim and move a foreign text as it likes, while no control token can
    be spelt in it; the second table swaps back.
    """
    taken = set(text)  # the private planes hold more characters than any prompt
    private = (c for c in range(0xF0000, 0x10FFFE) if chr(c) not in taken)
    guard = {ord(first): next(private) for first in self._first_characters}
    return guard, {v: k for k, v in guard.items()}

  def _encode_guarded(self, text: str, restore: dict[int, int]) -> list[int]:
    """Added tokens that stand in `text` by name become themselves; all between is plain."""
    ids, at = [], 0
    for match in self._added_pattern.finditer(text):
      ids += self.encode_plain(text[at:match.start()].translate(restore))
      ids.append(self._full.token_to_id(match.group()))
      at = match.end()
    return ids + self.encode_plain(text[at:].translate(restore))

  @functools.cached_property
  def _beginning(self) -> list[int]:
    """The control tokens that the tokenizer sets before a text, such as Llama's first one."""
    ids = self._full.encode("a", add_special_tokens=True).ids
    return ids[:ids.index(self.encode_plain("a")[0])]

  def _check_plain(self, contents: Sequence[str]) -> None:
    sample = "What? <search>1 é</search>"
    if self.decode(self.encode_plain(sample)) != unicodedata.normalize("NFC", sample):
      raise UserError(f"tokenizer {self.name!r} does not give back a plain text such as {sample!r}; its "
                      "vocabulary is incomplete, or tokenizer.json is missing")
    for content in contents:
      if not self._added.isdisjoint(self.encode_plain(content)):
        raise UserError(
            f"tokenizer {self.name!r} yields an added token for the plain text {content!r}; a "
            "passage could then forge it, so this tokenizer can't be used")


def _require_byte_level(backend: tokenizers.Tokenizer, name: str) -> None:
  model, decoder = backend.model, backend.decoder
  if (isinstance(model, tokenizers.models.BPE)
      and isinstance(decoder, tokenizers.decoders.ByteLevel)):
    return
  raise UserError(
      f"tokenizer {name!r} is {type(model).__name__} with decoder {type(decoder).__name__}; only "
      f"{_SUPPORTED}")


def _without_added_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
  """A second encoder over the same model, with no added vocabulary and no post-processing."""
  plain = tokenizers.Tokenizer(backend.model)
  if backend.normalizer is not None:
    plain.normalizer = backend.normalizer
  if backend.pre_tokenizer is not None:
    plain.pre_tokenizer = backend.pre_tokenizer
  return plain


def _byte_tables(backend, added, name: str) -> tuple[tuple[bytes | None, ...], dict[int, bytes]]:
  """The bytes of every id (None: control token, or no token), and the names of control tokens."""
  vocabulary = backend.get_vocab(with_added_tokens=True)
  table: list[bytes | None] = [None] * (max(vocabulary.values()) + 1)
  names = {i: b"" for i in range(len(table))}
  for token, i in vocabulary.items():
    if i in added:
      literal = added[i].content.encode()
      # A special token that spells one of our tags is that tag: it must be seen as text.
      control = added[i].special and added[i].content not in _OUR_TAGS
      table[i], names[i] = (None, literal) if control else (literal, b"")
    elif _BYTE_OF.keys() >= set(token):
      table[i] = bytes([_BYTE_OF[c] for c in token])
    else:  # such as SentencePiece's "▁the" under a decoder that isn't its own
      raise UserError(f"tokenizer {name!r} holds the token {token!r}, which stands for no bytes; "
                      f"only {_SUPPORTED}")
  return tuple(table), {i: name for i, name in names.items() if table[i] is None}


def _byte_alphabet() -> dict[str, int]:
  """The character by which byte-level BPE writes each byte, as its published scheme has it.

  Printable Latin-1 characters stand for themselves; the other bytes, in order, for the
  characters from U+0100 on.
  """
  shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  hidden = [b for b in range(256) if b not in shown]
  return {chr(b): b for b in shown} | {chr(0x100 + n): b for n, b in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


def _chat_renderer(auto, name: str) -> Callable[[Messages], str]:
  """What renders a chat as text, up to where the assistant speaks."""
  import jinja2

  def render(messages: Messages) -> str:
    try:
      return auto.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as e:
      roles = [m["role"] for m in messages]
      raise UserError(
          f"the chat template of {name!r} refuses messages with the roles {roles} "
          f"({_first_line(e)}); mend the rows, or set prompt.chat_template to False") from e

  return render


def _end_ids(eos_id: int | None, generation_config: str | None) -> set[int]:
  ids = set() if eos_id is None else {eos_id}
  if generation_config is None:
    return ids
  try:
    more = json.loads(pathlib.Path(generation_config).read_text())["eos_token_id"]
  except KeyError:
    return ids
  except (ValueError, TypeError) as e:
    raise UserError(f"{generation_config} is no JSON object ({_first_line(e)}); mend or remove it") from e
  found = [] if more is None else more if isinstance(more, list) else [more]
  if not all(type(i) is int for i in found):
    raise UserError(f"{generation_config}: eos_token_id is {more!r}; wanted an id or a list of ids")
  return ids | set(found)


def _valid(text: str) -> str:
  """The text with lone surrogates, which no encoder takes, as question marks."""
  return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _first_line(error: BaseException) -> str:
  return str(error).strip().partition("\n")[0]
