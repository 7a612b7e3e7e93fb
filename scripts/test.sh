#!/usr/bin/env bash
# Run the tests in .venv, which is made first when there is none. Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" test
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m pytest "$@"
