"""What programs do to a disk: a folder has one owner, and a write that fails says so."""

from __future__ import annotations

import contextlib
import fcntl
import json
import pathlib
from typing import Any, Iterator, Mapping

from searchr1_jax.types import UserError

LOCK_FILE = "run.lock"


class StorageError(Exception):
  """The disk failed, not the user and not the numbers: a launcher may start the run again."""


@contextlib.contextmanager
def writing(path: str | pathlib.Path) -> Iterator[None]:
  """Turns what the disk refuses while `path` is written into a StorageError."""
  try:
    yield
  except OSError as error:
    raise StorageError(f"{path} could not be written ({error.strerror or error}); mend the disk or "
                       "free some space, and repeat the command") from error


def make_folder(folder: pathlib.Path) -> pathlib.Path:
  """The folder, made where there is none."""
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:  # a file of that name or on the way to it, or no right to write there
    raise UserError(f"{folder} cannot be a folder ({error.strerror}); name another") from error
  return folder


def write_json(path: pathlib.Path, value: Any) -> None:
  """The value as a file that a person can read too."""
  with writing(path):
    path.write_text(json.dumps(value, indent=2) + "\n")


def begin_output(folder: pathlib.Path, mark: str, about: Mapping[str, Any]) -> None:
  """Takes a folder for a program's output, and notes in its file `mark` what that is about.

  The folder is new, or empty, or an older output of the same program: then `mark` is in it.
  """
  make_folder(folder)
  if any(folder.iterdir()) and not (folder / mark).is_file():
    raise UserError(f"{folder} is not empty and no older output of this program (it has no "
                    f"{mark}); name another folder")
  write_json(folder / mark, about)


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
  """Holds a folder against every other process; whatever ends this one gives it back."""
  with open(make_folder(folder) / LOCK_FILE, "a") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise UserError(f"another process is training in {folder}; wait for its end, or name another "
                      "workdir") from error
    except OSError as error:
      raise UserError(f"the file system of {folder} locks no files (flock: {error.strerror}); "
                      "mount it with flock, or name a workdir on another") from error
    yield
