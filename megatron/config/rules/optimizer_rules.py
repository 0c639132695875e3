"""What cannot be combined with an optimizer, and the nearest that can."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.sections.model import ModelRequest
from megatron.config.sections.optim import OptimRequest
from megatron.config.sections.optimizers import ADAM, MUON, SCHEDULE_FREE
from megatron.config.sections.parallel import ParallelRequest


def optimizer_problems(optim: OptimRequest, model: ModelRequest, parallel: ParallelRequest) -> Iterator[str]:
    """One sentence for everything that does not go with the optimizer."""
    given = f"--optimizer {optim.optimizer}"
    if optim.use_bnb_optimizer and optim.optimizer != ADAM:
        yield f"--use-bnb-optimizer cannot be combined with {given}: it is AdamW. Use --optimizer adam."
    if optim.use_bnb_optimizer and parallel.cpu_optimizer:
        yield (
            "--use-bnb-optimizer and --cpu-optimizer both make room on the GPU: the first updates there, the second on "
            "the host. Drop one of them."
        )
    if model.use_mup and optim.optimizer != ADAM:
        yield (
            f"--use-mup cannot be combined with {given}. Its learning rates are those for Adam; use --optimizer adam."
        )
    if optim.optimizer == SCHEDULE_FREE:
        yield from _schedule_free_problems(optim, given)
    if optim.optimizer != MUON:
        return
    if parallel.zero_stage == 3:
        yield (
            f"{given} cannot be combined with --zero-stage 3, which updates a part of the parameters at a time: the "
            "ranks would bring together one matrix after the other. Use --zero-stage 2, or 1 in a pipeline."
        )
    if parallel.cpu_optimizer:
        yield (
            f"{given} cannot be combined with --cpu-optimizer: the products of its matrices are work for the device. "
            "Drop --cpu-optimizer; --zero-stage 2 divides the state over the ranks."
        )


def _schedule_free_problems(optim: OptimRequest, given: str) -> Iterator[str]:
    if optim.lr_decay_style != "constant":
        yield (
            f"{given} cannot be combined with --lr-decay-style {optim.lr_decay_style}: the mean of its iterates takes "
            "the place of a decay. Use --lr-decay-style constant; the warm-up stays."
        )
    if optim.ema_decay is not None:
        yield (
            f"{given} cannot be combined with --ema-decay {optim.ema_decay}: it has a mean of the weights, which is "
            "evaluated and saved. Drop --ema-decay."
        )
    if optim.adam_beta1 == 0:
        yield (
            f"{given} cannot be combined with --adam-beta1 0, the share of the mean in the weights that are trained: "
            "the mean could not be told from them. Use the default, 0.9."
        )
