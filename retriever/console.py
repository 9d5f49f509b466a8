"""What programs say on stderr while they work: how far they are, and why they wait.

For programs to call; a library that prints would be in the way.
"""

from __future__ import annotations

import math
import sys
import time

import stamina.instrumentation
from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

LINE_SECONDS = 30.0  # between a task's lines in a log
RETRY_SECONDS = 5.0  # between lines about tries that failed


class Bars(Progress):
  """Rich's bars; where stderr is no terminal, as in a job's log, a line now and then."""

  def __init__(self, *, quiet: bool = False, transient: bool = False,
               line_seconds: float = LINE_SECONDS):
    super().__init__(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
        _Rate(), TimeRemainingColumn(), console=Console(stderr=True), transient=transient,
        disable=quiet)
    self._line_seconds = line_seconds
    self._told: dict[TaskID, float] = {}  # when

  def add_task(self, description: str, **about) -> TaskID:
    task_id = super().add_task(description, **about)
    self._tell(self._tasks[task_id])
    return task_id

  def advance(self, task_id: TaskID, advance: float | int = 1) -> None:
    super().advance(task_id, advance)
    self._tell(self._tasks[task_id])

  def update(self, task_id: TaskID, **changes) -> None:
    super().update(task_id, **changes)
    self._tell(self._tasks[task_id])

  def _tell(self, task: Task) -> None:
    now, told = self.get_time(), self._told.get(task.id, -math.inf)
    if (self.disable or self.console.is_terminal or task.total is None
        or now - told < self._line_seconds):
      return
    self._told[task.id] = now
    line = f"{task.description}: {task.completed:,.0f} of {task.total:,.0f}"
    if task.speed and task.time_remaining is not None:
      line += f", {_rate(task)}, {task.time_remaining / 60:,.0f} min left"
    self.console.print(Text(line), soft_wrap=True)


class _Rate(TextColumn):
  """How many a second."""

  def __init__(self):
    super().__init__("")

  def render(self, task: Task) -> Text:
    return Text(_rate(task))


def _rate(task: Task) -> str:
  return f"{task.speed:,.0f}/s" if task.speed else ""


def tell_retries() -> None:
  """From here on, whoever waits for a search to be tried again says why, but not at every try."""
  stamina.instrumentation.set_on_retry_hooks([_Retries()])


class _Retries:
  """Stamina's hook; its own would log a line a try, without the reason."""

  def __init__(self):
    self._next = 0.0

  def __call__(self, details: stamina.instrumentation.RetryDetails) -> None:
    now = time.monotonic()
    if now < self._next:
      return
    self._next = now + RETRY_SECONDS
    print(f"search: {details.caused_by}; trying again ({details.waited_so_far:.0f} s so far)",
          file=sys.stderr, flush=True)
