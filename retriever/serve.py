"""Program: serves a search engine over HTTP.

  python -m retriever.serve --index DIR [--host 127.0.0.1] [--port 8000] [--workers 1]

Ends at SIGTERM or Ctrl-C once what was asked is answered, within a few seconds, with exit code 0.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import ipaddress
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence

import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from retriever import console, wire
from retriever.app import Serving, create_app
from retriever.gate import ImpatientProtocol
from retriever.protocol import RetrievalError, SearchEngine, UserError

KEEP_ALIVE_SECONDS = 75  # longer than clients keep theirs, so that none is closed as it is used
GRACE_SECONDS = 5  # for what is being answered when the server is told to end


def main(argv: Sequence[str] | None = None) -> int:
  """Serves as the command line says; returns the exit code."""
  args = _parser().parse_args(argv)
  _end_well()
  console.tell_retries()
  try:
    token = _token(args.token_env, os.environ)
    _check_host(args.host, token)
    worker = Worker(args.index, _serving(args), token)
    with bind(args.host, args.port) as listener:
      where = f"http://{args.host}:{listener.getsockname()[1]}"
      if args.workers > 1:
        return _serve_several(worker, listener, args.workers, where)
      engine = worker.engine()
      print(f"{args.index} (fingerprint {engine.fingerprint[:12]}) on {where}", flush=True)
      serve(functools.partial(worker.app, engine), listener)
  except (UserError, RetrievalError, ValueError, OSError) as e:
    print(f"retriever.serve: {e}", file=sys.stderr)
    return 2
  return 0


def serve(app_factory: Callable[[], object], listener: socket.socket) -> None:
  """Serves until a signal comes; what is being answered then has GRACE_SECONDS to end."""
  _end_well()
  uvicorn.Server(config(app_factory)).run([listener])


@dataclasses.dataclass(frozen=True)
class Worker:
  """All that a process needs to serve; called, it opens the engine and gives the application."""

  index: str
  serving: Serving
  token: str | None = dataclasses.field(repr=False)

  def __call__(self) -> object:
    try:
      return self.app(self.engine())
    except (UserError, RetrievalError, OSError) as e:
      print(f"retriever.serve: {e}", file=sys.stderr)
      sys.exit(STARTUP_FAILURE)  # which tells the parent that another worker would fail as well

  def engine(self) -> SearchEngine:
    from retriever.opening import open_engine  # seconds, which a wrong command line need not wait
    return open_engine(self.index)

  def app(self, engine: SearchEngine) -> object:
    return create_app(engine, self.serving, token=self.token)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser("python -m retriever.serve", allow_abbrev=False,
                                   description="Serves a search engine over HTTP.")
  parser.add_argument("--index", required=True,
                      help="an index folder, or whatever else names a search engine")
  parser.add_argument("--host", default="127.0.0.1", help="other than this machine: needs a token")
  parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
  parser.add_argument("--workers", type=int, default=1, help="processes; each opens the index")
  parser.add_argument("--top_k", type=int, default=3, help="of requests that name none (default 3)")
  parser.add_argument("--token_env", help="the environment variable that holds the bearer token")
  parser.add_argument("--seconds", type=float, default=60.0, help="the longest wait (default 60)")
  parser.add_argument("--max_batch", type=int, default=512, help="queries searched at once")
  parser.add_argument("--max_waiting", type=int, default=4096,
                      help="queries that may wait (default 4096); more are told to come later")
  parser.add_argument("--cache_mb", type=int, default=32, help="text of searches kept; 0: none")
  return parser


def _serving(args: argparse.Namespace) -> Serving:
  if args.workers < 1:
    raise ValueError(f"--workers is {args.workers}, wanted at least 1")
  return Serving(top_k=args.top_k, seconds=args.seconds, max_batch=args.max_batch,
                 max_waiting=args.max_waiting, cache_bytes=args.cache_mb << 20,
                 several_workers=args.workers > 1)


def _token(name: str | None, environ: Mapping[str, str]) -> str | None:
  if name is None:
    return None
  token = environ.get(name, "")
  if not wire.is_token(token):
    raise ValueError(f"--token_env names {name}, which holds no token; set it to one of printable "
                     "ASCII characters without spaces around it")
  return token


def _check_host(host: str, token: str | None) -> None:
  """Only this machine may ask without a token."""
  try:
    local = host == "localhost" or ipaddress.ip_address(host).is_loopback
  except ValueError:
    local = False
  if not local and token is None:
    raise ValueError(f"--host {host} lets other machines in; put a secret in an environment "
                     "variable and name it with --token_env, or keep to 127.0.0.1")


def bind(host: str, port: int) -> socket.socket:
  """A socket that holds the address and refuses connections until the server is ready."""
  if not 0 <= port < 1 << 16:
    raise ValueError(f"--port is {port}, wanted 1 to 65535, or 0 for a free one")
  try:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with contextlib.ExitStack() as undo:
      listener = undo.enter_context(socket.socket(family, kind, protocol))
      listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      listener.bind(address)
      undo.pop_all()
  except OSError as e:
    raise OSError(f"{host}:{port} can't be listened on ({e}); choose another --port") from e
  return listener


def config(app_factory: Callable[[], object], workers: int = 1) -> uvicorn.Config:
  return uvicorn.Config(
      app_factory, factory=True, workers=workers, http=ImpatientProtocol, ws="none",
      lifespan="on", log_level="error", access_log=False, proxy_headers=False,
      server_header=False, timeout_keep_alive=KEEP_ALIVE_SECONDS,
      timeout_graceful_shutdown=GRACE_SECONDS)


def _serve_several(worker: Worker, listener: socket.socket, workers: int, where: str) -> int:
  with tempfile.TemporaryDirectory(prefix="retriever-metrics-") as folder:
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder  # read by the workers when they import
    supervisor = Multiprocess(config(worker, workers), [listener])
    print(f"{worker.index} in {workers} processes on {where}", flush=True)
    supervisor.run()
  failed = any(p.exitcode == STARTUP_FAILURE for p in supervisor.processes)
  return 2 if failed else 0


def _end_well() -> None:
  """Exit code 0 at the signals that ask for an end: uvicorn raises them again when it has ended."""
  def leave(number: int, frame: object) -> None:
    raise SystemExit(0)
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, leave)


if __name__ == "__main__":
  sys.exit(main())
