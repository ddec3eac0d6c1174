#!/bin/bash
# Runs one job on every host of a Cloud TPU slice: queues for the slice, waits, runs, collects, deletes.
#
#   launch/tpu_pod.sh --name=run1 --project=P --zone=us-east5-a --accelerator_type=v5p-32 --runtime_version=v2-alpha-tpuv5 \
#     --setup='git clone URL mint_jax && make -C mint_jax setup EXTRAS=tpu && sudo mount FILESTORE:/runs /mnt/runs' \
#     -- --config=configs/dpo/smollm2.py --workdir=/mnt/runs/dpo --config.mesh.fsdp=16
#
# Everything after "--" goes to mint_jax.launch on every host; JAX reads coordinator and process indices from the TPU's metadata. Options:
#   --name=NAME               name of the queued resource and its node; an ACTIVE one is used and not deleted at the end
#   --project= --zone= --accelerator_type= --runtime_version=
#   --setup=COMMAND           runs first on every host, in the login's home, once per slice; must make DIRECTORY with its .venv
#   --directory=DIRECTORY     repository on every host, relative to the login's home unless absolute (mint_jax)
#   --create_flag=FLAG        passed to the creation, such as --spot or --network=N; may be repeated
#   --wait=SECONDS            limit for the slice to become ACTIVE (3600)
#   --restarts=N              restarts after failures, on a new slice if this one is gone (0); the job resumes
#   --collect=FOLDER          copies the workdir from worker 0 to this local folder at the end
#   --keep                    does not delete the slice
#   --dry_run                 prints every command and each host's variables; runs nothing
#
# Status: the job's; 2 is a mistake in options or config, which is not tried again. Ctrl-C ends the job on all hosts.
set -euo pipefail

name='' project='' zone='' accelerator_type='' runtime_version='' setup='' directory=mint_jax
wait=3600 restarts=0 collect='' keep='' dry_run='' workdir='' created='' attempt=0 create_flags=()

fail() {  # STATUS MESSAGE
  echo "error: $2" >&2
  exit "$1"
}

say() { echo "[tpu_pod] $*" >&2; }

quoted() { printf '%q ' "$@"; }

parse() {
  while (($#)) && [[ $1 != -- ]]; do
    case $1 in
      --name=* | --project=* | --zone=* | --accelerator_type=* | --runtime_version=* | --setup=* | --directory=* | --wait=* | --restarts=* | --collect=*)
        local option=${1%%=*}
        printf -v "${option#--}" %s "${1#*=}" ;;
      --create_flag=*) create_flags+=("${1#*=}") ;;
      --keep) keep=yes ;;
      --dry_run) dry_run=yes ;;
      *) fail 2 "unknown option $1: options stand before --, what mint_jax.launch is to get behind it (the head of $0 lists them)" ;;
    esac
    shift
  done
  (($#)) || fail 2 "no command: give -- --config=FILE --workdir=SHARED_FOLDER after the options"
  shift
  job=("$@")
}

check() {
  local option argument config=''
  for option in name project zone accelerator_type runtime_version; do
    [[ ${!option} ]] || fail 2 "--$option is missing: give --$option=$(example "$option")"
  done
  [[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] || fail 2 "--name=$name: expected lower-case letters, digits and hyphens, a letter first"
  for option in wait restarts; do
    [[ ${!option} =~ ^[0-9]+$ ]] || fail 2 "--$option=${!option}: expected a whole number"
  done
  for argument in "${job[@]}"; do
    case $argument in --config=*) config=${argument#*=} ;; --workdir=*) workdir=${argument#*=} ;; esac
  done
  [[ $config ]] || fail 2 "no config behind --: give --config=FILE"
  [[ $workdir ]] || fail 2 "no workdir behind --: give --workdir=FOLDER, one that all hosts of the slice see"
  hosts=$(hosts_of "$accelerator_type")
}

example() {
  case $1 in
    name) echo my-run ;; project) echo PROJECT ;; zone) echo us-east5-a ;; accelerator_type) echo v5p-32 ;;
    runtime_version) echo v2-alpha-tpuv5 ;;
  esac
}

hosts_of() {  # of an accelerator type, whose number counts cores (8 a host) up to v4 and for v5p, chips (4 a host) for v5e and v6e
  local kind=${1%-*} number=${1##*-} a_host
  [[ $number =~ ^[1-9][0-9]*$ ]] || fail 2 "--accelerator_type=$1: expected a type and a number, such as v5p-32"
  case $kind in
    v2 | v3 | v4 | v5p) a_host=8 ;;
    v5litepod | v6e) if ((number <= 8)); then a_host=8; else a_host=4; fi ;;
    *) fail 2 "--accelerator_type=$1: expected v2-, v3-, v4-, v5p-, v5litepod- or v6e- and a number" ;;
  esac
  echo $(((number + a_host - 1) / a_host))
}

