"""GPT2-ALL-IN's line, and the tags under which its users look for the losses."""

from __future__ import annotations

from examples.gpt2_all_in import log_style
from megatron.checkpoint.record import Progress
from megatron.config import ReportConfig
from megatron.observe.console import LogPosition
from megatron.observe.destinations.tensorboard import evaluation_scalars, step_scalars
from tests.train.samples import WORKLOAD, metrics


def test_the_line_of_a_step() -> None:
    line = log_style.iteration_lines(metrics(), LogPosition(step=7, train_iterations=20))
    assert line == ["Step: 7 | Loss: 9.877"]


def test_the_tags_are_added_for_this_style_only() -> None:
    report, tags = ReportConfig(), log_style.LOSS_TAGS
    assert step_scalars(metrics(), report, WORKLOAD, tags)["loss_train"] == (9.87654321, 7)
    assert "loss_train" not in step_scalars(metrics(), report, WORKLOAD)
    progress = Progress(step=5, consumed_samples=10)
    assert evaluation_scalars(progress, "valid", 2.5, report, WORKLOAD, tags)["loss_valid"] == (2.5, 5)
    assert "loss_valid" not in evaluation_scalars(progress, "test", 2.5, report, WORKLOAD, tags)
    assert "loss_valid" not in evaluation_scalars(progress, "valid", 2.5, report, WORKLOAD)
