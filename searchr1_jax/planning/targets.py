"""Machines that programs can be compiled for from anywhere: what they hold, how fast they are.

Sizes and speeds are the vendors' published ones, dense bfloat16, for one chip:
NVIDIA's data sheets of H100 SXM, H200 SXM and A100 SXM 80 GB; Google Cloud's pages of TPU v5e, v5p
and v6e.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Sequence

import jax
from jax.experimental import topologies
import jax.numpy as jnp

from searchr1_jax.types import UserError


@dataclasses.dataclass(frozen=True)
class Chip:
  """`memory` in bytes; `flops` a second; `bandwidth` of memory, `link` to chips of the same host or
  torus and `network` to other hosts in bytes a second, one way."""

  name: str
  memory: int
  flops: float
  bandwidth: float
  link: float
  network: float


@dataclasses.dataclass(frozen=True)
class Target:
  """So many chips, `host_chips` to a host. `platform`, `topology`, `bounds`: what XLA calls it."""

  name: str
  chip: Chip
  chips: int
  host_chips: int
  platform: str
  topology: str = ""
  bounds: tuple[int, ...] = ()


H100 = Chip("H100", 84929347584, 989.4e12, 3.352e12, 450e9, 50e9)
H200 = Chip("H200", 150754820096, 989.4e12, 4.8e12, 450e9, 50e9)
A100 = Chip("A100", 85094825984, 312e12, 2.039e12, 300e9, 25e9)
# Slices as small as these close no ring: of a chip's links to its torus the corners use two, of the
# four (v5e, v6e) or six (v5p) that the pages add up.
V5E = Chip("TPU v5e", 16 * 2**30, 197e12, 819e9, 100e9, 100e9)
V5P = Chip("TPU v5p", 95 * 2**30, 459e12, 2.765e12, 200e9, 200e9)
V6E = Chip("TPU v6e", 32 * 2**30, 918e12, 1.64e12, 224e9, 224e9)

_TARGETS = (
    Target("h100x1", H100, 1, 1, "cuda", "1x1x1"),
    Target("h100x8", H100, 8, 8, "cuda", "1x1x8"),
    Target("h100x16", H100, 16, 8, "cuda", "1x2x8"),
    Target("h200x8", H200, 8, 8, "cuda", "1x1x8"),
    Target("a100x8", A100, 8, 8, "cuda", "1x1x8"),
    Target("v5e-16", V5E, 16, 4, "tpu", "v5e:4x4"),
    Target("v5p-8", V5P, 4, 4, "tpu", "v5p:2x2x1"),  # named by its 8 cores, two to a chip
    Target("v6e-8", V6E, 8, 8, "tpu", "v6e:2x4", (2, 4, 1)),
)
TARGETS = {t.name: t for t in _TARGETS}
NAMES = (*TARGETS, "cpu")
INSTALLED_BY = {"cuda": "plan-gpu", "tpu": "plan-tpu"}  # extras of pyproject.toml

# What XLA asks of a GPU that is not there, in its GpuTargetConfigProto.
_GPU = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {per_core} threads_per_core_limit: 2048 core_count: {cores}
  fpus_per_core: {fpus} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {bandwidth:.0f} l2_cache_size: {cache}
  clock_rate_ghz: {clock} device_memory_size: {memory:.0f}
  shared_memory_per_block_optin: {optin} cuda_compute_capability {{ major: {major} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }} device_description_str: "{title}" """
_HOPPER = dict(per_core=233472, cores=132, fpus=128, cache=52428800, optin=232448, major=9)
_GPUS = {
    "H100": dict(_HOPPER, clock=1.98, title="NVIDIA H100 80GB HBM3"),
    "H200": dict(_HOPPER, clock=1.98, title="NVIDIA H200"),
    "A100": dict(per_core=167936, cores=108, fpus=64, cache=41943040, optin=166912, major=8,
                 clock=1.41, title="NVIDIA A100-SXM4-80GB"),
}


def prepare(devices: int) -> None:
  """Before JAX looks for devices: this process computes on the CPU, whatever it compiles for.

  `devices`: how many the CPU is taken for where it is the target itself.
  """
  os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # a driver would be asked for
  os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # its lock is for those that use a TPU
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")  # else it asks the network
  os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", devices)


def find(name: str) -> Target:
  """A target by its name; `cpu` is this machine, as fast as it shows itself to be."""
  if name == "cpu":
    return _this_machine()
  if name not in TARGETS:
    raise UserError(f"there is no target {name!r}; choose one of {', '.join(NAMES)}")
  return TARGETS[name]


def devices(target: Target) -> Sequence[jax.Device]:
  """Its devices, to compile for and not to run on."""
  if target.platform == "cpu":
    return jax.devices("cpu")
  chip = target.chip
  how = dict(topology_name=target.topology)
  if target.bounds:  # of a host, where XLA takes another kind for usual
    how |= dict(chips_per_host_bounds=target.bounds)
  if target.platform == "cuda":
    text = _GPU.format(bandwidth=chip.bandwidth, memory=chip.memory, **_GPUS[chip.name])
    how = dict(target_config=text, topology=target.topology)
  try:
    return topologies.get_topology_desc(platform=target.platform, **how).devices
  except (RuntimeError, ValueError, NotImplementedError) as e:
    extra = INSTALLED_BY[target.platform]
    raise UserError(
        f"XLA's compiler for {target.name} is not in this environment ({str(e).splitlines()[0]}); "
        f"install it: pip install -e '.[{extra}]'") from e


def _this_machine() -> Target:
  """The CPU, its speeds measured in half a second."""
  memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  count = len(jax.devices("cpu"))  # simulated ones share the machine
  square, line = jnp.ones((1024, 1024)), jnp.ones(2**25)
  flops = 2 * 1024**3 / _seconds(jax.jit(lambda x: x @ x), square)
  bandwidth = 8 * 2**25 / _seconds(jax.jit(lambda x: x + 1), line)
  chip = Chip("CPU", memory // count, flops / count, bandwidth / count, bandwidth / count,
              bandwidth / count)
  return Target("cpu", chip, count, count, "cpu")


def _seconds(function, x) -> float:
  """The fastest of a few runs."""
  function(x).block_until_ready()
  def once():
    began = time.perf_counter()
    function(x).block_until_ready()
    return time.perf_counter() - began
  return min(once() for _ in range(5))
