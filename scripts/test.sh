#!/usr/bin/env bash
# Run the tests in .venv, which is made first when there is none. Arguments go to pytest; -n 0 runs them in one process.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" test
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal "$@"
