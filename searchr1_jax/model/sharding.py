"""Where arrays live on a mesh: one table from a parameter's logical axes to mesh axes."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from searchr1_jax.types import UserError

MESH_AXES = ("data", "fsdp", "tensor")
MEMORIES = ("device", "pinned_host")

# Logical axis of a parameter → mesh axis. Policy, value and reference share it.
RULES: Mapping[str, str | None] = {
    "vocab": "tensor",
    "width": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head": None,
    "mlp": "tensor",
    "layers": None,
}

# The logical axes of each parameter, by the last two names of its path (layers stacked in front).
_AXES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("embed",): ("vocab", "width"),
    ("head",): ("width", "vocab"),
    ("norm", "scale"): ("width",),
    ("q", "kernel"): ("width", "heads", "head"),
    ("k", "kernel"): ("width", "kv_heads", "head"),
    ("v", "kernel"): ("width", "kv_heads", "head"),
    ("q", "bias"): ("heads", "head"),
    ("k", "bias"): ("kv_heads", "head"),
    ("v", "bias"): ("kv_heads", "head"),
    ("o", "kernel"): ("heads", "head", "width"),
    ("gate", "kernel"): ("width", "mlp"),
    ("up", "kernel"): ("width", "mlp"),
    ("down", "kernel"): ("mlp", "width"),
    ("attention_norm", "scale"): ("width",),
    ("mlp_norm", "scale"): ("width",),
    ("q_norm", "scale"): ("head",),
    ("k_norm", "scale"): ("head",),
    ("value_head", "kernel"): ("width",),
    ("value_head", "bias"): (),
}


def make_mesh(data: int, fsdp: int, tensor: int,
              devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh of the first data · fsdp · tensor devices; of all of them, where processes share it.

  `devices`: this run's own if None.
  """
  sizes = dict(zip(MESH_AXES, (data, fsdp, tensor)))
  devices = jax.devices() if devices is None else devices
  wanted, there = data * fsdp * tensor, len(devices)
  processes = len({d.process_index for d in devices})
  if min(sizes.values()) < 1 or wanted > there or processes > 1 and wanted < there:
    among = f" in {processes} processes, and all must be used" if processes > 1 else ""
    raise UserError(f"mesh {sizes} needs {wanted} devices, there are {there}{among}; change "
                    "--config.mesh.data, .fsdp or .tensor")
  return Mesh(np.array(devices[:wanted]).reshape(data, fsdp, tensor), MESH_AXES)


def parameter_shardings(mesh: Mesh, params: Any, memory: str = "device",
                        axes: Sequence[str] = MESH_AXES) -> Any:
  """The sharding of each parameter (or optimizer moment: its path ends like the parameter's).

  An axis that a mesh axis does not divide is replicated, as key-value heads often must be.
  `memory`: one of `MEMORIES`; scalars always live on the devices. `axes`: of the mesh, those that
  parameters are spread over.
  """
  def of(path, leaf):
    names = tuple(str(p.key) for p in path if hasattr(p, "key"))
    known = _AXES.get(names[-2:]) or _AXES.get(names[-1:])
    kind = memory if leaf.ndim else "device"
    if known is None or leaf.ndim not in (len(known), len(known) + 1):
      return NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
    known = ("layers",) * (leaf.ndim - len(known)) + known
    over = [RULES[a] if RULES[a] in axes else None for a in known]
    return NamedSharding(mesh, _spec(mesh, over, leaf.shape), memory_kind=kind)

  return jax.tree_util.tree_map_with_path(of, params)


def put_batch(mesh: Mesh, batch: Any) -> Any:
  """Rows spread over `data` and `fsdp`; everything else about a row stays together.

  Every process has the whole batch on its host and takes the rows of its own devices.
  """
  sharding = rows(mesh)
  return jax.tree.map(
      lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), batch)


def constrain(mesh: Mesh | None, params: Any) -> Any:
  """Inside a jitted function: keeps parameters, gradients or moments where parameters live."""
  if mesh is None:
    return params
  return jax.lax.with_sharding_constraint(params, parameter_shardings(mesh, params))


