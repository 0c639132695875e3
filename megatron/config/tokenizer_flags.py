"""The flags with which a tool chooses a tokenizer, declared once for all tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.config.flags.fields import flag
from megatron.config.flags.paths import PathUse
from megatron.config.flags.section import ConfigSection
from megatron.config.sections.data import TOKENIZERS


@dataclass(frozen=True)
class TokenizerFileFlags(ConfigSection):
    """The flags of a tool that name a tokenizer's files; the tool declares `--tokenizer-type` itself."""

    help_title = "files of the tokenizer"

    vocab_file: str | None = flag(
        None, "vocabulary file (vocab.json or vocab.txt)", spelled=("--vocab",), path=PathUse.SMALL_FILE
    )
    merge_file: str | None = flag(None, "byte-pair merges (merges.txt)", spelled=("--merge",), path=PathUse.SMALL_FILE)
    tokenizer_name_or_path: str | None = flag(
        None,
        "folder, tokenizer.json or hub name of a Hugging Face tokenizer, or a SentencePiece .model",
        spelled=("--tokenizer-model",),
        path=PathUse.PLACE,
    )


def required_tokenizer_type() -> Any:
    """The `--tokenizer-type` of a tool that always needs a tokenizer."""
    return flag(help="tokenizer family", choices=TOKENIZERS)


def optional_tokenizer_type(help: str) -> Any:
    """The `--tokenizer-type` of a tool that can do without a tokenizer."""
    return flag(None, help, choices=TOKENIZERS)
