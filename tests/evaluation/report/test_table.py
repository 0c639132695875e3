"""The table of a result."""

from __future__ import annotations

from megatron.evaluation.report.table import result_lines
from megatron.evaluation.tasks.task import Mistake, TaskResult


def test_the_network_stands_below_the_baselines() -> None:
    result = TaskResult(
        name="lambada:a",
        kind="lambada",
        figures={"acc": 0.25, "ppl": 12.345},
        errors={"acc": 0.0625},
        count=8,
        wrong=(Mistake("a.jsonl line 2", "We saw\x1b[2J the", " cat", " dog"),),
        baselines={"uniform": {"ppl": 8000.0}, "bigram": {"acc": 0.125, "ppl": 99.5}},
        baseline_errors={"bigram": {"acc": 0.1}},
        notes=("a note",),
    )
    assert list(result_lines(result)) == [
        "lambada:a (lambada; 8 items; a note)",
        "                     acc     ppl",
        "  uniform                   8000",
        "  bigram     0.125 ± 0.1    99.5",
        "  model     0.25 ± 0.062   12.35",
        "  wrong at a.jsonl line 2",
        "    after 'We saw\\x1b[2J the'",
        "    it is ' cat', predicted was ' dog'",
    ]