commands() {  # all commands of the launcher
  local where=("--project=$project" "--zone=$zone") queue=(gcloud compute tpus queued-resources) vm=(gcloud compute tpus tpu-vm)
  create=("${queue[@]}" create "$name" "--node-id=$name" "${where[@]}" "--accelerator-type=$accelerator_type"
    "--runtime-version=$runtime_version" ${create_flags[@]+"${create_flags[@]}"} --quiet)
  state=("${queue[@]}" list "${where[@]}" "--filter=name ~ /queuedResources/$name\$" "--format=value(state.state)")
  describe=("${vm[@]}" describe "$name" "${where[@]}" "--format=value(state,networkEndpoints.len())")
  # A terminal on each host, so that what runs there ends with its connection.
  everywhere=("${vm[@]}" ssh "$name" "${where[@]}" --worker=all --ssh-flag=-tt --quiet)
  run="cd $(quoted "$directory")&& exec .venv/bin/python -u -m mint_jax.launch --distributed=$hosts $(quoted "${job[@]}")"
  local from=$workdir
  [[ $from == /* ]] || from=$directory/$from
  copy=("${vm[@]}" scp --recurse "$name:$from" "$collect" "${where[@]}" --worker=0 --quiet)
  delete=("${queue[@]}" delete "$name" "${where[@]}" --force --quiet)
}

show() {
  quoted "${create[@]}"; echo
  echo "$(quoted "${state[@]}") # until ACTIVE, $wait s at most"
  echo "$(quoted "${describe[@]}") # READY with $hosts hosts"
  [[ ! $setup ]] || { quoted "${everywhere[@]}" "--command=$setup"; echo; }
  echo "$(quoted "${everywhere[@]}" "--command=$run") # once more after a failure: $restarts times"
  [[ ! $collect ]] || { quoted "${copy[@]}"; echo; }
  [[ $keep ]] || { quoted "${delete[@]}"; echo; }
  local host
  for ((host = 0; host < hosts; host++)); do
    echo "# host $host: process $host of $hosts by the metadata key agent-worker-number; coordinator: worker 0, port 8482"
  done
}

slice() {  # one that is ACTIVE, whole and set up
  local now new=''
  now=$("${state[@]}")
  [[ ! $created || $now != ACTIVE ]] || whole || now='ACTIVE without all hosts'
  case $now in
    '' | ACTIVE) ;;
    FAILED | SUSPENDING | SUSPENDED | *without*) say "$name is $now: deleting it"; "${delete[@]}"; now='' ;;
    *) fail 1 "queued resource $name is $now, made by another: wait for it, or delete it with $(quoted "${delete[@]}")" ;;
  esac
  if [[ ! $now ]]; then
    created=yes new=yes
    "${create[@]}"
    await
  fi
  whole || fail 1 "$name has not all its $hosts hosts: found the above, expected READY $hosts"
  if [[ $setup && ($new || $attempt == 0) ]]; then
    "${everywhere[@]}" "--command=$setup" </dev/null || fail 1 "the setup failed on a host of $name (above)"
  fi
}

whole() {
  local now
  now=$("${describe[@]}") && echo "$now" >&2 && [[ $now == "READY"$'\t'"$hosts" ]]
}

await() {
  local now until=$((SECONDS + wait))
  while true; do
    now=$("${state[@]}") || now='unknown, gcloud failed'  # one failed query does not end the wait
    say "$name is ${now:-not listed yet}"
    case $now in
      ACTIVE) return ;;
      FAILED | SUSPENDING | SUSPENDED) fail 1 "queued resource $name became $now: is there quota for $accelerator_type in $zone?" ;;
    esac
    ((SECONDS < until)) || fail 1 "queued resource $name is $now after $wait s: give a longer --wait, another --zone, or --create_flag=--spot"
    sleep 30
  done
}

finish() {
  local status=$?
  trap - EXIT INT TERM
  if [[ $created && $keep ]]; then
    say "$name is left; delete it with: $(quoted "${delete[@]}")"
  elif [[ $created ]]; then
    say "deleting $name"
    "${delete[@]}" || { echo "error: $name was not deleted and costs money: $(quoted "${delete[@]}")" >&2; ((status)) || status=1; }
  fi
  exit "$status"
}

main() {
  parse "$@"
  check
  commands
  if [[ $dry_run ]]; then
    show
    return
  fi
  command -v gcloud >/dev/null || fail 2 "gcloud is not installed: see cloud.google.com/sdk, and log in"
  trap finish EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  local status=0
  for ((attempt = 0; attempt <= restarts; attempt++)); do
    slice
    status=0
    "${everywhere[@]}" "--command=$run" </dev/null || status=$?
    say "the job ended with status $status on $name"
    ((status != 0 && status != 2)) || break
  done
  if [[ $collect ]]; then
    mkdir -p "$collect"
    "${copy[@]}" || { echo "error: $workdir was not collected" >&2; ((status)) || status=1; }
  fi
  exit "$status"
}

main "$@"
