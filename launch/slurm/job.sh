# What a job of ours does on its first node: one task per node runs torchrun, which starts the ranks.
# shellcheck shell=bash disable=SC2154
#
# `submit.py` puts Slurm's options and these settings before it, all quoted:
#   name              of the job
#   program           the file that torchrun starts: launch/train_grpo.py, train_sft.py or evaluate.py
#   arguments         an array: its command line
#   root, workdir     the repository; the folder that relative paths begin at
#   output            the folder that the run writes, and leaves its exit status in
#   work_files        two words: what it writes there as it gets on, a folder and the names of its files
#   logs              a folder for what the nodes say
#   python            what runs on every node
#   ranks_per_node    how many
#   grace_seconds     how long ranks may take to save and stop
#   wait_seconds      how long the other nodes may take when one has ended, to find out and say why
#   runtime           none, pyxis or docker
#   image, mounts     of a container; folders, an array, which it sees at the same paths
#   continues         no, requeue or chain
#   links             how many jobs a chain has; this one's number is the first argument
#
# It ends with the run's status: 0 finished, 1 failed, 2 mistake in the settings, 75 stopped on request, 76 not saved in
# time, 77 diverged. Only after 1, 75 and 76 another start makes sense, and only if the run has saved more since this
# start.

set -euo pipefail

link=${1:-1}
restart=${SLURM_RESTART_COUNT:-0}
node_logs=$logs/$SLURM_JOB_ID

say() {
    echo "[$(date '+%F %T')] $name: $*"
}

# How the run ended, in words and as a status: launch/exit_status.py in bash, as a host that starts containers need have
# no Python of today.
exit_status() {
    local file=$output/exit_status.json line
    local message quote='\"' backslash='\\'
    local form='^\{"status": ([0-9]+), "message": "(.*)", "meaning": "([a-z ]+)"\}$'
    if ! line=$(cat "$file" 2>/dev/null); then
        echo "status 1 (failed): no $file: the run was killed, or did not get as far as its settings"
        return 1
    fi
    if [[ $line =~ $form ]]; then
        message=${BASH_REMATCH[2]//"$quote"/\"}
        echo "status ${BASH_REMATCH[1]} (${BASH_REMATCH[3]}): ${message//"$backslash"/\\}"
        return "${BASH_REMATCH[1]}"
    fi
    echo "status 1 (failed): $file cannot be read: ${line:0:200}"
    return 1
}

# A word that changes when the run has got on: a new checkpoint, new completions.
how_far() {
    find "$output/${work_files[0]}" -name "${work_files[1]}" -printf '%p %s\n' 2>/dev/null | sort | cksum || true
}

# Where the nodes meet: the first one's address as Slurm knows it, at a port that others there are unlikely to use.
meeting_point() {
    local first address
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    address=$(scontrol show node --oneliner "$first" | grep -o 'NodeAddr=[^ ]*' || true)
    address=${address#NodeAddr=}
    echo "${address:-$first}:$((20000 + SLURM_JOB_ID % 10000))"
}

# Sets `srun_options` and `command`.
prepare_command() {
    local mount variable docker pairs=""
    srun_options=(
        --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1
        --cpus-per-task="$SLURM_CPUS_ON_NODE" # else a task gets one core
        # When one node has ended, the others find out and end themselves; what does not is killed.
        --kill-on-bad-exit=0 --wait="$wait_seconds"
        --output="$node_logs/%n-%N.log" --open-mode=append
    )
    command=(
        "$python" -P -m torch.distributed.run
        --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$ranks_per_node" --max-restarts=0
        --signals-to-handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" --shutdown-timeout="$((grace_seconds + 15))"
        --rdzv-backend=c10d --rdzv-endpoint="$(meeting_point)" --rdzv-id="$SLURM_JOB_ID.$restart"
        "$program" "${arguments[@]}"
    )
    case $runtime in
    pyxis)
        srun_options+=(--container-image="$image" --container-workdir="$workdir")
        for mount in "${mounts[@]}"; do
            pairs+=",$mount:$mount"
        done
        srun_options+=(--container-mounts="${pairs#,}")
        ;;
    docker)
        docker=(docker run --rm --init --name="$(container_name)" --network=host --ipc=host)
        docker+=(--ulimit=memlock=-1 --ulimit=stack=67108864 --user="$(id -u):$(id -g)" --env=HOME=/tmp)
        [[ -z ${SLURM_GPUS_ON_NODE:-} ]] || docker+=(--gpus=all)
        [[ ! -e /dev/infiniband ]] || docker+=(--device=/dev/infiniband)
        for mount in "${mounts[@]}"; do
            docker+=(--volume="$mount:$mount")
        done
        for variable in $(compgen -e | grep -E '^(SLURM|CUDA_VISIBLE|CUDA_DEVICE|NCCL|GLOO|UCX|OMP|WANDB|TORCH|TRITON|VLLM|HF|PYTHON)' || true); do
            docker+=(--env="$variable")
        done
        command=("${docker[@]}" --workdir="$workdir" --entrypoint= "$image" "${command[@]}")
        ;;
    esac
}

