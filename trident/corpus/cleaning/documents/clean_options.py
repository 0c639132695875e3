"""The options of a cleaning run, as plain values for all workers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.tokenizers.tokenizer import TokenizerChoice


@dataclass(frozen=True)
class LengthLimits:
    """Limits on the length of a document; None is no limit.

    Args:
        tokenizer: counts tokens; required for a limit in tokens.
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
    """The languages to keep; see `LanguageFilter`."""

    languages: tuple[str, ...]
    threshold: float
    sample_characters: int


@dataclass(frozen=True)
class NearChoice:
    """The definition of near duplicates.

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
    """The word runs that must not occur, and the handling of documents with one.

    Args:
        files: evaluation texts: jsonl or .txt files, patterns, folders.
        run: words per run; shorter evaluation texts need at least `shortest_run`.
        maximum_occurrences: runs that occur more often in the corpus are common phrases and allowed; 0 disables this.
        drops: drop such documents; otherwise cut them around the runs, see `parts_around`.
        margin: characters removed on each side of a run.
        shortest_piece: minimum characters of a remaining part.
        maximum_pieces: documents with more parts are dropped.
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
    """The options for each document; the same in every worker.

    Args:
        key: of the text, in JSON lines and in Parquet files; `a.b` is key b of the object under a.
        kept_columns: additional columns of Parquet files in the output (JSON lines keep all their keys).
        document_separator: ends a document in plain text.
        fix_text, straighten_quotes: see `TextRepair`.
        normalize_space: see `with_plain_spaces`.
        gopher_quality: apply the rules of `GopherQuality`, with `minimum_stop_words`.
        gopher_repetition: apply the rules of `GopherRepetition`.
        exact_duplicates: drop documents with the text of an earlier one.
        skip_bad_lines: skip bad lines instead of stopping at the first.
        keep_originals: return the original dropped documents.
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
        """Returns the options required to find evaluation texts in documents.

        Copies that will be dropped are not counted, so that copies of one page with a test text do not make it a
        common phrase.
        """
        return CleanOptions(
            key=self.key,
            kept_columns=self.kept_columns,
            document_separator=self.document_separator,
            contamination=self.contamination,
            exact_duplicates=self.exact_duplicates or self.near is not None,
            skip_bad_lines=True,
        )
