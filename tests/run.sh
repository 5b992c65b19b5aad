#!/usr/bin/env bash
# All checks: formatting, lint, tests. What follows goes to pytest:
#
#     ./tests/run.sh                      everything that this machine can run
#     ./tests/run.sh tests/comm -x        one folder, up to the first failure
#     ./tests/run.sh -m "not slow"        without the tests that take more than 20 s
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
./launch/venv.sh
export PATH="$PWD/.venv/bin:$PATH"

ruff format --check --quiet . || {
    echo "error: these files aren't formatted; run .venv/bin/ruff format" >&2
    ruff format --check . >&2 || true
    exit 1
}
ruff check --quiet .
python -m pytest "$@"
