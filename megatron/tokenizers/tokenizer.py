"""Builds a tokenizer from the flags, for Megatron's families of tokenizers.

A reference library defines the correct ids of each family: `tokenizers`, or `sentencepiece` for its models. `gigatoken`
encodes if it is installed, supports the tokenizer and agrees with the reference on a fixed set of edge cases, checked
at every load; otherwise the reference does.

Special-token strings inside a text:

* Megatron's types (GPT2BPETokenizer, the SentencePiece and the BERT types) treat them as plain text: no document can
  forge an end of document.
* `PretrainedFromHF` and `HFTokenizer` follow `tokenizer.json`, which usually converts them to the special token. They
  also add the tokens of its post-processor (such as a beginning of sequence), like Megatron's call of `encode`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron.config.sections.data import NULL_TOKENIZER, SENTENCEPIECE_TOKENIZERS, TOKENIZERS, WORDPIECE_TOKENIZERS
from megatron.errors import ConfigError
from megatron.tokenizers.gpt2 import GPT2_END_OF_DOCUMENT, gpt2_tokenizer
from megatron.tokenizers.hugging_face import TOKENIZER_FOLDER, hugging_face_tokenizer
from megatron.tokenizers.library import Ids, Lengths, Tokenizer, add_special_tokens
from megatron.tokenizers.null import null_tokenizer
from megatron.tokenizers.sentencepiece import sentencepiece_tokenizer
from megatron.tokenizers.wordpiece import wordpiece_tokenizer

__all__ = [
    "GPT2_END_OF_DOCUMENT",
    "TOKENIZER_FOLDER",
    "Ids",
    "Lengths",
    "Tokenizer",
    "TokenizerChoice",
    "TokenizerFlags",
    "add_special_tokens",
    "build_tokenizer",
]


class TokenizerFlags(Protocol):
    """The flags that select a tokenizer, as in `DataConfig` and the tools' dataclasses."""

    @property
    def tokenizer_type(self) -> str | None: ...
    @property
    def vocab_file(self) -> str | None: ...
    @property
    def merge_file(self) -> str | None: ...
    @property
    def tokenizer_name_or_path(self) -> str | None: ...


@dataclass(frozen=True)
class TokenizerChoice:
    """The four flags alone, small enough to send to another process.

    Args:
        tokenizer_name_or_path: alias `--tokenizer-model`; the .model file for SentencePiece types.
    """

    tokenizer_type: str | None
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_name_or_path: str | None = None

    @staticmethod
    def of(flags: TokenizerFlags) -> TokenizerChoice:
        return TokenizerChoice(flags.tokenizer_type, flags.vocab_file, flags.merge_file, flags.tokenizer_name_or_path)

    def or_copy_next_to(self, checkpoint: Path) -> TokenizerChoice:
        """Returns the same choice; if its folder is gone, the copy next to an imported checkpoint."""
        recorded, copy = self.tokenizer_name_or_path, checkpoint.parent / TOKENIZER_FOLDER
        if recorded is None or Path(recorded).exists() or not copy.is_dir():
            return self
        return dataclasses.replace(self, tokenizer_name_or_path=str(copy))


def build_tokenizer(flags: TokenizerFlags, known_library: str | None = None) -> Tokenizer:
    """Loads the tokenizer selected by the flags.

    Only a Hub name in `--tokenizer-name-or-path` may access the network.

    Args:
        known_library: `library` of the same tokenizer in another process, to skip the equality check.

    Raises:
        ConfigError: a flag is missing, a file does not exist, or the type is unknown.
        DataError: a tokenizer file is damaged.
    """
    kind = flags.tokenizer_type
    if kind == "GPT2BPETokenizer":
        return gpt2_tokenizer(flags.vocab_file, flags.merge_file, known_library)
    if kind in ("PretrainedFromHF", "HFTokenizer"):
        source = flags.tokenizer_name_or_path or (flags.vocab_file if kind == "HFTokenizer" else None)
        return hugging_face_tokenizer(kind, source, known_library)
    if kind in SENTENCEPIECE_TOKENIZERS:
        return sentencepiece_tokenizer(kind, flags.tokenizer_name_or_path or flags.vocab_file, known_library)
    if kind in WORDPIECE_TOKENIZERS:
        return wordpiece_tokenizer(kind, flags.vocab_file, known_library)
    if kind == NULL_TOKENIZER:
        return null_tokenizer(flags.tokenizer_name_or_path)
    raise ConfigError(f"unknown --tokenizer-type {kind}; use one of {', '.join(TOKENIZERS)}.")
