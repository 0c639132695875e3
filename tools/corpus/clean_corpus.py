r"""Cleans raw text before preprocessing: repairs, filters and deduplicates documents, and reports the changes.

    python tools/corpus/clean_corpus.py --input raw/*.jsonl --output clean.jsonl --fix-text --language en \
        --min-characters 200 --exact-duplicates --report report.json --workers 8

Each step has a flag that enables it. The order and all keys of lines are kept; the output does not depend on --workers.
Documents without text are always dropped.
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
from megatron.config.sections.data import TokenizerFileFlags, optional_tokenizer_type

if TYPE_CHECKING:
    from trident.corpus.cleaning.documents.clean_options import CleanOptions


@dataclass(frozen=True)
class CleanFlags(TokenizerFileFlags):
    """Flags of this program."""

    input: tuple[str, ...] = flag(
        help="jsonl and .txt files, also .gz .bz2 .xz .zst, and .parquet; patterns; folders; - for standard input; "
        "sqlite:///file.db?table=name, mongodb://host/database, db.json; hf://name:split",
        nargs="+",
        path=PathUse.CORPUS,
    )
    output: str = flag(help="jsonl output file, compressed if it ends in .gz or .zst", path=PathUse.NEW_FILE)
    report: str | None = flag(
        None, "JSON file for counts and examples of dropped and changed documents", path=PathUse.NEW_FILE
    )
    dropped: str | None = flag(None, "jsonl file for the dropped documents with their reasons", path=PathUse.NEW_FILE)
    examples: int = flag(3, "examples per reason in the report", at_least=0)
    json_key: str = flag("text", "key of the text; a.b is key b of the object under a", spelled=("--json-keys",))
    keep_columns: tuple[str, ...] = flag(
        (), "additional columns of Parquet files to write; JSON lines keep all keys", nargs="+"
    )
    document_separator: str | None = flag(
        None,
        r"separator of documents in .txt files, a newline (\n) by default; if given, standard input is plain text too",
    )
    on_bad_line: str = flag(
        "error",
        "invalid lines: stop with an error, or skip and count them",
        choices=("error", "skip"),
    )
    workers: int = flag(1, "number of worker processes; 1 for none", at_least=1)
    log_interval: int = flag(1000, "documents between progress lines (at most one line per second)", at_least=1)

    fix_text: bool = flag(False, "repair mojibake, HTML entities and the like (ftfy)")
    keep_curly_quotes: bool = flag(False, "with --fix-text: keep curly quotes instead of straightening them")
    normalize_space: bool = flag(
        False,
        "normalize spaces and line endings, remove control characters, keep indentation and at most two blank lines",
    )
    language: tuple[str, ...] = flag(
        (),
        "keep only documents in these languages: ISO 639 codes, separated by commas or spaces (py3langid)",
        nargs="+",
    )
    language_threshold: float = flag(0.5, "minimum probability of the detected language", at_least=0, at_most=1)
    language_sample: int = flag(
        1000,
        "characters used for language detection, from four positions in the text; 0 for the whole text",
        at_least=0,
    )
    min_characters: int | None = flag(None, "minimum number of characters of a document", at_least=0)
    max_characters: int | None = flag(None, "maximum number of characters of a document", at_least=1)
    min_words: int | None = flag(None, "minimum number of whitespace-separated words of a document", at_least=0)
    max_words: int | None = flag(None, "maximum number of words of a document", at_least=1)
    min_tokens: int | None = flag(None, "minimum number of tokens of a document (128 upstream)", at_least=0)
    max_tokens: int | None = flag(None, "maximum number of tokens of a document", at_least=1)
    tokenizer_type: str | None = optional_tokenizer_type("tokenizer for --min-tokens and --max-tokens")
    gopher_quality: bool = flag(
        False, "Gopher quality filters: number and length of words, symbols, bullets, ellipses and stop words"
    )
    gopher_stop_words: int = flag(
        2,
        "number of eight frequent English words that --gopher-quality requires; 0 for other languages",
        at_least=0,
        at_most=8,
    )
    gopher_repetition: bool = flag(False, "Gopher repetition filters: repeated lines, paragraphs and n-grams")
    decontaminate: tuple[str, ...] = flag(
        (),
        "remove n-grams of these evaluation texts: jsonl or .txt; patterns; folders",
        nargs="+",
        path=PathUse.CORPUS,
    )
    decontaminate_mode: str = flag(
        "split", "split documents around matching n-grams, or drop them", choices=("split", "drop")
    )
    ngram: int = flag(13, "words per n-gram of --decontaminate", spelled=("--max-ngram-size",), at_least=1, at_most=100)
    min_ngram: int = flag(
        8,
        "minimum number of words of an evaluation text shorter than an n-gram",
        spelled=("--min-ngram-size",),
        at_least=1,
    )
    ngram_occurrences: int = flag(
        10,
        "keep n-grams that occur more often in the input, as common phrases; 0 keeps none and reads the input once",
        spelled=("--key-threshold",),
        at_least=0,
    )
    margin_characters: int = flag(
        200, "characters to remove on each side of an n-gram", spelled=("--remove-char-each-side",), at_least=0
    )
    min_piece_characters: int = flag(
        200, "minimum number of characters of a remaining part", spelled=("--filter-text-char-len",), at_least=1
    )
    max_pieces: int = flag(
        10, "drop documents that would be split into more parts", spelled=("--splits-count",), at_least=1
    )
    exact_duplicates: bool = flag(False, "drop documents whose text equals an earlier one's, ignoring whitespace")
    near_duplicates: bool = flag(False, "drop documents that are nearly identical to an earlier one (MinHash LSH)")
    near_threshold: float = flag(0.7, "minimum estimated Jaccard similarity of near duplicates", above=0, at_most=1)
    near_shingle: int = flag(5, "consecutive words (or characters) per shingle", at_least=1, at_most=100)
    near_unit: str = flag("word", "unit of shingles", choices=("word", "character"))
    near_permutations: int = flag(
        128,
        "MinHash permutations: more are more accurate and slower",
        spelled=("--num-perm",),
        at_least=16,
        at_most=4096,
    )
    seed: int = flag(1234, "random seed of MinHash permutations", at_least=0, at_most=2**32 - 1)

    def problems(self) -> Iterator[str]:
        """Yields violated rules between the flags."""
        if (self.min_tokens is not None or self.max_tokens is not None) and self.tokenizer_type is None:
            given = (
                f"--min-tokens {self.min_tokens}" if self.min_tokens is not None else f"--max-tokens {self.max_tokens}"
            )
            yield f"{given} requires --tokenizer-type and the files of the tokenizer. Add them, or use --min-words."
        for unit in ("characters", "words", "tokens"):
            least, most = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if least is not None and most is not None and least > most:
                yield f"--min-{unit} {least} is more than --max-{unit} {most}."
        if self.decontaminate and self.min_ngram > self.ngram:
            yield f"--min-ngram {self.min_ngram} is more than --ngram {self.ngram}. Use at most {self.ngram}."
        if self.keep_curly_quotes and not self.fix_text:
            yield "--keep-curly-quotes requires --fix-text. Add it."

    def options(self) -> CleanOptions:
        """The cleaning options of the flags."""
        from megatron.tokenizers.tokenizer import TokenizerChoice
        from trident.corpus.cleaning.documents.clean_options import (
            CleanOptions,
            ContaminationChoice,
            LanguageChoice,
            LengthLimits,
            NearChoice,
        )
        from trident.corpus.inputs.input_paths import read_separator

        languages = tuple(code for value in self.language for code in value.replace(",", " ").split())
        near = NearChoice(self.near_threshold, self.near_permutations, self.near_shingle, self.near_unit, self.seed)
        contamination = ContaminationChoice(
            self.decontaminate,
            run=self.ngram,
            shortest_run=self.min_ngram,
            maximum_occurrences=self.ngram_occurrences,
            drops=self.decontaminate_mode == "drop",
            margin=self.margin_characters,
            shortest_piece=self.min_piece_characters,
            maximum_pieces=self.max_pieces,
        )
        return CleanOptions(
            key=self.json_key,
            kept_columns=self.keep_columns,
            document_separator=None if self.document_separator is None else read_separator(self.document_separator),
            fix_text=self.fix_text,
            straighten_quotes=not self.keep_curly_quotes,
            normalize_space=self.normalize_space,
            language=LanguageChoice(languages, self.language_threshold, self.language_sample) if languages else None,
            lengths=LengthLimits(
                self.min_characters,
                self.max_characters,
                self.min_words,
                self.max_words,
                self.min_tokens,
                self.max_tokens,
                TokenizerChoice.of(self) if self.tokenizer_type is not None else None,
            ),
            gopher_quality=self.gopher_quality,
            minimum_stop_words=self.gopher_stop_words,
            gopher_repetition=self.gopher_repetition,
            contamination=contamination if self.decontaminate else None,
            exact_duplicates=self.exact_duplicates,
            near=near if self.near_duplicates else None,
            skip_bad_lines=self.on_bad_line == "skip",
            keep_originals=self.dropped is not None,
            maximum_examples=self.examples,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool on the command line's flags."""
    arguments = sys.argv[1:] if argv is None else argv
    flags = parse_flags(CleanFlags, arguments, prog="clean_corpus.py", description=__doc__ or "")
    from trident.corpus.cleaning.clean_corpus import CleanOutputs, clean_corpus
    from trident.corpus.inputs.input_blocks import total_bytes
    from trident.corpus.inputs.input_paths import expand_inputs
    from trident.corpus.workers.progress_line import ProgressLine

    process_exit.interrupt_on_sigterm()
    options = flags.options()
    files = expand_inputs(flags.input, options.document_separator)
    progress = ProgressLine(total_bytes(files), flags.log_interval, log.info, log.status_line())
    outputs = CleanOutputs(flags.output, flags.dropped, flags.report)
    try:
        report = clean_corpus(files, outputs, options, flags.workers, progress)
    except BaseException:
        progress.clear()
        raise
    progress.finish()
    for text in report.table():
        log.info(text)
    log.info(f"Wrote {flags.output}: {report.written:,} documents, {report.output_bytes:,} bytes.")
    if report.read and not report.kept:
        log.warning(f"None of {report.read:,} documents was kept; see the table above.")
    return 0


if __name__ == "__main__":
    process_exit.exit_with(main)
