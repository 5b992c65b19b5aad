#!/usr/bin/env bash
# Hosts with a network and a name of their own, on one machine: namespaces of the kernel, joined by
# links of a stated speed. Needs root and iproute2.
#
#     tools/network_hosts.sh up                  make the hosts; prints their names and addresses
#     tools/network_hosts.sh list                print them again
#     tools/network_hosts.sh exec HOST CMD ...   run CMD on a host
#     tools/network_hosts.sh all CMD ...         run CMD on all hosts at once; ends as the worst of them
#     tools/network_hosts.sh rate RATE           speed of every host's link from now on, both ways
#     tools/network_hosts.sh cut HOST            unplug a host's cable: packets are lost, nobody is told
#     tools/network_hosts.sh mend HOST           plug it in again
#     tools/network_hosts.sh counters            HOST, then bytes and packets sent, and received
#     tools/network_hosts.sh down                end what runs on the hosts, and remove them
#
#     node01 eth0 10.77.0.1 ---\                      The machine itself is NETWORK.254, on the first
#     node02 eth0 10.77.0.2 --- bridge, or leaf 1     leaf. A host reaches itself by lo, which isn't
#     node03 eth0 10.77.0.3 ---\           | spine    slowed down: ranks on one host are near each
#     node04 eth0 10.77.0.4 ---          leaf 2       other, ranks on two are far apart.
#
# Set in the environment, the first two alike for every call; they tell two sets of hosts apart:
#
#     HOSTS_PREFIX=node        a host is called PREFIX and two digits
#     HOSTS_NETWORK=10.77.0    first three numbers of its address
#     HOSTS_COUNT=2            how many `up` makes
#     HOSTS_RATE=1gbit         speed of a host's link each way, as tc writes it, or none: not slowed
#     HOSTS_SPINE=             speed of the links between leaves; unset: one bridge, no leaves
#     HOSTS_PER_LEAF=2         hosts on a leaf, if there is a spine
#
# All state is the kernel's, but for /etc/netns/HOST, whose files `exec` puts over those of /etc: each
# host has a hosts file, to be edited there. So `down` finds what a killed call has left.
set -euo pipefail

prefix=${HOSTS_PREFIX:-node}
network=${HOSTS_NETWORK:-10.77.0}
count=${HOSTS_COUNT:-2}
rate=${HOSTS_RATE:-1gbit}
spine=${HOSTS_SPINE:-}
per_leaf=${HOSTS_PER_LEAF:-2}

MTU=9000 # of fast interconnects; also fewer packets for a machine that plays all of the hosts

fail() {
    echo "error: $*" >&2
    exit 2
}

usage() {
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
}

host() { printf '%s%02d' "$prefix" "$1"; }

hosts() { # those that there are, or were left halfway
    { ip netns list | cut -d ' ' -f 1; ls /etc/netns 2>/dev/null || true; } |
        grep -xE "$prefix[0-9]{2}" | sort -u || true
}

links() { # ends of links, and bridges, in the machine's own network: HOST, PREFIX-leafN, PREFIX-sNa
    ip -o link show | sed -E 's/^[0-9]+: ([^:@]+).*/\1/' |
        grep -xE "$prefix([0-9]{2}|-leaf[0-9]+|-s[0-9]+[ab])" || true
}

need_host() {
    ip netns list | cut -d ' ' -f 1 | grep -qxF "${1:-}" ||
        fail "no host ${1:-named}; there are: $(hosts | paste -sd ' ')"
}

# shape IP-OPTIONS DEVICE RATE: what leaves by the device, at that speed. A burst above 64 KB keeps the
# kernel from cutting up packets that it has put together, which costs a small machine its speed.
shape() {
    if [[ $3 == none ]]; then
        tc $1 qdisc del dev "$2" root 2>/dev/null || true
    else
        tc $1 qdisc replace dev "$2" root tbf rate "$3" burst 256kb limit 4mb
    fi
}

# Without IPv6 nothing is sent but what programs send, and ARP: counters then count those.
no_ipv6() { # DEVICE, in the namespace of the call
    local setting=/proc/sys/net/ipv6/conf/$1/disable_ipv6
    [[ ! -e $setting ]] || echo 1 >"$setting"
}

shape_host() {
    shape "-n $1" eth0 "$2"
    shape "" "$1" "$2"
}

up() {
    [[ -z $(hosts)$(links) ]] ||
        fail "there are hosts already: $(hosts | paste -sd ' '); remove them by down, or set HOSTS_PREFIX"
    [[ -z $(ip -o addr show to "$network.0/24") ]] ||
        fail "this machine is on HOSTS_NETWORK=$network already; state another"
    local number leaf leaves=1
    trap down EXIT # all or nothing, such as under a rate that is none
    [[ -z $spine ]] || leaves=$(((count + per_leaf - 1) / per_leaf))
    for ((leaf = 1; leaf <= leaves; leaf++)); do make_leaf "$leaf"; done
    ip addr add "$network.254/24" dev "$prefix-leaf1"
    for ((number = 1; number <= count; number++)); do
        leaf=1
        [[ -z $spine ]] || leaf=$(((number - 1) / per_leaf + 1))
        make_host "$number" "$prefix-leaf$leaf"
    done
    trap - EXIT
    list
}

