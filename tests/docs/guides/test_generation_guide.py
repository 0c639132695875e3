"""The commands and the program of docs/generation.md, run in their order on a small checkpoint; and its tables."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from pathlib import Path

import pytest

from megatron.config.sampling_flags import BeamFlags
from tests.helpers.programs import forking_python
from tests.inference.checkpoints import make_checkpoint

ROOT = Path(__file__).resolve().parents[3]
GUIDE = (ROOT / "docs" / "generation.md").read_text()


def _records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@pytest.mark.slow
def test_everything_in_the_guide_works(tmp_path: Path) -> None:
    for name in ("tools", "megatron", "trident"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "made").mkdir()
    (tmp_path / "checkpoints" / "demo").symlink_to(make_checkpoint(tmp_path / "made"))
    commands, program = (
        "\n".join(re.findall(rf"```{language}\n(.*?)```", GUIDE, flags=re.S)) for language in ("bash", "python")
    )
    (tmp_path / "program.py").write_text(program + "print(len(text), best[0].score)\n")
    script = f'set -euo pipefail\npython() {{ "{forking_python()}" "$@"; }}\n{commands}\npython program.py'
    finished = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    greedy, drawn, best, free = (
        _records(tmp_path / name) for name in ("prompts.txt.out", "drawn.jsonl", "best.jsonl", "samples.jsonl")
    )
    assert [len(records) for records in (greedy, drawn, best, free)] == [2, 6, 4, 4]
    assert set(greedy[0]) == {"prompt", "text", "tokens", "length", "finished"}
    assert set(best[0]) == {*greedy[0], "score"}
    assert float(finished.stdout.split()[-1]) < 0


def test_every_flag_is_in_a_table() -> None:
    options = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(BeamFlags)]
    rows = "\n".join(line for line in GUIDE.splitlines() if line.startswith("|"))
    assert [option for option in options if f"`{option}" not in rows] == []
