"""Host memory and seconds of a model folder's import (to float32) and of its export.

  python -m benchmarks.weights --gb 3 --dtype bfloat16 --cpus 1

A random folder of several files is written to a temporary place, read by a fresh process and
written again by it. That process measures itself: the kernel's own high-water mark (VmHWM, reset
before each part) counts all that is resident: private memory, shared memory and the pages of mapped
files, so it is an upper bound whatever the reading is done with. `beyond` is that mark less what
was resident at the start and less the parameters, `needed`; freed memory that the process keeps
counts. `anonymous` is the same for private memory alone (RssAnon), sampled every 5 ms by the
parent. Exit 1 where `beyond` is more than the largest tensor in float32 and 1 GiB. One JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, Callable

from benchmarks import common

FILES = 4
SLACK = 2**30


def arguments() -> argparse.Namespace:
  p = argparse.ArgumentParser(description=__doc__,
                              formatter_class=argparse.RawDescriptionHelpFormatter)
  p.add_argument("--gb", type=float, default=3.0, help="size of the folder, 10^9 bytes")
  p.add_argument("--width", type=int, default=2048, help="the MLP is four times as wide")
  p.add_argument("--vocab", type=int, default=65536)
  p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16",
                 help="of the folder that is read and of the one that is written")
  p.add_argument("--cpus", default=None, help="pin to these cores, e.g. 0 or 0,1")
  p.add_argument("--child", default=None, help=argparse.SUPPRESS)
  return p.parse_args()


def shape_of(args: argparse.Namespace, itemsize: int):
  """A Qwen3 of about the size asked for, by its layers; its embedding is tied."""
  from searchr1_jax.model import shapes
  heads = args.width // 128
  layer = (3 * 4 + 4) * args.width**2  # three matrices of the MLP, four of the attention
  layers = max(1, round((args.gb * 1e9 / itemsize - args.vocab * args.width) / layer))
  return shapes.DecoderShape(
      vocab_size=args.vocab, width=args.width, mlp_width=4 * args.width, layers=layers, heads=heads,
      kv_heads=heads, head_size=128, rope_theta=1e6, norm_eps=1e-6, tied_embeddings=True,
      qk_norm=True, family="qwen3")


def generate(folder: pathlib.Path, shape: Any, dtype: Any) -> None:
  """Random weights of a `DecoderShape`, normal(0.02), in FILES files, by the library itself."""
  import numpy as np
  import safetensors.numpy
  from searchr1_jax.model import shapes, weights
  noise = (0.02 * np.random.default_rng(0).standard_normal(2**24, np.float32)).astype(dtype)
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(shapes.to_hugging_face(shape)))
  table = list(weights.entries(shape).items())
  for i in range(FILES):
    tensors = {name: np.resize(noise, entry.stored) for name, entry in table[i::FILES]}
    safetensors.numpy.save_file(tensors, folder / f"model-{i}.safetensors")


def resident(key: str, pid: int | str = "self") -> int:
  """Bytes that /proc tells of a process."""
  lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
  return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":")), 0)


def phase(name: str, work: Callable[[], Any]) -> Any:
  """Runs `work`; prints what it took, and the most that was resident meanwhile."""
  pathlib.Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
  print(json.dumps({"begin": name}), flush=True)
  began = time.perf_counter()
  result = work()
  print(json.dumps({"end": name, "seconds": round(time.perf_counter() - began, 2),
                    "resident": resident("VmHWM")}), flush=True)
  return result


def child(folder: pathlib.Path, args: argparse.Namespace) -> None:
  """Import and export, each measured."""
  import jax
  import jax.numpy as jnp
  from searchr1_jax.model import weights
  shape, _ = weights.read_config(folder)
  jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.zeros(8)))  # jax's own memory comes first
  print(json.dumps({"start": {key: resident(key) for key in ("VmRSS", "RssAnon")}}), flush=True)
  params = phase("import", lambda: jax.block_until_ready(weights.load(folder)))
  phase("export", lambda: weights.save(folder.parent / "out", params, shape,
                                       dtype=jnp.dtype(args.dtype)))


def watch(process: subprocess.Popen, needed: int) -> dict[str, dict[str, float]]:
  """Seconds of each part, and the memory that it took beyond the needed bytes."""
  found: dict[str, dict[str, float]] = {}
  peak, start = 0, {}

  def sample() -> None:
    nonlocal peak
    while process.poll() is None:
      try:
        peak = max(peak, resident("RssAnon", process.pid))
      except FileNotFoundError:
        return  # it ended between the two calls
      time.sleep(0.005)

  threading.Thread(target=sample, daemon=True).start()
  for line in process.stdout:
    said = json.loads(line)
    if "start" in said:
      start = said["start"]
    elif "begin" in said:
      peak = 0
    else:
      found[said["end"]] = {
          "seconds": said["seconds"], "beyond": said["resident"] - start["VmRSS"] - needed,
          "anonymous": peak - start["RssAnon"] - needed}
  return found


def main() -> None:
  args = arguments()
  common.pin(args.cpus)
  if args.child:
    return child(pathlib.Path(args.child), args)
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch) / "model"
    import jax.numpy as jnp
    from searchr1_jax.model import weights
    dtype = jnp.dtype(args.dtype)
    shape = shape_of(args, dtype.itemsize)
    generate(folder, shape, dtype)
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.weights", *sys.argv[1:],
                                f"--child={folder}"], stdout=subprocess.PIPE, text=True)
    counts = [math.prod(e.stored) for e in weights.entries(shape).values()]
    found = watch(process, 4 * sum(counts))
    if process.wait():
      sys.exit(f"the measured process ended with {process.returncode}")
  largest = 4 * max(counts)
  for part in found.values():
    part["gb_s"] = round(size / 1e9 / part["seconds"], 3)
  common.report(bench="weights", folder_bytes=size, dtype=args.dtype, needed=4 * sum(counts),
                largest_tensor=largest, allowed=largest + SLACK, **found)
  sys.exit(int(any(part["beyond"] > largest + SLACK for part in found.values())))


if __name__ == "__main__":
  main()
