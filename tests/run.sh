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
if [ $# -gt 0 ]; then
    exec python -m pytest "$@"
fi

# Ranks wait for each other for much of their time. So two sessions share the cores, each with a
# pool of its own: one of comparisons between grids, and one of the rest, which is the one in the
# foreground because it has the tests of interrupts.
grids=(tests/equivalence tests/pipeline tests/plan)
log=$(mktemp)
python -m pytest "${grids[@]}" -o cache_dir=.pytest_cache/grids >"$log" 2>&1 &
other=$!
trap 'kill "$other" 2>/dev/null || true; rm -f "$log"' EXIT
failed=0
python -m pytest "${grids[@]/#/--ignore=}" || failed=$?
wait "$other" || failed=$?
cat "$log"
exit "$failed"
