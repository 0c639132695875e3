#!/usr/bin/env bash
# README's first command: installs (once), then trains a small GPT on what this machine has, kills it, resumes it in another layout,
# checks that nothing was lost, and shows the loss curve and generated text. Needs only Python 3.10-3.13 with pip.
#
#   bash examples/quickstart.sh [--steps N] [--work-dir DIR]
#
# DS_ACCELERATOR=cpu in front of it uses the CPU of a machine with GPUs. DRY_RUN=1 prints the command, and SCALE=tiny trains for a few
# steps only. See examples/environment.sh for where things are installed and how to change that.
set -euo pipefail

caller_dir="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -n "${DRY_RUN:-}" ]; then
    PYTHON="${PYTHON:-python}"
else
    source examples/environment.sh
    prepare_environment plot
fi

# A relative --work-dir is relative to the caller's folder.
arguments=()
case "${SCALE:-full}" in
    full) ;;
    tiny) arguments+=(--steps 24) ;;
    *) printf 'error: SCALE=%s is neither full nor tiny.\n' "$SCALE" >&2; exit 64 ;;
esac
while [ $# -gt 0 ]; do
    if [ "$1" = --work-dir ] && [ $# -gt 1 ]; then
        case "$2" in /*) arguments+=(--work-dir "$2") ;; *) arguments+=(--work-dir "$caller_dir/$2") ;; esac
        shift 2
    else
        arguments+=("$1")
        shift
    fi
done
command=("$PYTHON" examples/kill_and_resume.py ${arguments[@]+"${arguments[@]}"})
if [ -n "${DRY_RUN:-}" ]; then
    printf '%q ' "${command[@]}"
    printf '\n'
else
    "${command[@]}"
fi
