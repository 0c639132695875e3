"""The options of a cleaning run, as plain values that every worker gets."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.tokenizers.tokenizer import TokenizerChoice


@dataclass(frozen=True)
class LengthLimits:
    """Limits on the length of a document; None is no limit.

    Args:
        tokenizer: what counts tokens; needed for a limit in tokens.
    """

    minimum_characters: int | None = None
    maximum_characters: int | None = None
    minimum_words: int | None = None
    maximum_words: int | None = None
    minimum_tokens: int | None = None
    maximum_tokens: int | None = None
    tokenizer: TokenizerChoice | None = None


@dataclass(frozen=True)
class LanguageChoice:
    """Which languages are kept; see `LanguageFilter`."""

    languages: tuple[str, ...]
    threshold: float
    sample_characters: int


@dataclass(frozen=True)
class NearChoice:
    """What makes two documents near duplicates.

    Args:
        threshold: minimum estimated Jaccard similarity of the sets of their shingles.
        permutations: length of a signature; the estimate's standard error is at most 0.5 / its square root.
        shingle: words (or characters) per shingle.
        unit: "word" or "character", see `WordSplitter`.
        seed: of the permutations.
    """

    threshold: float = 0.7
    permutations: int = 128
    shingle: int = 5
    unit: str = "word"
    seed: int = 1234


@dataclass(frozen=True)
class ContaminationChoice:
    """Which runs of words must not occur, and what happens to documents with one.

    Args:
        files: evaluation texts: jsonl or .txt files, patterns, folders.
        run: words per run; `shortest_run` of evaluation texts that have fewer.
        maximum_occurrences: runs that occur more often in the corpus are common phrases and are kept; 0 keeps none.
        drops: drop such documents; else they are cut around the runs, see `pieces_around`.
        margin: characters that are cut away on each side of a run.
        shortest_piece: minimum characters of a piece.
        maximum_pieces: documents that would fall into more are dropped.
    """

    files: tuple[str, ...]
    run: int = 13
    shortest_run: int = 8
    maximum_occurrences: int = 10
    drops: bool = False
    margin: int = 200
    shortest_piece: int = 200
    maximum_pieces: int = 10


@dataclass(frozen=True)
class CleanOptions:
    """What is done to each document; the same in every worker.

    Args:
        key: of the text, in lines of JSON and in Parquet files; `a.b` is key b of the object under a.
        kept_columns: additional columns of Parquet files that the output has (lines of JSON keep all their keys).
        document_separator: what ends a document in inputs of plain text.
        fix_text, straighten_quotes: see `TextRepair`.
        normalize_space: see `with_plain_spaces`.
        gopher_quality: whether the rules of `GopherQuality` hold, with `minimum_stop_words`.
        gopher_repetition: whether the rules of `GopherRepetition` hold.
        exact_duplicates: whether documents with the text of an earlier one are dropped.
        skip_bad_lines: leave bad lines out instead of stopping at the first.
        keep_originals: whether dropped documents are wanted as they were read.
        maximum_examples: examples per reason in the report.
    """

    key: str = "text"
    kept_columns: tuple[str, ...] = ()
    document_separator: str | None = None
    fix_text: bool = False
    straighten_quotes: bool = True
    normalize_space: bool = False
    language: LanguageChoice | None = None
    lengths: LengthLimits = LengthLimits()
    gopher_quality: bool = False
    minimum_stop_words: int = 2
    gopher_repetition: bool = False
    contamination: ContaminationChoice | None = None
    exact_duplicates: bool = False
    near: NearChoice | None = None
    skip_bad_lines: bool = False
    keep_originals: bool = False
    maximum_examples: int = 3

    def only_counting(self) -> CleanOptions:
        """What is needed to read documents and to find evaluation texts in them.

        Copies that will be dropped are not counted, so that a test text does not count as a common phrase because one
        page with it was copied often.
        """
        return CleanOptions(
            key=self.key,
            kept_columns=self.kept_columns,
            document_separator=self.document_separator,
            contamination=self.contamination,
            exact_duplicates=self.exact_duplicates or self.near is not None,
            skip_bad_lines=True,
        )
