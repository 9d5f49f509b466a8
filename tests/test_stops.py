"""The token automaton against a plain search for the stops in the bytes of the tokens."""

from __future__ import annotations

import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from real_tokenizers import load

from searchr1_jax.rollout.stops import build_automaton, cut_at_stop
from searchr1_jax.testing import ByteTokenizer
from searchr1_jax.text.actions import STOP_TAGS

STOPS = tuple(t.encode() for t in STOP_TAGS)


def plain_search(token_bytes, ids, stops=STOPS):
  """Index of the first id that completes a stop in the bytes since the last control token."""
  seen = b""
  for index, i in enumerate(ids):
    piece = token_bytes[i] if i < len(token_bytes) else None
    seen = b"" if piece is None else seen + piece
    if any(stop in seen for stop in stops):
      return index
  return None


def first_stops(automaton, ids_BL):
  """`cut_at_stop` for many rows at once, as a decode loop would do it; -1 for no stop."""
  state_B = np.zeros(len(ids_BL), dtype=np.int64)
  first_B = np.full(len(ids_BL), -1)
  for position, ids_B in enumerate(ids_BL.T):
    state_B = automaton.next_state_SV[state_B, ids_B]
    first_B[(state_B >= automaton.n_plain) & (first_B < 0)] = position
  return first_B


def plain_first_stops(token_bytes, ids_BL):
  """The same by `bytes.find`, rows joined by a byte that no tag holds; control tokens likewise."""
  # 0xFF is in no stop tag, so a control token written as 0xFF parts what stands around it.
  table = [b"\xff" if b is None else b for b in token_bytes]
  first_B = np.full(len(ids_BL), -1)
  for row, ids in enumerate(ids_BL.tolist()):
    pieces = [table[i] for i in ids]
    whole = b"".join(pieces)
    ends = [at + len(s) for s in STOPS if (at := whole.find(s)) >= 0]
    if ends:
      first_B[row] = np.searchsorted(np.cumsum([len(p) for p in pieces]), min(ends))
  return first_B


def test_states_and_latch():
  # Tokens: 0 "</se", 1 "arch>\n", 2 "x", 3 control, 4 "</search><", 5 "</answer>".
  tokens = [b"</se", b"arch>\n", b"x", None, b"</search><", b"</answer>"]
  automaton = build_automaton(tokens, STOPS, vocab_size=8)
  # Shared "<" and "</", then "search" and "answer" are 6 bytes each before the ">": with the
  # start, 1 + 2 + 6 + 6 = 15 plain states, and one for each stop.
  assert automaton.n_plain == 15
  assert automaton.next_state_SV.shape == (17, 8)
  assert automaton.next_state_SV.dtype == np.int16
  assert cut_at_stop(automaton, [2, 0, 1, 2]) == 2
  assert cut_at_stop(automaton, [4]) == 0  # completed inside the token
  assert cut_at_stop(automaton, [0, 2, 1]) is None  # interrupted by text
  assert cut_at_stop(automaton, [0, 3, 1]) is None  # by a control token
  assert cut_at_stop(automaton, [0, 7, 1]) is None  # by an id beyond the tokenizer
  # Two stops, two absorbing states: no token leaves them, control tokens included.
  np.testing.assert_array_equal(automaton.next_state_SV[15:], [[15] * 8, [16] * 8])
  assert automaton.next_state_SV[0, 5] == 16


def test_a_stop_inside_the_beginning_of_another_is_seen():
  # After "ab" the machine is on its way to "abb"; that "b" was completed there shows only in the
  # fallback of that state.
  automaton = build_automaton([b"a", b"b"], [b"abb", b"b"])
  assert cut_at_stop(automaton, [0, 1]) == 1


def test_wide_state_sets_take_wider_integers():
  # 40,000 bytes are 40,000 plain states (the last byte lands in the accepting one): over 2^15 - 1.
  automaton = build_automaton([b"a", b"b"], [b"a" * 40_000])
  assert automaton.next_state_SV.dtype == np.int32
  assert automaton.n_plain == 40_000


@pytest.mark.parametrize("stops", [[], [b""], [b"a", b""]])
def test_empty_stops_are_refused(stops):
  with pytest.raises(ValueError, match="non-empty"):
    build_automaton([b"a"], stops)


def test_a_vocabulary_narrower_than_the_tokenizer_is_refused():
  with pytest.raises(ValueError, match="do not fit"):
    build_automaton([b"a", b"b"], [b"a"], vocab_size=1)


