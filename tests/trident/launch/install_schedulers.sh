#!/usr/bin/env bash
# Installs Slurm and Open MPI for the tests of this folder, where nobody has to be asked: as root, with Debian's packages. Elsewhere,
# and where that fails, it does nothing; the tests then say what they miss. Nothing is started: RUNLEVEL=1 keeps the packages from it.
set -euo pipefail

missing=()
command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v srun >/dev/null || missing+=(slurm-wlm)
command -v munged >/dev/null || missing+=(munge)
command -v mpirun >/dev/null || missing+=(openmpi-bin)
command -v ip >/dev/null || missing+=(iproute2)
if [ ${#missing[@]} -eq 0 ] || [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
if ! { timeout 120 apt-get update && timeout 300 apt-get install --yes --no-install-recommends "${missing[@]}"; } >/dev/null 2>&1; then
    printf '%s could not be installed: the tests of tests/trident/launch that need them are skipped.\n' "${missing[*]}" >&2
fi
