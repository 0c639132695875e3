"""docs/pipelines.md has simulated tables, commands that run, and a schedule file as its example."""

import re
import shlex
from pathlib import Path

import pytest

from megatron.config.sections.pipelines import SCHEDULE_CHUNKS
from megatron.parallel.schedule.building import build_schedule
from tools.runs import plan

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "pipelines.md").read_text(encoding="utf-8")


def test_the_figures_are_those_of_the_simulation() -> None:
    table = GUIDE.partition("<!-- computed: schedules -->\n\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert [row[0].split("`")[1] for row in rows] == list(SCHEDULE_CHUNKS)
    for label, *shown in rows:
        name = label.split("`")[1]
        few, many = (build_schedule(name, 4, SCHEDULE_CHUNKS[name][0], count) for count in (8, 32))
        held = ", ".join(f"{alive:g}" for alive in many.stages_alive)
        assert shown == [f"{100 * few.bubble_ratio:.1f} %", f"{100 * many.bubble_ratio:.1f} %", held]


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```bash\n(.*?)```", GUIDE, flags=re.S)
    for line in block.splitlines():
        python, program, *words = shlex.split(line)
        assert (python, program) == ("python", "tools/runs/plan.py")
        assert plan.main(words) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"zbv.svg", "zbv.csv"}
    assert "interleaved          2   15.8%" in capsys.readouterr().out


def test_the_example_of_a_file_is_a_schedule(tmp_path: Path) -> None:
    (text,) = re.findall(r"```text\n(.*?)```", GUIDE, flags=re.S)
    path = tmp_path / "mine.csv"
    path.write_text(text)
    assert build_schedule(str(path), 2, 1, 2).placement.owners == (0, 1)
