"""Files that were made to do harm are refused, nothing in them is executed, and nothing grows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.errors import CheckpointError
from tests.trident.convert.pickles.hostile import CALLS, CANARY, CONTAINERS, ENDLESS, MISUSES, archive, value, whole
from trident.convert.pickles.reader import PickleLimits, outcomes, read_pickle, read_pickles

FILES = {
    **CALLS,
    **{name: (archive(content), said) for name, (content, said) in MISUSES.items()},
    **CONTAINERS,
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the reading process says of each file: they are parts of one file here, so that one process reads all."""
    folder = tmp_path_factory.mktemp("hostile")
    path = folder / "files.pt"
    ranges, place = [], 0
    with path.open("wb") as file:
        for content, _ in FILES.values():
            file.write(content)
            ranges.append((place, place + len(content)))
            place += len(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        answers = outcomes(
            [(path, bounds) for bounds in ranges], PickleLimits(memory_bytes=2**28, processor_seconds=30)
        )
    assert [entry.name for entry in folder.iterdir()] == ["files.pt"]
    return {name: answer.get("refused", "it was read") for name, answer in zip(FILES, answers, strict=True)}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused(name: str, refusals: dict[str, str]) -> None:
    assert re.search(FILES[name][1], refusals[name]), refusals[name]


def test_the_user_gets_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(CALLS["os_system"][0])
    with pytest.raises(CheckpointError, match=r"file\.pt is refused: the file names os\.system, which is not admitted"):
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


def test_there_are_at_least_60_of_them() -> None:
    assert len(FILES) >= 60 and len(CALLS) >= 40


def test_the_calls_do_harm_when_python_unpickles_them(tmp_path: Path) -> None:
    """Else their refusal would prove nothing: most of them reach the canary in Python's own unpickler."""
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
