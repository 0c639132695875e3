"""What happens where one document ends and the next begins inside a sample."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import RUN_MUST_MATCH, flag
from megatron.config.flags.section import ConfigSection


@dataclass(frozen=True)
class DocumentConfig(ConfigSection):
    """Loss, positions and attention at document boundaries."""

    eod_mask_loss: bool = flag(False, "no loss where the input token is end-of-document", resume=RUN_MUST_MATCH)
    reset_position_ids: bool = flag(False, "restart positions after each end-of-document", resume=RUN_MUST_MATCH)
    reset_attention_mask: bool = flag(False, "no attention across documents", resume=RUN_MUST_MATCH)

    @property
    def needs_segments(self) -> bool:
        """Whether the network must know which document each token belongs to."""
        return self.reset_position_ids or self.reset_attention_mask
