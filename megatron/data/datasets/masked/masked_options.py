"""Options of masked samples."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.objective.loss import MASKED, LossConfig
from megatron.config.objective.masking import ADDED_TOKENS, MaskingConfig
from megatron.data.order.sentence_map import SentenceRules
from megatron.errors import ConfigError


@dataclass(frozen=True)
class MaskedOptions:
    """The masking flags.

    Args:
        pairs: samples of sentences have two parts, whose order the model predicts (not `--bert-no-binary-head`).
    """

    masking: MaskingConfig
    pairs: bool = True

    @staticmethod
    def of(masking: MaskingConfig, loss: LossConfig, *, pairs: bool) -> MaskedOptions | None:
        """Returns the options set by flags; None for other objectives."""
        return MaskedOptions(masking, pairs) if loss.objective == MASKED else None

    def predictions(self, sequence_length: int) -> int:
        """Returns the maximum number of masked tokens in a sample.

        Raises:
            ConfigError: samples are too short for a masked token.
        """
        problem = self.masking.too_short(sequence_length)
        if problem:
            raise ConfigError(problem)
        return self.masking.predictions(sequence_length)

    def sentence_rules(self, sequence_length: int) -> SentenceRules:
        """Returns the rules for cutting documents into samples of sentences."""
        self.predictions(sequence_length)
        return SentenceRules(sequence_length - ADDED_TOKENS, self.masking.short_seq_prob, 2 if self.pairs else 1)
