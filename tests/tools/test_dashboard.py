"""The program as its page tells to start it, and the checkpoints that it lists."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from megatron.errors import DataError
from tests.trident.dashboard.run_folders import write_run
from tools.dashboard import list_checkpoints, main

ROOT = Path(__file__).resolve().parents[2]


def test_the_command_of_the_page_shows_the_runs_until_it_is_stopped(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/first", steps=5, control={"save": str(tmp_path)})
    (command,) = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/dashboard.md").read_text(), flags=re.S)
    assert command == "python tools/dashboard.py runs --port 6007\n"
    words = [sys.executable, str(ROOT / "tools/dashboard.py"), "runs", "--port", "0"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline() if process.stdout else ""
        found = re.fullmatch(r"1 run in runs: (http://127\.0\.0\.1:\d+) \(Ctrl-C to stop\)\n", line)
        if not found:
            process.kill()  # leaving the block waits for it
        assert found, line
        with urllib.request.urlopen(f"{found.group(1)}/api/runs", timeout=120) as answer:
            assert [run["name"] for run in json.load(answer)["runs"]] == ["first"]
        libraries = Path(f"/proc/{process.pid}/maps")
        assert not libraries.exists() or "libtorch" not in libraries.read_text(), "it starts without torch"
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=120)
    assert (process.returncode, output, errors) == (0, "stopped\n", "")


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing is not a folder"):
        main([str(tmp_path / "missing"), "--port", "0"])


def test_checkpoints_are_listed_with_their_state(tmp_path: Path) -> None:
    (tmp_path / "iter_0000005").mkdir()
    (tmp_path / ".tmp-iter_0000009-abc").mkdir()
    states = [(one["step"], one["state"]) for one in list_checkpoints(tmp_path)]
    assert states == [(9, "unfinished"), (5, "damaged")]
    assert list_checkpoints(tmp_path / "missing") == []
    (tmp_path / "file").touch()
    assert list_checkpoints(tmp_path / "file") == []
    assert list_checkpoints(Path("x" * 5000)) == [] == list_checkpoints(Path("\0"))
