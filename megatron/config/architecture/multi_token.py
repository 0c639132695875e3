"""Multi-token prediction: further blocks that predict the tokens after the next one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.config.architecture.encoder import EncoderFields
from megatron.config.architecture.positions import LEARNED, PositionFields
from megatron.config.flags.fields import flag, network_flag


@dataclass(frozen=True)
class MultiTokenFields(PositionFields, EncoderFields):
    """The blocks, and the weight of their losses.

    Source of the flags: NVIDIA Megatron-LM `megatron/training/arguments.py`.
    """

    mtp_num_layers: int = network_flag(
        0,
        "blocks of multi-token prediction after the last block: the k-th predicts the token k places after the next "
        "one",
        at_least=0,
        at_most=64,
    )
    mtp_loss_scaling_factor: float = flag(
        0.1, "weight of the mean of the losses of multi-token prediction beside the main loss", at_least=0
    )

    @property
    def widths(self) -> dict[str, int]:
        """As of the other blocks; tensor-parallel ranks divide the projection that joins states and embeddings, too."""
        others: Any = super()
        model: Any = self  # the whole architecture, of which this is a part
        return {**others.widths, **({"--hidden-size": model.hidden_size} if self.mtp_num_layers else {})}

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.mtp_num_layers > 0 and self.bidirectional:
            yield (
                f"--mtp-num-layers {self.mtp_num_layers} does not go with --bidirectional, with which a token has seen "
                "the ones after it. Drop one of them."
            )
        if self.mtp_num_layers > 0 and self.position_embedding_type == LEARNED:
            yield (
                f"--mtp-num-layers {self.mtp_num_layers} does not go with --position-embedding-type {LEARNED}: its "
                "blocks look word embeddings up again, which have no position of their own. Use rope, alibi or none."
            )