short = st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map(lambda s: "".join(s).encode())


@hypothesis.given(
    stops=st.lists(short, min_size=1, max_size=4),
    tokens=st.lists(st.none() | short | st.just(b""), min_size=1, max_size=6), data=st.data())
@hypothesis.settings(max_examples=500, deadline=None)
def test_any_stops_over_any_tokens(stops, tokens, data):
  # Two letters make stops overlap, contain and follow one another all the time.
  automaton = build_automaton(tokens, stops, vocab_size=len(tokens) + 1)
  ids = data.draw(st.lists(st.integers(0, len(tokens)), max_size=12))
  assert cut_at_stop(automaton, ids) == plain_search(tokens, ids, stops)


def random_strings(tokenizer, rng, rows, length):
  """Half of each row are tokens that hold a piece of a stop tag, a few are control or added."""
  whole = b"".join(STOPS)
  pieces = {whole[i:j] for i in range(len(whole)) for j in range(i + 1, len(whole) + 1)}
  table = tokenizer.token_bytes
  near = [i for i, b in enumerate(table)
          if b and (b in pieces or b"</" in b or b.startswith(b">"))]
  control = [i for i, b in enumerate(table) if b is None]
  spellings = [tokenizer.encode_plain(f"{head}{tag}{tail}")
               for tag in STOP_TAGS for head in ("", "x", " ", "<")
               for tail in ("", ".", "\n", "<")]
  ids_BL = rng.integers(0, tokenizer.size, (rows, length))
  ids_BL = np.where(rng.random(ids_BL.shape) < 0.5, rng.choice(near, ids_BL.shape), ids_BL)
  ids_BL = np.where(rng.random(ids_BL.shape) < 0.05, rng.choice(control, ids_BL.shape), ids_BL)
  # A third of the rows get a tag as the tokenizer spells it, half of those a token broken out.
  for row in range(0, rows, 3):
    spelling = spellings[rng.integers(len(spellings))]
    if len(spelling) <= length:
      at = rng.integers(length - len(spelling) + 1)
      ids_BL[row, at:at + len(spelling)] = spelling
      if row % 2:
        ids_BL[row, at + rng.integers(len(spelling))] = rng.choice(near)
  return ids_BL


@pytest.mark.parametrize("name, rows", [
    ("bytes", 400_000), ("qwen2.5-tokenizer", 300_000), ("smollm2-135m", 300_000)])
def test_a_million_random_token_strings(name, rows):
  tokenizer = load(name)
  automaton = build_automaton(tokenizer.token_bytes, STOPS)
  rng = np.random.default_rng(7)
  hits = 0
  for _ in range(rows // 20_000):
    ids_BL = random_strings(tokenizer, rng, 20_000, 16)
    found_B = first_stops(automaton, ids_BL)
    np.testing.assert_array_equal(found_B, plain_first_stops(tokenizer.token_bytes, ids_BL))
    hits += np.count_nonzero(found_B >= 0)
  assert 0.05 * rows < hits < 0.95 * rows  # the strings do hold stops, and not always


def test_the_host_function_agrees_with_the_table_walk():
  tokenizer = ByteTokenizer()
  automaton = build_automaton(tokenizer.token_bytes, STOPS)
  ids_BL = random_strings(tokenizer, np.random.default_rng(3), 300, 30)
  for ids, found in zip(ids_BL.tolist(), first_stops(automaton, ids_BL)):
    assert cut_at_stop(automaton, ids) == (None if found < 0 else found)


@pytest.mark.parametrize("tail", ["", ".", "\n", "<"])
def test_qwen_merges_the_end_of_a_tag_with_what_follows(tail):
  tokenizer = load("qwen2.5-tokenizer")
  automaton = build_automaton(tokenizer.token_bytes, STOPS)
  ids = tokenizer.encode_plain(f"<search>q</search>{tail}")
  stop = cut_at_stop(automaton, ids)
  assert stop == len(ids) - 1
  assert tokenizer.token_bytes[ids[stop]] == f">{tail}".encode()


def test_qwen_builds_in_seconds():
  tokenizer = load("qwen2.5-tokenizer")
  begin = time.process_time()
  automaton = build_automaton(tokenizer.token_bytes, STOPS, vocab_size=151_936)
  assert time.process_time() - begin < 5
  assert automaton.next_state_SV.shape == (17, 151_936)
  assert not automaton.next_state_SV[:15, tokenizer.size:].any()
