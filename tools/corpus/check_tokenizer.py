r"""Encodes and decodes texts, and reports round-trip differences, token counts and speed.

    python tools/corpus/check_tokenizer.py --tokenizer-type GPT2BPETokenizer --vocab-file demo-vocab.json \
        --merge-file demo-merges.txt --input corpus.jsonl
    python tools/corpus/check_tokenizer.py --tokenizer-type HFTokenizer --tokenizer-name-or-path demo-tokenizer.json \
        --text 'Merhaba dünya' '안녕 세상아 👍🏽'

The exit code is 65 if a text does not round-trip byte for byte with a byte-level tokenizer or --require-exact.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log, process_exit
from megatron.config import PathUse, flag, parse_flags
from megatron.config.sections.data import TokenizerFileFlags, required_tokenizer_type
from megatron.errors import ExitCode

if TYPE_CHECKING:
    from trident.corpus.vocabulary.round_trip import RoundTrip


@dataclass(frozen=True)
class CheckTokenizerFlags(TokenizerFileFlags):
    """Flags of this program."""

    tokenizer_type: str = required_tokenizer_type()
    text: tuple[str, ...] = flag((), "texts to encode, whose ids are printed", nargs="+")
    input: tuple[str, ...] = flag(
        (), "inputs, as for preprocess_data.py; - for standard input", nargs="+", path=PathUse.CORPUS
    )
    json_keys: tuple[str, ...] = flag(("text",), "JSON keys of the texts", nargs="+", spelled=("--json-key",))
    document_separator: str | None = flag(
        None,
        r"separator of documents in .txt files, a newline (\n) by default; if given, standard input is plain text too",
    )
    max_documents: int | None = flag(None, "maximum number of documents of --input", at_least=1)
    require_exact: bool = flag(False, "fail if a text does not round-trip, with any tokenizer")

    def problems(self) -> Iterator[str]:
        """Yields violated rules between the flags."""
        if not self.text and not self.input:
            yield "--text or --input is required."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the checks and returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    flags = parse_flags(CheckTokenizerFlags, arguments, prog="check_tokenizer.py", description=__doc__ or "")
    from itertools import islice

    from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
    from trident.corpus.inputs.input_paths import read_separator
    from trident.corpus.vocabulary.learning import texts_of
    from trident.corpus.vocabulary.round_trip import round_trip

    tokenizer = build_tokenizer(TokenizerChoice.of(flags))
    log.line(
        f"{tokenizer.name}: {tokenizer.vocab_size} entries, encoded by {tokenizer.library}, fingerprint "
        f"{tokenizer.fingerprint[:12]}"
    )
    wrong = 0
    if flags.text:
        for text in flags.text:
            ids = tokenizer.encode(text)
            log.line(f"{text!r} -> {' '.join(map(str, ids))} -> {tokenizer.decode(ids)!r}")
        wrong += _print_result(round_trip(tokenizer, flags.text))
    if flags.input:
        separator = None if flags.document_separator is None else read_separator(flags.document_separator)
        texts = texts_of(flags.input, flags.json_keys, 1.0, False, separator=separator)
        wrong += _print_result(round_trip(tokenizer, islice(texts, flags.max_documents)))
    if wrong and (tokenizer.is_exact or flags.require_exact):
        log.error(f"{wrong} texts do not round-trip byte for byte through {tokenizer.name}.")
        return int(ExitCode.DATA)
    return int(ExitCode.DONE)


def _print_result(round_trip: RoundTrip) -> int:
    """Prints the counts and the first differences; returns the number of texts that did not round-trip."""
    for line in round_trip.report():
        log.line(line)
    for difference in round_trip.differences:
        log.line(
            f"  document {difference.document}, character {difference.position}: {difference.was!r} became "
            f"{difference.became!r}"
        )
    return round_trip.inexact


if __name__ == "__main__":
    process_exit.exit_with(main)
