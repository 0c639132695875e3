# shellcheck shell=bash
# Sourced by the scripts of examples/ and tests/: finds or creates a Python environment for the project, and runs commands.
#
#   prepare_environment EXTRA     sets PYTHON to an interpreter with the project and its EXTRA installed
#   run COMMAND...                runs a command; with DRY_RUN=1 prints it as it would be typed
#
# Which environment: the active virtual or conda environment (not conda's base) unless its torch is too old; else `.venv` beside
# the project. A system torch that is new enough is used through --system-site-packages: an installed torch is never replaced.
#
# Variables: PYTHON (interpreter to start from), VENV_DIR (instead of .venv), TORCH_INDEX_URL (package index for torch).

PROJECT_DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
TORCH_REQUIREMENT="torch==2.13.0"   # installed only where no torch >= 2.7 is present
OLDEST_TORCH="2.7"

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }

# Runs a command, or prints it as it would be typed.
run() {
    if [ -n "${DRY_RUN:-}" ]; then
        printf '%q ' "$@"
        printf '\n'
    else
        "$@"
    fi
}

# Whether an interpreter is a Python this project supports.
python_fits() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

# Prints the torch version of an interpreter and succeeds if it is new enough; fails silently if it has none.
torch_version() {
    "$1" - "$OLDEST_TORCH" 2>/dev/null <<'PY'
import importlib.metadata
import re
import sys

found = importlib.metadata.version("torch")
print(found)
sys.exit(tuple(map(int, re.findall(r"\d+", found)[:2])) < tuple(map(int, sys.argv[1].split("."))))
PY
}

# The first supported interpreter, preferably one with a usable torch.
find_python() {
    local candidate first=""
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10 python; do
        if ! command -v "$candidate" >/dev/null 2>&1 || ! python_fits "$candidate"; then continue; fi
        if torch_version "$candidate" >/dev/null; then
            printf '%s' "$candidate"
            return
        fi
        first="${first:-$candidate}"
    done
    printf '%s' "$first"
}

# The interpreter of the active environment, if it is one to install into.
active_python() {
    local prefix="${VIRTUAL_ENV:-}"
    if [ -z "$prefix" ] && [ -n "${CONDA_PREFIX:-}" ] && [ "${CONDA_DEFAULT_ENV:-base}" != base ]; then
        prefix="$CONDA_PREFIX"
    fi
    [ -n "$prefix" ] && [ -x "$prefix/bin/python" ] || return 1
    if ! python_fits "$prefix/bin/python"; then
        say "The active environment $prefix has a Python outside 3.10-3.13; using $VENV_DIR instead."
        return 1
    fi
    local found
    if ! found="$(torch_version "$prefix/bin/python")" && [ -n "$found" ]; then
        say "The active environment $prefix has torch $found, older than $OLDEST_TORCH; leaving it alone and using $VENV_DIR."
        return 1
    fi
    printf '%s' "$prefix/bin/python"
}

# Creates $VENV_DIR, also on systems whose Python has no ensurepip.
make_venv() {
    local base="$1"
    local -a options=()
    if torch_version "$base" >/dev/null; then
        say "Using the torch $(torch_version "$base") that is installed for $(command -v "$base")."
        options=(--system-site-packages)
    fi
    say "Creating $VENV_DIR with $("$base" --version 2>&1)."
    local folder="$VENV_DIR.making.$$"   # renamed when complete, so that an interrupted run leaves no incomplete environment
    rm -rf "$folder"
    if ! "$base" -m venv ${options[@]+"${options[@]}"} "$folder" >/dev/null 2>&1; then
        rm -rf "$folder"
        { "$base" -m venv --without-pip ${options[@]+"${options[@]}"} "$folder" &&
            "$base" -m pip --python "$folder/bin/python" install --quiet pip; } >&2 ||
            { rm -rf "$folder"; fail "$base cannot create a virtual environment. On Debian or Ubuntu: apt install python3-venv."; }
    fi
    move_scripts "$folder" "$VENV_DIR"
    rm -rf "$VENV_DIR"
    mv "$folder" "$VENV_DIR"
}

# Writes the folder where an environment will be into its scripts, which name the one they were created in.
move_scripts() {
    "$1/bin/python" - "$1" "$2" <<'PY'
import os
import pathlib
import sys

made, final = (os.path.abspath(folder).encode() for folder in sys.argv[1:])
for script in [*pathlib.Path(sys.argv[1], "bin").iterdir(), pathlib.Path(sys.argv[1], "pyvenv.cfg")]:
    if not script.is_symlink() and made in (content := script.read_bytes()) and b"\0" not in content:
        script.write_bytes(content.replace(made, final))
PY
}

