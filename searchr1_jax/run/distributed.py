"""Several processes as one run: how they start, what they tell each other, and who writes.

Every process runs the same command on the same config, sees the same file system, and calls what
follows in the same order. Process 0 leads: it alone writes. On one process all of it does nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import socket
import time
from typing import Any, Callable, Sequence, TypeVar

from absl import flags
import jax
from jax.experimental import multihost_utils
import numpy as np
from jaxtyping import Array

from retriever.protocol import CorpusError, Passage, RetrievalError, Search
from searchr1_jax.model.decoder import Params
from searchr1_jax.rollout import drive
from searchr1_jax.rollout.engine import Engine
from searchr1_jax.rollout.episode import Rules
from searchr1_jax.rollout.searches import Retrieval
from searchr1_jax.rollout.draw import Sampling
from searchr1_jax.run.disk import StorageError
from searchr1_jax.types import Role, SearchRecord, Segment, StopReason, Trajectory, UserError

T = TypeVar("T")

# JAX ends the others (SIGABRT, with a message that names the lost one) so many seconds after a
# process has gone silent, or has ended while they go on.
SILENCE, FAREWELL = 10, 15
PATIENCE = 300  # seconds that the others wait for process 0 to open its port
_ADDRESS = re.compile(r"([\w.-]+|\[[\da-fA-F:.%]+\]):(\d{1,5})")
_SHARED_ERRORS = (CorpusError, UserError, StorageError, RetrievalError)  # the first that fits
_COUNTS = ("sample", "turns", "invalid_actions", "unexecuted_searches", "truncated_observations",
           "forged_information")
_TOTALS = ("prefilled_tokens", "generated_tokens", "shared_tokens", "kept_tokens", "searches",
           "seat_steps", "busy_seat_steps", "busy_generated_tokens")


def define_flags(values: flags.FlagValues) -> None:
  """--coordinator, --processes and --process; or --distributed. They differ from process to
  process or machine to machine, so they are no part of a config."""
  flags.DEFINE_string("coordinator", None, "host:port that process 0 opens for the others",
                      flag_values=values)
  flags.DEFINE_integer("processes", None, "how many there are", lower_bound=1, flag_values=values)
  flags.DEFINE_integer("process", None, "which of them this is, from 0", lower_bound=0,
                       flag_values=values)
  flags.DEFINE_bool("distributed", False, "find all that out from Slurm, a TPU pod or Open MPI",
                    flag_values=values)


def start(values: flags.FlagValues) -> None:
  """Joins the other processes, where the flags say that there are any; before JAX does anything."""
  told = (values.coordinator, values.processes, values.process)
  if not values.distributed and told == (None, None, None):
    return
  if values.distributed and told != (None, None, None):
    raise UserError("--distributed finds out by itself what --coordinator, --processes and "
                    "--process say; give it or them")
  if not values.distributed and None in told:
    raise UserError("of --coordinator, --processes and --process some are missing; give all three, "
                    "or --distributed alone")
  if not values.distributed and values.process >= values.processes:
    raise UserError(f"--process is {values.process}; wanted 0 to {values.processes - 1}")
  if not values.distributed:
    _check_port(values.coordinator, values.process == 0)
  jax.config.update("jax_enable_preemption_service", False)  # signals are this program's to heed
  try:
    jax.distributed.initialize(*told, heartbeat_timeout_seconds=SILENCE,
                               shutdown_timeout_seconds=FAREWELL)
  except (RuntimeError, ValueError) as error:
    raise UserError(f"the processes could not be joined ({error}); check that all are started, and "
                    "that the coordinator's host and port can be reached") from error


def _check_port(coordinator: str, mine: bool) -> None:
  """Process 0 can open the port, or the others wait until it has: JAX says neither in words."""
  address = _ADDRESS.fullmatch(coordinator)
  if not address or not 0 < int(address[2]) < 2**16:
    raise UserError(f"--coordinator is {coordinator!r}; wanted host:port, such as node0:1234")
  host, port = address[1].strip("[]"), int(address[2])
  if mine:
    try:
      socket.create_server(("", port)).close()
    except OSError as error:
      raise UserError(f"port {port} of --coordinator={coordinator} cannot be opened here "
                      f"({error.strerror}); name a free one") from error
    return
  began = time.monotonic()
  while True:
    try:
      return socket.create_connection((host, port), timeout=5).close()
    except OSError as error:
      if time.monotonic() - began > PATIENCE:
        raise UserError(f"process 0 has not opened --coordinator={coordinator} for {PATIENCE} s "
                        f"({error}); start it there, and check host and port") from error
    time.sleep(0.2)


def is_leader() -> bool:
  """Whether this is the process that writes."""
  return jax.process_index() == 0


def gather(mine: bytes) -> list[bytes]:
  """What each process brought, in their order, on all of them."""
  if jax.process_count() == 1:
    return [mine]
  sizes = multihost_utils.process_allgather(np.int32(len(mine)))
  room = 1 << int(sizes.max()).bit_length()  # of few sizes, since each compiles
  padded = np.zeros(room, np.uint8)
  padded[: len(mine)] = np.frombuffer(mine, np.uint8)
  rows = multihost_utils.process_allgather(padded)
  return [row[:size].tobytes() for row, size in zip(rows, sizes.tolist())]


def any_process(flag: bool) -> bool:
  """Whether it is so on any process; all get the same answer."""
  return flag if jax.process_count() == 1 else any(map(bool, gather(b"1" if flag else b"")))


def barrier() -> None:
  """Returns once all processes have come here."""
  gather(b"")


def from_leader(action: Callable[[], T]) -> T:
  """What the action comes to on process 0: plain JSON, the same on all."""
  if jax.process_count() == 1:
    return action()
  return json.loads(gather(json.dumps(action()).encode() if is_leader() else b"")[0])


def on_leader(action: Callable[[], T]) -> T | None:
  """Does it on process 0 alone while the others wait; None on those.

  An error that has an exit code ends all of them alike.
  """
  if jax.process_count() == 1:
    return action()
  result, error = None, None
  if is_leader():
    try:
      result = action()
    except _SHARED_ERRORS as e:
      error = e
  kind = next((i for i, k in enumerate(_SHARED_ERRORS) if isinstance(error, k)), None)
  told = from_leader(lambda: error and [kind, str(error)])
  if error:
    raise error
  if told:
    raise _SHARED_ERRORS[told[0]](told[1])
  return result


def refuse_differences(about: dict[str, str]) -> None:
  """All processes must have the same of each thing named; they would drift apart otherwise."""
  digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in about.items()}
  everyone = [json.loads(theirs) for theirs in gather(json.dumps(digests).encode())]
  for process, theirs in enumerate(everyone):
    if wrong := [name for name in about if theirs[name] != everyone[0][name]]:
      raise UserError(f"process {process} has another {wrong[0]} than process 0; give all of them "
                      "the same command and files")


def rollout(engine: Engine, params: Params, tasks: Sequence[drive.Task], rules: Rules,
            search: Search, *, how: Sampling, key: Array,
            retrieval: Retrieval) -> tuple[list[Trajectory], drive.RolloutStats]:
  """`drive.rollout` by all processes: each runs its share of the questions, at its own pace.

  All get every episode, in the order of `tasks`. The samples of a question stay on one process.
  """
  numbers = {q: i for i, q in enumerate(dict.fromkeys(t.question.key for t in tasks))}
  shares: list[list[int]] = [[] for _ in range(jax.process_count())]
  for i, task in enumerate(tasks):
    shares[numbers[task.question.key] % len(shares)].append(i)
  mine = [tasks[i] for i in shares[jax.process_index()]]
  found, stats = drive.rollout(engine, params, mine, rules, search, how=how, key=key,
                               retrieval=retrieval)
  if len(shares) == 1:
    return found, stats
  began, done = time.monotonic(), {}
  for share, theirs in zip(shares, gather(pack(found, stats)), strict=True):
    episodes, totals = unpack(theirs, [tasks[i] for i in share])
    done |= dict(zip(share, episodes, strict=True))
    if share is not shares[jax.process_index()]:
      stats = dataclasses.replace(stats, **{n: getattr(stats, n) + totals[n] for n in _TOTALS})
  stats.seconds["wait"] = time.monotonic() - began  # for the slowest process
  return [done[i] for i in range(len(tasks))], stats


def pack(trajectories: Sequence[Trajectory], stats: drive.RolloutStats) -> bytes:
  """What a process tells of its episodes: a line of JSON, all ids, all log-probs."""
  head = {"totals": {n: getattr(stats, n) for n in _TOTALS}, "episodes": [
      {"segments": [(s.role.value, len(s.ids)) for s in t.segments],
       "stop_reason": t.stop_reason.value,
       "searches": [(s.turn, s.query, [(p.id, p.contents, p.score) for p in s.passages])
                    for s in t.searches],
       "counts": {name: getattr(t, name) for name in _COUNTS}} for t in trajectories]}
  segments = [s for t in trajectories for s in t.segments]
  ids = np.array([i for s in segments for i in s.ids], np.int32)
  logprobs = np.array([x for s in segments for x in s.sampler_logprobs], np.float32)
  return json.dumps(head).encode() + b"\n" + ids.tobytes() + logprobs.tobytes()


def unpack(data: bytes, tasks: Sequence[drive.Task]) -> tuple[list[Trajectory], dict[str, Any]]:
  """The episodes of these tasks, and the totals of the process that ran them."""
  line, _, numbers = data.partition(b"\n")
  head = json.loads(line)
  tokens = sum(n for e in head["episodes"] for _, n in e["segments"])
  ids = iter(np.frombuffer(numbers, np.int32, tokens).tolist())
  logprobs = iter(np.frombuffer(numbers, np.float32, offset=4 * tokens).tolist())

  def segment(role: str, n: int) -> Segment:
    taken = tuple(next(ids) for _ in range(n))
    sampled = tuple(next(logprobs) for _ in taken) if role == Role.POLICY.value else ()
    return Segment(Role(role), taken, sampled)

  return [Trajectory(
      question=task.question, prompt_ids=tuple(task.prompt_ids),
      segments=tuple(segment(*s) for s in e["segments"]), stop_reason=StopReason(e["stop_reason"]),
      searches=tuple(SearchRecord(turn, query, tuple(Passage(*p) for p in passages))
                     for turn, query, passages in e["searches"]), **e["counts"])
          for task, e in zip(tasks, head["episodes"], strict=True)], head["totals"]
