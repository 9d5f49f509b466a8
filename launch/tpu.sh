#!/usr/bin/env bash
# Starts: one process on every worker of a Cloud TPU slice, which goes on when this has returned.
# Needs: gcloud, and a slice on which the following was done, with your sizes, zone and repository:
#
#   gcloud compute tpus queued-resources create searchr1 --node-id=searchr1 --zone=us-east5-a \
#       --accelerator-type=v6e-16 --runtime-version=v2-alpha-tpuv6e
#   gcloud compute tpus tpu-vm ssh searchr1 --zone=us-east5-a --worker=all --command="
#       git clone REPOSITORY searchr1-jax && cd searchr1-jax && make venv &&
#       .venv/bin/pip install -e '.[tpu]'"
#
# and, where it has several workers, a file system mounted on all (Filestore) for models and runs.
#
#   TPU=searchr1 ZONE=us-east5-a launch/tpu.sh --config=configs/grpo_qwen3b.py \
#       --workdir=/shared/runs/tpu --config.mesh.fsdp=16
#
# Every argument is the trainer's. The sizes of the mesh multiply to the slice's chips. To follow
# it, and to stop it after saving, `gcloud compute tpus tpu-vm ssh` the same way with
#   --worker=0   --command="tail -F searchr1-jax/train.log"
#   --worker=all --command="pkill -f [s]earchr1_jax.train"

: "${TPU:?names the slice}" "${ZONE:?is where the slice is}"
printf -v words ' %q' "$@"
exec gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="cd searchr1-jax &&
. .venv/bin/activate && setsid -f launch/node.sh$words >> train.log 2>&1 < /dev/null"
