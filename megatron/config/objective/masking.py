"""Masked language modelling: how samples are made from text, and which of their tokens are to be predicted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.config.flags.fields import RUN_MUST_MATCH, flag
from megatron.config.flags.section import ConfigSection

SENTENCES = "sentences"
DOCUMENTS = "documents"
STREAM = "stream"

ADDED_TOKENS = 3  # of samples of sentences: [CLS] A [SEP] B [SEP]
_ENDS = 2  # of other samples, with a token at each end
_DEVIATIONS = 6  # of the number of hidden tokens; a sample in a billion has more
_WHOLE_PHRASES = 3


@dataclass(frozen=True)
class MaskingConfig(ConfigSection):
    """The samples of `--objective masked`."""

    masked_samples: str = flag(
        SENTENCES,
        "what a sample holds: sentences, the sentence pairs of BERT from PREFIX_text_sentence files; documents, one "
        "document, cut or padded; stream, text that runs on over documents, as RoBERTa's full sentences do",
        choices=(SENTENCES, DOCUMENTS, STREAM),
        resume=RUN_MUST_MATCH,
    )
    mask_prob: float = flag(0.15, "share of the tokens to be predicted", above=0, below=1, resume=RUN_MUST_MATCH)
    random_replace_prob: float = flag(
        0.1,
        "share of the tokens to be predicted that are shown as a random token instead of the mask token",
        at_least=0,
        at_most=1,
        resume=RUN_MUST_MATCH,
    )
    unmask_replace_prob: float = flag(
        0.1,
        "share of the tokens to be predicted that are shown as they are",
        at_least=0,
        at_most=1,
        resume=RUN_MUST_MATCH,
    )
    whole_word_masking: bool = flag(
        help="choose whole words, not pieces of them; on for sentences, else off",
        computed=lambda masking: masking.masked_samples == SENTENCES,
        follows=("masked_samples",),
        resume=RUN_MUST_MATCH,
    )
    masking_ngrams: int = flag(
        help="most words in a row that are chosen together, n of them with a probability proportional to 1/n; 3 for "
        "sentences, else 1",
        computed=lambda masking: _WHOLE_PHRASES if masking.masked_samples == SENTENCES else 1,
        follows=("masked_samples",),
        at_least=1,
        resume=RUN_MUST_MATCH,
    )
    short_seq_prob: float = flag(
        0.1,
        "share of the samples of sentences that are made shorter than --seq-length",
        at_least=0,
        at_most=1,
        resume=RUN_MUST_MATCH,
    )

    def predictions(self, sequence_length: int) -> int:
        """The most tokens of a sample that are hidden; not positive if it is too short for a single one."""
        if self.masked_samples == SENTENCES:
            return math.floor(self.mask_prob * (sequence_length - ADDED_TOKENS))
        deviation = math.sqrt(self.mask_prob * (1 - self.mask_prob) * sequence_length)
        most = math.ceil(self.mask_prob * sequence_length + _DEVIATIONS * deviation)
        return min(most, sequence_length - _ENDS)

    def too_short(self, sequence_length: int) -> str:
        """Why samples of this many tokens cannot be masked; empty if they can."""
        if self.predictions(sequence_length) > 0:
            return ""
        return (
            f"--seq-length {sequence_length} with --mask-prob {self.mask_prob} leaves no token of a sample to be "
            "predicted. Use longer samples or a larger share."
        )
