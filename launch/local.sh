#!/usr/bin/env bash
# Starts: one process on this machine, on all its GPUs (eight H100, say), again where that helps.
# Needs: `pip install -e ".[gpu]"`, its environment active, and this checkout as working directory.
#
#   launch/local.sh --config=configs/grpo_qwen3b.py --workdir=runs/local --config.mesh.fsdp=8
#
# Every argument is the trainer's. A mesh takes as many GPUs as its sizes multiply to. PYTHON names
# another interpreter than `python`; SEARCHR1_TRIES and SEARCHR1_PAUSE are in restart.sh. Ctrl-C or
# TERM once: the run saves and ends (code 75); the same command goes on.

exec "$(dirname "$0")/restart.sh" "${PYTHON:-python}" -m searchr1_jax.train "$@"
