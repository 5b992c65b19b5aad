#!/usr/bin/env bash
# A real SLURM cluster of several nodes on this one machine: Debian's or Ubuntu's packages, as root,
# without systemd, in a container if need be.
#
#     ./tools/slurm_cluster.sh install    SLURM's packages, by apt; nothing if they are there
#     ./tools/slurm_cluster.sh start      munged, slurmctld, a slurmd for each node; waits for all
#     ./tools/slurm_cluster.sh stop       cancels all jobs, ends those daemons, removes their state
#     ./tools/slurm_cluster.sh status     nodes and jobs
#     eval "$(./tools/slurm_cluster.sh env)"    lets sbatch, srun and squeue of this shell find it
#
# What the environment can say, to `start` and alike to all that follows it:
#
#     CLUSTER_NODES=4       nodes node01 …; two leaf switches under a spine have half of them each
#     CLUSTER_CPUS=4        of a node, whether the machine has them or not
#     CLUSTER_GPUS=0        of a node: files that look like devices, which nothing can compute with
#     CLUSTER_DIR           configuration, state and logs; /tmp/slurm_cluster
#     CLUSTER_PORT=16817    of slurmctld; slurmd number i listens on the hundredth behind it, + i
#     CLUSTER_PREFIX=node   how the nodes' names begin. Two clusters at once on a machine need other
#                           folders, ports and prefixes
#     CLUSTER_HOSTS         a script that runs a command on a host, `SCRIPT exec node01 COMMAND …`,
#     CLUSTER_NETWORK       and the first three numbers of the hosts' addresses, as in 10.77.0: each
#                           slurmd then runs in the network namespace of a host of its node's name
#
# Jobs go to the partition `main`; those in `high` push them out, with their signal and a minute's
# grace. Names of nodes are written to /etc/hosts, and `stop` takes them out again.
set -euo pipefail

nodes=${CLUSTER_NODES:-4}
cpus=${CLUSTER_CPUS:-4}
gpus=${CLUSTER_GPUS:-0}
dir=${CLUSTER_DIR:-/tmp/slurm_cluster}
port=${CLUSTER_PORT:-16817}
prefix=${CLUSTER_PREFIX:-node}
hosts=${CLUSTER_HOSTS:-}
network=${CLUSTER_NETWORK:-10.77.0}
mark="# slurm_cluster $dir"
export SLURM_CONF=$dir/slurm.conf

fail() {
    echo "error: $*" >&2
    exit 1
}

name() { printf '%s%02d' "$prefix" "$1"; }

installed() { command -v slurmctld slurmd srun munged >/dev/null; }

install() {
    installed && return
    command -v apt-get >/dev/null || fail "SLURM isn't here and there is no apt-get to install it"
    # Another installation may be going on: wait for it.
    local apt=(apt-get -qq -o DPkg::Lock::Timeout=300)
    "${apt[@]}" update >&2
    DEBIAN_FRONTEND=noninteractive "${apt[@]}" install -y --no-install-recommends \
        slurmctld slurmd slurm-client munge >&2
    installed || fail "apt-get installed SLURM's packages, but slurmctld isn't on PATH"
}

# --- Configuration --------------------------------------------------------------------------------

write_configuration() {
    local address=127.0.0.1 last half
    [[ -z $hosts ]] || address=$network.254
    last=$(printf '%02d' "$nodes")
    # munged refuses folders that others could write to.
    command install -d -m 755 "$dir" "$dir"/{state,spool,log,run,munge}
    cat >"$SLURM_CONF" <<CONF
ClusterName=$prefix
SlurmctldHost=$(hostname -s)($address)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A job that is requeued waits for as long as its credentials are valid, two minutes by default.
AuthInfo=cred_expire=5,socket=$dir/munge/munge.sock
MailProg=/bin/true
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
# What containers don't have: control groups, and cores to bind tasks to.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# Nodes have what is stated below, whatever slurmd finds.
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/backfill
# Every second, not every minute.
SchedulerParameters=sched_interval=1,bf_interval=2,batch_sched_delay=0
ReturnToService=2
JobRequeue=1
KillWait=30
MinJobAge=300
InactiveLimit=0
SlurmdTimeout=30
TopologyPlugin=topology/tree
# Root without CAP_SYS_RESOURCE couldn't raise a job's limits to those of whoever submits it.
PropagateResourceLimits=NONE
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
$(((gpus == 0)) || echo "GresTypes=gpu")
$(for ((i = 1; i <= nodes; i++)); do node_line "$i"; done)
PartitionName=main Nodes=${prefix}[01-$last] Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=high Nodes=${prefix}[01-$last] MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
CONF
    # Named, for slurmd won't start where it looks for one and finds no control groups.
    echo 'CgroupPlugin=cgroup/v1' >"$dir/cgroup.conf"
    half=$(((nodes + 1) / 2))
    echo "SwitchName=leaf1 Nodes=${prefix}[01-$(printf '%02d' $half)]" >"$dir/topology.conf"
    ((nodes == 1)) || cat >>"$dir/topology.conf" <<CONF
SwitchName=leaf2 Nodes=${prefix}[$(printf '%02d' $((half + 1)))-$last]
SwitchName=spine Switches=leaf[1-2]
CONF
    rm -f "$dir/gres.conf"
    ((gpus == 0)) || write_gpus
}

