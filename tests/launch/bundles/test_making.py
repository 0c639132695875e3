"""One file with the modules of a start: what is read from it, what not, and when it is made again."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.errors import LaunchError
from megatron.launch.bundles import running as bundled
from megatron.launch.bundles.making import bundled_command, ensure_bundle
from megatron.launch.bundles.running import BundleFinder

PROGRAM = """
import sys
opened = set()
sys.addaudithook(lambda event, values: event == "open" and opened.add(str(values[0])))
import wide.deep.module, wide.later
print(sys.argv[1:], wide.deep.module.__file__, wide.deep.module.PLACE, wide.later.PLACE)
print(sorted(name for name in opened if "wide" in name))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of three modules that can be imported."""
    folder = tmp_path / "code" / "wide" / "deep"
    folder.mkdir(parents=True)
    for name in ("wide/__init__.py", "wide/deep/__init__.py", "wide/deep/module.py", "wide/later.py"):
        (tmp_path / "code" / name).write_text("PLACE = __name__\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return tmp_path / "code" / "wide"


def run(bundle: Path, program: Path) -> tuple[str, str]:
    command = [sys.executable, *bundled_command(bundle), str(program), "--flag", "a b"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def test_modules_come_from_the_bundle_and_others_from_their_files(package: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "made" / "start.bundle"
    ensure_bundle(bundle, sys.executable, ("wide.deep.module",))
    assert {"wide", "wide.deep", "wide.deep.module"} <= BundleFinder(str(bundle)).modules.keys()
    shown, warned = run(bundle, tmp_path / "program.py")
    words, opened = shown.splitlines()
    assert words == f"['--flag', 'a b'] {package}/deep/module.py wide.deep.module wide.later"
    assert "wide/later.py" in opened and "wide/deep" not in opened and "wide/__init__" not in opened and not warned


def test_it_is_made_again_when_a_source_has_changed(package: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "start.bundle"
    ensure_bundle(bundle, sys.executable, ("wide.deep.module",))
    made_at = bundle.stat().st_mtime_ns
    ensure_bundle(bundle, sys.executable, ("wide.deep.module",))
    assert bundle.stat().st_mtime_ns == made_at
    (package / "deep" / "module.py").write_text("PLACE = 'changed'\n")
    ensure_bundle(bundle, sys.executable, ("wide.deep.module",))
    assert " changed " in run(bundle, tmp_path / "program.py")[0]
    assert os.listdir(tmp_path / "code") == ["wide"] and not list(tmp_path.glob(".start*"))


def test_a_bundle_of_another_interpreter_is_not_used(package: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "start.bundle"
    bundle.write_bytes(bundled.MAGIC + b"?" * len(importlib.util.MAGIC_NUMBER) + bytes(8))
    shown, warned = run(bundle, tmp_path / "program.py")
    assert "wide.deep.module wide.later" in shown
    assert f"{bundle} is not used (--bundle): made by another version of Python or of this program" in warned
    ensure_bundle(bundle, sys.executable, ("wide",))
    bundle.write_bytes(bundle.read_bytes().replace(sys.prefix.encode(), b"?" * len(sys.prefix.encode()), 1))
    assert "is not used (--bundle): made for the environment ???" in run(bundle, tmp_path / "program.py")[1]


def test_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"cannot import what the trainer needs: ModuleNotFoundError.*no_such_module"):
        ensure_bundle(tmp_path / "a", sys.executable, ("no_such_module",))
    with pytest.raises(LaunchError, match=r"--bundle .* cannot be written: .*Give a file that all hosts can read"):
        ensure_bundle(tmp_path / "a", str(tmp_path / "no-python"), ())
