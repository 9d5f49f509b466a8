"""Passages a second of a sentence encoder, and of sentence-transformers beside it.

  python -m benchmarks.encode --assets DIR --passages 2000 --cpus 0,1 --peer PYTHON

Reads DIR/minilm-l6 and DIR/wiki-vital/corpus.jsonl. PYTHON: the interpreter of an environment with
sentence-transformers, run on the same cores; the two take turns, so that what else the machine does
meets both. Tokenizing counts. `first_s`: the first round, which compiles; `cpu_s`: processor
seconds of all threads, which a busy machine disturbs less; `max_difference`: between the two's
vectors. One JSON line.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile
import time
from typing import Any

from benchmarks import common

# Loads, encodes once to warm up and leaves its vectors; then times a round for each line it reads.
PEER = """
import json, sys, time
import numpy as np
import sentence_transformers
folder, texts, out, max_tokens, dtype = sys.argv[1:]
passages = json.load(open(texts))
model = sentence_transformers.SentenceTransformer(
    folder, device="cpu", model_kwargs={"torch_dtype": dtype})
model.max_seq_length = int(max_tokens)
encode = lambda: model.encode(passages, batch_size=32, normalize_embeddings=True,
                              show_progress_bar=False)
np.save(out, encode().astype(np.float32))
print(json.dumps({"version": sentence_transformers.__version__}), flush=True)
for _ in sys.stdin:
  began = time.perf_counter(), time.process_time()
  encode()
  print(json.dumps([time.perf_counter() - began[0], time.process_time() - began[1]]), flush=True)
"""


def arguments() -> argparse.Namespace:
  p = argparse.ArgumentParser(description=__doc__,
                              formatter_class=argparse.RawDescriptionHelpFormatter)
  p.add_argument("--assets", type=pathlib.Path, required=True)
  p.add_argument("--passages", type=int, default=2000, help="spread evenly over the corpus")
  p.add_argument("--max-tokens", type=int, default=256)
  p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
  p.add_argument("--repeats", type=int, default=3)
  p.add_argument("--peer", default=None, help="a python with sentence-transformers")
  p.add_argument("--cpus", default=None, help="pin to these cores, e.g. 0 or 0,1")
  return p.parse_args()


def read_passages(assets: pathlib.Path, count: int) -> list[str]:
  """So many passages' contents, spread evenly over the corpus."""
  lines = (assets / "wiki-vital" / "corpus.jsonl").read_text().splitlines()
  step = max(1, len(lines) // count)
  return [json.loads(line)["contents"] for line in lines[::step][:count]]


class Peer:
  """The other interpreter, loaded and warm, waiting for its turns."""

  def __init__(self, args: argparse.Namespace, folder: pathlib.Path, passages: list[str],
               scratch: pathlib.Path):
    self.vectors_file = scratch / "vectors.npy"
    (scratch / "texts.json").write_text(json.dumps(passages))
    self._process = subprocess.Popen(
        [args.peer, "-c", PEER, folder, scratch / "texts.json", self.vectors_file,
         str(args.max_tokens), args.dtype],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    self.version = self._answer()["version"]

  def round(self) -> list[float]:
    """Seconds of encoding all, by the clock and of the processors."""
    self._process.stdin.write("\n")
    self._process.stdin.flush()
    return self._answer()

  def end(self) -> None:
    self._process.communicate()

  def _answer(self) -> Any:
    line = self._process.stdout.readline()
    if not line:
      raise SystemExit(f"the peer ended with {self._process.wait()}")
    return json.loads(line)


def figures(whose: str, rounds: list[list[float]], passages: list[str]) -> dict[str, Any]:
  """What is reported of the rounds of one of the two."""
  clock, processors = zip(*rounds)
  return {f"{whose}encode_s": common.spread(clock), f"{whose}cpu_s": common.spread(processors),
          f"{whose}passages_s": round(len(passages) / statistics.median(clock), 1)}


def main() -> None:
  args = arguments()
  common.pin(args.cpus)
  import numpy as np
  from retriever import encoders
  folder, passages = args.assets / "minilm-l6", read_passages(args.assets, args.passages)
  spec = encoders.wanted_spec(str(folder), max_tokens=args.max_tokens, dtype=args.dtype)
  encoder = encoders.fit(spec, [])
  with tempfile.TemporaryDirectory() as scratch:
    peer = Peer(args, folder, passages, pathlib.Path(scratch)) if args.peer else None
    began = time.perf_counter()
    vectors_PD = encoder.encode_passages(passages)
    first, ours, theirs = time.perf_counter() - began, [], []
    for _ in range(args.repeats):
      began = time.perf_counter(), time.process_time()
      encoder.encode_passages(passages)
      ours.append([time.perf_counter() - began[0], time.process_time() - began[1]])
      if peer:
        theirs.append(peer.round())
    found: dict[str, Any] = {}
    if peer:
      peer.end()
      found = {"peer": f"sentence-transformers {peer.version}",
               **figures("peer_", theirs, passages),
               "times_the_peer": common.spread([t[0] / o[0] for o, t in zip(ours, theirs)]),
               "times_the_peer_cpu": common.spread([t[1] / o[1] for o, t in zip(ours, theirs)]),
               "max_difference": float(np.abs(vectors_PD - np.load(peer.vectors_file)).max())}
  common.report(bench="encode", passages=len(passages), dtype=args.dtype,
                max_tokens=args.max_tokens, first_s=round(first, 2), **figures("", ours, passages),
                **found)


if __name__ == "__main__":
  main()
