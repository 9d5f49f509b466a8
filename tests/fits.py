"""Does a config fit the machine that it names? Two files ask, so that two workers share the work."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def check(name: str) -> None:
  """Compiled for that machine: the largest shapes of each kind and the usual ones, a tenth to spare."""
  done = subprocess.run(
      [sys.executable, "-m", "searchr1_jax.plan", f"--config=configs/{name}.py", "--json", "--quick"],
      cwd=ROOT, capture_output=True, text=True, timeout=1500)
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout.splitlines()[-1])
  assert found["fits"] and found["peak_gib"] <= 0.9 * found["memory_gib"]
  docs = (ROOT / "docs" / "cost.md").read_text()
  row = re.search(rf"`{name}`.*?\| *([\d.]+) of", docs)  # compiled with the usual effort
  assert float(row[1]) == pytest.approx(found["peak_gib"], rel=0.1)
  assert float(row[1]) <= 0.9 * found["memory_gib"]
