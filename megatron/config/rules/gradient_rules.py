"""What does not go with the figures that are logged of gradients, and the nearest that does."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.sections.optim import OptimConfig
from megatron.config.sections.parallel import ParallelRequest
from megatron.config.sections.pipelines import DEEPSPEED
from megatron.config.sections.reporting import ReportConfig

_NOISE = "--log-gradient-noise-scale"


def gradient_figure_problems(report: ReportConfig, parallel: ParallelRequest) -> Iterator[str]:
    """One sentence for each."""
    flags = {
        "--log-grad-norm": report.log_grad_norm,
        "--log-num-zeros-in-grad": report.log_num_zeros_in_grad,
        _NOISE: report.log_gradient_noise_scale,
    }
    for name, is_given in flags.items():
        if is_given and parallel.zero_stage == 3:
            yield (
                f"{name} cannot be combined with --zero-stage 3, with which DeepSpeed averages the gradients of a few "
                f"layers at a time and keeps its own parts of them. Use --zero-stage 2, or drop {name}."
            )
    if not report.log_gradient_noise_scale:
        return
    if parallel.ring_size * parallel.ulysses_size > 1:
        yield (
            f"{_NOISE} cannot be combined with ranks that share samples (--context-parallel-size, "
            "--ds-sequence-parallel-size): none of them has the gradient of a micro-batch. Drop one of the two."
        )
    if parallel.pipeline_model_parallel_size > 1 and parallel.pipeline_engine == DEEPSPEED:
        yield (
            f"{_NOISE} cannot be combined with --pipeline-engine deepspeed, which adds the gradients of micro-batches "
            "up by itself. Use --pipeline-engine own."
        )


def noise_problems(report: ReportConfig, optim: OptimConfig) -> Iterator[str]:
    """What cannot be measured with the batch sizes of a run."""
    if report.log_gradient_noise_scale and optim.global_batch_size <= optim.micro_batch_size:
        yield (
            f"{_NOISE} needs two batch sizes, and --global-batch-size {optim.global_batch_size} is one micro-batch "
            f"(--micro-batch-size {optim.micro_batch_size}). Use smaller micro-batches."
        )
