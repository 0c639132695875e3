"""README's first command without the installation: a small version of the whole demonstration, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from examples import kill_and_resume
from megatron import device
from megatron.errors import ConfigError, MegatronError
from tests.helpers.programs import forking_python


@pytest.mark.full
def test_a_small_demonstration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The killed processes are real ones; the other commands run in forks of a process that has PyTorch."""
    real, show, stand_in = kill_and_resume.python, kill_and_resume.show, forking_python()

    def python(threads: int, *words: object) -> list[str]:
        command = real(threads, *words)
        is_killed = "torch.distributed.run" in command
        return command if is_killed else [stand_in if word == sys.executable else word for word in command]

    def shown(command: Sequence[str]) -> None:
        show([sys.executable if word == stand_in else word for word in command])

    monkeypatch.setattr(kill_and_resume, "python", python)
    monkeypatch.setattr(kill_and_resume, "show", shown)
    size = ["--num-layers", "2", "--hidden-size", "32", "--seq-length", "32", "--vocab-size", "400", "--steps", "8"]
    code = kill_and_resume.main(["--work-dir", str(tmp_path), *size])
    said, errors = capfd.readouterr()
    assert code == 0, said[-4000:] + errors[-4000:]
    assert "sent SIGKILL to the launcher" in said
    assert "all 4 ranks have exited; the last logged step is" in said
    assert "EQUAL: all" in said
    (run,) = tmp_path.glob("run-*")
    assert f"Everything is in {run}" in said
    assert "--mark 2:checkpoint" in said and ":SIGKILL" in said, "the picture shows both"
    log = said.partition("=== Comparing")[0]
    assert "[000-000]" not in log and "Unable to find" not in log and "\nstep 8/8 | loss" in log
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "killed" / "metrics.jsonl").exists() and (run / "resumed" / "metrics.jsonl").exists()
    saved = sorted(int(path.name.removeprefix("iter_")) for path in (run / "checkpoints").glob("iter_*"))
    assert saved == [2, 4, 6, 8]
    assert all(f"\n{prompt}" in said for prompt in kill_and_resume.PROMPTS), "what it writes is shown"


def test_invalid_flags_of_the_demonstration() -> None:
    with pytest.raises(ConfigError, match="--hidden-size 30 cannot be split into 4 heads"):
        kill_and_resume.main(["--hidden-size", "30"])
    with pytest.raises(ConfigError, match="--steps 3 is out of range"):
        kill_and_resume.main(["--steps", "3"])


def test_a_command_that_fails_ends_it() -> None:
    with pytest.raises(MegatronError, match="ended with exit code 3"):
        kill_and_resume.call(kill_and_resume.python(1, "-c", "import sys; sys.exit(3)"))


def test_children_are_found_and_their_end_is_detected() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in kill_and_resume.children_of(os.getpid())
        assert kill_and_resume.is_alive(child.pid)
        child.kill()
        deadline = time.monotonic() + 120
        while kill_and_resume.is_alive(child.pid):  # it has not been reaped, so it is in the table as a zombie
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    assert not kill_and_resume.is_alive(child.pid)


@pytest.mark.parametrize(("kind", "gpus", "ranks"), [("cuda", 1, 1), ("cuda", 3, 2), ("cuda", 8, 4), ("cpu", 1, 4)])
def test_gpus_are_used_as_far_as_they_go(kind: str, gpus: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("choose_accelerator", None), ("device_type", kind), ("device_count", gpus)):
        monkeypatch.setattr(device, name, lambda value=value: value)
    assert kill_and_resume.hardware() == (kind, ranks)
