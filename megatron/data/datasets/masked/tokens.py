"""Choosing tokens to hide, each with the same probability, as RoBERTa and DeepSpeed's HelloDeepSpeed do.

One 64-bit number for every place of a sample decides everything about it: the upper half whether it is hidden and what
is shown there, the lower half which token if it is a random one. The numbers follow from the seed and the sample's
number.

Source: Liu et al., "RoBERTa", 2019, section 4.1 (masked anew in every epoch); deepspeedai/DeepSpeedExamples
`training/HelloDeepSpeed/train_bert.py` (`masking_function`).
"""

from __future__ import annotations

import numpy as np

from megatron.config.objective.masking import MaskingConfig
from megatron.data.datasets.masked.vocabulary import MaskedVocabulary

_HALF = np.uint64(32)
_LOWER = np.uint64(2**32 - 1)


def hide_tokens(
    text: np.ndarray,
    may_hide: np.ndarray,
    most: int,
    rules: MaskingConfig,
    vocabulary: MaskedVocabulary,
    numbers: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Hides tokens of a sample, or whole words if the rules say so.

    Shapes:
        text: int64 [s]; may_hide: bool [s]; numbers: uint64 [s]; result: the tokens as they are shown, int64 [s], and
        which are hidden, bool [s].

    Args:
        most: tokens that are hidden at most; further ones stay.
    """
    may_hide = may_hide & ~vocabulary.is_special[text]
    draws = numbers >> _HALF
    if rules.whole_word_masking:
        draws = draws[_first_of_word(text, may_hide, vocabulary)]
    share, shown = rules.mask_prob, rules.random_replace_prob + rules.unmask_replace_prob
    is_hidden = may_hide & (draws < _bound(share))
    places = np.flatnonzero(is_hidden)
    if len(places) > most:
        is_hidden[places[most:]] = False
        places = places[:most]
    drawn = draws[places]
    others = vocabulary.drawable[
        ((numbers[places] & _LOWER) * np.uint64(len(vocabulary.drawable)) >> _HALF).astype(int)
    ]
    replaced = np.where(drawn < _bound(share * (1 - rules.unmask_replace_prob)), others, text[places])
    replaced[drawn < _bound(share * (1 - shown))] = vocabulary.mask_id
    result = text.copy()
    result[places] = replaced
    return result, is_hidden


def sample_numbers(seed: int, sample: int, count: int) -> np.ndarray:
    """Random numbers of a sample. Shapes: result uint64 [count]."""
    return np.random.Philox(key=np.array([seed, sample], np.uint64)).random_raw(count)


def _bound(share: float) -> np.uint64:
    return np.uint64(round(share * 2**32))


def _first_of_word(text: np.ndarray, may_hide: np.ndarray, vocabulary: MaskedVocabulary) -> np.ndarray:
    """The place where the word of each token begins; no word goes beyond a special token."""
    begins = ~vocabulary.continues[text]
    begins[0] = True
    begins[1:] |= ~may_hide[:-1]
    return np.maximum.accumulate(np.where(begins, np.arange(len(text)), 0))
