"""Masked language modelling: the samples, and the tokens to predict in them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.config.flags.fields import RUN_MUST_MATCH, flag
from megatron.config.flags.section import ConfigSection

SENTENCES = "sentences"
DOCUMENTS = "documents"
STREAM = "stream"

ADDED_TOKENS = 3  # to sentence pairs: [CLS] A [SEP] B [SEP]
_ENDS = 2  # of other samples: a token at each end
_DEVIATIONS = 6  # standard deviations of the number of masked tokens; one sample in a billion has more
_SENTENCE_NGRAMS = 3


@dataclass(frozen=True)
class MaskingConfig(ConfigSection):
    """The samples of `--objective masked`."""

    masked_samples: str = flag(
        SENTENCES,
        "samples: sentences are BERT's sentence pairs from PREFIX_text_sentence files, documents one document each, "
        "truncated or padded, stream text that continues across documents, like RoBERTa's full sentences",
        choices=(SENTENCES, DOCUMENTS, STREAM),
        resume=RUN_MUST_MATCH,
    )
    mask_prob: float = flag(0.15, "fraction of tokens to predict", above=0, below=1, resume=RUN_MUST_MATCH)
    random_replace_prob: float = flag(
        0.1,
        "fraction of the tokens to predict that are replaced by a random token instead of the mask token",
        at_least=0,
        at_most=1,
        resume=RUN_MUST_MATCH,
    )
    unmask_replace_prob: float = flag(
        0.1,
        "fraction of the tokens to predict that are left unchanged",
        at_least=0,
        at_most=1,
        resume=RUN_MUST_MATCH,
    )
    whole_word_masking: bool = flag(
        help="mask whole words instead of single tokens; on for sentences, else off if unset",
        computed=lambda masking: masking.masked_samples == SENTENCES,
        follows=("masked_samples",),
        resume=RUN_MUST_MATCH,
    )
    masking_ngrams: int = flag(
        help="maximum number of words of a masked span; n words have a probability proportional to 1/n; 3 for "
        "sentences, else 1 if unset",
        computed=lambda masking: _SENTENCE_NGRAMS if masking.masked_samples == SENTENCES else 1,
        follows=("masked_samples",),
        at_least=1,
        resume=RUN_MUST_MATCH,
    )
    short_seq_prob: float = flag(
        0.1,
        "probability of a sentence pair shorter than --seq-length",
        at_least=0,
        at_most=1,
        resume=RUN_MUST_MATCH,
    )

    def predictions(self, sequence_length: int) -> int:
        """Maximum number of masked tokens in a sample; not positive if it is too short for a single one."""
        if self.masked_samples == SENTENCES:
            return math.floor(self.mask_prob * (sequence_length - ADDED_TOKENS))
        deviation = math.sqrt(self.mask_prob * (1 - self.mask_prob) * sequence_length)
        most = math.ceil(self.mask_prob * sequence_length + _DEVIATIONS * deviation)
        return min(most, sequence_length - _ENDS)

    def too_short(self, sequence_length: int) -> str:
        """The reason that samples of this many tokens cannot be masked; empty if they can."""
        if self.predictions(sequence_length) > 0:
            return ""
        return (
            f"--seq-length {sequence_length} with --mask-prob {self.mask_prob} leaves no token to predict. Increase "
            "--seq-length or --mask-prob."
        )
