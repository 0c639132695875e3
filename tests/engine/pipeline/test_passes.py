"""The schedule that a pipeline's settings stand for."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.engine.pipeline.passes import ONE_FORWARD_ONE_BACKWARD, PipelineSettings
from megatron.errors import ConfigError
from megatron.parallel.schedule.actions import Placement


def test_the_default_is_1f1b() -> None:
    assert ONE_FORWARD_ONE_BACKWARD.placement(2) == Placement.loop(2, 1)
    assert not ONE_FORWARD_ONE_BACKWARD.splits_backward and not ONE_FORWARD_ONE_BACKWARD.by_deepspeed


def test_zero_bubble_schedules_split_the_backward_pass() -> None:
    assert PipelineSettings("zbv", 2).splits_backward
    assert PipelineSettings("zbv", 2).placement(2) == Placement.v_shape(2)


def test_a_file_says_where_chunks_are_and_whether_backward_passes_are_split(tmp_path: Path) -> None:
    path = tmp_path / "v.csv"
    path.write_text("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    settings = PipelineSettings(str(path), 2)
    assert settings.placement(2) == Placement.v_shape(2) and not settings.splits_backward
    path.write_text("0F0,0I0,0W0\n")
    assert PipelineSettings(str(path)).splits_backward


def test_a_schedule_may_not_go_with_a_number_of_chunks() -> None:
    with pytest.raises(ConfigError, match="zbv does not support 3 chunks"):
        PipelineSettings("zbv", 3).placement(2)
