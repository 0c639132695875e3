"""What a rank does before its slow imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.errors import ExitCode, PeerLostError
from megatron.parallel import rank_start
from megatron.parallel.processes import born_at
from megatron.parallel.rank_start import write_error_file

ROOT = Path(__file__).resolve().parents[2]
needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only: PR_SET_PDEATHSIG")


def test_nothing_slow_is_imported_for_it() -> None:
    program = "import sys, pretrain_gpt; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'deepspeed')))"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@needs_linux
def test_a_launcher_that_ended_meanwhile_is_an_error_that_asks_for_a_requeue(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([4711, 1, 1])
    monkeypatch.setattr(rank_start.os, "getppid", lambda: next(answers))
    monkeypatch.setattr(rank_start.ctypes, "CDLL", lambda *_, **__: type("C", (), {"prctl": lambda *_: 0})())
    with pytest.raises(PeerLostError, match="its parent process was 4711 and is now 1") as caught:
        rank_start.bind_to_launcher()
    assert caught.value.exit_code == ExitCode.REQUEUE


@needs_linux
def test_a_process_that_adopts_orphans_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    own, name = os.getpid(), Path("/proc/self/comm").read_text().strip()
    assert not rank_start._is_adopter(own)
    monkeypatch.setattr(rank_start, "_ADOPTERS", (name,))
    monkeypatch.setattr(rank_start, "_LAUNCHER_MARKS", ())
    assert rank_start._is_adopter(own)
    words = Path("/proc/self/cmdline").read_bytes().decode().split("\0")
    monkeypatch.setattr(rank_start, "_LAUNCHER_MARKS", (words[0].lower(),))
    assert not rank_start._is_adopter(own)


@needs_linux
def test_a_launcher_killed_while_its_rank_is_importing_takes_the_rank_along(tmp_path: Path) -> None:
    """The rank ties itself to the launcher before its imports: here one that would take ten minutes."""
    rank = (
        "import sys, time\n"
        "from megatron.parallel.rank_start import begin_rank\n"
        "begin_rank()\n"
        f"open({str(tmp_path / 'began')!r}, 'w').close()\n"
        "time.sleep(600)  # the imports\n"
    )
    launcher = f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {rank!r}])\n"
    launcher += "print(child.pid, flush=True)\nchild.wait()\n"
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", launcher],
        cwd=ROOT,
        env={**os.environ, **variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        _wait(lambda: (tmp_path / "began").exists())
        process.kill()
        process.wait()
        _wait(lambda: not born_at(child))
    finally:
        process.stdout.close()
        if born_at(child):
            os.kill(child, signal.SIGKILL)


def test_an_error_is_written_the_way_torchrun_reads_it(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    path = tmp_path / "error.json"
    assert write_error_file(path, 65, "the file is damaged.\nUse another.") is False
    assert json.loads(path.read_text())["message"]["message"].startswith("the file")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=65, error_file=str(path))
    assert "the file is damaged." in ChildFailedError("pretrain_gpt.py", {0: failure}).format_msg()


def _wait(condition, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
