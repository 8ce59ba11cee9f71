#!/usr/bin/env bash
# The main job on one machine without a GPU: makes .venv if it is missing, installs moorage, builds a small
# starter model and warms it up, then improves it by reinforcement learning on reverse-text.
# Further arguments go to `moorage rl`, for example: bash scripts/quickstart.sh --seed 1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
prepare_environment
export HF_HUB_OFFLINE=1

began=$(date +%s)
if [[ ! -f runs/starter/config.json ]]; then
    echo "building and warming up the starter model (runs/starter)"
    "$VENV/bin/moorage" sft @ examples/reverse_text/sft.toml
fi
"$VENV/bin/moorage" rl @ examples/reverse_text/rl.toml --clean "$@"
echo "done in $(($(date +%s) - began)) s after installation; see runs/reverse_text/summary.json"
