"""docs/pipelines.md has simulated tables, commands that run, and a schedule file as its example."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron.config import ModelConfig
from megatron.config.sections.pipelines import SCHEDULE_CHUNKS
from megatron.model.costs import block_cost, chunk_flops, token_work
from megatron.parallel.schedule.building import build_schedule
from megatron.parallel.schedule.division import BY_COST, EVENLY
from megatron.parallel.schedule.simulation import simulate
from tests.train.samples import model_config
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


def test_the_formulas_are_those_of_the_simulation() -> None:
    for ranks, count in ((2, 8), (4, 8), (8, 32)):
        waits = ranks - 1
        assert build_schedule("1f1b", ranks, 1, count).bubble_ratio == pytest.approx(waits / (count + waits))
        for chunks in (2, 4):
            bubble = build_schedule("interleaved", ranks, chunks, count).bubble_ratio
            assert bubble == pytest.approx(waits / (chunks * count + waits))
    uneven = build_schedule("interleaved", 4, 2, 6).bubble_ratio
    assert f"idle {uneven:.1%} of the time, where the formula says {3 / 15:.1%}".replace("%", " %") in GUIDE


# The networks of the table about dividing layers: network, sequence length, stages.
NETWORKS = {
    "GPT 125M": (model_config(num_layers=12, hidden_size=768, num_attention_heads=12), 1024, 4),
    "GPT 1.3B": (model_config(num_layers=24, hidden_size=2048, num_attention_heads=16), 2048, 4),
    "Llama 3 8B": (
        model_config(
            num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=14336,
            gated_linear_unit=True, add_bias_linear=False,
        ), 8192, 8,
    ),
}  # fmt: skip


def division_row(name: str) -> list[str]:
    """Blocks that the head costs, blocks of the stages of 1F1B, and how much less a step takes than with equal ones."""
    model, length, stages = NETWORKS[name]
    rows = 128_256 if name.startswith("Llama") else 50_304
    model = ModelConfig(**{**vars(model), "vocab_size": rows, "padded_vocab_size": rows})
    work, cells = token_work(model, length), [name, str(stages)]
    block = block_cost(model, 0).flops(work.pairs)
    for schedule_name in ("1f1b", "interleaved", "zbv"):
        schedule = build_schedule(schedule_name, stages, SCHEDULE_CHUNKS[schedule_name][0], 16)
        costs = [chunk_flops(model, work, schedule.placement, division) for division in (BY_COST, EVENLY)]
        if schedule_name == "1f1b":
            head = costs[1][-1] - block * (model.num_layers // stages)
            counts = [*(cost // block for cost in costs[0][:-1]), (costs[0][-1] - head) // block]
            cells += [f"{head / block:.1f}", ", ".join(map(str, counts))]
        ends = [
            max(span.end for span in simulate(schedule.orders, schedule.placement, chunk_costs=each)) for each in costs
        ]
        cells.append(f"{100 * (1 - ends[0] / ends[1]):.0f} %")
    return cells


def test_what_the_division_of_layers_saves_is_simulated() -> None:
    table = GUIDE.partition("<!-- computed: division -->\n\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert rows == [division_row(name) for name in NETWORKS]


def test_every_schedule_has_a_row() -> None:
    table = GUIDE.partition("## Schedules")[2].partition("\n\n## ")[0]
    assert re.findall(r"^\| `([^`]+)` ", table, flags=re.M)[1:] == [*SCHEDULE_CHUNKS, "FILE.csv"]


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
