"""One server process for all tests of a session that need one: a real checkpoint behind the real tool."""

from __future__ import annotations

import atexit
import functools
import os
import re
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.programs import forking_python
from tests.inference.checkpoints import make_checkpoint
from tests.tokenizers.chat.tokenizers_with_tokens import DSGPT2_TOKENS

ROOT = Path(__file__).resolve().parents[3]
_SECONDS = 120


@dataclass(frozen=True)
class ServedProcess:
    """A running `tools/serve.py`."""

    process: subprocess.Popen[bytes]
    log: Path
    address: str

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and waits for the end; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(_SECONDS)


def start_server(checkpoints: Path, log: Path, *flags: str) -> ServedProcess:
    """Starts the tool on a free port and waits until it serves."""
    command = [forking_python(), str(ROOT / "tools" / "serve.py"), "--load", str(checkpoints), "--port", "0", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    ends_at = time.monotonic() + _SECONDS
    while True:
        found = re.search(r"^serving \S+ at (http://\S+)$", log.read_text(), flags=re.M)
        if found:
            return ServedProcess(process, log, found.group(1))
        if process.poll() is not None or time.monotonic() > ends_at:
            process.kill()
            raise AssertionError(f"the server does not serve:\n{log.read_text()}")
        time.sleep(0.02)


@functools.cache
def chat_server() -> ServedProcess:
    """A server of an untrained dsGPT2-style chat model, for the tests of a whole session."""
    folder = tempfile.TemporaryDirectory(prefix="served")
    checkpoints = make_checkpoint(
        Path(folder.name), "--chat-template", "dsgpt2", more_tokens=DSGPT2_TOKENS, positions=256
    )
    server = start_server(checkpoints, Path(folder.name) / "log")

    def end() -> None:
        server.process.kill()
        server.process.wait()
        folder.cleanup()

    atexit.register(end)
    return server
