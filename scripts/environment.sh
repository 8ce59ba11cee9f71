# Sourced by the other scripts: makes .venv when it is missing and installs exact versions into it.
# Usage: source scripts/environment.sh; prepare_environment [--dev]
# Nothing is installed again while the lock files and pyproject.toml are unchanged.

PYTHON="${PYTHON:-python3}"
VENV="${VENV:-.venv}"

prepare_environment() {
    local locks=(requirements.lock)
    [[ "${1:-}" == "--dev" ]] && locks+=(requirements-dev.lock)
    if [[ ! -x "$VENV/bin/python" ]]; then
        if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "moorage needs Python 3.11 or newer; '$PYTHON' is $("$PYTHON" --version). Set PYTHON to a newer one." >&2
            return 2
        fi
        echo "making $VENV"
        "$PYTHON" -m venv "$VENV"
    fi
    local stamp="$VENV/.installed${1:-}"
    local want
    want="$(cat "${locks[@]}" pyproject.toml | sha256sum | cut -d' ' -f1)"
    if [[ "$(cat "$stamp" 2>/dev/null)" != "$want" ]]; then
        echo "installing ${locks[*]} into $VENV (once; some minutes)"
        local arguments=()
        for lock in "${locks[@]}"; do arguments+=(-r "$lock"); done
        "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "${arguments[@]}"
        "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -e .
        echo "$want" > "$stamp"
    fi
}
