"""GPT-2's byte-level BPE from its two files.

Source: openai/gpt-2 `src/encoder.py`; the files are Hugging Face's (`vocab.json`, `merges.txt`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.errors import ConfigError, DataError
from megatron.tokenizers.library import Tokenizer, TokenizerProperties, rust_tokenizer
from megatron.tokenizers.tokenizer_files import canonical, read_tokenizer_file, read_tokenizer_json, require_tokenizers

GPT2_END_OF_DOCUMENT = "<|endoftext|>"
_END_OF_DOCUMENT_TOKENS = (GPT2_END_OF_DOCUMENT, "</s>")


def gpt2_tokenizer(vocab_file: str | None, merge_file: str | None, known_library: str | None) -> Tokenizer:
    """Loads `vocab.json` and `merges.txt`; `<|endoftext|>` ends a document, or `</s>` if the vocabulary lacks it.

    Raises:
        ConfigError: a file is missing.
        DataError: a file is damaged, or the two do not match.
    """
    problems = [
        f"--tokenizer-type GPT2BPETokenizer requires {flag} (a {what} file)."
        for flag, value, what in (
            ("--vocab-file", vocab_file, "vocab.json"),
            ("--merge-file", merge_file, "merges.txt"),
        )
        if not value
    ]
    if problems or vocab_file is None or merge_file is None:
        raise ConfigError(problems)
    vocabulary = _gpt2_vocabulary(vocab_file)
    merges = _gpt2_merges(merge_file, vocabulary, vocab_file)
    eod_id = next((vocabulary[token] for token in _END_OF_DOCUMENT_TOKENS if token in vocabulary), None)
    if eod_id is None:
        raise DataError(
            f"{vocab_file} has no {' or '.join(_END_OF_DOCUMENT_TOKENS)} entry, which must end documents. Use "
            "GPT-2's vocabulary, or one written by tools/train_tokenizer.py."
        )
    facts = TokenizerProperties(
        "GPT2BPETokenizer",
        eod_id=eod_id,
        vocab_size=1 + max(vocabulary.values()),
        identity=lambda: canonical({"vocab": vocabulary, "merges": merges}),
        special_ids=lambda: _unreachable(vocabulary, merges),
        is_exact=True,
    )
    return rust_tokenizer(facts, byte_level_bpe(vocabulary, merges), known_library)


def _unreachable(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Returns the tokens that no text can produce: neither one byte nor the result of a merge."""
    made = {left + right for left, right in merges}
    return {token: number for token, number in vocabulary.items() if len(token) > 1 and token not in made}


def byte_level_bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """Builds GPT-2's rules in `tokenizers`: its split pattern, bytes as printable characters, no added tokens."""
    require_tokenizers()
    from tokenizers import Tokenizer as Reference
    from tokenizers import decoders, models, pre_tokenizers

    reference = Reference(models.BPE(vocab=vocabulary, merges=merges))
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.decoder = decoders.ByteLevel()
    return reference


def _gpt2_vocabulary(path: str) -> dict[str, int]:
    vocabulary = read_tokenizer_json(path, "--vocab-file")
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise DataError(f"{path} (--vocab-file) must hold one JSON object of token to id, as GPT-2's vocab.json does.")
    for token, number in vocabulary.items():
        if type(number) is not int or not 0 <= number < 2**31:
            raise DataError(
                f"{path} (--vocab-file): token {token!r:.200} has id {number!r:.200}; ids are integers from 0 to 2^31 "
                "- 1."
            )
    if len(set(vocabulary.values())) != len(vocabulary):
        raise DataError(f"{path} (--vocab-file) assigns one id to two tokens; ids must be unique.")
    return vocabulary


def _gpt2_merges(path: str, vocabulary: dict[str, int], vocab_file: str) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(read_tokenizer_file(path, "--merge-file").split("\n"), start=1):
        line = line.rstrip("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise DataError(f"{path}:{number} (--merge-file) is not two tokens separated by one space: {line[:80]!r}.")
        for token in (left, right, left + right):
            if token not in vocabulary:
                raise DataError(
                    f"{path}:{number} merges {left!r:.200} and {right!r:.200}, but {token!r:.200} is not in "
                    f"{vocab_file}: --vocab-file and --merge-file must come from the same tokenizer."
                )
        merges.append((left, right))
    return merges
