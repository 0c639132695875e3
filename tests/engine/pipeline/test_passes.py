"""The schedule that a pipeline's settings stand for."""

from __future__ import annotations

from pathlib import Path

from megatron.engine.pipeline.passes import PipelineSettings
from megatron.parallel.schedule.actions import Placement


def test_a_file_says_where_chunks_are_and_whether_backward_passes_are_split(tmp_path: Path) -> None:
    path = tmp_path / "v.csv"
    path.write_text("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    settings = PipelineSettings(str(path), 2)
    assert settings.placement(2) == Placement.v_shape(2) and not settings.splits_backward
    path.write_text("0F0,0I0,0W0\n")
    assert PipelineSettings(str(path)).splits_backward
