"""A run and its search server: what the server suffers, the run does not learn from."""

from __future__ import annotations

import json
import pathlib
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import search_servers
import tiny_runs

from retriever.engine import open_index
from searchr1_jax import train
from searchr1_jax.run import checkpoint, cli

pytestmark = pytest.mark.slow
SECONDS = 60.0  # of a search, all attempts together: a server here takes some to start


@pytest.fixture(scope="module")
def world(tmp_path_factory):
  return tiny_runs.world(tmp_path_factory.mktemp("search"))


def config(world, url, **changes):
  c = tiny_runs.config(world, "grpo", **{"rollout__search_seconds": SECONDS, **changes})
  c.retriever.index = url
  return c


def end(workdir: pathlib.Path):
  """What a run came to: every leaf of its last state, and its metrics but the seconds."""
  saves = checkpoint.CheckpointReader(workdir / "checkpoints")
  record = saves._record(saves.steps()[-1])
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return record["leaves"], [{k: v for k, v in line.items() if not k.startswith(("seconds/", "speed/"))}
                            for line in lines]


@pytest.fixture(scope="module")
def local(world, tmp_path_factory):
  """The run whose search never leaves the process."""
  workdir = tmp_path_factory.mktemp("local")
  train.train(config(world, str(world / "index")), workdir)
  return end(workdir)


class Server:
  """`python -m retriever.serve` over the world's index, on a port of its own."""

  def __init__(self, world):
    self._world = world
    with socket.socket() as s:
      s.bind(("127.0.0.1", 0))
      self.port = s.getsockname()[1]
    self.url = f"http://127.0.0.1:{self.port}"

  def start(self) -> None:
    self._process = subprocess.Popen(
        [sys.executable, "-m", "retriever.serve", "--index", str(self._world / "index"), "--port",
         str(self.port)], cwd=tiny_runs.ROOT, stdout=subprocess.DEVNULL)
    search_servers.wait_until(lambda: search_servers.answers(self.port))

  def kill(self) -> None:
    self._process.kill()
    self._process.wait()

  def queries(self) -> float:
    """How many queries it has been asked."""
    with urllib.request.urlopen(f"{self.url}/metrics") as reply:
      text = reply.read().decode()
    return float(next(line.split()[1] for line in text.splitlines()
                      if line.startswith("retriever_queries_total")))


@pytest.fixture
def server(world):
  server = Server(world)
  server.start()
  yield server
  server.kill()


def start(tmp_path, world, url, **changes) -> subprocess.Popen:
  file = tiny_runs.config_file(tmp_path / "c.py", world, "grpo", retriever__index=url,
                               rollout__search_seconds=SECONDS, **changes)
  return subprocess.Popen(
      [sys.executable, "-m", "searchr1_jax.train", f"--config={file}",
       f"--workdir={tmp_path / 'run'}"], cwd=tiny_runs.ROOT, stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE, text=True)


def steps(workdir: pathlib.Path) -> int:
  path = workdir / "metrics.jsonl"
  return len(path.read_text().splitlines()) if path.is_file() else 0


def test_a_server_killed_in_mid_step_and_started_again_costs_no_step(
    world, server, local, tmp_path):
  """SIGKILL once the second step searches; it comes back, and the run ends as if nothing was."""
  run = start(tmp_path, world, server.url)
  search_servers.PATIENCE, patience = 300.0, search_servers.PATIENCE
  try:
    search_servers.wait_until(lambda: run.poll() is not None or steps(tmp_path / "run") >= 1)
    before = server.queries()
    while server.queries() == before and run.poll() is None:
      time.sleep(0.002)
    server.kill()
    assert steps(tmp_path / "run") == 1 and run.poll() is None  # in the middle of the second
    time.sleep(3)
    server.start()
    _, stderr = run.communicate(timeout=300)
  finally:
    search_servers.PATIENCE = patience
    run.kill()
  assert run.returncode == 0, stderr
  leaves, metrics = end(tmp_path / "run")
  assert [m["step"] for m in metrics] == [0, 1, 2]
  assert all(m["rollout/lost_episodes"] == 0 for m in metrics)
  assert (leaves, metrics) == local


def test_a_server_that_stays_away_stops_the_run_with_a_checkpoint(world, server, tmp_path):
  run = start(tmp_path, world, server.url, steps=50, limits__lost_batches=3)
  try:
    deadline = time.monotonic() + 300
    while steps(tmp_path / "run") < 2 and time.monotonic() < deadline and run.poll() is None:
      time.sleep(0.05)
    server.kill()
    killed = time.monotonic()
    _, stderr = run.communicate(timeout=300)
    took = time.monotonic() - killed
  finally:
    run.kill()
    server.start()  # for the fixture, which ends it
  assert run.returncode == cli.RETRIEVER == 5, stderr
  assert took <= SECONDS + 10
  assert "search engine lost" in stderr and "Traceback" not in stderr, stderr
  assert "refused" in stderr.lower() or "no server" in stderr.lower() or server.url in stderr
  done = steps(tmp_path / "run")
  assert checkpoint.CheckpointReader(tmp_path / "run" / "checkpoints").steps()[-1] == done >= 2


@pytest.fixture(scope="module")
def toy(world, tmp_path_factory):
  """The run against the toy server when it is well."""
  workdir = tmp_path_factory.mktemp("toy")
  with search_servers.FaultyServer("status_500", 0.0) as well:
    train.train(config(world, well.url), workdir)
    assert well.asked
  return end(workdir)


@pytest.mark.parametrize("fault", ["killed", "html", "permuted"])  # all: test_retriever_client
def test_the_parameters_never_see_a_fault(world, toy, tmp_path, fault):
  """A third of all requests fail, and the run ends with the same bytes as without."""
  with search_servers.FaultyServer(fault, 0.3) as server:
    train.train(config(world, server.url), tmp_path / "run")
  assert end(tmp_path / "run") == toy


def test_a_fault_that_never_ends_teaches_nothing(world, tmp_path):
  with search_servers.FaultyServer("html", 1.0) as server:
    with pytest.raises(cli.RetrieverLost, match="lost"):
      train.train(config(world, server.url, rollout__search_seconds=2.0), tmp_path / "run")
  assert steps(tmp_path / "run") == 0


def test_another_index_than_the_run_began_with_is_refused(world, local, tmp_path):
  """The server's fingerprint is the index's own, which a resumed run insists on."""
  with search_servers.running(open_index(world / "index")) as url:
    train.train(config(world, url, steps=1), tmp_path / "run")
  with search_servers.FaultyServer("html", 0.0) as other:
    with pytest.raises(Exception, match="another"):
      train.train(config(world, other.url, steps=2), tmp_path / "run")


def test_a_run_connects_to_its_server_and_nowhere_else(world, tmp_path, monkeypatch):
  asked, connect = [], socket.socket.connect
  monkeypatch.setattr(socket.socket, "connect",
                      lambda self, address: asked.append(address) or connect(self, address))
  with search_servers.FaultyServer("html", 0.0) as server:
    train.train(config(world, server.url, steps=1), tmp_path / "run")
    port = server.port
  assert {tuple(address[:2]) for address in asked} == {("127.0.0.1", port)}
