"""Compiles a program for its target, and says what one run of it takes on each device."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import time
import zlib
from collections.abc import Mapping
from typing import Any

import jax

from searchr1_jax.planning import flops, hlo
from searchr1_jax.planning.programs import Program
from searchr1_jax.planning.targets import Target


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What a compiler made: bytes of arguments, temporaries and of results beyond the arguments that
  they are written over; the HLO text; seconds that it took."""

  arguments: int
  temporaries: int
  new: int
  text: str
  seconds: float


@dataclasses.dataclass(frozen=True)
class Cost:
  """Of one run on one device. Sizes, `memory`, `link` and `network` in bytes; see `hlo.Traffic`."""

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


def measure(program: Program, target: Target, kept: pathlib.Path, fresh: bool = False,
            quick: bool = False) -> Cost:
  """Compiles it, unless the folder `kept` has what an equal program was compiled to.

  `fresh`: compiles it again, and keeps that. `quick`: with the least effort, three to six times
  sooner for TPUs; temporaries came within a tenth of the usual ones.
  """
  lowered, operations = lower(program)
  options = {"exec_time_optimization_effort": -1.0} if quick else {}
  about = json.dumps([target.name, jax.__version__, jax.lib.__version__, *options.items()])
  name = hashlib.sha256((about + lowered.as_text()).encode()).hexdigest()
  path = kept / _compilers() / f"{name}.json.gz"
  made = None if fresh else _read(path)
  if made is None:
    made = _compile(lowered, options)
    _write(path, made)
  devices = _devices(program)
  moved = hlo.traffic(made.text, program.trips, devices, target.host_chips)
  return Cost(made.arguments, made.temporaries, made.new, operations / devices, moved.memory,
              moved.link, moved.network, made.seconds)


def resident(tree: Any) -> int:
  """Bytes that described arrays take for each device."""
  return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
             for x in jax.tree.leaves(tree))


def _compile(lowered: Any, options: Mapping[str, float]) -> Compiled:
  began = time.perf_counter()
  compiled = lowered.compile(compiler_options=dict(options))
  sizes = compiled.memory_analysis()
  return Compiled(sizes.argument_size_in_bytes, sizes.temp_size_in_bytes,
                  sizes.output_size_in_bytes - sizes.alias_size_in_bytes, compiled.as_text(),
                  time.perf_counter() - began)


def _compilers() -> str:
  """A name for the versions and flags that decide what comes out."""
  found = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
  for name in ("jaxlib", "jax-cuda12-plugin", "nvidia-cudnn-cu12", "libtpu"):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found.append(f"{name} {importlib.metadata.version(name)}")
  return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


def _read(path: pathlib.Path) -> Compiled | None:
  """What was kept; None where there is nothing, or no whole file, which is then written again."""
  try:
    return Compiled(**json.loads(gzip.decompress(path.read_bytes())))
  except (OSError, EOFError, zlib.error, ValueError, TypeError):
    return None


def _write(path: pathlib.Path, made: Compiled) -> None:
  """Keeps it, whole or not at all, whoever else writes the same; where that's not possible, not."""
  part = path.with_suffix(f".{os.getpid()}")
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(gzip.compress(json.dumps(dataclasses.asdict(made)).encode()))
    part.replace(path)
  except OSError:
    with contextlib.suppress(OSError):
      part.unlink()


def _devices(program: Program) -> int:
  """How many it runs on together."""
  places = (getattr(x, "sharding", None) for x in jax.tree.leaves(program.args))
  return next((len(p.device_set) for p in places if p is not None), 1)
