"""Malicious files are refused, nothing in them is executed, and their cost is bounded."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.errors import CheckpointError
from tests.trident.convert.pickles.hostile import CALLS, CANARY, CONTAINERS, ENDLESS, MISUSES, archive, value, whole
from trident.convert.pickles.reader import PickleLimits, described_ranges, read_pickle, read_pickles

FILES = {
    **CALLS,
    **{name: (archive(content), said) for name, (content, said) in MISUSES.items()},
    **CONTAINERS,
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The refusal of each file; they are ranges of one file here, so that one process reads all."""
    folder = tmp_path_factory.mktemp("hostile")
    path = folder / "files.pt"
    ranges, offset = [], 0
    with path.open("wb") as file:
        for content, _ in FILES.values():
            file.write(content)
            ranges.append((offset, offset + len(content)))
            offset += len(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        answers = described_ranges(
            [(path, bounds) for bounds in ranges], PickleLimits(memory_bytes=2**28, processor_seconds=30)
        )
    assert [entry.name for entry in folder.iterdir()] == ["files.pt"]
    return {name: answer.get("refused", "it was read") for name, answer in zip(FILES, answers, strict=True)}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused(name: str, refusals: dict[str, str]) -> None:
    assert re.search(FILES[name][1], refusals[name]), refusals[name]


def test_the_error_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(CALLS["os_system"][0])
    with pytest.raises(CheckpointError, match=r"file\.pt is refused: the file names os\.system, which is not allowed"):
        read_pickle(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="bytes 0 to 0 of"):
        read_pickle(path)


def test_reading_that_takes_too_long_or_too_much_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    for content in ENDLESS.values():
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="takes more than 1 seconds"):
            read_pickle(path, PickleLimits(processor_seconds=1))
    path.write_bytes(b"\x80\x02" + b"(" + b"]" * 4_000_000 + b"t.")
    with pytest.raises(CheckpointError, match="134217728 bytes of memory"):
        read_pickle(path, PickleLimits(memory_bytes=2**27))


def test_the_file_that_ends_the_reading_process_is_named(tmp_path: Path) -> None:
    """A key nested three million deep overflows the stack when it is hashed; the files read with it are fine."""
    fine, deep = tmp_path / "fine.pt", tmp_path / "deep.pt"
    fine.write_bytes(whole(value([1, 2])))
    deep.write_bytes(whole(b"})", b"\x85" * 3_000_000, value(1), b"s"))
    with pytest.raises(CheckpointError, match=re.escape(f"{deep} cannot be read: it takes more than")):
        read_pickles([fine, deep, fine])
    assert read_pickles([fine, fine]) == [[1, 2], [1, 2]]


def test_python_executes_the_calls(tmp_path: Path) -> None:
    """Most of them reach the canary in Python's own unpickler; otherwise their refusal proves nothing."""
    program = (
        "import contextlib, os, pickle, sys\n"
        "from tests.trident.convert.pickles.hostile import CALLS\n"
        "reached = []\n"
        "for name, (content, said) in CALLS.items():\n"
        "    if 'torch' in said: continue  # slow to import\n"
        "    os.makedirs(name)\n"
        "    os.chdir(name)\n"
        "    with contextlib.suppress(BaseException):\n"
        "        found = pickle.loads(content)\n"
        "        getattr(found, 'wait', getattr(found, 'read', int))()\n"
        "    os.chdir('..')\n"
        f"    if any(entry.startswith({CANARY!r}) for entry in os.listdir(name)): reached.append(name)\n"
        "sys.stderr.write(' '.join(reached))\n"
    )
    root = Path(__file__).resolve().parents[4]
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    missed = set(CALLS) - set(done.stderr.split())
    assert len(missed) <= 8, sorted(missed)
