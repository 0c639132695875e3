"""Which pipelines are legal, what follows from the flags, and the nearest legal setting of what is refused."""

from __future__ import annotations

import dataclasses
import types

import pytest

from megatron.config import ParallelRequest, pipeline_rules
from megatron.config.pipeline_rules import chunks_per_rank, most_stages, pipeline_problems, schedule_name
from megatron.config.sections.pipelines import ENGINES, OWN, SCHEDULE_CHUNKS
from megatron.errors import ConfigError
from tests.config.command_lines import small

STAGES = "--pipeline-model-parallel-size 2 "


@pytest.fixture
def every_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """An own engine that runs all schedules, with ZeRO stages up to 2."""
    able = dataclasses.replace(ENGINES[OWN], schedules=tuple(SCHEDULE_CHUNKS), reads_files=True, zero_stages=(0, 1, 2))
    monkeypatch.setattr(pipeline_rules, "ENGINES", types.MappingProxyType({**ENGINES, OWN: able}))


@pytest.mark.usefixtures("every_schedule")
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
    assert (schedule_name(parallel, 12), chunks_per_rank(parallel, 12)) == (name, chunks)
    assert list(pipeline_problems(parallel, 12)) == []


@pytest.mark.usefixtures("every_schedule")
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--pipeline-schedule gpipe", "--pipeline-schedule gpipe is not known. Use one of 1f1b, .* or FILE.csv"),
        (
            "--pipeline-model-parallel-size 1 --account-for-loss-in-pipeline-split",
            "--account-for-loss-in-pipeline-split needs stages, and --pipeline-model-parallel-size is 1. Drop it.",
        ),
        ("--enable-zbh1-pipeline --pipeline-schedule zbv", "means --pipeline-schedule zb-h1, .* zbv is given. Drop"),
        (
            "--enable-zbh1-exact-semantics --virtual-pipeline-model-parallel-size 2",
            "--enable-zbh1-pipeline takes 1 chunk of the network a rank, and 2 are asked for.* or --pipeline-schedule "
            "interleaved or interleaved-zb or zbv",
        ),
        (
            "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 1",
            "interleaved takes at least 2 chunks of the network a rank, and 1 is asked .* Use --virtual.* 2, or "
            "--pipeline-schedule 1f1b or zb-h1",
        ),
        (
            "--pipeline-schedule zbv --virtual-pipeline-model-parallel-size 3 --num-layers 6",
            "zbv takes 2 chunks of the network a rank, and 3 are asked for",
        ),
        (
            "--pipeline-schedule zbv --num-layers 8 --num-layers-per-virtual-pipeline-stage 1",
            "4 are asked for. Use --num-layers-per-virtual-pipeline-stage 2, or",
        ),
        (
            "--pipeline-schedule zbv --num-layers 6 --num-layers-per-virtual-pipeline-stage 1",
            "3 are asked for. Use --virtual-pipeline-model-parallel-size 2 without --num-layers-per-virtual-pipe.*, or",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 3",
            "-stage 3 x --pipeline-model-parallel-size 2 does not divide the 4 layers .* Use 2 or 1",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 1 --num-layers 5",
            "does not divide the 5 layers .* Use --virtual-pipeline-model-parallel-size, .* or a multiple of 2 layers",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 1 --virtual-pipeline-model-parallel-size 4",
            "--num-layers-per-virtual-pipeline-stage 1 makes 2 chunks a rank, and .* asks for 4. Drop one",
        ),
        (
            "--virtual-pipeline-model-parallel-size 3",
            "4 layers cannot fill 2 pipeline stages of 3 chunks each .*interleaved.* at least 6 layers, or fewer",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 2 --account-for-loss-in-pipeline-split",
            "-stage 2 x --pipeline-model-parallel-size 2 does not divide the 4 layers .* with the ends that count as",
        ),
        (
            "--decoder-first-pipeline-num-layers 3 --pipeline-model-parallel-size 1",
            "--decoder-first-pipeline-num-layers 3 needs stages, and --pipeline-model-parallel-size is 1. Drop it",
        ),
        (
            "--decoder-last-pipeline-num-layers 4",
            "-num-layers 4 leaves 0 of 4 layers to 1 other pipeline rank of 2, .* at least 1. Give at most 3 in all",
        ),
        (
            "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 2",
            "leaves 1 of 4 layers to 0 other pipeline ranks of 2, and every rank needs at least 1. Give 4 in all",
        ),
        (
            "--decoder-first-pipeline-num-layers 1 --pipeline-schedule zbv",
            "leaves 3 of 4 layers to 1 other .* every rank needs at least 2. Give at most 2 in all, and at least 2 eac",
        ),
        (
            "--decoder-first-pipeline-num-layers 3 --account-for-embedding-in-pipeline-split",
            "-num-layers 3 and --account-for-embedding-in-pipeline-split both say how many blocks a stage holds. Drop",
        ),
        (
            "--decoder-first-pipeline-num-layers 2 --num-layers-per-virtual-pipeline-stage 1",
            "-num-layers 2 and --num-layers-per-virtual-pipeline-stage 1 both say how many blocks a stage holds",
        ),
        (
            "--pp-partition-method type:transformer --account-for-loss-in-pipeline-split",
            "-loss-in-pipeline-split and --pp-partition-method type:transformer both say how many",
        ),
        (
            "--pipeline-engine deepspeed --pipeline-schedule zbv",
            "--pipeline-engine deepspeed does not run the pipeline schedule zbv. Use --pipeline-engine own",
        ),
        (
            "--pipeline-engine deepspeed --zero-stage 2",
            "--zero-stage 2 cannot be used .* would already have scattered them. Use --pipeline-engine own, --zero-st",
        ),
        (
            "--zero-stage 3",
            "--zero-stage 3 cannot be used with .*: it would gather the weights .* Use --zero-stage 0, 1 or 2",
        ),
        (
            "--zero-stage 3 --pipeline-model-parallel-size 1 --pipeline-schedule zbv",
            "3 cannot be used with --pipeline-schedule zbv: .*, or --pipeline-schedule 1f1b without virtual stages",
        ),
    ],
)
def test_what_is_refused_has_a_way_out(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        small(f"{STAGES}--pipeline-engine own {flags}")
    assert len(caught.value.problems) == 1


def test_an_engine_runs_only_what_its_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = dataclasses.replace(ENGINES[OWN], schedules=(), reads_files=False)
    monkeypatch.setattr(pipeline_rules, "ENGINES", types.MappingProxyType({**ENGINES, OWN: nothing}))
    with pytest.raises(ConfigError, match="own does not run the pipeline schedule zbv. Use --pipeline-schedule 1f1b"):
        small(f"{STAGES}--pipeline-engine own --pipeline-schedule zbv")


def test_a_single_chunk_has_no_schedule() -> None:
    assert small("--zero-stage 3").parallel.pipeline_model_parallel_size == 1


def test_the_stages_that_are_proposed_leave_a_layer_for_each_chunk() -> None:
    assert most_stages(ParallelRequest(), 12) == 12
    assert most_stages(ParallelRequest(zero_stage=3), 12) == 1
    assert most_stages(ParallelRequest(virtual_pipeline_model_parallel_size=5), 12) == 2
    assert most_stages(ParallelRequest(num_layers_per_virtual_pipeline_stage=2), 12) == 12
