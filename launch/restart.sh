#!/usr/bin/env bash
# Runs a command, and again while it ends in a way that another start can mend. What the other files
# here start goes through it; those that have their own way to start again ask `restartable` alone.
#
#   launch/restart.sh python -m searchr1_jax.train --config=configs/grpo_tiny.py --workdir=runs/tiny
#
# SEARCHR1_TRIES  starts in all (10); with 1 the command takes the place of this script
# SEARCHR1_PAUSE  seconds before the second start (30), doubled before each further one, up to 600.
#                 Processes that share a run must all have ended before the first comes back: JAX
#                 takes 25 seconds to end those that have lost one.
#
# TERM, INT and HUP reach the command, which the trainer answers by saving; then nothing is started
# again. Sent once more, later, they end it at once. The exit code is the command's last.

restartable() {  # of searchr1_jax/run/cli.py: no retriever, storage, stopped after saving; a signal
  (($1 == 5 || $1 == 6 || $1 == 75 || $1 > 128))
}

stop() {  # hands a signal on; a later one as TERM, by which the trainer ends at once
  woken=1
  if [[ ! $asked ]]; then
    asked=$SECONDS
    kill -s "$1" "$child"
  elif ((SECONDS > asked + 1)); then  # before that, it is one wish that came by two ways
    kill -s TERM "$child"
  fi 2> /dev/null
}

await() {  # runs a command to its end, also where a signal wakes this shell before
  "$@" &
  child=$!
  if [[ $asked ]]; then kill "$child"; fi  # for a signal that came before there was one
  while
    woken=
    wait "$child"
    status=$?
    [[ $woken ]]
  do :; done
  child=
}

keep_running() {
  local tries=${SEARCHR1_TRIES:-10} pause=${SEARCHR1_PAUSE:-30} start code
  asked= woken= child=
  if ((tries == 1)); then exec "$@"; fi
  set -m  # commands in groups of their own: a terminal's Ctrl-C comes to them through here alone
  # Where all of a service or job is sent TERM, the trainer has it already and would die of another.
  trap 'stop INT' TERM
  trap 'stop TERM' INT HUP
  for ((start = 1; ; start++)); do
    await "$@"
    code=$status
    if [[ $asked ]] || ! restartable "$code"; then break; fi
    if ((start >= tries)); then
      echo "launch: exit code $code at start $start of $tries; giving up" >&2
      break
    fi
    echo "launch: exit code $code; start $((start + 1)) of $tries in $pause s" >&2
    await sleep "$pause"
    if [[ $asked ]]; then break; fi
    pause=$((pause * 2 < 600 ? pause * 2 : 600))
  done
  exit "$code"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  keep_running "$@"
fi
