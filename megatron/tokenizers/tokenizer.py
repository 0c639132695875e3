"""Text to token ids and back: which tokenizer the flags choose, of the families that Megatron knows.

Each family has a reference library that defines what the right ids are: `tokenizers`, or `sentencepiece` for its own
models. `gigatoken` encodes where it is installed, supports the tokenizer and agrees with the reference on a fixed set
of hard texts, checked at every load; else the reference does.

Special-token strings inside a text:

* The types of Megatron (GPT2BPETokenizer, the SentencePiece and the BERT types) treat them as plain text: no document
  can forge an end of document.
* `PretrainedFromHF` and `HFTokenizer` do what `tokenizer.json` says, which is usually that they become the special
  token. They also add what its post-processor adds (a beginning-of-sequence token, say), as Megatron does by calling
  `encode`.
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
from megatron.tokenizers.library import Ids, Lengths, Tokenizer, surround
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
    "build_tokenizer",
    "surround",
]


class TokenizerFlags(Protocol):
    """The flags that choose a tokenizer: `DataConfig` and the tools' own dataclasses have them."""

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
    """The four flags by themselves, small enough to send to another process.

    Args:
        tokenizer_name_or_path: also spelled `--tokenizer-model`; of the SentencePiece types it is the .model file.
    """

    tokenizer_type: str | None
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_name_or_path: str | None = None

    @staticmethod
    def of(flags: TokenizerFlags) -> TokenizerChoice:
        return TokenizerChoice(flags.tokenizer_type, flags.vocab_file, flags.merge_file, flags.tokenizer_name_or_path)

    def or_copy_next_to(self, checkpoint: Path) -> TokenizerChoice:
        """The same choice; if its folder is gone, the copy that an import put next to the checkpoint."""
        recorded, copy = self.tokenizer_name_or_path, checkpoint.parent / TOKENIZER_FOLDER
        if recorded is None or Path(recorded).exists() or not copy.is_dir():
            return self
        return dataclasses.replace(self, tokenizer_name_or_path=str(copy))


def build_tokenizer(flags: TokenizerFlags, known_library: str | None = None) -> Tokenizer:
    """Loads the tokenizer that the flags name.

    Only a hub name of `--tokenizer-name-or-path` may touch the network.

    Args:
        known_library: what `library` of the same tokenizer was in another process, so that the check which decided it
            need not be made again.

    Raises:
        ConfigError: a flag is missing, names nothing, or is not a known type.
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
    raise ConfigError(f"--tokenizer-type {kind} is unknown; choose one of {', '.join(TOKENIZERS)}.")
