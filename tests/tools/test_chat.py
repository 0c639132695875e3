"""`tools/chat.py`: piped questions, commands, and Ctrl-C."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tests.helpers.programs import forking_python
from tests.inference.checkpoints import make_checkpoint
from tests.tokenizers.chat.tokenizers_with_tokens import DSGPT2_TOKENS
from tools import chat

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained chat model."""
    folder = tmp_path_factory.mktemp("chat")
    return make_checkpoint(folder, "--chat-template", "dsgpt2", more_tokens=DSGPT2_TOKENS, positions=256)


def talk(checkpoints: Path, monkeypatch: pytest.MonkeyPatch, *lines: str | bytes, flags: tuple[str, ...] = ()) -> None:
    """Runs the tool with these lines as its standard input."""
    typed = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed)))
    usual = ("--greedy", "--max-new-tokens", "6")
    assert chat.main(["--load", str(checkpoints), *usual, *flags]) == 0


def test_every_line_of_a_pipe_is_a_question(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    talk(checkpoints, monkeypatch, "Hello", "", "Hello", "/reset", "Hello")
    said = capfd.readouterr()
    first, *rest = said.out.split("\n")
    assert "successfully loaded checkpoint" in said.err  # and not among the answers
    assert first and rest[-2:] == [first, ""]  # after /reset the same question has the same answer
    assert "Conversation cleared." in said.err and "(truncated: see" in said.err
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f]", said.out)


def test_commands(checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    talk(checkpoints, monkeypatch, "/help", "/system Be kind.", "Hello", "/quit", "Hello")
    said = capfd.readouterr()
    assert "unknown command /help. Use /reset, /system TEXT or /quit; //help sends it as a message." in said.err
    assert "cleared, with a system prompt" in said.err
    assert "dsgpt2 has no system messages" in said.err and not said.out  # refused, and the next line goes on
    talk(checkpoints, monkeypatch, "/system Be kind.", "Hello", flags=("--chat-template", "plain"))
    assert capfd.readouterr().out.count("\n") == 1


def test_a_question_that_is_too_long_is_refused(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    talk(checkpoints, monkeypatch, "word " * 300, "Hello")
    said = capfd.readouterr()
    assert "but this model has 256 positions" in said.err and said.out.count("\n") == 1


def test_a_line_that_is_not_utf8_is_refused_and_the_next_is_asked(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    talk(checkpoints, monkeypatch, "", b"\xff\xfe hi", "Hello")
    said = capfd.readouterr()
    assert said.err.count("error: line 2 of standard input is not UTF-8.") == 1 and said.out.count("\n") == 1


def test_commands_take_what_they_take_and_a_question_may_begin_with_a_slash(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(chat, "_answer", lambda conversation, question: asked.append(question))
    talk(
        checkpoints,
        monkeypatch,
        "/quit now",
        "/reset all",
        "//quit now",
        "//",
        "/",
        "/system\tBe kind.",
        "/quit",
        "Hello",
    )
    said = capfd.readouterr().err
    assert "/quit expects no text. Use /quit alone, or //quit now to send it as a message." in said
    assert "/reset expects no text." in said and "unknown command /." in said and "with a system prompt" in said
    assert asked == ["/quit now", "/"]


def test_a_bias_beyond_the_vocabulary_is_refused_before_a_question(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="--logit-bias has token 800000, but the tokenizer's ids are 0 to"):
        talk(checkpoints, monkeypatch, flags=("--logit-bias", "1=2", "800000=5"))


def test_wrong_flags_are_refused() -> None:
    with pytest.raises(ConfigError, match="--load is required"):
        chat.main([])
    with pytest.raises(ConfigError, match="--max-new-tokens 0 is out of range"):
        chat.main(["--load", "x", "--max-new-tokens", "0"])


@pytest.mark.slow
def test_in_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_ends(checkpoints: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [forking_python(), str(ROOT / "tools" / "chat.py"), "--load", str(checkpoints), "--logit-bias"]
    command += [f"{number}=-100" for number in range(590, 605)]  # nothing ends an answer but its length
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""

    def wait_for(text: bytes) -> None:
        nonlocal seen
        ends_at = time.monotonic() + 120
        while text not in seen:
            assert time.monotonic() < ends_at, seen
            seen += os.read(ours, 4096)

    wait_for(b"Ctrl-D exits.")
    wait_for(b"> ")
    seen = b""
    os.write(ours, b"Hello\n")
    wait_for(b"Hello\r\n")
    seen = seen.partition(b"Hello\r\n")[2]
    while not seen:
        seen += os.read(ours, 4096)
    process.send_signal(signal.SIGINT)
    wait_for(b"\r\n> ")  # stopped, or at its end if the machine was fast
    assert b"(stopped)" in seen or b"(truncated" in seen
    os.write(ours, b"\x04")
    assert process.wait(120) == 0
    os.close(ours)
