"""How masked samples are made, as far as the flags decide it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.config.objective.loss import MASKED, LossConfig
from megatron.config.objective.masking import SENTENCES, MaskingConfig
from megatron.data.order.sentence_map import SentenceRules
from megatron.errors import ConfigError

ADDED_TOKENS = 3  # [CLS] A [SEP] B [SEP]
_DEVIATIONS = 6  # of the number of hidden tokens; a sample in a billion has more


@dataclass(frozen=True)
class MaskedOptions:
    """What the masking flags say.

    Args:
        pairs: whether samples of sentences have two parts, whose order is to be told (not `--bert-no-binary-head`).
    """

    masking: MaskingConfig
    pairs: bool = True

    @staticmethod
    def of(masking: MaskingConfig, loss: LossConfig, *, pairs: bool) -> MaskedOptions | None:
        """The options that flags give; None for other objectives."""
        return MaskedOptions(masking, pairs) if loss.objective == MASKED else None

    def predictions(self, sequence_length: int) -> int:
        """How many tokens of a sample are hidden at most.

        Raises:
            ConfigError: samples are too short for a single one.
        """
        share = self.masking.mask_prob
        if self.masking.masked_samples == SENTENCES:
            most = math.floor(share * (sequence_length - ADDED_TOKENS))
        else:
            deviation = math.sqrt(share * (1 - share) * sequence_length)
            most = min(math.ceil(share * sequence_length + _DEVIATIONS * deviation), sequence_length - 2)
        if most < 1:
            raise ConfigError(
                f"--seq-length {sequence_length} with --mask-prob {share} leaves no token of a sample to be predicted. "
                "Use longer samples or a greater share."
            )
        return most

    def sentence_rules(self, sequence_length: int) -> SentenceRules:
        """How documents are cut into samples of sentences."""
        self.predictions(sequence_length)
        return SentenceRules(sequence_length - ADDED_TOKENS, self.masking.short_seq_prob, 2 if self.pairs else 1)
