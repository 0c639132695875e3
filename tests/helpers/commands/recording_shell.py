"""Runs shell text with stand-ins for the programs it starts, which write down their arguments instead of working."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAMS = ("python", "torchrun", "deepspeed", "srun", "sbatch", "scontrol", "pip", "docker", "curl")

_STAND_IN = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
sys.exit(int(os.environ.get("STAND_IN_CODE", "0")) if "pretrain_gpt.py" in " ".join(sys.argv) else 0)
"""


def recorded(text: str, folder: Path, *arguments: str, **variables: str) -> list[list[str]]:
    """The commands that a piece of bash would start, in order, each as program and arguments.

    `bash SCRIPT` in the text is recorded too, and not run. What is neither a stand-in nor built in really runs.
    """
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name in (*PROGRAMS, "bash"):
        (programs / name).write_text(_STAND_IN)
        (programs / name).chmod(0o755)
    record = folder / "record.jsonl"
    record.unlink(missing_ok=True)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "RECORD": str(record), **variables}
    command = ["/bin/bash" if Path("/bin/bash").exists() else "bash", "-eu", "-c", text, "bash", *arguments]
    finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    if finished.returncode:
        raise AssertionError(f"exit code {finished.returncode}\n{finished.stdout}{finished.stderr}")
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
