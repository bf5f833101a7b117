#!/bin/sh
# Makes the virtual environment $1 with the extras $2 and the tested versions of constraints.txt.
# Uses uv when it is installed; else the Python of .python-version, which the tested versions were
# tested on; else the newest Python >= 3.12 that pyenv or the PATH has.
set -eu
venv=$1
extras=$2

if command -v uv >/dev/null 2>&1; then
    uv venv --allow-existing --python "$(cat .python-version)" "$venv"
    exec uv pip install --python "$venv/bin/python" -c constraints.txt -e ".[$extras]"
fi

for candidate in "python$(cat .python-version)" \
    $(ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python 2>/dev/null | sort -Vr) \
    python3.14 python3.13 python3.12 python3 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
        python=$candidate
        break
    fi
done
if [ -z "${python:-}" ]; then
    echo "error: no Python >= 3.12 found; install one, or install uv." >&2
    exit 1
fi
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --upgrade pip
exec "$venv/bin/python" -m pip install --quiet -c constraints.txt -e ".[$extras]"
