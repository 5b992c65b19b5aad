#!/usr/bin/env bash
# Train a recipe on N ranks of this machine.
#
#     ./launch/local.sh N RECIPE [section.key=value ...]
#
# `megagrid train RECIPE` starts its ranks by itself; this is the same in the open, with every
# variable that matters to NCCL, CUDA, OpenMP or gloo beside its reason. Each keeps a value that is
# already set.
set -euo pipefail

if (($# < 2)) || ! [[ $1 =~ ^[1-9][0-9]*$ ]]; then
    echo "error: usage: ./launch/local.sh RANKS RECIPE [section.key=value ...]" >&2
    exit 2
fi
ranks=$1
shift
bin=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin
[[ -x $bin/torchrun ]] || {
    echo "error: $bin/torchrun is missing; run ./launch/venv.sh first" >&2
    exit 2
}

set_default() {
    [[ -n ${!1+set} ]] || export "$1=$2"
}

# Threads of one rank. torch takes all cores for every rank; ranks that wait for each other while
# their threads fight for cores are many times slower.
cores=$("$bin/python" -c 'from megagrid.grid.bootstrap import cores; print(cores())')
set_default OMP_NUM_THREADS $((cores > ranks ? cores / ranks : 1))

# All ranks are here, so their sockets use the loopback device. gloo would otherwise ask the name
# of the host for an address (megagrid tells it better by itself), and NCCL take the first network
# card: containers often have neither a name that resolves nor a card. NCCL only meets through it;
# data goes by NVLink, PCIe or memory.
loopback=lo
[[ $(uname) != Darwin ]] || loopback=lo0
set_default GLOO_SOCKET_IFNAME $loopback
set_default NCCL_SOCKET_IFNAME $loopback

# Gathering and freeing layers of unequal size fragments CUDA's allocator; segments that grow in
# place avoid running out of memory with memory to spare.
set_default PYTORCH_ALLOC_CONF expandable_segments:True

# A rank that crashes in native code says where in Python it was.
set_default PYTHONFAULTHANDLER 1

# --standalone lets the system choose a free port, so that two runs on one machine never collide.
# No restarts: a mistake at the start would only repeat itself; a run goes on by checkpoint.resume.
#
# SIGTERM and SIGUSR1 ask the ranks to save and stop. torchrun passes only the first on, and kills
# half a minute later, which may be too short for a step and its save.
exec "$bin/torchrun" --standalone --nproc-per-node "$ranks" --max-restarts 0 \
    --signals-to-handle SIGTERM,SIGUSR1,SIGINT,SIGHUP,SIGQUIT --shutdown-timeout 600 \
    -m megagrid train "$@"
