# Sourced by the other scripts: makes .venv at the top of the repository and installs adabatch into it, once.
# Extras to install are in $1, such as "lm" or "test". Works from a machine that has only Python and git.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3 python; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python="$candidate"
        break
    fi
done
if [ -z "${python:-}" ]; then
    echo "adabatch needs Python 3.11 or newer; set PYTHON to one" >&2
    exit 1
fi

stamp=".venv/installed-$1"
if [ ! -f "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ scripts/constraints.txt -nt "$stamp" ]; then
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    echo "installing adabatch[$1] into .venv ..."
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --constraint scripts/constraints.txt --editable ".[$1]"
    touch "$stamp"
fi
