"""The commands of docs/serving.md, run in their order on an untrained chat model."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.programs import forking_python
from tests.helpers.ranks import free_port
from tests.inference.checkpoints import make_checkpoint
from tests.tokenizers.chat.tokenizers_with_tokens import DSGPT2_TOKENS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]


def test_every_command_of_the_guide_works(tmp_path: Path) -> None:
    for name in ("tools", "megatron", "trident"):
        (tmp_path / name).symlink_to(ROOT / name)
    made = make_checkpoint(tmp_path, "--chat-template", "dsgpt2", more_tokens=DSGPT2_TOKENS, positions=128)
    (tmp_path / "chat").mkdir()
    made.rename(tmp_path / "chat" / "checkpoints")
    guide = (ROOT / "docs" / "serving.md").read_text()
    commands = []
    for kind, block in re.findall(r"```(bash|python)\n(.*?)```", guide, flags=re.S):
        if kind == "python":
            (tmp_path / "client.py").write_text(with_free_port(block))
            commands.append("python client.py")
        elif not block.startswith("torchrun"):  # run by test_serve.py
            commands.append(with_free_port(block).replace("--load checkpoints/chat", "--load chat/checkpoints"))
    python = forking_python()
    program = "\n".join(["set -euo pipefail", *commands, "kill -TERM $!", "wait $!"])
    program = re.sub(r"(^|\| )python ", rf'\1"{python}" ', program, flags=re.M)
    finished = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-4000:]
    assert '{"input":"Hello","response":' in finished.stdout and finished.stdout.count("data: [DONE]") == 1
    assert '"object":"text_completion"' in finished.stdout and "megatron_requests_total" in finished.stdout
    assert "stopping: no requests" in finished.stderr


def with_free_port(text: str) -> str:
    """The text with a port that is free in place of 4001, always the same one in a process."""
    return text.replace("4001", str(_PORT))


_PORT = free_port()
