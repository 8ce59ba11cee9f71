#!/usr/bin/env bash
# The full counts behind the claims (tests marked `proof`): every seed, every repetition. Takes long.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
prepare_environment --dev
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
exec "$VENV/bin/python" -m pytest -q -m proof --timeout 3600 --durations 20 "$@"
