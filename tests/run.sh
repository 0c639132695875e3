#!/usr/bin/env bash
# Installs the project with its test extra (once; later runs reuse it) and runs the whole test suite.
#
#   bash tests/run.sh                 everything
#   bash tests/run.sh -k parity       arguments go to pytest
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh
prepare_environment test
"$PYTHON" -m pytest --numprocesses 2 --dist worksteal "$@"
