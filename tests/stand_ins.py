"""Programs that stand in front of real ones while launch files run, and what they note."""

from __future__ import annotations

import os
import pathlib
import signal
import stat
import subprocess
import sys

import pytest
import tiny_runs

LAUNCH = tiny_runs.ROOT / "launch"
# Of the environment of whoever runs the tests: what launch files read.
LEFT_OUT = ("PYTHON", "SLURM_", "SKYPILOT_", "SEARCHR1_", "JOB_")

# A program that notes its words and ends as the file `ends` says, a line a start.
STUB = """#!/usr/bin/env bash
echo "$*" >> {folder}/starts
end=$(sed -n "$(grep -c . {folder}/starts)p" {folder}/ends)
case $end in KILL|ABRT) kill -s $end $$ ;; *) exit $end ;; esac
"""
NOTED = '#!/usr/bin/env bash\necho "$*" >> {folder}/{name}\n'
# A trainer that hears signals as the real one does: the second of a kind would end it unsaved.
HEEDING = """#!{python}
import os, signal, sys, time
heard = []
def hear(number, frame):
  signal.signal(number, signal.SIG_DFL)
  heard.append(signal.Signals(number).name)
for number in (signal.SIGTERM, signal.SIGINT):
  signal.signal(number, hear)
print("ready", flush=True)
while not heard:
  time.sleep(0.01)
time.sleep(0.3)  # the rest of a step, in which more may come
print(*sorted(heard), flush=True)
sys.exit(75)
"""


class Box:
  """A folder of programs that stand in front of the real ones, and what they noted."""

  def __init__(self, folder: pathlib.Path):
    self.started: list[subprocess.Popen] = []
    self.folder, self.env = folder, os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    for name in [n for n in self.env if n.startswith(LEFT_OUT)]:
      del self.env[name]

  def put(self, name: str, text: str) -> None:
    path = self.folder / name
    path.write_text(text.replace("{folder}", str(self.folder)).replace("{name}", f"{name}.words")
                    .replace("{python}", sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)

  def ends(self, *codes: int | str) -> None:
    """`python` will end so, start after start; pauses are noted, not slept."""
    self.put("python", STUB)
    self.put("sleep", NOTED)
    (self.folder / "ends").write_text("\n".join(map(str, codes)) + "\n")

  def said(self, name: str) -> list[str]:
    path = self.folder / name
    return path.read_text().splitlines() if path.is_file() else []

  def run(self, *words: str | pathlib.Path, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(words, env=self.env | env, cwd=tiny_runs.ROOT, timeout=60,
                          capture_output=True, text=True)

  def start(self, *words: str | pathlib.Path, **how) -> subprocess.Popen:
    env = self.env | how.pop("env", {})
    self.started.append(subprocess.Popen(
        words, env=env, cwd=tiny_runs.ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, **how))
    return self.started[-1]


@pytest.fixture
def box(tmp_path):
  (folder := tmp_path / "bin").mkdir()
  # Under nohup it is ignored, and a shell can't trap what it was started to ignore.
  before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
  yield (made := Box(folder))
  signal.signal(signal.SIGHUP, before)
  for child in (c for c in made.started if c.poll() is None):  # a failed test has left them
    for pid in [*children_of(child.pid), child.pid]:
      os.kill(pid, signal.SIGKILL)
    child.communicate()


def children_of(pid: int) -> list[int]:
  return [int(p) for p in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
