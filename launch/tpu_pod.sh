#!/bin/sh
# Runs one job on every host of a Cloud TPU slice:
#
#   launch/tpu_pod.sh NAME ZONE --config=configs/dpo/smollm2.py --workdir=SHARED/run --config.mesh.fsdp=16
#
# Every host needs this repository with its .venv (make does that, with the extra "tpu") in DIRECTORY of the login user, and
# SHARED, a folder that all hosts see (Filestore, or a bucket mounted with gcsfuse). Ctrl-C ends the job on all hosts.
set -eu

if [ $# -lt 3 ]; then
  echo "usage: launch/tpu_pod.sh NAME ZONE --config=FILE --workdir=SHARED_FOLDER [--config.x=y ...]" >&2
  exit 2
fi
name=$1 zone=$2
shift 2

quoted=
for argument in "$@"; do  # once more a shell reads them, on the other side
  quoted="$quoted '$(printf %s "$argument" | sed "s/'/'\\\\''/g")'"
done

exec gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --ssh-flag=-t \
  --command="cd '${DIRECTORY:-mint_jax}' && exec .venv/bin/python -u -m mint_jax.launch --distributed$quoted"
