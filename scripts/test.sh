#!/usr/bin/env bash
# The default tests, in the same .venv with the test dependencies. Arguments go to pytest; the costly tiers are
# `bash scripts/test.sh -m slow` and scripts/proof.sh.
# Without a path, two pytest processes run side by side: the flows, and all others, whose report follows when both
# are done.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
prepare_environment --dev
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

for argument in "$@"; do
    [[ -e "${argument%%::*}" ]] && exec "$VENV/bin/python" -m pytest -q "$@"
done

# half NAME ARGUMENTS..: pytest with a memory of its own of what failed last; nothing to run is fine.
half() {
    local code=0
    "$VENV/bin/python" -m pytest -q -o cache_dir=".pytest_cache/$1" "${@:2}" || code=$?
    [[ $code == 0 || $code == 5 ]]
}
report="$(mktemp)"
half others tests/arch tests/unit tests/contract tests/fault tests/gpu "$@" >"$report" 2>&1 &
others=$!
trap 'kill "$others" 2>/dev/null || true; rm -f "$report"' EXIT
failed=0
half flows tests/flow "$@" || failed=1
wait "$others" || failed=1
cat "$report"
exit "$failed"
