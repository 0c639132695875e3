#!/usr/bin/env bash
# README's first command: installs (once), then trains a small GPT on this machine's CPU, kills it, resumes it in another layout,
# proves that nothing was lost, and shows the loss and a sample of text. Needs Python 3.10-3.13 with pip, and nothing else.
#
#   bash examples/quickstart.sh [--steps N] [--work-dir DIR]
#
# See examples/environment.sh for where things are installed and how to choose another place.
set -euo pipefail

caller_dir="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh
prepare_environment plot

# A relative --work-dir is meant from where the user stands.
arguments=()
while [ $# -gt 0 ]; do
    if [ "$1" = --work-dir ] && [ $# -gt 1 ]; then
        case "$2" in /*) arguments+=(--work-dir "$2") ;; *) arguments+=(--work-dir "$caller_dir/$2") ;; esac
        shift 2
    else
        arguments+=("$1")
        shift
    fi
done
"$PYTHON" examples/kill_and_resume.py ${arguments[@]+"${arguments[@]}"}
