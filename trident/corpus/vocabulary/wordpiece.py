"""Training of WordPiece vocabularies with BERT's rules for words, written as `vocab.txt` and `tokenizer.json`.

Pieces are merged by frequency, as in byte-pair encoding; BERT's own trainer was never published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megatron.errors import ConfigError, DataError
from megatron.tokenizers.tokenizer_files import require_tokenizers
from megatron.tokenizers.wordpiece import ADDED_TOKENS, CONTINUATION, UNKNOWN_TOKEN, wordpiece

_BERT_TOKENS = ("[PAD]", UNKNOWN_TOKEN, "[CLS]", "[SEP]", "[MASK]")
_ALL_WORDS = 2**31 - 1


def train_wordpiece(
    read_texts: Callable[[], Iterable[str]],
    vocab_size: int,
    min_frequency: int = 2,
    special: Sequence[str] = (),
    lower_case: bool = False,
    show_progress: bool = False,
) -> dict[str, bytes]:
    """Trains a vocabulary: special tokens, characters, characters inside words, then pieces in order of discovery.

    The texts are read twice, first for their characters, whose order would otherwise be random.

    Args:
        vocab_size: total entries; fewer if the text has no more pieces.
        special: tokens with the ids from 0 on; BERT's five follow if missing.
        lower_case: convert words to lower case without accents.

    Returns:
        The contents of its files by suffix.

    Raises:
        ConfigError: the size is too small for the special tokens and the characters of the text.
        DataError: no text.
    """
    require_tokenizers()
    from tokenizers import Tokenizer, models, trainers

    tokens = [*special, *(token for token in _BERT_TOKENS if token not in special)]
    rules = wordpiece({UNKNOWN_TOKEN: 0}, lower_case)

    def trained(model: Any, trainer: Any) -> dict[str, int]:
        learner = Tokenizer(model)
        learner.normalizer, learner.pre_tokenizer = rules.normalizer, rules.pre_tokenizer
        learner.train_from_iterator(read_texts(), trainer)
        vocabulary: dict[str, int] = learner.get_vocab(with_added_tokens=True)
        return vocabulary

    words = trained(models.WordLevel(), trainers.WordLevelTrainer(vocab_size=_ALL_WORDS, show_progress=show_progress))
    if not words:
        raise DataError("The input has no text to learn from; use more text (--input).")
    inside = sorted({CONTINUATION + letter for word in words for letter in word[1:]})
    first = sorted({letter for word in words for letter in word})
    if len(tokens) + len(first) + len(inside) > vocab_size:
        raise ConfigError(
            f"--vocab-size {vocab_size} is too small: {len(tokens)} special tokens, {len(first)} letters and "
            f"{len(inside)} letters inside words need {len(tokens) + len(first) + len(inside)}."
        )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[*tokens, *first, *inside],
        continuing_subword_prefix=CONTINUATION,
        show_progress=show_progress,
    )
    vocabulary = trained(models.BPE(continuing_subword_prefix=CONTINUATION), trainer)
    names = sorted(vocabulary, key=vocabulary.__getitem__)
    return {"-vocab.txt": "".join(f"{name}\n" for name in names).encode(), **_tokenizer_json(names, tokens, lower_case)}


def _tokenizer_json(names: Sequence[str], special: Sequence[str], lower_case: bool) -> dict[str, bytes]:
    """Returns the equivalent tokenizer.json, with upstream's two tokens, which matches special tokens inside texts."""
    everything = [*names, *(token for token in ADDED_TOKENS if token not in names)]
    tokenizer = wordpiece({name: number for number, name in enumerate(everything)}, lower_case)
    tokenizer.add_special_tokens([*special, *(token for token in ADDED_TOKENS if token not in special)])
    return {"-tokenizer.json": tokenizer.to_str(pretty=True).encode()}
