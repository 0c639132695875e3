#!/usr/bin/env bash
# All checks that a change must pass: format, lint, types, tests. Arguments go to pytest.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh
prepare_environment dev
"$PYTHON" -m ruff format --check .
"$PYTHON" -m ruff check .
"$PYTHON" -m mypy
bash tests/run.sh "$@"
