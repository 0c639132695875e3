"""The commands of docs/seeds/dsgpt2.md, run once in order on a tiny network for all scenarios of dsGPT2."""

from __future__ import annotations

import atexit
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.programs import forking_python

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs" / "seeds" / "dsgpt2.md"
TRAIN_STEPS, FINETUNE_STEPS = 30, 120
_SECONDS = 300


@dataclass(frozen=True)
class ExampleRun:
    """The results of the commands.

    Attributes:
        outputs: the output of each command, by its text in the guide.
    """

    folder: Path
    outputs: Mapping[str, str]
    environment: Mapping[str, str]

    def output_of(self, script: str) -> str:
        """The output of the only command that runs a script without arguments."""
        return self.outputs[f"bash examples/dsgpt2/{script}.sh"]


def commands_of_the_guide() -> list[str]:
    """Every line of the guide's shell blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


@functools.cache
def dsgpt2_example() -> ExampleRun:
    """Runs the guide's commands except the server's."""
    holder = tempfile.TemporaryDirectory(prefix="dsgpt2")
    atexit.register(holder.cleanup)
    folder = Path(holder.name)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHON": forking_python(),
        "SCALE": "tiny",
        "DSGPT2_DIR": str(folder),
        "RANKS": "1",
        "DOCUMENTS": "100",
        "VOCABULARY_SIZE": "500",
        "MODEL": "112m --truncated_len 48 --num-layers 2 --hidden-size 64 --num-attention-heads 4",
        "TRAIN_ITERS": str(TRAIN_STEPS),
        "FINETUNE_ITERS": str(FINETUNE_STEPS),
        "PORT": "0",
    }
    outputs = {}
    for command in commands_of_the_guide():
        if "8_serve" in command or command.startswith("curl"):
            continue  # the server and its client
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        outputs[command] = done.stdout + done.stderr
    return ExampleRun(folder, outputs, environment)
