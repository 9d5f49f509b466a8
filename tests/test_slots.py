"""Plans over rows and seats: nobody loses a seat, nothing grows beyond its budget or its list."""

from __future__ import annotations

import dataclasses

from hypothesis import given, strategies as st
import pytest

from searchr1_jax.rollout import slots
from searchr1_jax.rollout.slots import EngineShapes, Insert
from searchr1_jax.types import UserError

SHAPES = EngineShapes(rows=12, slots=1000, tokens=50, seats=(2, 8), row_buckets=(1, 4),
                      chunk_buckets=(16, 64, 256), widths=(200, 400))


def some_sizes(most):
  return st.lists(st.integers(1, most), min_size=1, max_size=4).map(tuple)


@st.composite
def any_sizes(draw):
  """Arguments of an `EngineShapes`; built in the test, since checks of types draw at random."""
  rows = draw(st.integers(1, 40))
  return dict(
      rows=rows, slots=draw(st.integers(1, 300)), tokens=draw(st.integers(1, 400)),
      seats=draw(some_sizes(rows)), row_buckets=draw(some_sizes(rows)),
      chunk_buckets=draw(some_sizes(300)), widths=draw(st.just(()) | some_sizes(400)))


# Who sits where.


@st.composite
def seatings(draw):
  """A desk before a call, of some rows and some empty seats, and the rows chosen for the call."""
  before = draw(st.lists(st.integers(0, 20), unique=True, max_size=10))
  empty = draw(st.sets(st.integers(0, 9)))
  chosen = draw(st.lists(st.integers(0, 20), unique=True, max_size=10))
  return [None if i in empty else r for i, r in enumerate(before)], chosen


@given(seatings())
def test_every_chosen_row_has_one_seat_and_those_who_sat_stay(case):
  before, chosen = case
  rows, brought = slots.seat(before, chosen)
  assert sorted(rows) == sorted(chosen)  # seats 0 to n-1, one row each
  sat = {r: i for i, r in enumerate(before) if r is not None}
  for i, row in enumerate(rows):
    stays = sat.get(row, len(chosen)) < len(chosen)
    assert not stays or sat[row] == i
    assert (i not in brought) == stays
  assert len(set(brought)) == len(brought)


def test_a_row_beyond_the_seats_in_use_is_brought_to_a_free_one():
  # 5 and 7 sit on seats 0 and 2; two seats are in use now, so 7 moves to where 6 sat.
  assert slots.seat([5, 6, 7], [7, 5]) == ([5, 7], [1])
  assert slots.seat([5, 6, 7], [7, 6, 5]) == ([5, 6, 7], [])
  assert slots.seat([], [3, 1]) == ([3, 1], [0, 1])


@given(st.integers(1, 60), any_sizes())
def test_seats_hold_the_rows_that_wait_or_nearly_all(ready, sizes):
  shapes = EngineShapes(**sizes)
  seats = slots.seats_for(ready, shapes)
  assert seats in shapes.seats
  smaller = [s for s in shapes.seats if s < ready]
  if seats < ready:  # the largest there is, or an eighth of the seats too few at most
    assert seats == max(smaller)
    assert seats == shapes.seats[-1] or ready - seats <= seats / 8
  else:  # the smallest that holds them, and no smaller one would nearly do
    assert all(s >= seats for s in shapes.seats if s >= ready)
    assert not smaller or ready - max(smaller) > max(smaller) / 8


def test_a_tail_of_one_row_has_the_smallest_seats():
  assert [slots.seats_for(n, SHAPES) for n in (1, 2, 3, 8, 9, 12)] == [2, 2, 8, 8, 8, 8]
  # 8 and 16 seats: a ninth row waits for its turn, a tenth brings the larger desk.
  shapes = dataclasses.replace(SHAPES, rows=32, seats=(8, 16))
  assert [slots.seats_for(n, shapes) for n in (8, 9, 10, 16, 18, 19)] == [8, 8, 16, 16, 16, 16]


# The closed list.


@given(any_sizes())
def test_shapes_are_in_order_and_every_row_can_be_read_whole(sizes):
  shapes = EngineShapes(**sizes)
  for name in ("seats", "row_buckets", "chunk_buckets", "widths"):
    kept = getattr(shapes, name)
    assert list(kept) == sorted(set(kept))
    assert set(kept) <= {*sizes[name], shapes.slots}
  assert shapes.widths[-1] == shapes.slots
  assert all(shapes.tokens <= w for w in shapes.widths)
  assert dataclasses.replace(shapes) == shapes


def test_widths_that_read_nothing_of_use_are_left_out():
  # 40 is less than one call writes; 1000 and more is the whole row.
  shapes = dataclasses.replace(SHAPES, widths=(1000, 40, 400, 50, 400, 2000))
  assert shapes.widths == (50, 400, 1000)
  assert dataclasses.replace(SHAPES, slots=30, widths=()).tokens == 30


