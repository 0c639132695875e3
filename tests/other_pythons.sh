#!/usr/bin/env bash
# Runs a short part of the suite on the oldest and the newest supported Python of this machine, in about a minute.
#
# Looked for on PATH, among pyenv's versions and by uv. Each gets an environment of its own in a temporary folder, without
# torch: the package index has only builds with CUDA for most versions (5 GB installed). What imports torch is left out.
# Where there is no such Python, or no package index to install from, a line says so and nothing fails.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh
PACKAGES=(numpy orjson pyyaml jinja2 safetensors tokenizers gigatoken pytest hypothesis sentencepiece sentencex xxhash zstandard mongomock pymongo)
FOLDERS=(tests/config tests/tokenizers tests/data)

# Prints "MINOR INTERPRETER" for each supported Python that runs, the oldest first.
supported_pythons() {
    local minor candidate
    for minor in 10 11 12 13; do
        for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python \
            "$(uv python find --no-python-downloads "3.$minor" 2>/dev/null || true)"; do
            if "$candidate" -c "import sys; sys.exit(sys.version_info[:2] != (3, $minor))" >/dev/null 2>&1; then
                printf '%s %s\n' "$minor" "$candidate"
                break
            fi
        done
    done
}

# Prints the test files of some folders that can be imported without torch.
files_without_torch() {
    "$1" - "${@:2}" <<'PY'
import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, ".")
for path in sorted(path for folder in sys.argv[1:] for path in Path(folder).rglob("test_*.py")):
    try:
        importlib.import_module(".".join(path.with_suffix("").parts))
    except pytest.skip.Exception:
        pass  # pytest says why
    except ModuleNotFoundError as failure:
        if failure.name == "torch":
            continue
        raise
    print(path)
PY
}

# Installs what the tests need and runs them with one interpreter.
run_with() {
    local base="$1" folder="$2" python="$2/bin/python"
    export PYTHONPYCACHEPREFIX="$folder/bytecode"
    unset PYTHONDONTWRITEBYTECODE
    if ! "$base" -m venv "$folder" >"$folder.install" 2>&1 || ! "$python" -m pip install --quiet --no-compile \
        --no-input --disable-pip-version-check --retries 1 --timeout 15 "${PACKAGES[@]}" >>"$folder.install" 2>&1; then
        say "skipped: $("$base" --version) has no environment for the tests: $(tail -n 1 "$folder.install")"
        return
    fi
    local -a files
    IFS=$'\n' read -r -d '' -a files < <(files_without_torch "$python" "${FOLDERS[@]}" && printf '\0')
    say "$("$base" --version), ${#files[@]} files that need no torch:"
    "$python" -m pytest -q --tb=short -p no:cacheprovider "${files[@]}"
}

prepare_environment test
own="$("$PYTHON" -c 'import sys; print(sys.version_info[1])')"
found="$(supported_pythons)"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
jobs=""
for line in "$(head -n 1 <<<"$found")" "$(tail -n 1 <<<"$found")"; do
    read -r minor interpreter <<<"$line" || true
    if [ -z "$minor" ]; then
        say "skipped: no Python 3.10-3.13 was found on PATH, among pyenv's versions or by uv."
    elif [ "$minor" = "$own" ]; then
        say "skipped: Python 3.$minor is the one that the whole suite runs on."
    elif [ ! -e "$scratch/$minor.log" ]; then
        run_with "$interpreter" "$scratch/$minor" >"$scratch/$minor.log" 2>&1 &
        jobs="$jobs $minor:$!"
    fi
done
failed=0
for job in $jobs; do
    wait "${job#*:}" || failed=1
    cat "$scratch/${job%:*}.log"
done
exit "$failed"
