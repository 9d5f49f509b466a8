"""What a compiled program moves, read from its HLO text: bytes of memory, bytes between devices.

XLA's own analysis counts the body of a loop once and is missing for NVIDIA GPUs, so this counts
over the text. What a fusion reads and writes crosses the memory bus, what happens inside it does
not; a loop counts as often as it runs; a slice costs what it takes out, an update what it puts in.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Iterable, Mapping

import numpy as np

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute",
               "ragged-all-to-all", "collective-broadcast")
# These move no bytes themselves: they name, group or order what others have computed.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
         "optimization-barrier", "partition-id", "replica-id", "add-dependency", "domain"}
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # and which operand is what they put in
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\](?:\{([^}]*)\})?")
_LINE = re.compile(r"\s*(ROOT )?%?([\w.-]+) = (.*)")
_OPCODE = re.compile(r" ([a-z][\w-]*)\(")
_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) .*\{\s*$")
_CALLED = re.compile(r"\b(calls|body|condition|to_apply|true_computation|false_computation|"
                     r"branch_computations)=(\{[^}]*\}|%?[\w.-]+)")
_FAST_MEMORY = re.compile(r"S\([1-9]\d*\)")  # what a TPU keeps on the chip, as its layout says


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line: what it makes, what it does, what stands in its parentheses and behind them."""

  name: str
  result: str
  opcode: str
  arguments: str
  rest: str
  root: bool

  @functools.cached_property
  def bytes(self) -> int:
    """What its result takes in memory."""
    return sum(_sizes(self.result))

  @functools.cached_property
  def operands(self) -> tuple[str, ...]:
    return tuple(re.findall(r"%([\w.-]+)", self.arguments))

  @functools.cached_property
  def called(self) -> Mapping[str, tuple[str, ...]]:
    """The computations that it runs, by their part: `body`, `condition`, `calls`, …"""
    return {part: tuple(re.findall(r"[\w.-]+", names))
            for part, names in _CALLED.findall(self.rest)}

  @property
  def scope(self) -> list[str]:
    """Where in the Python program it comes from."""
    found = re.search(r'op_name="([^"]*)"', self.rest)
    return found[1].split("/") if found else []


Computation = Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Traffic:
  """Of one device, in bytes: `memory` across its bus, `link` into it from other devices.

  `network`: the part of `link` that comes from another host. `dot_flops`: of the products that
  the text shows as such; libraries hide theirs.
  """

  memory: float = 0.0
  link: float = 0.0
  network: float = 0.0
  dot_flops: float = 0.0

  def __add__(self, other: Traffic) -> Traffic:
    return Traffic(self.memory + other.memory, self.link + other.link,
                   self.network + other.network, self.dot_flops + other.dot_flops)

  def times(self, n: int) -> Traffic:
    return Traffic(n * self.memory, n * self.link, n * self.network, n * self.dot_flops)


def traffic(text: str, trips: Mapping[str, int], devices: int, host_devices: int) -> Traffic:
  """What one run of a program moves.

  `trips`: how often a loop runs, by the scope that it stands in; one that is not named there and
  whose length the text does not say counts once. `devices`: of the program; `host_devices`: of each
  host.
  """
  computations, entry = parse(text)
  return _Counter(computations, trips, devices, host_devices).computation(entry)


def parse(text: str) -> tuple[dict[str, Computation], str]:
  """All computations by name, and the name of the one that the program starts with."""
  computations: dict[str, dict[str, Instruction]] = {}
  entry, current = "", {}
  for line in text.splitlines():
    header = None if line.startswith(" ") else _HEADER.match(line)
    if header and header[2] != "HloModule":
      current = computations.setdefault(header[2], {})
      entry = header[2] if header[1] else entry
    elif (found := _LINE.match(line)) and (instruction := _instruction(*found.groups())):
      current[instruction.name] = instruction
  if not entry:
    raise ValueError("no ENTRY computation: this is not the text of an HLO module")
  return computations, entry


def _instruction(root: str | None, name: str, line: str) -> Instruction | None:
  line = re.sub(r"/\*.*?\*/", "", line)
  opcode = _OPCODE.search(line)
  if not opcode:
    return None
  depth, end = 1, opcode.end()
  while depth and end < len(line):
    depth += (line[end] == "(") - (line[end] == ")")
    end += 1
  return Instruction(name, line[: opcode.start()], opcode[1], line[opcode.end() : end - 1],
                     line[end:], bool(root))


def _sizes(text: str) -> list[int]:
  """Bytes of each array in a type; 0 for one that stays in fast memory."""
  return [0 if layout and _FAST_MEMORY.search(layout) else
          math.prod(_numbers(sizes)) * _bits(kind) // 8
          for kind, sizes, layout in _ARRAY.findall(text)]