# Runs pip in the environment, whatever it was made with.
install_packages() {
    if "$PYTHON" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m ensurepip --default-pip >/dev/null 2>&1; then
        "$PYTHON" -m pip install --disable-pip-version-check --no-input --no-compile -qq --root-user-action ignore "$@" >&2
    elif command -v uv >/dev/null 2>&1; then
        uv pip install --python "$PYTHON" --quiet "$@" >&2
    else
        fail "$PYTHON has no pip. Add it (python -m ensurepip), or deactivate the environment to use $VENV_DIR."
    fi
}

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }

# Options that let pip find a CPU build of torch (200 MB instead of 3 GB) if that is wanted and reachable.
torch_source() {
    if [ -n "${TORCH_INDEX_URL:-}" ]; then
        printf '%s\n' --index-url "$TORCH_INDEX_URL"
        return
    fi
    [ "$(uname -s)" = Linux ] && ! has_gpu || return 0
    local chosen
    chosen="${PIP_INDEX_URL:-}${PIP_FIND_LINKS:-}${PIP_NO_INDEX:-}$("$PYTHON" -m pip config list 2>/dev/null || true)"
    case "$chosen" in
        "") ;;
        *://* | *index* | *find-links* | /*) return 0 ;;   # the user has configured a package source
    esac
    local cpu_index="https://download.pytorch.org/whl/cpu"
    if "$PYTHON" -c "import urllib.request; urllib.request.urlopen('$cpu_index/torch/', timeout=5)" >/dev/null 2>&1; then
        say "No GPU found: taking the CPU build of torch from $cpu_index (TORCH_INDEX_URL chooses another index)."
        printf '%s\n' --extra-index-url "$cpu_index"
    else
        say "No GPU found, and $cpu_index is out of reach: the default build of torch is larger (set TORCH_INDEX_URL to choose)."
    fi
}

install_torch() {
    if torch_version "$PYTHON" >/dev/null; then
        return
    fi
    local -a source=()
    local option
    while IFS= read -r option; do source+=("$option"); done < <(torch_source)
    say "Installing $TORCH_REQUIREMENT."
    install_packages ${source[@]+"${source[@]}"} "$TORCH_REQUIREMENT" ||
        fail "torch could not be installed (see above). Install any torch >= $OLDEST_TORCH yourself and run this again."
}

# A digest of everything that determines what must be installed.
wanted_state() {
    "$PYTHON" - "$PROJECT_DIR" "$1" <<'PY'
import hashlib
import pathlib
import sys

project, extra = pathlib.Path(sys.argv[1]), sys.argv[2]
files = [project / "pyproject.toml", project / "setup.py", *sorted((project / "csrc").rglob("*.[ch]*"))]
digest = hashlib.sha256("\0".join([str(project), extra, sys.version]).encode())
for path in files:
    digest.update(path.read_bytes() if path.is_file() else b"")
print(digest.hexdigest())
PY
}

is_installed() {
    "$PYTHON" -c 'import importlib.metadata as m; [m.version(name) for name in ("torch", "deepspeed", "trident-megatron")]' >/dev/null 2>&1
}

install_project() {
    local extra="$1" stamps state constraint
    stamps="$("$PYTHON" -c 'import sys; print(sys.prefix)')/.trident-megatron"
    state="$(wanted_state "$extra")"
    if [ "$(cat "$stamps/$extra" 2>/dev/null)" = "$state" ] && is_installed; then
        return
    fi
    local started=$SECONDS
    install_torch
    mkdir -p "$stamps"
    constraint="$stamps/torch.constraint"
    printf 'torch==%s\n' "$(torch_version "$PYTHON")" >"$constraint"
    say "Installing the project with its \"$extra\" extra into $("$PYTHON" -c 'import sys; print(sys.prefix)')."
    install_packages --constraint "$constraint" --editable "${PROJECT_DIR}[$extra]" ||
        fail "the installation failed (see above). Nothing outside the environment was changed; run this again to continue."
    printf '%s\n' "$state" >"$stamps/$extra.$$" && mv "$stamps/$extra.$$" "$stamps/$extra"
    say "Installed in $((SECONDS - started)) s."
}

prepare_environment() {
    local extra="$1" base
    VENV_DIR="${VENV_DIR:-$PROJECT_DIR/.venv}"
    if base="$(active_python)"; then
        PYTHON="$base"
    elif [ -x "$VENV_DIR/bin/python" ] && python_fits "$VENV_DIR/bin/python"; then
        PYTHON="$VENV_DIR/bin/python"
    else
        base="$(find_python)"
        [ -n "$base" ] || fail "no Python 3.10-3.13 found. Install one, or name it: PYTHON=/path/to/python3 bash $0"
        make_venv "$base"
        PYTHON="$VENV_DIR/bin/python"
    fi
    install_project "$extra"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
    if ! has_gpu; then
        export DS_ACCELERATOR=cpu
    fi
}
