"""Program: what a config takes on a machine that is not here: memory, seconds a step, hours.

python -m searchr1_jax.plan --config=configs/ppo_qwen7b.py --target=h100x8

Compiles the programs of a training step for the target (h100x1, h100x8, h100x16, h200x8, a100x8,
v5e-16, v5p-8, v6e-8, cpu; the config's own `machine` if none is named), and adds them up: what is
resident in which phase, whether it fits, how long a step takes at the roofline. --every_shape
compiles the whole closed list, not just the shapes that are met most and the largest. The mean
episode is --prompt, --searches, --turn and --observation (tokens). --efficiency is the share of the
roofline that the estimate counts on. Nothing is downloaded: a hub id's shape is known by its name.
--json prints the table's numbers as one object, on the last line. The exit code is 1 where the
config does not fit. --fresh compiles again what earlier plans have compiled. --quick compiles with
the least effort, for TPUs several times sooner: memory within a tenth, seconds less true.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
from typing import Any, Iterator, Sequence

from absl import flags
import ml_collections
import rich.console
import rich.table

from retriever import console
from searchr1_jax.model import shapes, weights
from searchr1_jax.planning import costs, targets, whole
from searchr1_jax.planning.programs import Step
from searchr1_jax.planning.workload import Load
from searchr1_jax.run import cli, setup
from searchr1_jax.text.tokenizer import Tokenizer
from searchr1_jax.types import UserError

# Ids of the families' published tokenizers, where there is no folder to read one from.
TOKENIZERS = {"qwen2": 151665, "qwen3": 151669, "llama": 128256}
GIB = 2**30
DOES_NOT_FIT = 1  # exit code, beside those of run/cli.py


def kept_folder() -> pathlib.Path:
  """Where the costs of programs are kept from plan to plan."""
  cache = os.environ.get("SEARCHR1_CACHE") or pathlib.Path.home() / ".cache" / "searchr1-jax"
  return pathlib.Path(cache) / "plan"


def make_plan(c: ml_collections.ConfigDict, target: targets.Target, load: Load, *,
              kept: pathlib.Path, every_shape: bool = False, fresh: bool = False,
              quick: bool = False) -> whole.Plan:
  """Compiles what the config's step runs on the target. `targets.prepare` must have been called."""
  step = open_step(c, target, load)
  lines = []
  with console.Bars(transient=True) as bars:
    for program in bars.track(list(step.programs(every_shape)),
                              description=f"compiling for {target.name}"):
      cost = costs.measure(program, target, kept, fresh, quick)
      lines.append(whole.Line(program, cost, cost.seconds(target)))
  return whole.plan(step, target, lines)


def open_step(c: ml_collections.ConfigDict, target: targets.Target, load: Load) -> Step:
  """The step of a config on a target's devices, nothing compiled yet."""
  shape, allowed_vocab = open_shape(c.model.path)
  setup.check_lengths(c, shape, c.model.path)
  return Step(c, shape, allowed_vocab, setup.mesh(c, targets.devices(target)), load)


def check_mesh(c: ml_collections.ConfigDict, name: str) -> int:
  """The devices of a config's mesh: as many as the target has, on a CPU any reasonable number."""
  wanted = c.mesh.data * c.mesh.fsdp * c.mesh.tensor
  there = targets.TARGETS[name].chips if name in targets.TARGETS else min(wanted, 512)
  if wanted != there:
    raise UserError(f"mesh data={c.mesh.data}, fsdp={c.mesh.fsdp}, tensor={c.mesh.tensor} has "
                    f"{wanted} devices, {name} has {there}; change --config.mesh.fsdp, or --target")
  return wanted


def open_shape(path: str) -> tuple[shapes.DecoderShape, int]:
  """The shape of a model, and how many ids its tokenizer has: of a folder, or of a known name."""
  if pathlib.Path(path).is_dir():
    return weights.read_config(path)[0], Tokenizer.load(path).size
  name = path.rpartition("/")[2].removesuffix("-Instruct")
  if name not in shapes.NAMED:
    raise UserError(f"model {path!r} is neither a folder nor of a known size; name a folder, or a "
                    f"hub id that ends in one of {', '.join(shapes.NAMED)}")
  shape = shapes.NAMED[name]
  return shape, TOKENIZERS[shape.family]


def show(plan: whole.Plan, c: ml_collections.ConfigDict, efficiency: float,
         page: rich.console.Console) -> None:
  """The table of programs, then the whole."""
  table = rich.table.Table(title=f"{c.model.path} on {plan.target.name}", title_justify="left")
  table.add_column("program")
  for name in ("calls a step", "arguments GiB", "temporaries GiB", "TFLOP", "moved GB",
               "collectives GB", "roofline ms", "bound by"):
    table.add_column(name, justify="right")
  for line in plan.lines:
    cost = line.cost
    table.add_row(line.program.name, f"{line.program.calls:.3g}", *(_plain(x) for x in (
        cost.arguments / GIB, cost.temporaries / GIB, cost.flops / 1e12, cost.memory / 1e9,
        cost.link / 1e9, 1e3 * line.seconds)), line.bound)
  page.print(table)
  memory = rich.table.Table(title="memory of a device, GiB", title_justify="left")
  for name in ("phase", "resident", "peak"):
    memory.add_column(name, justify="left" if name != "peak" else "right")
  for phase, peak in plan.peaks.items():
    alive = [f"{n} {plan.residents[n] / GIB:.3g}" for n in whole.PHASES[phase] if
             n in plan.residents]
    memory.add_row(phase, ", ".join(alive), f"{peak / GIB:.3g}")
  page.print(memory)
  for text in _words(plan, c, efficiency):
    page.print(text, highlight=False, soft_wrap=True)


