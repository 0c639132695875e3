"""The layout, as requested and as resolved."""

from __future__ import annotations

from megatron.config import ParallelRequest
from megatron.config.sections.parallel import without_training


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
