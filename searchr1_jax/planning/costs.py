"""Compiles a program for its target, and says what one run of it takes on each device."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import pathlib
import time
from typing import Any

import jax

from searchr1_jax.planning import flops, hlo
from searchr1_jax.planning.programs import Program
from searchr1_jax.planning.targets import Target


@dataclasses.dataclass(frozen=True)
class Cost:
  """Of one device. Sizes, `memory`, `link` and `network` in bytes (see `hlo.Traffic`).

  `new` is what its results take beyond the arguments that they are written over.
  """

  arguments: int
  temporaries: int
  new: int
  flops: float
  memory: float
  link: float
  network: float
  compile_seconds: float

  def seconds(self, target: Target) -> dict[str, float]:
    """At the roofline: each part as if it were alone."""
    chip = target.chip
    return {"compute": self.flops / chip.flops, "memory": self.memory / chip.bandwidth,
            "collectives": (self.link - self.network) / chip.link + self.network / chip.network}


def lower(program: Program) -> tuple[Any, float]:
  """The lowered program, and the FLOPs of one run on all devices together."""
  traced = program.function.trace(*program.args, **program.kwargs)
  return traced.lower(), flops.count(traced.jaxpr, program.trips)


def measure(program: Program, target: Target, kept: pathlib.Path | None = None) -> Cost:
  """Compiles it, unless the folder `kept` has what an equal program came to."""
  lowered, operations = lower(program)
  devices = _devices(program)
  about = json.dumps([target.name, jax.__version__, devices, sorted(program.trips.items())])
  name = hashlib.sha256((about + lowered.as_text()).encode()).hexdigest()
  path = kept / f"{name}.json" if kept else None
  if path and path.is_file():
    return Cost(**json.loads(path.read_text()))
  began = time.perf_counter()
  compiled = lowered.compile()
  sizes = compiled.memory_analysis()
  moved = hlo.traffic(compiled.as_text(), program.trips, devices, target.host_chips)
  cost = Cost(sizes.argument_size_in_bytes, sizes.temp_size_in_bytes,
              sizes.output_size_in_bytes - sizes.alias_size_in_bytes, operations / devices,
              moved.memory, moved.link, moved.network, time.perf_counter() - began)
  if path:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(dataclasses.asdict(cost)))
    part.replace(path)  # a kill leaves no half of it
  return cost


def _devices(program: Program) -> int:
  """How many it runs on together."""
  places = (getattr(x, "sharding", None) for x in jax.tree.leaves(program.args))
  return next((len(p.device_set) for p in places if p is not None), 1)


def resident(tree: Any) -> int:
  """Bytes that described arrays take for each device."""
  return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
             for x in jax.tree.leaves(tree))
