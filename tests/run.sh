#!/usr/bin/env bash
# Installs the project with its test extra (once; later runs reuse it) and runs the whole test suite.
#
#   bash tests/run.sh                 everything, on up to 8 cores
#   bash tests/run.sh -k parity       arguments go to pytest
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh
prepare_environment test
workers="$("$PYTHON" -c 'import os; print(min(8, os.cpu_count() or 1))')"
"$PYTHON" -m pytest --numprocesses "$workers" --dist loadgroup "$@"
