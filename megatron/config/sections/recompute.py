"""Which activations the backward pass computes again instead of keeping them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.section import ConfigSection


@dataclass(frozen=True)
class RecomputeConfig(ConfigSection):
    """Activation checkpointing: whole blocks, attention only, or nothing."""

    checkpoint_activations: bool = flag(
        False, "recompute each block in the backward pass instead of keeping its activations"
    )
    checkpoint_num_layers: int = flag(
        1,
        "blocks per recompute chunk",
        spelled=("--recompute-num-layers", "--activations-checkpoint-num-layers"),
        at_least=1,
    )
    distribute_saved_activations: bool = flag(
        False,
        "with --checkpoint-activations, split the input that is kept of each block over the tensor-parallel ranks",
        spelled=("--distribute-checkpointed-activations", "--partition-activations"),
    )
    sequence_parallel: bool = flag(
        False,
        "with tensor parallelism, only with --checkpoint-activations: the same as --distribute-saved-activations",
    )
    recompute_granularity: str | None = flag(
        None, "full: the same as --checkpoint-activations; selective: attention only", choices=("full", "selective")
    )
    recompute_activations: bool = flag(False, "the same as --recompute-granularity selective")
    activations_checkpoint_method: str | None = flag(
        None, "uniform: the same as --checkpoint-activations", choices=("uniform",)
    )

    @property
    def distributes_saved(self) -> bool:
        """Whether what is kept of a block that is recomputed is split over the tensor-parallel ranks."""
        return self.checkpoint_activations and (self.distribute_saved_activations or self.sequence_parallel)

    @property
    def recomputes_attention(self) -> bool:
        """Whether the attention core alone is recomputed."""
        return self.recompute_granularity == "selective"

    def complete(self) -> None:
        if self.recompute_activations and self.recompute_granularity is None:
            self.set_derived("recompute_granularity", "selective")
        if self.recompute_granularity == "full" or self.activations_checkpoint_method is not None:
            self.set_derived("checkpoint_activations", True)

    def problems(self) -> Iterator[str]:
        if self.recompute_activations and self.recompute_granularity == "full":
            yield "--recompute-activations means selective, and --recompute-granularity full is given. Drop one."
