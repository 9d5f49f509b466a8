"""Stop strings as an automaton over tokens, so that a decode loop stops at the exact token.

A tokenizer may hide the end of a tag inside a longer token (`>\\n`, `><`), and may spell the tag
in many ways. The automaton reads the bytes of each token through an Aho-Corasick machine once, at
start-up; after that, one table look-up a token is the whole work.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Iterable, Sequence

import numpy as np
from jaxtyping import Integer, UInt8


@dataclasses.dataclass(frozen=True)
class TokenAutomaton:
  """`state = next_state_SV[state, token]`, from state 0 at the start of each turn.

  The states below `n_plain` are on the way; state `n_plain + i` says that stop i was completed,
  on whichever byte of a token, and is never left. Here S counts states.
  """

  next_state_SV: Integer[np.ndarray, "S V"]
  n_plain: int
  stops: tuple[bytes, ...]

  def stopped(self, state: int) -> bool:
    return state >= self.n_plain


def build_automaton(
    token_bytes: Sequence[bytes | None], stops: Sequence[bytes],
    vocab_size: int | None = None) -> TokenAutomaton:
  """The automaton of `stops` over the tokens whose bytes are given.

  A control token (None) takes every plain state back to 0, and so does an id from the end of
  `token_bytes` up to `vocab_size`, the width of a model that is wider than its tokenizer.
  """
  if not stops or not all(stops):
    raise ValueError(f"stops are non-empty byte strings, got {list(stops)!r}")
  step_MM, n_plain = _byte_automaton(stops)
  width = len(token_bytes) if vocab_size is None else vocab_size
  if width < len(token_bytes):
    raise ValueError(f"{len(token_bytes)} tokens do not fit a vocabulary of {width}")
  table_SV = np.repeat(np.arange(len(step_MM), dtype=step_MM.dtype)[:, None], width, axis=1)
  # Tokens sorted by falling length: those that still have a byte at position p are a prefix.
  order_M = np.array(
      sorted((i for i, b in enumerate(token_bytes) if b is not None),
             key=lambda i: -len(token_bytes[i])), dtype=np.int64)
  state_SM = table_SV[:, order_M]
  for byte_M in _byte_columns([token_bytes[i] for i in order_M]):
    state_SM[:, :len(byte_M)] = step_MM[state_SM[:, :len(byte_M)], byte_M[None, :]]
  table_SV[:, order_M] = state_SM
  control_V = np.ones(width, dtype=bool)
  control_V[order_M] = False
  table_SV[:n_plain, control_V] = 0
  return TokenAutomaton(table_SV, n_plain, tuple(stops))


def cut_at_stop(automaton: TokenAutomaton, ids: Iterable[int]) -> int | None:
  """The index of the first id that completes a stop, in a turn that starts with `ids`."""
  state = 0
  for index, token in enumerate(ids):
    state = int(automaton.next_state_SV[state, token])
    if automaton.stopped(state):
      return index
  return None


def _byte_columns(tokens: Sequence[bytes]) -> list[UInt8[np.ndarray, "M"]]:
  """Column p holds byte p of every token that has one; `tokens` fall in length."""
  length_M = np.array([len(b) for b in tokens], dtype=np.int64)
  start_M = np.cumsum(length_M) - length_M
  flat_M = np.frombuffer(b"".join(tokens), dtype=np.uint8)
  longest = int(length_M[0]) if len(tokens) else 0
  return [flat_M[start_M[:np.count_nonzero(length_M > p)] + p] for p in range(longest)]


def _byte_automaton(stops: Sequence[bytes]) -> tuple[Integer[np.ndarray, "M 256"], int]:
  """The state after each state and byte, plain states first; and how many of those there are."""
  rows, ends = _aho_corasick(stops)
  plain = [node for node in range(len(rows)) if node not in ends]
  state_of = {node: state for state, node in enumerate(plain)}
  state_of |= {node: len(plain) + stop for node, stop in ends.items()}
  n_states = len(plain) + len(stops)
  dtype = np.int16 if n_states <= np.iinfo(np.int16).max else np.int32
  step_MM = np.repeat(np.arange(n_states, dtype=dtype)[:, None], 256, axis=1)
  for node in plain:
    step_MM[state_of[node]] = [state_of[after] for after in rows[node]]
  return step_MM, len(plain)


def _aho_corasick(stops: Sequence[bytes]) -> tuple[list[list[int]], dict[int, int]]:
  """The trie of the stops: the node after each node and byte, and the nodes that complete one."""
  children, ends = _trie(stops)
  rows: list[list[int]] = [[] for _ in children]
  queue = collections.deque([(0, 0)])
  # Breadth first: the fallback of a node is shallower than it, so that row is already complete.
  while queue:
    node, fallback = queue.popleft()
    if fallback in ends:  # the suffix that the fallback stands for ends here as well
      ends.setdefault(node, ends[fallback])
    rows[node] = list(rows[fallback]) if node else [0] * 256
    for byte, child in children[node].items():
      queue.append((child, rows[node][byte]))
      rows[node][byte] = child
  return rows, ends


def _trie(stops: Sequence[bytes]) -> tuple[list[dict[int, int]], dict[int, int]]:
  children: list[dict[int, int]] = [{}]
  ends: dict[int, int] = {}
  for number, stop in enumerate(stops):
    node = 0
    for byte in stop:
      if byte not in children[node]:
        children[node][byte] = len(children)
        children.append({})
      node = children[node][byte]
    ends.setdefault(node, number)
  return children, ends
