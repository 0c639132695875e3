#!/usr/bin/env bash
# Runs a sample of the tests of kernels, networks, layouts and conversion on another torch, by hand: it downloads gigabytes.
#
#   bash tests/other_torches.sh VERSION [pytest flags]
#
# The environment has that torch of its own and takes every other package from the environment of the suite. It is kept in
# TORCHES_DIR (by default ~/.cache/trident-megatron/torches), so that a second run downloads nothing. Builds with CUDA run on a
# CPU too. SAMPLE=1 runs all tests, SAMPLE=50 every fiftieth (by default every twentieth); FOLDERS names other folders.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh
[ $# -gt 0 ] || fail "Which torch? For example: bash tests/other_torches.sh 2.7.1"
version="$1"
shift
SAMPLE="${SAMPLE:-20}"
FOLDERS="${FOLDERS:-tests/kernels tests/model tests/parity tests/trident/convert}"
folder="${TORCHES_DIR:-$HOME/.cache/trident-megatron/torches}/$version"
prepare_environment test

if [ "$(torch_version "$folder/bin/python" || true)" != "$version" ]; then
    "$PYTHON" -m venv "$folder"
    # A machine's constraints may cap torch, whose other versions are the point here.
    PIP_CONSTRAINT=/dev/null "$folder/bin/python" -m pip install --no-input --no-compile --disable-pip-version-check "torch==$version"
fi
packages="$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
own="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
echo "import site; site.addsitedir('$own')" >"$packages/suite.pth"

export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
python="$folder/bin/python"
say "torch $("$python" -c 'import torch; print(torch.__version__)'), every ${SAMPLE}th test of $FOLDERS"
# shellcheck disable=SC2086
"$python" -m pytest -q -p no:cacheprovider -p tests.helpers.suite.every_nth --every "$SAMPLE" "$@" $FOLDERS