def _plain(x: float) -> str:
  """Three digits, no powers of ten."""
  return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def _words(plan: whole.Plan, c: ml_collections.ConfigDict, efficiency: float) -> Iterator[str]:
  chip, seconds = plan.target.chip, plan.step_seconds
  if plan.target.platform == "cpu":
    yield (f"a device of this machine, as measured now: {chip.flops / 1e9:.0f} GFLOP/s, "
           f"{chip.bandwidth / 1e9:.1f} GB/s of memory")
  elif c.model.dtype == "float32":
    yield "float32 is counted at the speed of bfloat16, which no accelerator reaches with it"
  yield ("a line of the table is one run of a program on one device; 0 calls: it is compiled for "
         "its memory, as the largest of its kind or to begin with")
  load, bounds = plan.load, plan.bounds()
  yield (f"the mean episode: {load.prompt} tokens of prompt, {load.searches:g} searches of "
         f"{load.observation}, {load.searches + 1:g} turns of {load.turn}, within what the config "
         "allows (--prompt, --searches, --observation, --turn)")
  phases = ", ".join(f"{phase} {s:.1f} by {bounds[phase]}"
                     for phase, s in plan.phase_seconds().items())
  yield (f"a step at the roofline: {seconds:.1f} s ({phases}); collectives alone "
         f"{100 * plan.collective_share():.0f} % of it")
  step = seconds / efficiency
  yield (f"at {100 * efficiency:.0f} % of the roofline: {step:.0f} s a step, "
         f"{plan.generated_tokens / step:.0f} tokens/s written on all devices, "
         f"{plan.trained_tokens / step:.0f} trained, {c.steps * step / 3600:.1f} hours for "
         f"{c.steps} steps (searches that rollouts wait for, evaluations and checkpoints not counted)")
  if plan.pinned:
    yield (f"pinned memory of a host: {plan.pinned / GIB:.3g} GiB, whose copies to and from the "
           "devices are not counted in the seconds")
  share = f"{plan.peak / GIB:.3g} of {chip.memory / GIB:.3g} GiB a device at the peak"
  if plan.fits:
    yield f"fits: {share}"
  else:
    yield f"does not fit ({share}, {100 * whole.SPARE:.0f} % to be left free): {plan.advice(c)}"


def summary(plan: whole.Plan, c: ml_collections.ConfigDict, efficiency: float) -> dict[str, Any]:
  """The plan as plain JSON; `programs` one entry each, in bytes, FLOPs and seconds of a device."""
  step = plan.step_seconds / efficiency
  return {
      "target": plan.target.name, "model": c.model.path, "fits": plan.fits,
      "peak_gib": plan.peak / GIB, "memory_gib": plan.target.chip.memory / GIB,
      "step_seconds_roofline": plan.step_seconds, "efficiency": efficiency, "step_seconds": step,
      "hours": c.steps * step / 3600, "tokens_per_second": plan.generated_tokens / step,
      "collective_share": plan.collective_share(), "phase_seconds": plan.phase_seconds(),
      "phase_peak_gib": {p: n / GIB for p, n in plan.peaks.items()},
      "resident_gib": {n: size / GIB for n, size in plan.residents.items()},
      "pinned_gib": plan.pinned / GIB,
      "programs": [{"phase": line.program.phase, "name": line.program.name,
                    "calls": line.program.calls, "roofline": line.seconds, "bound": line.bound,
                    **dataclasses.asdict(line.cost)} for line in plan.lines]}


def main(words: Sequence[str]) -> None:
  def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("target", None, "the machine; the config's own if none is named",
                        flag_values=values)
    flags.DEFINE_bool("every_shape", False, "the whole closed list", flag_values=values)
    flags.DEFINE_bool("json", False, "one object on the last line", flag_values=values)
    flags.DEFINE_bool("fresh", False, "compile again what is known", flag_values=values)
    flags.DEFINE_bool("quick", False, "the compiler's least effort", flag_values=values)
    flags.DEFINE_float("efficiency", 0.4, "share of the roofline", lower_bound=0.01,
                       upper_bound=1.0, flag_values=values)
    mean = Load()
    for name in ("prompt", "turn", "observation"):
      flags.DEFINE_integer(name, getattr(mean, name), "tokens", lower_bound=1, flag_values=values)
    flags.DEFINE_float("searches", mean.searches, "of a mean episode", lower_bound=0.0,
                       flag_values=values)
    cli.define_config(values, words, cli.base_config())

  values, _ = cli.parse(words, define)
  c = values.config
  name = values.target or c.machine
  if not name:
    raise UserError(f"no target; name one of {', '.join(targets.NAMES)} as --target=h100x8")
  setup.check(c)
  if name not in targets.NAMES:
    targets.find(name)  # says so
  targets.prepare(check_mesh(c, name))
  load = Load(values.prompt, values.searches, values.turn, values.observation)
  plan = make_plan(c, targets.find(name), load, kept=kept_folder(),
                   every_shape=values.every_shape, fresh=values.fresh, quick=values.quick)
  show(plan, c, values.efficiency, rich.console.Console(width=150))
  if values.json:
    print(json.dumps(summary(plan, c, values.efficiency)))
  if not plan.fits:
    sys.exit(DOES_NOT_FIT)


if __name__ == "__main__":
  cli.run_program(main)