# A command of Slurm, again and again for two minutes: its controller may be on its way to another machine.
patiently() {
    local try
    for try in 1 2 3 4 5 6; do
        "$@" && return
        ((try == 6)) || sleep 20
    done
    return 1
}

container_name() {
    echo "rlmath-$SLURM_JOB_ID"
}

# What keeps this job from being queued again; nothing if it may be.
obstacle() {
    local state
    if ! state=$(patiently squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T); then
        echo "Slurm does not answer"
    elif [[ $state != RUNNING ]]; then
        echo "Slurm has ended it (${state:-gone})"
    elif [[ $(how_far) == "$far_before" ]]; then
        echo "nothing was saved in this start, so another one would end like it. Is --time too short?"
    fi
}

# Whether another start would end with the same status.
is_final() {
    [[ $1 == 0 || $1 == 2 || $1 == 77 ]]
}

go_on_or_end() {
    local status=$1 reason
    if is_final "$status"; then
        exit "$status"
    fi
    case $continues in
    requeue)
        reason=$(obstacle)
        if [[ -z $reason ]]; then
            say "goes into the queue again, and on from there"
            patiently scontrol requeue "$SLURM_JOB_ID" || say "Slurm does not queue it again"
        else
            say "does not queue itself again: $reason"
        fi
        ;;
    chain)
        if ((link < links)); then
            say "link $link of $links ends; the next one goes on"
        else
            say "the chain of $links links is at its end; submit it again to go on"
        fi
        ;;
    no)
        [[ $status != 75 ]] || say "submit it again to go on"
        ;;
    esac
    exit "$status"
}

main() {
    local told before=0 status=0 srun_status=0
    cd "$workdir"
    mkdir -p "$node_logs" "$output" # a mistake, too, is told in the run's folder
    say "job $SLURM_JOB_ID, start $((restart + 1)), link $link of $links:" \
        "$SLURM_JOB_NUM_NODES nodes ($SLURM_JOB_NODELIST) x $ranks_per_node ranks; logs in $node_logs"
    if ((restart > 0 || link > 1)); then
        told=$(exit_status) || before=$?
        say "the start before: $told"
        if ((link > 1)) && is_final "$before"; then
            say "nothing is left to do"
            exit "$before"
        fi
    fi
    rm -f "$output/exit_status.json"
    far_before=$(how_far)
    export PYTHONUNBUFFERED=1 PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

    # Signals are for the ranks; this shell waits for them and then tells how they ended.
    trap : USR1 TERM
    prepare_command
    srun "${srun_options[@]}" "${command[@]}" || srun_status=$?
    [[ $runtime != docker ]] || srun --overlap docker rm --force "$(container_name)" >/dev/null 2>&1 || true

    # torchrun ends with 1 whatever its ranks ended with, srun with the highest status of all nodes.
    told=$(exit_status) || status=$?
    say "$told"
    if [[ $status == 0 && $srun_status != 0 ]]; then
        say "the run finished, but srun ended with $srun_status"
        status=1
    fi
    if [[ $status != 0 ]]; then
        sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --partition="$SLURM_JOB_PARTITION" \
            --states=down,drain,fail,no_respond \
            --format="[$(date '+%F %T')] $name: node %N is %T: %E" || true
    fi
    go_on_or_end "$status"
}

main
