"""The number format of weights and activations, and the loss scaling that float16 needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.section import ConfigSection


@dataclass(frozen=True)
class PrecisionConfig(ConfigSection):
    """The training dtype and the loss scale."""

    fp16: bool = flag(False, "train in float16 with loss scaling; CUDA only")
    bf16: bool = flag(False, "train in bfloat16")
    loss_scale: float | None = flag(None, "constant fp16 loss scale; dynamic if unset", above=0)
    initial_loss_scale: float = flag(2.0**32, "initial value of the dynamic loss scale", at_least=1)
    min_loss_scale: float = flag(1.0, "lower bound of the dynamic loss scale", above=0)
    loss_scale_window: float = flag(1000, "steps without overflow before the loss scale doubles", at_least=1)
    hysteresis: int = flag(2, "overflows before the loss scale halves", at_least=1)

    @property
    def dtype_name(self) -> str:
        """The dtype of weights and activations: float32, float16 or bfloat16."""
        return "float16" if self.fp16 else "bfloat16" if self.bf16 else "float32"

    def problems(self) -> Iterator[str]:
        if self.fp16 and self.bf16:
            yield "--fp16 and --bf16 are both given. A run has one dtype; drop one of them."