def _bits(kind: str) -> int:
  return 8 if kind == "pred" else int(re.search(r"\d+", kind)[0])


def _numbers(text: str) -> list[int]:
  return [int(n) for n in text.split(",") if n]


class _Counter:
  """Goes through the computations; each is counted once and remembered."""

  def __init__(self, computations: Mapping[str, Computation], trips: Mapping[str, int],
               devices: int, host_devices: int):
    self._computations, self._trips = computations, trips
    self._devices, self._host_devices = devices, host_devices
    self._found: dict[str, Traffic] = {}

  def computation(self, name: str) -> Traffic:
    if name not in self._found:
      inside = self._computations[name]
      self._found[name] = sum((self._one(i, inside) for i in inside.values()), Traffic())
    return self._found[name]

  def _one(self, i: Instruction, inside: Computation) -> Traffic:
    kind = i.opcode.removesuffix("-start")
    if i.opcode in _FREE or i.opcode.endswith(("-done", "-update")):
      return Traffic()
    if i.opcode == "while":
      once = self._all(i.called["body"] + i.called["condition"])
      return once.times(self._trip_count(i))
    if i.opcode == "conditional":
      branches = [self.computation(n) for names in i.called.values() for n in names]
      return max(branches, key=lambda t: t.memory)
    if kind in ("call", "async"):
      return self._all(n for names in i.called.values() for n in names)
    if kind in COLLECTIVES:
      return self._collective(i, kind, inside)
    if i.opcode == "fusion":
      return self._fusion(i, inside)
    return Traffic(memory=_moved(i, inside), dot_flops=_dot_flops(i, inside))

  def _all(self, names: Iterable[str]) -> Traffic:
    return sum(map(self.computation, names), Traffic())

  def _trip_count(self, i: Instruction) -> int:
    name = i.scope[-2] if i.scope[-1:] == ["while"] and len(i.scope) > 1 else ""
    if name in self._trips:
      return self._trips[name]
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', i.rest)
    return int(known[1]) if known else self._bound(i.called["condition"][0])

  def _bound(self, condition: str) -> int:
    """The only constant of a loop's condition: where it counts from 0, it runs so often."""
    constants = {int(i.arguments) for i in self._computations[condition].values()
                 if i.opcode == "constant" and i.arguments.isdecimal()}
    return constants.pop() if len(constants) == 1 else 1

  def _collective(self, i: Instruction, kind: str, inside: Computation) -> Traffic:
    given = sum(_operand_sizes(i, inside))
    # The start of an asynchronous one makes its operands over again, then the results.
    both = i.opcode.endswith("-start") and kind != "all-reduce"
    made = i.bytes - given if both else i.bytes
    groups = _groups(i.rest, self._devices)
    share = 1 - 1 / len(groups[0])
    link = share * {"all-gather": made, "all-reduce": 2 * given}.get(kind, given)
    if kind in ("collective-permute", "collective-broadcast"):
      link = float(given)
    hosts = max(len({device // self._host_devices for device in g}) for g in groups)
    # A ring enters a host once, and all of its members there share the way in.
    network = link * hosts / len(groups[0]) if hosts > 1 else 0.0
    return Traffic(memory=float(given + made), link=link, network=network)

  def _fusion(self, i: Instruction, inside: Computation) -> Traffic:
    """What it reads and writes: of an operand of which it takes slices, those alone."""
    body = self._computations[i.called["calls"][0]]
    memory = float(sum(_written(r, body) for r in body.values() if r.root))
    for n, size in enumerate(_operand_sizes(i, inside)):
      memory += min(size, self._read(n, body))
    found = Traffic(memory=memory, dot_flops=sum((_dot_flops(b, body) for b in body.values()), 0.0))
    for b in body.values():
      if b.opcode in COLLECTIVES:  # on TPUs they are fused with what they are a part of
        scattered = b.opcode == "all-reduce" and any(r.opcode == "dynamic-slice" and r.root
                                                     for r in body.values())
        kind = "reduce-scatter" if scattered else b.opcode
        found += dataclasses.replace(self._collective(b, kind, body), memory=0.0)
    return found

  def _read(self, n: int, body: Computation) -> float:
    """How much of its n-th operand a fusion reads: infinitely much where that cannot be told."""
    return sum((self._used(p.name, body) for p in body.values()
                if p.opcode == "parameter" and int(p.arguments) == n), 0.0)

  def _used(self, name: str, body: Computation) -> float:
    """How much of an array is read in a fusion, and in the fusions inside it."""
    total = 0.0
    for user in body.values():
      if name not in user.operands:
        continue
      first = user.operands[0] == name
      if first and user.opcode in _SLICES:
        total += sum(_sizes(_FAST_MEMORY.sub("", user.result)))
      elif user.opcode in ("bitcast", "get-tuple-element", "tuple") and not user.root:
        total += self._used(user.name, body)
      elif user.opcode == "fusion":
        inner = self._computations[user.called["calls"][0]]
        total += sum(self._read(n, inner) for n, o in enumerate(user.operands) if o == name)
      elif not (first and user.opcode in _UPDATES):  # updated where it is
        total += math.inf
    return total


def _operand_sizes(i: Instruction, inside: Computation) -> list[int]:
  return [inside[name].bytes if name in inside else 0 for name in i.operands]


def _moved(i: Instruction, inside: Computation) -> float:
  """Bytes that an instruction by itself reads and writes."""
  sizes = _operand_sizes(i, inside)
  if i.opcode in _SLICES:
    return 2.0 * i.bytes
  if i.opcode in _UPDATES:
    return 2.0 * sizes[_UPDATES[i.opcode]]
  if i.opcode == "slice-start":  # its result: the source, then the slice
    slices = i.result[i.result.index("), ") :]
    return float(_sizes(_FAST_MEMORY.sub("", slices))[0] + _sizes(slices)[0])
  if i.opcode.endswith("-start"):  # a copy on its way: its result names the source as well
    return float(sum(sizes) + (_sizes(i.result) or [0])[0])
  return float(sum(sizes) + i.bytes)


def _written(i: Instruction, body: Computation) -> int:
  """Bytes that the root of a fusion writes."""
  if i.opcode == "tuple":
    return sum(_written(body[name], body) for name in i.operands)
  if i.opcode == "bitcast":
    return min(i.bytes, _written(body[i.operands[0]], body))
  if i.opcode in _UPDATES:
    return min(i.bytes, _operand_sizes(i, body)[_UPDATES[i.opcode]])
  return i.bytes


def _dot_flops(i: Instruction, inside: Computation) -> float:
  """FLOPs of a product that stands in the text: 2 for each multiplication and addition."""
  if i.opcode != "dot" or i.operands[0] not in inside:
    return 0.0
  left = _numbers(_ARRAY.search(inside[i.operands[0]].result)[2])
  axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.rest)[1]
  made = math.prod(_numbers(_ARRAY.search(i.result)[2]))
  return 2.0 * made * math.prod(left[a] for a in _numbers(axes))


def _groups(rest: str, devices: int) -> list[list[int]]:
  """Who talks to whom, as lists of devices. The text says it in one of three ways:
  `{{0,1},{2,3}}`, `[2,2]<=[4]`, or by the axes in a group: `mesh['a'=2,'b'=2], device_ids=([4]) {'b'}`.
  """
  found = re.search(r"(?:replica_groups|source_target_pairs)=(\{\{[\d,{}]*\}\}|\{\}|\[.*?\]<=\S+|"
                    r"mesh\[.*?\].*? ?\{[^}]*\})", rest)
  if not found or found[1] == "{}":
    if "replica_groups=" in rest and not found:
      raise ValueError(f"devices of a collective are written in an unknown way: {rest[:200]}")
    return [list(range(devices))]
  text = found[1]
  if text.startswith("{"):
    return [_numbers(g) for g in re.findall(r"\{([\d,]+)\}", text)]
  if text.startswith("["):
    shape = _numbers(re.match(r"\[([\d,]+)\]", text)[1])
    return _order(text.partition("<=")[2]).reshape(shape).tolist()
  sizes = dict(re.findall(r"'(\w+)'=(\d+)", text))
  axes, chosen = list(sizes), re.findall(r"'(\w+)'(?!=)", text)
  ids = re.search(r"device_ids=\((\[.*?)\) ?\{", text)
  count = math.prod(map(int, sizes.values()))
  mesh = (_order(ids[1]) if ids else np.arange(count)).reshape(*map(int, sizes.values()))
  others = [a for a in axes if a not in chosen]
  together = math.prod(int(sizes[a]) for a in chosen)
  return mesh.transpose([axes.index(a) for a in others + chosen]).reshape(-1, together).tolist()


def _order(text: str) -> np.ndarray:
  """The devices that `[2,4]T(1,0)` lists: 0, 1, … as an array of these sizes, its axes turned."""
  sizes, turned = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()
  ids = np.arange(math.prod(_numbers(sizes))).reshape(_numbers(sizes))
  return (ids.transpose(_numbers(turned)) if turned else ids).reshape(-1)
