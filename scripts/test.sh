#!/usr/bin/env bash
# The default tests, in the same .venv with the test dependencies. Arguments go to pytest; the costly tiers are
# `bash scripts/test.sh -m slow` and scripts/proof.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
prepare_environment --dev
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
exec "$VENV/bin/python" -m pytest -q "$@"
