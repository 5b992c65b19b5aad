#!/usr/bin/env bash
# Make .venv with megagrid and its pinned dependencies. Does nothing if that is already so.
#
#     ./launch/venv.sh [FOLDER]        FOLDER: where the environment lies, .venv by default
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:-$root/.venv}
stamp=$venv/megagrid.stamp

fail() {
    echo "error: $*" >&2
    exit 1
}

# Everything that decides what is installed. The path is part of it: an editable install points
# to it, so a moved checkout needs a new one.
state() {
    echo "$root"
    cat "$root/setup.py" "$root/launch/requirements.txt" "$root/launch/venv.sh"
}

up_to_date() {
    [[ -f $stamp ]] && state | cmp -s - "$stamp" && "$venv/bin/python" -c '' 2>/dev/null
}

# A Python from 3.11 on that can make environments; a name may exist and yet not run (a version
# manager's stub) or lack ensurepip (a distribution's minimal package).
find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3.14 python3 python; do
        if "$candidate" -c 'import sys, venv, ensurepip
sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

up_to_date && exit 0

python=$(find_python) || fail "no Python 3.11 to 3.14 with venv found on PATH;" \
    "install one (Debian: python3.11 and python3.11-venv) and run this again"
mkdir -p "$(dirname "$venv")"

# One at a time. The lock is on the file descriptor, so it ends with this script however that ends.
# Through Python, because not every system has flock(1).
exec 9>"$venv.lock"
"$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
up_to_date && exit 0

echo "installing into $venv with $("$python" --version); the first time takes minutes"
"$venv/bin/python" -c 'import pip' 2>/dev/null || "$python" -m venv --clear "$venv" ||
    fail "could not make a virtual environment at $venv"
rm -f "$stamp"

# A user's pip settings for installs outside environments would be refused inside one.
export PIP_USER=0
pip() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" ||
        fail "pip could not install ${*: -1}; its reason is above; run this again to go on"
}

# torch first and alone: by far the largest, so an interrupted installation keeps it.
pip "$(grep '^torch==' "$root/launch/requirements.txt")"
pip --requirement "$root/launch/requirements.txt"
pip --no-deps --no-build-isolation --editable "$root"
"$venv/bin/python" -m pip check >/dev/null ||
    fail "launch/requirements.txt contradicts setup.py: $("$venv/bin/python" -m pip check)"

state >"$stamp"
