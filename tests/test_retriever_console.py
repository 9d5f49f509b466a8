"""What the programs say while they work: something in a log, too, and not too much."""

from __future__ import annotations

import pytest
import stamina.instrumentation

from retriever import client as client_lib
from retriever import console, evaluate
from retriever.client import Client
from retriever.console import Bars
from retriever.protocol import CorpusError, RetrievalError
from tests.search_servers import FaultyServer


@pytest.fixture
def retries():
  console.tell_retries()
  yield
  stamina.instrumentation.set_on_retry_hooks(None)  # stamina's own


def test_a_log_has_lines_at_the_start_now_and_then_and_at_the_end(capsys):
  clock = [0.0]
  with Bars(line_seconds=30.0) as bars:
    bars.get_time = lambda: clock[0]
    task = bars.add_task("encoding", total=1_000)
    for _ in range(100):  # 200 s
      clock[0] += 2
      bars.advance(task, 10)
  lines = capsys.readouterr().err.splitlines()
  told = [line for line in lines if line.startswith("encoding: ")]
  assert told[:2] == ["encoding: 0 of 1,000", "encoding: 150 of 1,000, 5/s, 3 min left"]
  assert len(told) == 7 and "100%" in lines[-1] and len(lines) == 8


def test_updates_are_told_as_advances_are(capsys):
  with Bars(line_seconds=0.0, transient=True) as bars:
    bars.update(bars.add_task("indexing", total=50), completed=20)
    assert list(bars.track((c for c in "ab"), description="of unknown number")) == ["a", "b"]
  assert capsys.readouterr().err.split() == "indexing: 0 of 50 indexing: 20 of 50".split()


def test_quiet_bars_say_nothing(capsys):
  with Bars(quiet=True, line_seconds=0.0) as bars:
    bars.update(bars.add_task("indexing", total=50), completed=20)
  assert capsys.readouterr().err == ""


def test_who_waits_for_a_search_says_why_and_not_at_every_try(monkeypatch, capsys, retries):
  monkeypatch.setattr(client_lib, "BACKOFF_SECONDS", (0.005, 0.05))
  with FaultyServer("status_500", 1.0) as server, Client(server.url, seconds=0.5) as client:
    with pytest.raises(RetrievalError):
      client.search(["a"], 1)
    assert len(server.asked) > 2
  assert capsys.readouterr().err == "search: status 500; trying again (0 s so far)\n"


def test_who_waits_for_a_first_server_says_so(monkeypatch, capsys, retries):
  monkeypatch.setattr(client_lib, "LOOK_SECONDS", 0.02)
  with FaultyServer("busy", 0.0) as server:
    port = server.port
  with pytest.raises(RetrievalError, match="no server within 0.3 s"):
    Client(f"http://127.0.0.1:{port}", seconds=0.3)
  said = capsys.readouterr().err.splitlines()
  assert len(said) == 1 and said[0].startswith("search: no server yet (http://127.0.0.1:")


def test_an_evaluation_stopped_by_hand_ends_without_a_traceback(tmp_path, monkeypatch, capsys,
                                                                retries):
  def stop(*_):
    raise KeyboardInterrupt
  monkeypatch.setattr(evaluate, "read_questions", stop)
  assert evaluate.main(["--index", "empty", "--questions", str(tmp_path)]) == 130
  assert capsys.readouterr().err == "retriever.evaluate: stopped\n"


def test_a_qdrant_address_without_scheme_makes_no_folder(tmp_path, monkeypatch):
  pytest.importorskip("qdrant_client")
  from retriever.qdrant import connect
  monkeypatch.chdir(tmp_path)
  with pytest.raises(CorpusError, match="did you mean http://localhost:6333"):
    connect("localhost:6333")
  assert not list(tmp_path.iterdir())
