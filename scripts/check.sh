#!/usr/bin/env bash
# What a machine can check without running the project: format, lint, types, layers and surfaces.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
prepare_environment --dev
paths=(src tests bench)
failed=0
step() {
    echo "== $*"
    "$@" || failed=1
}
step "$VENV/bin/ruff" format --check "${paths[@]}"
step "$VENV/bin/ruff" check "${paths[@]}"
step "$VENV/bin/pyright" --pythonpath "$VENV/bin/python"
step "$VENV/bin/python" -m pytest -q tests/arch
exit "$failed"
