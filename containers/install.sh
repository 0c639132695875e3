#!/usr/bin/env bash
# Installs what an image holds, for Dockerfile, containers/apptainer.def and .devcontainer alike. Meant for Debian's images of Python.
#
#   bash containers/install.sh torch DEVICE      cpu, or a build of torch for GPUs, such as cu126
#   bash containers/install.sh project EXTRAS    the project with extras of pyproject.toml, such as plot or plot,data,serve
#
# Torch is a step of its own, since it is by far the largest part and seldom changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH_REQUIREMENT="torch==2.13.0"

usage() {
    sed -n 's/^#   //p' "${BASH_SOURCE[0]}" >&2
    exit 64
}

# The build for GPUs brings CUDA's or ROCm's libraries with it; the host needs the driver.
install_torch() {
    case "$1" in
        cpu | cu[0-9]* | rocm[0-9]*) ;;
        *) usage ;;
    esac
    python -m pip install --no-cache-dir --index-url "https://download.pytorch.org/whl/$1" "$TORCH_REQUIREMENT"
}

# The index builder needs a C++ compiler only while it is compiled.
install_project() {
    apt-get update
    apt-get install --yes --no-install-recommends g++
    python -m pip install --no-cache-dir --editable ".[$1]"
    apt-get purge --yes --auto-remove g++
    rm -rf /var/lib/apt/lists/*
}

[[ $# -eq 2 ]] || usage
case "$1" in
    torch) install_torch "$2" ;;
    project) install_project "$2" ;;
    *) usage ;;
esac
