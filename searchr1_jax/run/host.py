"""The process itself, as the C library sees it."""

from __future__ import annotations

import ctypes

# Options of mallopt(3), by their numbers in malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_MOST = 2**31 - 1  # bytes; what a C int holds


def keep_freed_memory() -> None:
  """Keeps up to 2 GiB of freed memory for the next request instead of giving it back at once.

  XLA's CPU programs ask for their temporary memory anew at each call. Fresh from the kernel, every
  page of it faults once: a fifth of a small model's update. Call it before jax is first used, since
  threads that have allocated keep their own arenas. Without the GNU C library nothing changes.
  """
  try:
    mallopt = ctypes.CDLL("libc.so.6").mallopt
  except (OSError, AttributeError):
    return
  for option, value in ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _MOST), (_TRIM_THRESHOLD, _MOST),
                        (_TOP_PAD, 2**26)):
    mallopt(option, value)
