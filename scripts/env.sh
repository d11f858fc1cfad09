# Sourced by run_train.sh and tests/run.sh: finds or makes the Python environment.
#
#   ensure_env "dev"   sets PYTHON to an interpreter that has torchtitan with these extras (comma-separated)
#
# An active environment that has them is used as it is. Otherwise .venv is made from constraints.txt; it is reused
# until pyproject.toml or constraints.txt change, and made again if an earlier set-up did not finish.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
STAMP="$VENV/.complete"

fail() {
    echo "error: $*" >&2
    exit 2
}

has_package() { # python extras
    [[ -n "$(command -v "$1")" ]] && "$1" -P "$ROOT/scripts/has_package.py" "$2" 2>/dev/null
}

find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer with the modules venv and ensurepip on PATH; install one" \
        "(Debian, Ubuntu: apt install python3-venv)"
}

fingerprint() { # of what the environment is made from, and where
    { echo "$ROOT" && cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt"; } | cksum
}

is_complete() { # extras
    [[ -f "$STAMP" && "$(cat "$STAMP")" == "$(fingerprint)" ]] && has_package "$VENV/bin/python" "$1"
}

make_venv() { # extras
    local base pip=("$VENV/bin/python" -m pip install --disable-pip-version-check -c "$ROOT/constraints.txt")
    if [[ ! -f "$STAMP" ]]; then
        base="$(find_python)" || exit
        rm -rf "$VENV"
        echo "Setting up $VENV with $base (once; a few minutes)" >&2
        "$base" -m venv "$VENV" >&2 || fail "$base could not make $VENV; see above"
    fi
    rm -f "$STAMP"
    "${pip[@]}" torch >&2 || fail "torch could not be installed; see above, and run again to retry"
    "${pip[@]}" --quiet -e "$ROOT${1:+[$1]}" >&2 || fail "the packages could not be installed; see above, and run again to retry"
    fingerprint >"$STAMP"
}

ensure_env() { # extras
    local candidate
    for candidate in python python3; do
        if has_package "$candidate" "$1"; then
            PYTHON="$candidate"
            return
        fi
    done
    PYTHON="$VENV/bin/python"
    is_complete "$1" && return
    if command -v flock >/dev/null; then # two first uses at once: the second waits for the first
        exec 9<"$ROOT/constraints.txt"
        flock 9
        is_complete "$1" || make_venv "$1"
        exec 9>&-
    else
        make_venv "$1"
    fi
    is_complete "$1" || fail "$VENV was made but lacks packages; remove it and run again"
}
