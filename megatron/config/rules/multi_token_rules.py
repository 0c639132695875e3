"""What multi-token prediction does not go with."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.objective.distillation import DistillationConfig
from megatron.config.objective.loss import CAUSAL, LossConfig
from megatron.config.sections.model import ModelRequest
from megatron.config.sections.optim import OptimRequest
from megatron.config.sections.parallel import ParallelRequest


def multi_token_problems(
    model: ModelRequest,
    parallel: ParallelRequest,
    loss: LossConfig,
    distillation: DistillationConfig,
    optim: OptimRequest,
    length: int,
) -> Iterator[str]:
    """One sentence for everything that multi-token prediction cannot be combined with.

    Args:
        length: tokens of a sample.
    """
    if not model.mtp_num_layers > 0:
        return
    asked = f"--mtp-num-layers {model.mtp_num_layers}"
    shortest = min([length, *optim.curriculum_lengths, optim.curriculum_min_length or length])
    if model.mtp_num_layers >= shortest:
        sample = (
            f"--seq-length {length}" if shortest == length else f"the curriculum, whose first samples have {shortest}"
        )
        yield (
            f"{asked} does not go with {sample}: the last of its blocks would have no token to predict. Use at most "
            f"{shortest - 1}, or longer samples."
        )
    if loss.objective != CAUSAL:
        yield (
            f"{asked} does not go with --objective {loss.objective}, where tokens may have seen the ones after the "
            f"next. Use --objective {CAUSAL}, or drop --mtp-num-layers."
        )
    if distillation.is_on:
        teaches = "--mos" if distillation.mos else "--kd"
        yield f"{asked} does not go with {teaches}: a teacher predicts the next token alone. Drop one of them."
    if parallel.sequence_size > 1:
        sizes = {
            "--context-parallel-size": parallel.context_parallel_size,
            "--ds-sequence-parallel-size": parallel.ds_sequence_parallel_size,
        }
        shared = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        yield (
            f"{asked} does not go with {shared}: a rank would need tokens that other ranks have. Use "
            "--tensor-model-parallel-size with --sequence-parallel for long samples, or drop --mtp-num-layers."
        )