def spread_rows(mesh: Mesh | None, x: jax.Array) -> jax.Array:
  """Inside a jitted function: rows of activations over `data` and `fsdp`, as `put_batch` has them.

  Without this the compiler may gather all rows on every device to save the gathering of a sharded
  kernel.
  """
  return x if mesh is None else jax.lax.with_sharding_constraint(x, rows(mesh))


def row_shards(mesh: Mesh | None) -> int:
  """Parts that rows are cut into."""
  return 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]


def spread_sums(mesh: Mesh | None, x: jax.Array) -> jax.Array:
  """Inside a jitted function: sums over the rows of each of `row_shards`, each where its rows are."""
  if mesh is None:
    return x
  first = rows(mesh).spec[:1] or (None,)
  spec = (*first, *(PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1))
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def to_memory(mesh: Mesh | None, params: Any, memory: str = "device") -> Any:
  """Inside a jitted function: copies parameters or moments between the devices and their host."""
  if mesh is None:
    return params
  return jax.device_put(params, parameter_shardings(mesh, params, memory))


def rollout_mesh(mesh: Mesh) -> Mesh:
  """This process's devices of a mesh, for rollouts: heads over `tensor` as before, rows over `data`."""
  mine = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
  tensor = mesh.shape["tensor"]
  if len(mine) % tensor:
    raise UserError(f"a process has {len(mine)} devices of the mesh, and config.mesh.tensor is "
                    f"{tensor}: a rollout spreads heads within one process; lower mesh.tensor")
  return Mesh(np.array(mine).reshape(-1, 1, tensor), MESH_AXES)


def gather(mesh: Mesh | None, params: Any) -> Any:
  """Inside a jitted function: parameters whole on every device, but for what `tensor` splits."""
  if mesh is None:
    return params
  return jax.lax.with_sharding_constraint(
      params, parameter_shardings(mesh, params, axes=("tensor",)))


def on_rollout_mesh(here: Mesh, gathered: Any) -> Any:
  """What `gather` gave, as arrays of this process's `rollout_mesh` alone: no copy."""
  shardings = parameter_shardings(here, gathered, axes=("tensor",))
  def move(x, sharding):
    by_device = {s.device: s.data for s in x.addressable_shards}
    return jax.make_array_from_single_device_arrays(
        x.shape, sharding, [by_device[d] for d in here.devices.flat])

  return jax.tree.map(move, gathered, shardings)


def rollout_rows(mesh: Mesh, heads: int = 0) -> NamedSharding:
  """Rows over `data`; a second axis of key-value heads over `tensor`, where that divides them."""
  return NamedSharding(mesh, _spec(mesh, ["data", "tensor" if heads else None], [0, heads]))


def over_rows(mesh: Mesh, function: Callable, split: Sequence[bool]) -> Callable:
  """The function on each device's own rows, which no other device then waits for.

  `split`: of each argument, whether its leading axis is the rows; otherwise it is the same
  everywhere. Results have rows in front. `tensor` stays with the compiler.
  """
  if mesh.shape["data"] == 1:
    return function
  specs = tuple(PartitionSpec("data") if s else PartitionSpec() for s in split)
  # Kernels of libraries cannot be partitioned where some axes are the compiler's and some are not.
  own = set(MESH_AXES) if mesh.shape["tensor"] == 1 else {"data"}
  return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("data"),
                       axis_names=own, check_vma=False)


def over_rows_and_heads(mesh: Mesh | None, function: Callable) -> Callable:
  """The function on each device's own rows and heads, the first two axes of all it takes and gives."""
  if mesh is None:
    return function
  spec = PartitionSpec(("data", "fsdp"), "tensor")
  return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def rows(mesh: Mesh) -> NamedSharding:
  """The first axis over `data` and `fsdp`."""
  rows = tuple(a for a in ("data", "fsdp") if mesh.shape[a] > 1)
  return NamedSharding(mesh, PartitionSpec(rows) if rows else PartitionSpec())


def _spec(mesh: Mesh, axes: Sequence[str | None], sizes: Sequence[int]) -> PartitionSpec:
  """The shortest spec that says it: two ways to say the same would compile twice."""
  spec = [a if a and mesh.shape[a] > 1 and size % mesh.shape[a] == 0 else None
          for a, size in zip(axes, sizes)]
  while spec and spec[-1] is None:
    spec.pop()
  return PartitionSpec(*spec)
