#!/usr/bin/env bash
# Installs the wheels of a folder beside the machine's own packages, without a network, and measures for nine minutes.
#
#     bash benchmarks/gpu/run.sh --wheels FOLDER --output FOLDER --script first      (then: second; five and a half minutes each)
#     bash benchmarks/gpu/run.sh --wheels FOLDER --output FOLDER [--minutes 30] [--parts tests,ops,124m,...] [further flags]
#
# FOLDER/gpu-page.tar.gz then holds all results; it is written anew after each part.
set -euo pipefail
cd "$(dirname "$0")/../.."
wheels="" words=()
while (($#)); do
    case "$1" in
        --wheels) wheels="$2"; shift 2 ;;
        *) words+=("$1"); shift ;;
    esac
done
if [[ -n "$wheels" ]]; then
    site="${TMPDIR:-/tmp}/megatron-wheels"
    python3 -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" "$wheels"/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PATH="$site/bin:$PATH"
fi
export DS_BUILD_OPS=0 TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-${TMPDIR:-/tmp}/megatron-inductor}"
exec python3 -u -m benchmarks.gpu "${words[@]}"
