"""Does a config fit the machine that it names? Two test files ask, for two workers to share it.

  python tests/fits.py ppo_qwen7b      # from the root: compiles for memory alone, bytes as JSON
"""

from __future__ import annotations

import importlib
import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def check(name: str) -> None:
  """In a process of its own, as it describes devices that are not there: a tenth to spare."""
  done = subprocess.run([sys.executable, __file__, name], cwd=ROOT, capture_output=True, text=True,
                        timeout=1500)
  assert done.returncode == 0, done.stderr
  peak, memory = json.loads(done.stdout.splitlines()[-1])
  assert peak <= 0.9 * memory
  docs = (ROOT / "docs" / "cost.md").read_text()
  row = re.search(rf"`{name}`.*?\| *([\d.]+) of", docs)  # all programs, with the usual effort
  assert float(row[1]) == pytest.approx(peak / 2**30, rel=0.1)
  assert float(row[1]) <= 0.9 * memory / 2**30


def measure(name: str) -> tuple[int, float]:
  """A device's peak and its memory, of the programs that are not small ones of their kind."""
  from searchr1_jax import plan
  from searchr1_jax.planning import costs, targets, whole
  from searchr1_jax.planning.workload import Load

  c = importlib.import_module(f"configs.{name}").get_config()
  targets.prepare(plan.check_mesh(c, c.machine))
  target = targets.find(c.machine)
  step = plan.open_step(c, target, Load())
  programs = list(step.programs(every_shape=False))
  lines = [whole.Line(p, costs.measure(p, target, plan.kept_folder(), quick=True), {})
           for p in programs if not any(smaller(p.name, other.name) for other in programs)]
  found = whole.plan(step, target, lines)
  return found.peak, target.chip.memory


def smaller(name: str, other: str) -> bool:
  """Whether no number in one program's name exceeds that of another of its kind."""
  same_kind = re.sub(r"\d+", "", name) == re.sub(r"\d+", "", other)
  numbers = (map(int, re.findall(r"\d+", n)) for n in (name, other))
  return same_kind and name != other and all(a <= b for a, b in zip(*numbers))


if __name__ == "__main__":
  sys.path.insert(0, str(ROOT))
  print(json.dumps(measure(sys.argv[1])))