make_leaf() { # all but the first have a link to the first, which plays the spine too
    ip link add "$prefix-leaf$1" mtu $MTU type bridge
    no_ipv6 "$prefix-leaf$1"
    ip link set "$prefix-leaf$1" up
    (($1 > 1)) || return 0
    local near=$prefix-s${1}a far=$prefix-s${1}b
    ip link add "$near" mtu $MTU type veth peer name "$far" mtu $MTU
    no_ipv6 "$near"
    no_ipv6 "$far"
    ip link set "$near" master "$prefix-leaf1" up
    ip link set "$far" master "$prefix-leaf$1" up
    shape "" "$near" "$spine"
    shape "" "$far" "$spine"
}

make_host() {
    local name address=$network.$1
    name=$(host "$1")
    mkdir -p "/etc/netns/$name"
    hosts_file >"/etc/netns/$name/hosts"
    echo "$name" >"/etc/netns/$name/hostname"
    ip netns add "$name"
    ip link add "$name" mtu $MTU type veth peer name eth0 netns "$name" mtu $MTU
    no_ipv6 "$name"
    ip netns exec "$name" bash -c "$(declare -f no_ipv6); no_ipv6 all"
    ip link set "$name" master "$2" up
    ip -n "$name" link set lo up
    ip -n "$name" addr add "$address/24" dev eth0
    ip -n "$name" link set eth0 up
    shape_host "$name" "$rate"
}

hosts_file() {
    local number
    echo "127.0.0.1 localhost"
    for ((number = 1; number <= count; number++)); do echo "$network.$number $(host "$number")"; done
}

list() {
    local name
    for name in $(hosts); do echo "$name $network.$((10#${name#"$prefix"}))"; done
}

# The command takes the place of this script, so that a signal to the call is one to the command.
run_on() {
    need_host "${1:-}"
    (($# > 1)) || fail "exec $1 needs a command"
    exec ip netns exec "$1" unshare --uts -- bash -c 'hostname "$0" && exec "$@"' "$@"
}

run_on_all() {
    local name children=() child worst=0
    trap 'kill "${children[@]}" 2>/dev/null || true' TERM INT HUP
    for name in $(hosts); do
        run_on "$name" "$@" &
        children+=($!)
    done
    for child in "${children[@]}"; do
        local code=0
        wait "$child" || code=$?
        ((code <= worst)) || worst=$code
    done
    return $worst
}

plug() { # HOST up|down
    need_host "$1"
    ip link set "$1" "$2"
}

counters() { # seen from the other end of each host's link: what comes in there is what it has sent
    local name
    for name in $(hosts); do
        local statistics=/sys/class/net/$name/statistics
        echo "$name $(cd "$statistics" && cat rx_bytes rx_packets tx_bytes tx_packets | paste -sd ' ')"
    done
}

down() {
    local name pids link look
    for name in $(hosts); do
        # What runs there may start something more until the last of it is gone.
        for ((look = 0; look < 100; look++)); do
            pids=$(ip netns pids "$name" 2>/dev/null) && [[ -n $pids ]] || break
            kill -KILL $pids 2>/dev/null || true
            sleep 0.05
        done
        ip netns del "$name" 2>/dev/null || true
        rm -rf "/etc/netns/$name"
    done
    for link in $(links); do ip link del "$link" 2>/dev/null || true; done # one end takes the other along
    rmdir /etc/netns 2>/dev/null || true
}

main() {
    local verb=${1:-help}
    shift || true
    case $verb in
    help | --help | -h) usage && return ;;
    esac
    [[ $prefix =~ ^[a-z]{1,6}$ ]] || fail "HOSTS_PREFIX=$prefix must be one to six small letters"
    [[ $network =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || fail "HOSTS_NETWORK=$network must be three numbers, as 10.77.0"
    [[ $count =~ ^[1-9][0-9]?$ ]] || fail "HOSTS_COUNT=$count must be 1 to 99"
    [[ $per_leaf =~ ^[1-9][0-9]?$ ]] || fail "HOSTS_PER_LEAF=$per_leaf must be 1 to 99"
    command -v ip tc >/dev/null || fail "ip and tc are missing; apt-get install iproute2"
    ((EUID == 0)) || fail "namespaces are root's to make; run it as root"
    case $verb in
    up) up ;;
    list) list ;;
    exec) run_on "$@" ;;
    all) run_on_all "$@" ;;
    rate)
        (($# == 1)) || fail "rate needs a speed, as 1gbit or none"
        local name
        for name in $(hosts); do shape_host "$name" "$1"; done
        ;;
    cut) plug "${1:-}" down ;;
    mend) plug "${1:-}" up ;;
    counters) counters ;;
    down) down ;;
    *) fail "unknown verb $verb; --help lists them" ;;
    esac
}

main "$@"
