"""The schedule and the chunks that follow from the flags of a pipeline, and what its engine runs."""

from __future__ import annotations

import dataclasses
import types

import pytest

from megatron.config import ParallelRequest
from megatron.config.parse import read_flags
from megatron.config.rules import pipeline
from megatron.config.rules.checking import run_problems
from megatron.config.sections.pipelines import ENGINES, OWN
from megatron.errors import ConfigError
from tests.config.command_lines import small, words

STAGES = "--pipeline-model-parallel-size 2 "


@pytest.mark.parametrize(
    ("flags", "name", "chunks"),
    [
        ({}, "1f1b", 1),
        ({"virtual_pipeline_model_parallel_size": 1}, "1f1b", 1),
        ({"virtual_pipeline_model_parallel_size": 3}, "interleaved", 3),
        ({"num_layers_per_virtual_pipeline_stage": 2}, "interleaved", 3),
        ({"num_layers_per_virtual_pipeline_stage": 6}, "1f1b", 1),
        ({"num_layers_per_virtual_pipeline_stage": 2, "virtual_pipeline_model_parallel_size": 3}, "interleaved", 3),
        (
            {
                "num_layers_per_virtual_pipeline_stage": 7,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            "1f1b",
            1,
        ),
        ({"decoder_first_pipeline_num_layers": 9}, "1f1b", 1),
        ({"decoder_first_pipeline_num_layers": 9, "decoder_last_pipeline_num_layers": 3}, "1f1b", 1),
        ({"pipeline_schedule": "interleaved"}, "interleaved", 2),
        ({"pipeline_schedule": "zbv"}, "zbv", 2),
        ({"enable_zbh1_pipeline": True}, "zb-h1", 1),
        ({"enable_zbh1_pipeline": True, "pipeline_schedule": "zb-h1"}, "zb-h1", 1),
        ({"pipeline_schedule": "interleaved-zb", "num_layers_per_virtual_pipeline_stage": 1}, "interleaved-zb", 6),
        ({"pipeline_schedule": "mine.csv"}, "mine.csv", 1),
        ({"pipeline_schedule": "mine.csv", "virtual_pipeline_model_parallel_size": 2}, "mine.csv", 2),
        ({"zero_stage": 2, "pipeline_schedule": "zbv"}, "zbv", 2),
    ],
)
def test_schedule_and_chunks_follow_from_the_flags(flags: dict[str, object], name: str, chunks: int) -> None:
    parallel = ParallelRequest(pipeline_model_parallel_size=2, pipeline_engine=OWN, **flags)
    assert (parallel.schedule_for(12), parallel.chunks_for(12)) == (name, chunks)
    run = read_flags(words("--num-layers 12")).run
    assert list(run_problems(dataclasses.replace(run, parallel=parallel))) == []


def test_an_engine_runs_only_what_its_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = dataclasses.replace(ENGINES[OWN], schedules=(), reads_files=False)
    monkeypatch.setattr(pipeline, "ENGINES", types.MappingProxyType({**ENGINES, OWN: nothing}))
    with pytest.raises(
        ConfigError, match="own does not support the pipeline schedule zbv. Use --pipeline-schedule 1f1b"
    ):
        small(f"{STAGES}--pipeline-engine own --pipeline-schedule zbv")


def test_the_stages_that_are_proposed_leave_a_layer_for_each_chunk() -> None:
    assert ParallelRequest().most_stages(12) == 12
    assert ParallelRequest(zero_stage=3).most_stages(12) == 1
    assert ParallelRequest(virtual_pipeline_model_parallel_size=5).most_stages(12) == 2
    assert ParallelRequest(num_layers_per_virtual_pipeline_stage=2).most_stages(12) == 12
