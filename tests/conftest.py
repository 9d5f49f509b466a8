"""Everything strict while tests run: axes and types checked, nothing promoted, no warnings."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import typing

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"  # read by jax here and in every subprocess
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
if "PYTEST_XDIST_WORKER" in os.environ:  # other workers want the cores on which OpenMP would spin
  os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import jaxtyping
import pytest

# Before the packages are first imported: the hook rewrites them while they load.
jaxtyping.install_import_hook(("searchr1_jax", "retriever"), "beartype.beartype")

ROOT = pathlib.Path(__file__).resolve().parent.parent

hypothesis.settings.register_profile(
    "steady", derandomize=True, database=None, deadline=None, max_examples=50)
hypothesis.settings.load_profile("steady")


@pytest.fixture(scope="session")
def assets() -> pathlib.Path:
  """The folder of real models and texts; a test that asks for it is skipped where there is none."""
  folder = os.environ.get("SEARCHR1_ASSETS")
  if not folder:
    pytest.skip("SEARCHR1_ASSETS is unset: `make assets` builds the real models and texts")
  if not pathlib.Path(folder).is_dir():
    pytest.fail(f"SEARCHR1_ASSETS names {folder}, which is no folder")
  return pathlib.Path(folder)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
  """The tokenizer of the generated worlds, built anew."""
  from searchr1_jax.text.tokenizer import Tokenizer
  from searchr1_jax.worlds import vocabulary

  folder = tmp_path_factory.mktemp("tokenizer")
  vocabulary.build_tokenizer(folder)
  return Tokenizer.load(folder)


class RunPython(typing.Protocol):
  """`run_python(code, devices=8, timeout=120, env={})`: a fresh interpreter, its result."""

  def __call__(self, code: str, devices: int = ..., timeout: float = ...,
               env: dict[str, str] | None = ...) -> subprocess.CompletedProcess: ...


@pytest.fixture
def run_python() -> RunPython:
  """Runs code in a fresh interpreter with so many simulated devices; fails the test if it fails."""

  def run(code, devices=8, timeout=120, env=None):
    environ = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ | (env or {}),
                          capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done

  return run
