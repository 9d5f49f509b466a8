"""run/disk.py: nothing of the user's is written over, and two processes never share a run."""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from searchr1_jax.run import disk
from searchr1_jax.types import UserError

HOLDER = """
import pathlib, sys, time
from searchr1_jax.run import disk
with disk.locked(pathlib.Path(sys.argv[1])):
  print("held", flush=True)
  time.sleep(600)
"""


def test_an_output_goes_to_an_empty_folder_or_over_an_older_one(tmp_path):
  for _ in range(2):
    disk.begin_output(tmp_path / "new" / "out", "made.json", {"from": "x"})
    (tmp_path / "new" / "out" / "result.txt").write_text("1")
  (tmp_path / "thesis").mkdir()
  (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
  with pytest.raises(UserError, match="thesis is not empty and no older output .*made.json"):
    disk.begin_output(tmp_path / "thesis", "made.json", {})
  assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["chapter1.txt"]


def test_a_file_is_no_folder(tmp_path):
  (tmp_path / "notes.txt").write_text("mine")
  for use in (lambda p: disk.begin_output(p, "made.json", {}), disk.make_folder,
              lambda p: disk.locked(p).__enter__()):
    for path in (tmp_path / "notes.txt", tmp_path / "notes.txt" / "below"):
      with pytest.raises(UserError, match="notes.txt.* cannot be a folder"):
        use(path)
  assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_full_disk_is_a_storage_error_that_names_the_file():
  with pytest.raises(disk.StorageError, match="metrics.jsonl could not be written .No space left"):
    with disk.writing("metrics.jsonl"):
      os.write(os.open("/dev/full", os.O_WRONLY), b"x")


def test_a_folder_is_held_by_one_process_and_a_kill_gives_it_back(tmp_path):
  holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], text=True,
                            stdout=subprocess.PIPE, cwd=pathlib.Path(__file__).parent.parent)
  assert holder.stdout.readline() == "held\n"
  with pytest.raises(UserError, match="another process is training in"):
    with disk.locked(tmp_path):
      pass
  os.kill(holder.pid, signal.SIGKILL)
  holder.communicate()
  for _ in range(2):
    with disk.locked(tmp_path):
      pass


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
  def flock(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")

  monkeypatch.setattr(fcntl, "flock", flock)
  with pytest.raises(UserError, match=f"file system of {tmp_path} locks no files"):
    with disk.locked(tmp_path):
      pass
