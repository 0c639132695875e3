"""What fits a number of processes, and the layouts that --elastic chooses where the one asked for does not."""

from __future__ import annotations

import pytest

from megatron.config import elastic
from megatron.config.elastic import fit_layout
from megatron.config.rules.checking import world_problems
from megatron.config.schedule import batch_sizes
from megatron.errors import ConfigError
from tests.config.command_lines import small


def test_a_layout_that_fits_is_left_alone() -> None:
    request = small("--elastic --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")
    for world in (4, 8, 16):
        assert world_problems(request, world) == [] and fit_layout(request, world) == (request, ())
    fixed = small("--tensor-model-parallel-size 2")
    assert fit_layout(fixed, 3) == (fixed, ())
    assert ["multiple of 2 processes" in one for one in world_problems(fixed, 3)] == [True]


@pytest.mark.parametrize(
    ("flags", "world", "chosen", "words"),
    [
        (
            "2 2",
            2,
            (2, 1, 2),
            r"2 tensor x 2 pipeline ranks do not fit 2 processes; using 2 x 1 x 1 data: it keeps the ",
        ),
        ("2 2", 6, (2, 3, 2), "it keeps the tensor size. The global batch stays 8"),
        ("4 1", 2, (2, 1, 2), "it keeps the pipeline size"),
        ("1 4", 2, (1, 2, 2), "it keeps the tensor size"),
        ("2 2", 1, (1, 1, 2), "do not fit 1 process; using 1 x 1 x 1 data: it is the nearest legal layout"),
        ("4 4", 8, (4, 2, 2), "it keeps the tensor size"),
        ("1 1", 8, (1, 2, 2), "using 1 x 2 x 4 data: it keeps the tensor size"),
        ("1 1 --zero-stage 3", 8, (2, 1, 2), "it keeps the pipeline size"),
        (
            "1 1 --zero-stage 3 --num-attention-heads 1 --ffn-hidden-size 255",
            8,
            (1, 1, 1),
            "--micro-batch-size becomes 1",
        ),
    ],
)
def test_the_layout_that_is_chosen(flags: str, world: int, chosen: tuple[int, int, int], words: str) -> None:
    tp, pp, *more = flags.split()
    request = small(f"--elastic --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} {' '.join(more)}")
    found, (notice,) = fit_layout(request, world)
    sizes = found.parallel
    assert (sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size) == chosen[:2]
    assert found.optim.micro_batch_size == chosen[2] and found.optim.global_batch_size == 8
    assert words in notice and world_problems(found, world) == []


@pytest.mark.parametrize(
    ("flags", "world", "kept"),
    [
        ("2 --pipeline-schedule zbv --num-layers-per-virtual-pipeline-stage 2", 1, (1, None, None, None, False)),
        (
            "2 --num-layers-per-virtual-pipeline-stage 2 --virtual-pipeline-model-parallel-size 2",
            1,
            (1, None, None, None, False),
        ),
        ("2 --enable-zbh1-pipeline", 1, (1, None, None, None, False)),
        ("4 --enable-zbh1-pipeline", 2, (2, None, None, None, True)),
        ("4 --num-layers-per-virtual-pipeline-stage 1", 2, (2, None, 2, None, False)),
        ("2 --num-layers-per-virtual-pipeline-stage 1 --tensor-model-parallel-size 4", 4, (1, None, None, None, False)),
        ("3 --num-layers 12 --num-layers-per-virtual-pipeline-stage 1", 4, (4, None, 3, None, False)),
        ("4 --pipeline-schedule zbv --num-layers-per-virtual-pipeline-stage 1", 2, (2, "zbv", 2, None, False)),
        ("4 --pipeline-schedule mine.csv --virtual-pipeline-model-parallel-size 2", 2, (2, None, 2, None, False)),
    ],
)
def test_other_stages_keep_schedule_and_chunks(flags: str, world: int, kept: tuple[object, ...]) -> None:
    found, (notice,) = fit_layout(small(f"--elastic --num-layers 8 --pipeline-model-parallel-size {flags}"), world)
    sizes = found.parallel
    assert kept == (
        sizes.pipeline_model_parallel_size,
        sizes.pipeline_schedule,
        sizes.virtual_pipeline_model_parallel_size,
        sizes.num_layers_per_virtual_pipeline_stage,
        sizes.enable_zbh1_pipeline,
    )
    assert world_problems(found, world) == []
    assert ("the pipeline schedule becomes interleaved" in notice) == ("mine.csv" in flags)


def test_what_no_layout_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"no layout for 7 processes that divides --global-batch-size 8, .* Start 6 proc"
    ):
        fit_layout(small("--elastic"), 7)
    with (
        monkeypatch.context() as patch,
        pytest.raises(ConfigError, match="for 3 processes, nor for fewer. Drop --elas"),
    ):
        patch.setattr(elastic, "_legal_request", lambda *_: None)
        fit_layout(small("--elastic"), 3)
    with pytest.raises(ConfigError, match="--elastic requires --global-batch-size"):
        small("--elastic", drop="--global-batch-size")


def test_shares_of_a_batch() -> None:
    assert batch_sizes(small().optim, 2) == (2, 8)
    assert batch_sizes(small(drop="--micro-batch-size").optim, 2) == (4, 8)
