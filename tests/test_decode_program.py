"""The compiled decode program, read as text: no parameter moves in its loop, no cache is copied."""

from __future__ import annotations

import collections
import re

import jax
import pytest
from test_engine import SHAPES, SLOTS, engine_for, noisy, tasks_for

from searchr1_jax.rollout import draw
from searchr1_jax.rollout.engine import Insert

MOVES = ("copy", "copy-start", "slice", "dynamic-slice", "transpose", "gather", "concatenate")


def operations(hlo):
  """{computation: [(operation, result's shape, the computations it calls)]} of a module's text."""
  found, inside = collections.defaultdict(list), None
  for line in hlo.splitlines():
    if head := re.match(r"(?:ENTRY )?%(\S+) .*\{$", line):
      inside = head[1]
    elif op := re.match(r"\s+(?:ROOT )?%\S+ = (?:\w+\[([\d,]*)\])?.*? ([a-z][\w-]*)\(", line):
      shape = tuple(map(int, (op[1] or "").split(","))) if op[1] else ()
      called = re.findall(r"(?:calls|to_apply|body|condition|branch_computations)="
                          r"\{?(%[^,}\s]+(?:, %[^,}\s]+)*)", line)
      names = [n.strip(" %") for c in called for n in c.split(",")]
      found[inside].append((op[2], shape, names))
  return found


def reached(computations, name):
  """The operations of a computation and of all that it calls."""
  for op, shape, called in computations[name]:
    yield op, shape
    for other in called:
      yield from reached(computations, other)


@pytest.fixture(scope="module")
def decode_program():
  """The text of the compiled decode program, and the parameters, as an engine calls it."""
  shape, params = noisy()
  engine, calls = engine_for(shape), []
  engine.begin(params, jax.random.key(0), draw.sampling(1.0))
  program, task = engine._programs.decode, tasks_for(1)[0]

  def spy(*args):
    calls.append(jax.tree.map(lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=getattr(x, "sharding", None)), args))
    return program(*args)

  engine._programs = engine._programs._replace(decode=spy)
  engine.insert([Insert(engine.admit(task.prompt_ids), task.prompt_ids, 2, True, task.seeds)])
  engine.decode()
  return operations(program.lower(*calls[0]).compile().as_text()), engine._params


def sides(shape):
  """A shape in any order of its axes."""
  return tuple(sorted(s for s in shape if s > 1))


def loops(computations):
  """What each while loop does in a step."""
  return [list(reached(computations, called[1]))
          for ops in computations.values() for op, _, called in ops if op == "while"]


def test_the_loop_moves_no_parameter(decode_program):
  computations, params = decode_program
  kernels = {sides(p.shape) for p in jax.tree.leaves(params) if p.ndim > 1}
  writing = max(loops(computations), key=len)  # the others bring, keep and draw
  assert sum(op == "dot" for op, _ in writing) >= 7 * noisy()[0].layers
  assert [(op, s) for op, s in writing if op in MOVES and sides(s) in kernels] == []


def test_the_program_copies_no_cache(decode_program):
  computations, _ = decode_program
  shape = noisy()[0]
  k = (SHAPES.rows, shape.kv_heads, shape.head_size, SLOTS)
  v = (SHAPES.rows, shape.kv_heads, SLOTS, shape.head_size)
  everything = [(op, s) for ops in computations.values() for op, s, _ in ops]
  assert {k, v} <= {s for op, s in everything if op == "parameter"}
  copied = [(op, s) for op, s in everything if op in ("copy", "copy-start", "transpose")
            and s in (k, v)]
  assert copied == []
