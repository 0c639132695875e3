"""docs/scaling.md has commands that run, and the table that the planner computes."""

import re
import shlex
from pathlib import Path

import pytest

import pretrain_gpt
from benchmarks.gpu.constants import TOKENS, planned_step
from benchmarks.gpu.shapes import SHAPES
from tests.trident.plan.test_gpu_page import H100, MEASURED
from tools.runs import plan

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")


@pytest.mark.full
def test_the_commands_run(capsys: pytest.CaptureFixture[str]) -> None:
    for line in "".join(re.findall(r"```bash\n(.*?)```", GUIDE, flags=re.S)).splitlines():
        python, program, *words = shlex.split(line)
        assert python == "python"
        assert {"tools/runs/plan.py": plan.main, "pretrain_gpt.py": pretrain_gpt.train}[program](words) == 0
    shown = capsys.readouterr().out
    assert "70.6B parameters" in shown
    assert "the programs of all ranks match" in shown
    assert "this command, which does not fit:" in shown or "this command, which fits:" in shown


def test_the_table_has_what_the_planner_says() -> None:
    for step, gib in MEASURED:
        found = planned_step(step, H100)
        numbers = gib, found.memory.counted / 2**30, TOKENS * 1e3 / step.tokens_per_second, found.time.seconds * 1e3
        row = f"| {numbers[0]:.2f} | {numbers[1]:.2f} | {numbers[2]:.1f} | {numbers[3]:.1f} |"
        assert f"{SHAPES[step.network].name}, {step.length:,} {row}" in GUIDE