@pytest.mark.parametrize("change, says", [
    ({"rows": 0}, r"seats is \(2, 8\); wanted sizes from 1 to rollout.rows=0"),
    ({"rows": 7}, r"seats is \(2, 8\); wanted sizes from 1 to rollout.rows=7"),
    ({"seats": ()}, "seats"), ({"seats": (0,)}, "seats"), ({"seats": (-1, 4)}, "seats"),
    ({"row_buckets": ()}, "row_buckets"), ({"row_buckets": (0, 4)}, "row_buckets"),
    ({"row_buckets": (13,)}, "row_buckets .* from 1 to rollout.rows=12"),
    ({"chunk_buckets": ()}, "chunk_buckets"), ({"chunk_buckets": (0, 8)}, "chunk_buckets"),
    ({"tokens": 0}, "0 tokens writes nothing"), ({"tokens": -3}, "-3 tokens"),
    ({"widths": (0, 80)}, "widths"), ({"widths": (-5,)}, "widths")])
def test_shapes_that_hold_nothing_are_refused(change, says):
  with pytest.raises(UserError, match=says):
    dataclasses.replace(SHAPES, **change)


@given(any_sizes())
def test_fixed_shapes_leave_nothing_to_choose_but_the_chunk(sizes):
  shapes = EngineShapes(**sizes)
  fixed = shapes.fixed()
  assert [len(fixed.seats), len(fixed.row_buckets), len(fixed.widths)] == [1, 1, 1]
  assert fixed.seats[0] == shapes.seats[-1] and fixed.row_buckets[0] in shapes.row_buckets
  same = ("rows", "slots", "tokens", "chunk_buckets")
  assert all(getattr(fixed, n) == getattr(shapes, n) for n in same)
  assert fixed.fixed() == fixed


# A budget of memory.


@given(any_sizes(), st.integers(1, 10**6), st.integers(0, 100), st.integers(0, 10**6))
def test_a_budget_is_never_exceeded_nor_wasted(sizes, row_bytes, whole, rest):
  shapes = EngineShapes(**sizes)
  budget = whole * row_bytes + rest % row_bytes
  wanted = shapes.rows + shapes.seats[-1]
  if whole < 2:
    with pytest.raises(UserError, match="one row and its seat take; raise it or lower"):
      shapes.within(budget, row_bytes)
    return
  cut = shapes.within(budget, row_bytes)
  if wanted <= whole:
    assert cut == shapes
    return
  assert (cut.rows + cut.seats[-1]) * row_bytes <= budget < (whole + 1) * row_bytes
  assert cut.rows + cut.seats[-1] == whole  # none of what fits is left unused
  assert 1 <= cut.seats[-1] <= min(cut.rows, shapes.seats[-1])
  assert cut.row_buckets[-1] <= cut.rows <= shapes.rows
  for name in ("seats", "row_buckets"):  # the smaller sizes stay
    assert set(getattr(cut, name)[:-1]) <= set(getattr(shapes, name))
  assert (cut.slots, cut.tokens, cut.widths) == (shapes.slots, shapes.tokens, shapes.widths)


def test_rows_and_seats_keep_their_shares_of_a_budget():
  # 12 rows and 8 seats are 20 of 100 bytes; 1050 bytes hold ten: 4 seats, 6 rows.
  cut = SHAPES.within(1050, 100)
  assert (cut.rows, cut.seats, cut.row_buckets) == (6, (2, 4), (1, 4))
  assert SHAPES.within(2000, 100) == SHAPES
  assert (SHAPES.within(200, 100).rows, SHAPES.within(299, 100).seats) == (1, (1,))
  with pytest.raises(UserError, match="rollout.cache_gib=1 is less than the 1.2 that one row"):
    SHAPES.within(2**30, int(0.6 * 2**30))


# How much there is to compile.


@st.composite
def loads(draw):
  """Rows of two devices, how much each of them holds, and how much comes."""
  rows = draw(st.lists(st.integers(0, 2 * SHAPES.rows - 1), unique=True, max_size=24))
  return [(row, draw(st.integers(0, 500)), draw(st.integers(1, 500))) for row in rows]


@given(st.lists(loads(), max_size=4))
def test_plans_stay_on_the_closed_list(several):
  calls = [c for load in several for c in slots.plan_prefill(
      [Insert(row, range(comes), 1, not holds, (0, 0)) for row, holds, comes in load],
      [holds for _, holds, _ in load], SHAPES, devices=2)]
  prefills = {(c.rows, c.chunk, c.width) for c in calls}
  decodes = {(slots.seats_for(n, SHAPES), w) for n in range(1, 13) for w in SHAPES.widths}
  shares = set(SHAPES.widths)
  assert len(prefills) + len(decodes) + len(shares) <= SHAPES.programs()
  assert prefills <= {(r, c, w) for r in SHAPES.row_buckets for c in SHAPES.chunk_buckets
                      for w in SHAPES.widths}


def test_the_closed_list_counts_prefills_shares_and_decodes():
  # 3 widths: 2 x 3 prefills, 1 share, 2 decodes of each.
  assert SHAPES.programs() == 3 * (6 + 1 + 2)
  # What a deterministic rollout compiles: a prefill for each chunk, a share, a decode.
  assert SHAPES.fixed().programs() == 3 + 1 + 1
