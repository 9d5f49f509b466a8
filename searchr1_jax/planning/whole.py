"""From the costs of programs to the whole: memory of each phase, seconds of a step."""

from __future__ import annotations

import dataclasses
from typing import Callable, Mapping, Sequence

import ml_collections

from searchr1_jax.planning import costs
from searchr1_jax.planning.programs import PHASES, Program, Step
from searchr1_jax.planning.targets import Target
from searchr1_jax.planning.workload import Load

SPARE = 0.1  # share of the memory that stays free: the runtime, NCCL's buffers, gaps between arrays

# What can be turned, the cheapest first: in which phases it helps, and where it is not done yet.
_ALL = tuple(PHASES)
REMEDIES: tuple[tuple[str, tuple[str, ...], Callable[[ml_collections.ConfigDict], bool]], ...] = (
    ("model.remat=full", ("update",), lambda c: c.model.remat != "full"),
    ("smaller batch.tokens or model.logits_tokens", ("score", "update"), lambda c: True),
    ("a larger mesh.tensor in place of mesh.fsdp", ("lay out", "rollout"),
     lambda c: c.mesh.fsdp > 1),
    ("optimizer.moments_memory=pinned_host", _ALL,
     lambda c: c.optimizer.moments_memory == "device"),
    ("model.reference_memory=pinned_host", _ALL,
     lambda c: bool(c.algo.kl_coef) and c.model.reference_memory == "device"),
    ("a machine with more devices or memory", _ALL, lambda c: True),
)


@dataclasses.dataclass(frozen=True)
class Line:
  """One program: its cost, seconds of a call at the roofline, and what bounds it."""

  program: Program
  cost: costs.Cost
  parts: Mapping[str, float]

  @property
  def seconds(self) -> float:
    return max(self.parts.values())

  @property
  def bound(self) -> str:
    return max(self.parts, key=lambda part: self.parts[part])


@dataclasses.dataclass(frozen=True)
class Plan:
  """What a config comes to on a target. Bytes of one device, seconds of one training step."""

  target: Target
  lines: Sequence[Line]
  residents: Mapping[str, int]
  pinned: int
  peaks: Mapping[str, int]
  generated_tokens: float
  trained_tokens: float
  load: Load

  @property
  def peak(self) -> int:
    return max(self.peaks.values())

  @property
  def limit(self) -> float:
    """What may be used of a device."""
    return (1 - SPARE) * self.target.chip.memory

  @property
  def fits(self) -> bool:
    return self.peak <= self.limit

  def bounds(self) -> dict[str, str]:
    """What bounds most of each phase's seconds."""
    spent: dict[str, dict[str, float]] = {}
    for line in self.lines:
      of = spent.setdefault(line.program.phase, {})
      of[line.bound] = of.get(line.bound, 0.0) + line.seconds * line.program.calls
    return {phase: max(of, key=lambda part: of[part]) for phase, of in spent.items()}

  def phase_seconds(self) -> dict[str, float]:
    """At the roofline, each phase's programs one after another."""
    found: dict[str, float] = {}
    for line in self.lines:
      spent = line.seconds * line.program.calls
      found[line.program.phase] = found.get(line.program.phase, 0.0) + spent
    return {phase: s for phase, s in found.items() if s}

  @property
  def step_seconds(self) -> float:
    return sum(self.phase_seconds().values())

  def collective_share(self) -> float:
    """Seconds of collectives over those of the step: hidden behind the rest, or not."""
    spent = sum(line.parts["collectives"] * line.program.calls for line in self.lines)
    return spent / self.step_seconds if self.step_seconds else 0.0

  def advice(self, c: ml_collections.ConfigDict) -> str:
    """What is too large, and what to change of a config where it does not fit."""
    over = {p: n for p, n in self.peaks.items() if n > self.limit}
    phase = max(over, key=lambda p: over[p])
    alive = sorted((n for n in PHASES[phase] if n in self.residents),
                   key=lambda n: -self.residents[n])
    most = ", ".join(f"{n} {self.residents[n] / 2**30:.1f}" for n in alive[:3])
    told = "; ".join(f"{p} {n / 2**30:.1f} GiB" for p, n in over.items())
    found = [what for what, phases, free in REMEDIES if phase in phases and free(c)]
    excess = over[phase] - self.limit
    left = self.residents.get("rows", 0) + self.residents.get("desk", 0) - excess
    if phase == "rollout" and left >= 2**30:
      found.insert(0, f"rollout.cache_gib={left / 2**30:.0f}")
    return (f"{told}; {excess / 2**30:.1f} GiB too much. Largest in {phase}: {most}. Try "
            f"{'; or '.join(found)}")


def plan(step: Step, target: Target, lines: Sequence[Line]) -> Plan:
  """Adds it all up."""
  sizes = {name: costs.resident(tree) for name, tree in step.residents.items()}
  on_device = {name: size for name, size in sizes.items() if name not in step.pinned}
  waiting = {name: size for name, size in sizes.items() if name in step.pinned}

  def beside(line: Line) -> int:
    """What a program takes beside the residents, among which its lasting results count."""
    new = 0 if line.program.makes else max(0, line.cost.new)
    return line.cost.temporaries + new + sum(waiting.get(n, 0) for n in line.program.fetches)

  peaks = {}
  for phase, names in PHASES.items():
    most = max((beside(line) for line in lines if line.program.phase == phase), default=0)
    peaks[phase] = sum(on_device.get(n, 0) for n in names) + most
  return Plan(target, lines, on_device, sum(waiting.values()) * target.host_chips, peaks,
              step.episodes * step.load.written, step.episodes * step.load.length, step.load)
