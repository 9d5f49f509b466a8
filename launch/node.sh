#!/usr/bin/env bash
# Starts: one process of several that share a run. Each node runs it, told by Slurm, a JobSet,
# SkyPilot or a TPU slice which process it is; the files for those call it.
# Needs: what local.sh needs, on every node, and a --workdir on a file system that all of them see,
# with locks and renames (NFS, Lustre; no bucket).
#
#   launch/node.sh --config=configs/grpo_qwen3b.py --workdir=/shared/runs/1 --config.mesh.fsdp=16
#
# By hand, as SkyPilot would, on each of two machines: SKYPILOT_NUM_NODES=2 SKYPILOT_NODE_RANK=0
# (and 1) SKYPILOT_NODE_IPS=$'10.0.0.1\n10.0.0.2'.
# SEARCHR1_PORT (1234) is opened on the first of them.

if [[ ${SKYPILOT_NODE_RANK:-} ]]; then
  joined=(--coordinator="${SKYPILOT_NODE_IPS%%$'\n'*}:${SEARCHR1_PORT:-1234}"
          --processes="$SKYPILOT_NUM_NODES" --process="$SKYPILOT_NODE_RANK")
elif [[ ${JOB_COMPLETION_INDEX:-} ]]; then  # jobset.yaml sets the other two
  joined=(--coordinator="$SEARCHR1_COORDINATOR:${SEARCHR1_PORT:-1234}"
          --processes="$SEARCHR1_PROCESSES" --process="$JOB_COMPLETION_INDEX")
else
  joined=(--distributed)
fi
exec "$(dirname "$0")/local.sh" "$@" "${joined[@]}"
