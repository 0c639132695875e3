r"""Validates preprocessed corpora and prints their statistics.

    python tools/corpus/check_data.py my-gpt2_text_document
    python tools/corpus/check_data.py my-gpt2_text_document --show 3 --vocab-file vocab.json --merge-file merges.txt \
        --tokenizer-type GPT2BPETokenizer

The exit code is 0 on success and 65 if a file is damaged, contains ids outside the vocabulary, or was made with another
tokenizer. Duplicates are counted, but are not an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log, process_exit
from megatron.config import PathUse, flag, parse_flags
from megatron.config.sections.data import TokenizerFileFlags, optional_tokenizer_type
from megatron.errors import DataError, ExitCode

_SHOWN_CHARACTERS = 400


@dataclass(frozen=True)
class CheckFlags(TokenizerFileFlags):
    """Flags of this program."""

    prefixes: tuple[str, ...] = flag(
        help="data prefixes, without .bin/.idx; also accepted as positional arguments", nargs="+", path=PathUse.PREFIX
    )
    show: int = flag(0, "documents of each prefix to decode and print", at_least=0)
    tokenizer_type: str | None = optional_tokenizer_type("tokenizer that made the data")

    def problems(self) -> Iterator[str]:
        """Yields violated rules between the flags."""
        if self.show and self.tokenizer_type is None:
            yield f"--show {self.show} requires --tokenizer-type and the files of the tokenizer."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the checks and returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    flags = parse_flags(CheckFlags, arguments, prog="check_data.py", description=__doc__ or "", positional="--prefixes")
    from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer

    tokenizer = build_tokenizer(TokenizerChoice.of(flags)) if flags.tokenizer_type else None
    wrong = 0
    for prefix in flags.prefixes:
        try:
            wrong += _check(prefix, flags.show, tokenizer)
        except DataError as failure:
            log.error(str(failure))
            wrong += 1
    return int(ExitCode.DATA if wrong else ExitCode.DONE)


def _check(prefix: str, show: int, tokenizer: Any) -> int:
    """Checks one prefix; returns 1 if it contains ids outside the vocabulary."""
    from megatron.data.formats.indexed import IndexedDataset
    from megatron.data.formats.sidecar import check_tokenizer_fits
    from tools.corpus.examination import examine, report, sample_documents

    examined = examine(prefix, None if tokenizer is None else tokenizer.vocab_size)
    for text in report(examined):
        log.line(text)
    if tokenizer is not None:
        check_tokenizer_fits([prefix], tokenizer)
    if examined.out_of_range:
        log.error(
            f"{prefix} contains {examined.out_of_range} ids outside the vocabulary. Preprocess it again with the "
            "tokenizer of the training run."
        )
        return 1
    for number, ids in sample_documents(IndexedDataset(prefix), show) if show else ():
        text = tokenizer.decode(ids[:_SHOWN_CHARACTERS])
        cut = "..." if len(ids) > _SHOWN_CHARACTERS or len(text) > _SHOWN_CHARACTERS else ""
        log.line(f"  document {number} ({len(ids)} tokens): {text[:_SHOWN_CHARACTERS]!r}{cut}")
    return 0


if __name__ == "__main__":
    process_exit.exit_with(main)
