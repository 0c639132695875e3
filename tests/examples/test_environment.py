"""examples/environment.sh: what is installed where, when it is used again, what is left alone. No network, no pip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "environment.sh"

# A stand-in for pip: records the requested packages, and makes them look installed.
FAKE_PIP = """
import pathlib, re, sys

words = sys.argv[1:]
if words[:1] in (["--version"], ["config"]):
    sys.exit(0)
here = pathlib.Path(__file__).resolve().parent.parent
log = here / "pip.log"
log.write_text((log.read_text() if log.exists() else "") + " ".join(words) + "\\n")
if (here / "pip.fails").exists():
    sys.exit(1)
for word in words:
    for name, version in re.findall(r"^(torch)==([0-9.]+)$", word) or (
        [("deepspeed", "0.19.8"), ("trident-megatron", "0.1.0")] if "[" in word else []
    ):
        folder = here / f"{name.replace(chr(45), chr(95))}-{version}.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
"""


@dataclass(frozen=True)
class FakeEnvironment:
    """A real virtual environment with a pip that only pretends."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, torch: str | None = None) -> FakeEnvironment:
        venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
        made = cls(folder)
        (made.packages / "pip").mkdir()
        (made.packages / "pip" / "__main__.py").write_text(FAKE_PIP)
        if torch:
            made.install("torch", torch)
        return made

    @property
    def packages(self) -> Path:
        return next(self.folder.glob("lib/python3*/site-packages"))

    @property
    def pip_calls(self) -> list[str]:
        log = self.packages / "pip.log"
        return log.read_text().splitlines() if log.exists() else []

    def install(self, name: str, version: str) -> None:
        info = self.packages / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def prepare(extra: str = "plot", **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs prepare_environment in a shell with few variables; prints which interpreter it chose."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PIP_FIND_LINKS": "/nowhere", **variables}
    program = f'set -euo pipefail; source "{SCRIPT}"; prepare_environment {extra}; echo "$PYTHON $OMP_NUM_THREADS"'
    return subprocess.run(["bash", "-c", program], env=environment, capture_output=True, text=True, timeout=120)


def test_an_active_environment_is_installed_into_once(tmp_path: Path) -> None:
    active = FakeEnvironment.make(tmp_path / "active")
    first = prepare(VIRTUAL_ENV=str(active.folder))
    assert first.returncode == 0, first.stderr
    assert first.stdout.split() == [str(active.folder / "bin" / "python"), "1"]
    torch, project = active.pip_calls
    assert "torch==2.13.0" in torch.split()
    assert f"--editable {ROOT}[plot]" in project
    again = prepare(VIRTUAL_ENV=str(active.folder))
    assert again.returncode == 0, again.stderr
    assert len(active.pip_calls) == 2, "the second run installs nothing"
    prepare("test", VIRTUAL_ENV=str(active.folder))
    assert len(active.pip_calls) == 3, "another extra is installed on top, without torch"
    assert f"{ROOT}[test]" in active.pip_calls[-1]


def test_an_installed_torch_is_never_replaced(tmp_path: Path) -> None:
    active = FakeEnvironment.make(tmp_path / "active", torch="2.9.1")
    assert prepare(VIRTUAL_ENV=str(active.folder)).returncode == 0
    (project,) = active.pip_calls
    words = project.split()
    constraint = Path(words[words.index("--constraint") + 1])
    assert constraint.read_text() == "torch==2.9.1\n"


def test_an_environment_with_an_old_torch_is_left_alone(tmp_path: Path) -> None:
    active = FakeEnvironment.make(tmp_path / "active", torch="2.1.0")
    own = FakeEnvironment.make(tmp_path / "own")
    finished = prepare(VIRTUAL_ENV=str(active.folder), VENV_DIR=str(own.folder))
    assert finished.returncode == 0, finished.stderr
    assert "has torch 2.1.0, older than 2.7; leaving it alone" in finished.stderr
    assert active.pip_calls == []
    assert finished.stdout.split()[0] == str(own.folder / "bin" / "python")


def test_condas_base_environment_is_left_alone(tmp_path: Path) -> None:
    base, named, own = (FakeEnvironment.make(tmp_path / name) for name in ("base", "named", "own"))
    prepare(CONDA_PREFIX=str(base.folder), CONDA_DEFAULT_ENV="base", VENV_DIR=str(own.folder))
    assert base.pip_calls == [] and own.pip_calls != []
    prepare(CONDA_PREFIX=str(named.folder), CONDA_DEFAULT_ENV="work", VENV_DIR=str(own.folder))
    assert named.pip_calls != []


def test_torch_index_url_is_for_torch_only(tmp_path: Path) -> None:
    active = FakeEnvironment.make(tmp_path / "active")
    prepare(VIRTUAL_ENV=str(active.folder), TORCH_INDEX_URL="https://example.org/cpu")
    torch, project = active.pip_calls
    assert "--index-url https://example.org/cpu" in torch
    assert "example.org" not in project


def test_a_missing_package_is_installed_again(tmp_path: Path) -> None:
    active = FakeEnvironment.make(tmp_path / "active", torch="2.9.1")
    prepare(VIRTUAL_ENV=str(active.folder))
    shutil.rmtree(active.packages / "deepspeed-0.19.8.dist-info")
    prepare(VIRTUAL_ENV=str(active.folder))
    assert len(active.pip_calls) == 2


def test_a_failed_installation_is_reported_and_retried(tmp_path: Path) -> None:
    active = FakeEnvironment.make(tmp_path / "active", torch="2.9.1")
    broken = active.packages / "pip.fails"
    broken.touch()
    failed = prepare(VIRTUAL_ENV=str(active.folder))
    assert failed.returncode == 1
    assert "error: the installation failed" in failed.stderr
    broken.unlink()
    assert prepare(VIRTUAL_ENV=str(active.folder)).returncode == 0
    assert len(active.pip_calls) == 2


def test_a_missing_python_is_reported(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "cat", "uname", "grep"):
        found = next(Path(folder) / name for folder in ("/bin", "/usr/bin") if (Path(folder) / name).exists())
        (tools / name).symlink_to(found)
    finished = prepare(PATH=str(tools), VENV_DIR=str(tmp_path / "venv"))
    assert finished.returncode == 1
    assert "no Python 3.10-3.13 found" in finished.stderr


@pytest.mark.full
def test_a_new_environment_appears_only_when_complete(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    program = f'set -eu; source "{SCRIPT}"; VENV_DIR="{folder}"; make_venv "{sys.executable}"; ls -a "{tmp_path}"'
    finished = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == [".", "..", "venv"]
    assert subprocess.run([str(folder / "bin" / "pip"), "--version"], capture_output=True).returncode == 0
    which = f'unset VIRTUAL_ENV; source "{folder}/bin/activate"; command -v python'
    assert subprocess.check_output(["bash", "-c", which], text=True).strip() == str(folder / "bin" / "python")
