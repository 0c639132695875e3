"""The layout, as requested and as resolved."""

from __future__ import annotations

import pytest

from megatron.config import ParallelConfig, ParallelRequest
from megatron.config.sections.parallel import without_training
from megatron.errors import ConfigError


def test_ranks_of_one_replica() -> None:
    layout = ParallelRequest(tensor_model_parallel_size=2, pipeline_model_parallel_size=3)
    assert layout.model_parallel_size == 6 and layout.distributed_backend is None


def test_a_resolved_layout_is_complete() -> None:
    with pytest.raises(TypeError, match="distributed_backend"):
        ParallelConfig()
    found = ParallelConfig(distributed_backend="gloo", world_size=4, data_parallel_size=4, effective_zero_stage=1)
    assert (found.world_size, found.distributed_backend) == (4, "gloo")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"pp_partition_method": "uniform"}, "--pp-partition-method uniform is not supported: stages consist of whole"),
        ({"make_vocab_size_divisible_by": 0, "pad_vocab_size_to": 5}, "--make-vocab-size-divisible-by 0 is out of"),
    ],
)
def test_invalid_values_are_rejected(flags: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ParallelRequest(**flags)


def test_inference_divides_matrices_and_layers_only() -> None:
    layout = ParallelRequest(
        pipeline_model_parallel_size=2,
        pipeline_schedule="zbv",
        num_layers_per_virtual_pipeline_stage=2,
        zero_stage=2,
        context_parallel_size=4,
        sequence_parallel=True,
    )
    alone = without_training(layout, 1, 1)
    assert alone == ParallelRequest() and without_training(layout, 2, 4).model_parallel_size == 8
