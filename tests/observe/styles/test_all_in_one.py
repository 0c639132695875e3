"""GPT2-ALL-IN's line, and the tags under which its users look for the losses."""

from __future__ import annotations

from megatron.checkpoint.record import Progress
from megatron.config import ControlConfig
from megatron.observe.line_style import Moment
from megatron.observe.styles import all_in_one
from megatron.observe.tensorboard import evaluation_scalars, step_scalars
from tests.train.samples import WORKLOAD, metrics


def test_the_line_of_a_step() -> None:
    line = all_in_one.iteration_lines(metrics(), Moment(step=7, train_iterations=20))
    assert line == [f"Step: {metrics().iteration} | Loss: {metrics().lm_loss:.3f}"]


def test_the_tags_are_added_for_this_style_only() -> None:
    style, other = ControlConfig(log_style="all_in_one"), ControlConfig()
    assert step_scalars(metrics(), style, WORKLOAD)["loss_train"] == (metrics().lm_loss, metrics().iteration)
    assert "loss_train" not in step_scalars(metrics(), other, WORKLOAD)
    progress = Progress(step=5, consumed_samples=10)
    assert evaluation_scalars(progress, "valid", 2.5, style, WORKLOAD)["loss_valid"] == (2.5, 5)
    assert "loss_valid" not in evaluation_scalars(progress, "test", 2.5, style, WORKLOAD)
    assert "loss_valid" not in evaluation_scalars(progress, "valid", 2.5, other, WORKLOAD)
