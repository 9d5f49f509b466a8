"""Plans every config that names an accelerator, and writes the table of docs/cost.md anew.

  python -m benchmarks.plans            # or `make plan`; a first time takes minutes

One JSON line: each config's peak, whether it fits, seconds of a step. Exit code 1 if one does not
fit.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import subprocess
import sys

from benchmarks import common
from searchr1_jax.plan import DOES_NOT_FIT
from searchr1_jax.planning import targets

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "cost.md"
BEGIN, END = "<!-- table: make plan -->\n", "<!-- end of table -->"


def planned() -> list[str]:
  """The configs for accelerators."""
  names = sorted(p.stem for p in (ROOT / "configs").glob("*.py") if not p.stem.startswith("_"))
  machines = {n: importlib.import_module(f"configs.{n}").get_config().get("machine", "")
              for n in names}
  return [n for n, machine in machines.items() if machine in targets.TARGETS]


def plan(name: str) -> dict:
  """What the program says of a config."""
  done = subprocess.run([sys.executable, "-m", "searchr1_jax.plan", "--json",
                         f"--config=configs/{name}.py"], cwd=ROOT, capture_output=True, text=True)
  if done.returncode not in (0, DOES_NOT_FIT):
    raise SystemExit(f"{name}: {done.stderr}")
  return json.loads(done.stdout.splitlines()[-1])


def row(name: str, p: dict) -> str:
  """A line of the page's table."""
  phases = p["phase_seconds"]
  s = lambda *names: f"{sum(phases.get(n, 0.0) for n in names):.1f}"
  return (f"| `{name}` | {p['target']} | {p['peak_gib']:.1f} of {p['memory_gib']:.1f} | "
          f"{s('lay out', 'rollout')} | {s('score')} | {s('update')} | "
          f"{p['step_seconds_roofline']:.1f} | {100 * p['collective_share']:.0f} % | "
          f"{p['step_seconds']:.0f} | {p['hours']:.1f} |\n")


HEAD = ("| config | machine | peak, GiB a device | rollout, s | scores, s | updates, s | step, s | "
        "collectives | step at 40 %, s | hours |\n|---|---|---|---|---|---|---|---|---|---|\n")


def main() -> None:
  p = argparse.ArgumentParser(description=__doc__,
                              formatter_class=argparse.RawDescriptionHelpFormatter)
  p.add_argument("--configs", nargs="*", default=planned())
  args = p.parse_args()
  os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs on what is compiled for
  found = {}
  for name in args.configs:
    found[name] = plan(name)
    print(row(name, found[name]), end="", flush=True)
  if sorted(found) == planned():
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table = HEAD + "".join(row(n, q) for n, q in found.items())
    PAGE.write_text(before + BEGIN + table + END + rest.partition(END)[2])
  common.report(bench="plans", configs={
      n: {k: q[k] for k in ("target", "fits", "peak_gib", "memory_gib", "step_seconds_roofline",
                            "hours")} for n, q in found.items()})
  sys.exit(0 if all(q["fits"] for q in found.values()) else 1)


if __name__ == "__main__":
  main()