node_line() { # NUMBER
    local node host address
    node=$(name "$1") host=$(hostname -s) address=127.0.0.1
    [[ -z $hosts ]] || host=$node address=$network.$1
    echo "NodeName=$node NodeHostname=$host NodeAddr=$address Port=$((port + 100 + $1))" \
        "CPUs=$cpus RealMemory=4000$( ((gpus == 0)) || echo " Gres=gpu:$gpus") State=UNKNOWN"
}

# Copies of /dev/null: SLURM counts devices, and gives a job their numbers in CUDA_VISIBLE_DEVICES.
write_gpus() {
    local i
    mkdir -p "$dir/dev"
    for ((i = 0; i < gpus; i++)); do
        [[ -c $dir/dev/nvidia$i ]] || mknod "$dir/dev/nvidia$i" c 1 3
    done
    echo "Name=gpu File=$dir/dev/nvidia[0-$((gpus - 1))]" >"$dir/gres.conf"
}

# In place, since a container's /etc/hosts is mounted; one cluster at a time.
edit_hosts() { # add|remove
    local i others
    exec 9>/tmp/slurm_cluster.hosts.lock
    flock 9
    # Lines that end so: another cluster's folder may begin with the name of this one's.
    others=$(mark=" $mark" awk '
        substr($0, length($0) - length(ENVIRON["mark"]) + 1) != ENVIRON["mark"]' /etc/hosts)
    {
        echo "$others"
        [[ $1 == remove || -n $hosts ]] ||
            for ((i = 1; i <= nodes; i++)); do echo "127.0.0.1 $(name "$i") $mark"; done
    } >/etc/hosts
    exec 9>&-
}

# --- Daemons --------------------------------------------------------------------------------------

# Whether a file names a process that is one of the daemons: the system gives numbers out again.
alive() { # PIDFILE
    [[ -s $1 ]] && grep -qxE 'slurmctld|slurmd|munged' "/proc/$(<"$1")/comm" 2>/dev/null
}

start() {
    local i node
    ((EUID == 0)) || fail 'starting SLURM takes root; run this with sudo'
    write_configuration
    edit_hosts add
    if ! alive "$dir/munge/munged.pid"; then
        [[ -s $dir/munge/key ]] || (umask 077 && head -c 128 /dev/urandom >"$dir/munge/key")
        munged --key-file="$dir/munge/key" --socket="$dir/munge/munge.sock" --num-threads=2 \
            --pid-file="$dir/munge/munged.pid" --log-file="$dir/munge/munged.log" \
            --seed-file="$dir/munge/seed"
    fi
    alive "$dir/run/slurmctld.pid" || slurmctld -f "$SLURM_CONF"
    for ((i = 1; i <= nodes; i++)); do
        node=$(name "$i")
        alive "$dir/run/slurmd.$node.pid" ||
            ${hosts:+"$hosts" exec "$node"} slurmd -f "$SLURM_CONF" -N "$node" ||
            fail "slurmd of $node didn't start: $(tail -n 1 "$dir/log/slurmd.$node.log")"
    done
    wait_for_nodes || fail "the nodes didn't all come up in half a minute; see $dir/log"
    sinfo --Node --long
}

wait_for_nodes() {
    local i usable
    for ((i = 0; i < 150; i++)); do
        usable=$(sinfo -h -N -p main -o %T 2>/dev/null | grep -cxE 'idle|mixed|allocated' || true)
        ((usable >= nodes)) && return
        sleep 0.2
    done
    return 1
}

stop() {
    local i file pid pids=()
    if alive "$dir/run/slurmctld.pid"; then
        scancel --user root 2>/dev/null || true
        for ((i = 0; i < 200; i++)); do
            [[ -n $(squeue -h 2>/dev/null) ]] || break
            sleep 0.2
        done
    fi
    for file in "$dir"/run/slurmd.*.pid "$dir"/run/slurmctld.pid "$dir"/munge/munged.pid; do
        if alive "$file"; then pids+=("$(<"$file")"); fi
    done
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    for pid in "${pids[@]}"; do
        for ((i = 0; i < 50; i++)); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null || true
    done
    edit_hosts remove
    rm -rf "$dir/state" "$dir/spool" "$dir/run" "$dir/munge" # the logs stay
}

case ${1:-} in
    install) install ;;
    start) install && start ;;
    stop) stop ;;
    status) sinfo --Node --long && squeue ;;
    env) echo "export SLURM_CONF=$SLURM_CONF" ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2 && exit 2 ;;
esac
