"""Notebooks run from top to bottom in a fresh kernel, and say what they promise."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))

RUN = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
print("".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", [])))
"""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_notebook_runs(path, tmp_path):
  # In a process of its own: the kernel shall not inherit the tests' strict settings of warnings.
  environ = {k: v for k, v in os.environ.items() if not k.startswith("JAX_NUMPY_")}
  done = subprocess.run([sys.executable, "-c", RUN, str(path)], cwd=path.parent, env=environ,
                        capture_output=True, text=True, timeout=400)
  assert done.returncode == 0, done.stderr[-3000:]
  if path.stem == "masking_math":
    assert "gradient outside the mask: 0.0" in done.stdout
    assert "loss and every gradient identical: True" in done.stdout
