"""The folder of a run."""

from __future__ import annotations

import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from examples.hello_deepspeed.flags import RUN_FILES
from megatron.errors import ConfigError, StorageError
from megatron.observe.run_directory import open_run_directory, write_arguments


def git(folder: Path, *words: str) -> str:
    """Runs git in a test's own repository, whatever repository the tests were started from."""
    names = ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL")
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", "-C", str(folder), *words],
        env={**plain, **dict.fromkeys(names, "t@t")},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.fixture(autouse=True)
def outside_of_any_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Git commands of the tests must not act on a repository that a git hook points to."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one committed file."""
    folder = tmp_path / "check out"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "program.py").write_text("one\n")
    git(folder, "add", "program.py")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_a_new_run_gets_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: open_run_directory(None, {"number": number}, name="my gpt/2"), range(8)))
    assert len({directory.path for directory in found}) == 8
    assert found[0].path.parent == Path("runs")
    assert sorted(directory.path.name for directory in found)[0] == "my-gpt-2-20260101-000000"
    assert [json.loads((directory.path / "config.json").read_text()) for directory in found] == [
        {"number": number} for number in range(8)
    ]


def test_a_given_folder_is_not_shared_by_accident(tmp_path: Path) -> None:
    folder = str(tmp_path / "a" / "run")
    open_run_directory(folder, {"start": 1})
    with pytest.raises(ConfigError, match=r"--run-dir .*a/run already contains a run.*--load"):
        open_run_directory(folder, {"start": 2})
    for start in (2, 3):
        open_run_directory(folder, {"start": start}, is_resume=True)
    directory = Path(folder)
    found = {path.name: json.loads(path.read_text())["start"] for path in directory.glob("config*.json")}
    assert found == {"config.1.json": 1, "config.2.json": 2, "config.json": 3}
    assert {"git.txt", "git.1.txt", "git.2.txt", "git.diff", "git.1.diff"} <= {
        path.name for path in directory.iterdir()
    }


def test_commit_and_changes_are_recorded(checkout: Path, tmp_path: Path) -> None:
    (checkout / "program.py").write_bytes(b"two \xff\n")
    (checkout / "new.py").touch()
    directory = open_run_directory(str(tmp_path / "run"), {}, source=checkout / "program.py")
    text = (directory.path / "git.txt").read_text()
    assert text == f"commit {git(checkout, 'rev-parse', 'HEAD')} M program.py\n?? new.py\n"
    changes = (directory.path / "git.diff").read_bytes()
    assert b"-one\n+two \xff\n" in changes
    (checkout / "program.py").write_text("one\n")
    git(checkout, "apply", "--check", str((directory.path / "git.diff").resolve()))


def test_a_program_outside_of_any_checkout(tmp_path: Path, checkout: Path) -> None:
    (checkout / "installed.py").touch()
    for number, source in enumerate((tmp_path / "program.py", checkout / "installed.py")):
        directory = open_run_directory(str(tmp_path / f"run{number}"), {}, source=source)
        assert (directory.path / "git.txt").read_text().startswith("not a git checkout")
        assert (directory.path / "git.diff").read_text() == ""


def test_a_machine_without_git(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    directory = open_run_directory(str(tmp_path / "run"), {}, source=checkout / "program.py")
    assert "git is not installed" in (directory.path / "git.txt").read_text()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"run directory .*file/run cannot be written: Not a directory.*--run-dir"):
        open_run_directory(str(tmp_path / "file" / "run"), {})


def test_what_was_given_is_recorded_without_secrets(tmp_path: Path) -> None:
    config = {"data": {"note": ("me:s3same@db.example.com", 1)}}
    flags = json.dumps({"header": "Authorization: Bearer s3same"})
    source = tmp_path / "program.py"  # not the checkout of these tests, whose diff would be recorded
    path = open_run_directory(str(tmp_path / "run"), config, source=source, names=RUN_FILES, program_flags=flags).path
    assert json.loads((path / "config.json").read_text()) == {"data": {"note": ["me:***@db.example.com", 1]}}
    written = write_arguments(str(tmp_path / "log"), ["a ... HF_TOKEN=s3same"])
    texts = [file.read_text() for file in (*path.iterdir(), written) if file.is_file()]
    assert "HF_TOKEN=***" in texts[-1] and not [text for text in texts if "s3same" in text]


def test_the_files_of_hellodeepspeed(checkout: Path, tmp_path: Path) -> None:
    """The commit stands alone, so that scripts can read it; earlier starts are kept."""
    (checkout / "program.py").write_text("two\n")
    for start, flags in enumerate(('{"h_dim": 32}', '{"h_dim": 32, "num_iterations": 9}')):
        directory = open_run_directory(
            str(tmp_path / "run"),
            {},
            is_resume=start > 0,
            source=checkout / "program.py",
            names=RUN_FILES,
            program_flags=flags,
        )
    assert (directory.path / "githash.log").read_text() == git(checkout, "rev-parse", "HEAD")
    assert "-one\n+two" in (directory.path / "gitdiff.log").read_text()
    assert json.loads((directory.path / "hparams.json").read_text()) == {"h_dim": 32, "num_iterations": 9}
    assert json.loads((directory.path / "hparams.1.json").read_text()) == {"h_dim": 32}
    assert not (directory.path / "git.txt").exists()


def test_hellodeepspeed_without_a_commit_and_without_a_checkout(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "program.py").write_text("one\n")
    (tmp_path / "program.py").touch()
    git(folder, "add", "program.py")
    for source, commit, changes in (
        (folder / "program.py", "none yet\n", "+one\n"),
        (tmp_path / "program.py", f"not a git checkout, or git is not installed: {tmp_path}\n", ""),
    ):
        place = str(tmp_path / f"run-{source.parent.name}")
        directory = open_run_directory(place, {}, source=source, names=RUN_FILES)
        assert (directory.path / "githash.log").read_text() == commit
        assert (directory.path / "gitdiff.log").read_text().endswith(changes)
        assert json.loads((directory.path / "hparams.json").read_text()) == {}
