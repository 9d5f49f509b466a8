"""Many clients with single queries: our server against one that searches once a request.

  python -m benchmarks.serving --index DIR --questions test.jsonl --server-cpus 1 --cpus 0
  python -m benchmarks.serving --rows 1000000 --dim 384 --server-cpus 1 --cpus 0

With an index folder its encoder is part of the work. Without, a Flat index of random unit vectors
answers for vectors that are looked up. The other server is the usual one: FastAPI, a pydantic
model, a plain function that searches for the request's queries. Both are one process each, on the same
cores, over the same mapped files, and keep no answers; they are measured in turns. Latencies in ms
are over all repeats, throughput is the median of them, `cpu_ms` what a request costs the server,
which tells more where others use the machine. One JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

import pydantic

p = argparse.ArgumentParser(description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--index", default=None, help="an index folder")
p.add_argument("--questions", default=None, help='jsonl with a "question" a line')
p.add_argument("--rows", type=int, default=1_000_000)
p.add_argument("--dim", type=int, default=384)
p.add_argument("--clients", type=int, default=64)
p.add_argument("--k", type=int, default=3)
p.add_argument("--seconds", type=float, default=15.0, help="of each measurement")
p.add_argument("--repeats", type=int, default=3)
p.add_argument("--cpus", default=None, help="cores of the clients, e.g. 0")
p.add_argument("--server-cpus", default=None, help="cores of the server")
p.add_argument("--seed", type=int, default=0)
p.add_argument("--vectors", default=None, help=argparse.SUPPRESS)
p.add_argument("--serve", choices=("ours", "usual"), default=None, help=argparse.SUPPRESS)
args = p.parse_args()


def pin(cpus: str | None) -> None:
  """Before any library counts the cores."""
  if cpus:
    os.sched_setaffinity(0, {int(c) for c in cpus.split(",")})


# The servers.


class QueryRequest(pydantic.BaseModel):
  queries: list[str]
  topk: int | None = None
  return_scores: bool = False


def open_engine():
  """The engine that both serve, which keeps no answers."""
  from retriever import engine
  if args.index:
    return engine.open_index(args.index)
  import numpy as np

  from retriever.faiss_index import FlatIndex
  vectors_PD = np.load(args.vectors, mmap_mode="r")
  queries_QD = unit_vectors(4096, args.dim, args.seed + 1)

  class LookedUp:
    dim = args.dim

    def encode_queries(self, queries):
      return queries_QD[[int(q) % len(queries_QD) for q in queries]]

  class Rows:
    def __len__(self):
      return len(vectors_PD)

    def __getitem__(self, row):
      return str(row), f'"Row {row}"\n' + "a hundred words of text " * 25

    def close(self):
      pass

  return engine.Engine(engine.Dense(LookedUp(), FlatIndex(vectors_PD)), Rows(), "random vectors")


def usual_app(engine):
  """The server that is found elsewhere: every request searches for itself."""
  import fastapi
  app = fastapi.FastAPI()

  @app.post("/retrieve")
  def retrieve(request: QueryRequest):
    found = engine.search(request.queries, request.topk or 3)
    return {"result": [[{"document": {"id": p.id, "contents": p.contents}, "score": p.score}
                        for p in passages] for passages in found]}

  return app


def run_server() -> None:
  pin(args.server_cpus)
  import uvicorn

  from retriever import app, serve
  engine, listener = open_engine(), serve.bind("127.0.0.1", 0)
  warm_up(engine)
  print(listener.getsockname()[1], flush=True)
  if args.serve == "ours":
    serve.serve(lambda: app.create_app(engine, app.Serving(cache_bytes=0)), listener)
  else:
    config = uvicorn.Config(usual_app(engine), log_level="error", access_log=False)
    uvicorn.Server(config).run([listener])


def warm_up(engine) -> None:
  """Searches of every size, so that all that compiles has been."""
  queries = queries_to_ask()
  for size in (1, 1, 1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 48, 64):
    for start in range(0, min(len(queries) - size, 8 * size), size) if args.index else (0,):
      engine.search(queries[start:start + size], args.k)


def unit_vectors(rows: int, dim: int, seed: int):
  import numpy as np
  vectors_MD = np.random.default_rng(seed).standard_normal((rows, dim), np.float32)
  vectors_MD /= np.linalg.norm(vectors_MD, axis=1, keepdims=True)
  return vectors_MD


# The clients.


async def ask(port: int, queries: list[str], seconds: float) -> tuple[float, list[float]]:
  """(requests a second, seconds of each) of clients that each ask again once they are answered."""
  took: list[float] = []
  asked = iter(range(10**9))
  end = time.monotonic() + seconds

  async def client() -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while (began := time.monotonic()) < end:
      await answer(reader, writer, queries[next(asked) % len(queries)])
      took.append(time.monotonic() - began)
    writer.close()

  began = time.monotonic()
  await asyncio.gather(*(client() for _ in range(args.clients)))
  return len(took) / (time.monotonic() - began), took


async def answer(reader, writer, query: str) -> bytes:
  body = json.dumps({"queries": [query], "topk": args.k, "return_scores": True}).encode()
  writer.write(b"POST /retrieve HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
               b"content-length: %d\r\n\r\n%b" % (len(body), body))
  head = await reader.readuntil(b"\r\n\r\n")
  reply = await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))
  if not head.startswith(b"HTTP/1.1 200"):
    raise RuntimeError(f"{head!r} {reply[:500]!r}")
  return reply


async def some_answers(port: int, queries: list[str]) -> list[list[str]]:
  reader, writer = await asyncio.open_connection("127.0.0.1", port)
  replies = [json.loads(await answer(reader, writer, q)) for q in queries]
  writer.close()
  return [[item["document"]["id"] for item in reply["result"][0]] for reply in replies]


@contextlib.contextmanager
def server(which: str, vectors: str | None):
  command = [sys.executable, "-m", "benchmarks.serving", *sys.argv[1:], "--serve", which]
  command += ["--vectors", vectors] if vectors else []
  process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
  try:
    port = int(process.stdout.readline())
    time.sleep(1.0)
    yield port, process.pid
  finally:
    process.terminate()
    process.wait()


def queries_to_ask() -> list[str]:
  if args.index is None:
    return [str(i) for i in range(4096)]
  lines = pathlib.Path(args.questions).read_text(encoding="utf-8").splitlines()
  return list(dict.fromkeys(json.loads(line)["question"] for line in lines))


def cpu_seconds(pid: int) -> float:
  """Of a process and all its threads, so far."""
  fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
  return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Measured:
  """One server: rate and latencies of each turn."""

  def __init__(self, port: int, pid: int):
    self.port, self._pid, self.rates, self._took, self._cpu = port, pid, [], [], 0.0

  def measure(self, queries: list[str]) -> None:
    before = cpu_seconds(self._pid)
    rate, took = asyncio.run(ask(self.port, queries, args.seconds))
    self._cpu += cpu_seconds(self._pid) - before
    self.rates.append(rate)
    self._took += took

  def summary(self) -> dict[str, float]:
    took = sorted(self._took)
    at = lambda share: round(1e3 * took[int(share * (len(took) - 1))], 1)
    return {"requests_s": round(statistics.median(self.rates), 1), "p50_ms": at(0.5),
            "p99_ms": at(0.99), "cpu_ms": round(self.cpu_ms(), 2)}

  def cpu_ms(self) -> float:
    return 1e3 * self._cpu / len(self._took)


def main() -> None:
  pin(args.cpus)
  with contextlib.ExitStack() as stack:
    vectors = None
    if args.index is None:
      import numpy as np
      vectors = os.path.join(stack.enter_context(tempfile.TemporaryDirectory()), "vectors.npy")
      np.save(vectors, unit_vectors(args.rows, args.dim, args.seed))
    queries = queries_to_ask()
    ours, usual = (Measured(*stack.enter_context(server(which, vectors)))
                   for which in ("ours", "usual"))
    answers = [asyncio.run(some_answers(s.port, queries[:20])) for s in (ours, usual)]
    if answers[0] != answers[1]:
      raise RuntimeError("the two servers find different passages")
    for one in (ours, usual):
      asyncio.run(ask(one.port, queries, min(args.seconds, 3.0)))
    for _ in range(args.repeats):
      ours.measure(queries)
      usual.measure(queries)
  ratios = [a / b for a, b in zip(ours.rates, usual.rates)]
  rows = {"index": args.index} if args.index else {"rows": args.rows, "dim": args.dim}
  print(json.dumps({
      "bench": "serving", **rows, "clients": args.clients, "k": args.k,
      "ours": ours.summary(), "usual": usual.summary(),
      "throughput_ratio": {"median": round(statistics.median(ratios), 2),
                           "min": round(min(ratios), 2), "max": round(max(ratios), 2)},
      "cpu_ratio": round(usual.cpu_ms() / ours.cpu_ms(), 2),
      "env": {"clients_on": args.cpus, "server_on": args.server_cpus, "cores": os.cpu_count()}}))


if __name__ == "__main__":
  run_server() if args.serve else main()
