#!/usr/bin/env bash
# Lint, types and tests: what CI runs, and what to run before a commit.
#
#   ./tests/run.sh              everything but the slow checks
#   ./tests/run.sh --slow       everything
#   ./tests/run.sh -k resume    other arguments go to pytest; lint and types run all the same
#
# Two processes run tests side by side, each a file at a time (much of a test is waiting for others); -n 0 is one alone.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/env.sh"
ensure_env dev
cd "$ROOT"

select=(-m "not slow")
arguments=()
for argument in "$@"; do
    if [[ "$argument" == --slow ]]; then select=(); else arguments+=("$argument"); fi
done

code=(torchtitan torchtitan_recipes tests benchmarks scripts)
echo "== lint" && "$PYTHON" -m ruff check "${code[@]}" && "$PYTHON" -m ruff format --check "${code[@]}"
echo "== types" && "$PYTHON" -m pyright --pythonpath "$(command -v "$PYTHON")"
echo "== tests" && "$PYTHON" -m pytest -n 2 --dist loadfile ${select[@]+"${select[@]}"} ${arguments[@]+"${arguments[@]}"}
