"""What a cleaning run is asked to do, as plain values that every worker gets."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.data.tokenizer import TokenizerChoice


@dataclass(frozen=True)
class LengthLimits:
    """How long a document may be; None is no limit.

    Args:
        tokenizer: what counts tokens; needed for a limit in tokens.
    """

    least_characters: int | None = None
    most_characters: int | None = None
    least_words: int | None = None
    most_words: int | None = None
    least_tokens: int | None = None
    most_tokens: int | None = None
    tokenizer: TokenizerChoice | None = None


@dataclass(frozen=True)
class LanguageChoice:
    """Which languages stay; see `LanguageFilter`."""

    languages: tuple[str, ...]
    threshold: float
    sample_characters: int


@dataclass(frozen=True)
class NearChoice:
    """What makes two documents near duplicates.

    Args:
        threshold: least estimated Jaccard similarity of the sets of their shingles.
        permutations: length of a signature; the estimate's standard error is at most 0.5 / its square root.
        shingle: words (or characters) a shingle.
        unit: "word" or "character", see `WordSplitter`.
        seed: of the permutations.
    """

    threshold: float = 0.7
    permutations: int = 128
    shingle: int = 5
    unit: str = "word"
    seed: int = 1234


@dataclass(frozen=True)
class CleanOptions:
    """What is done to every document; the same in every worker.

    Args:
        key: of the text, in lines of JSON and in Parquet files; `a.b` is key b of the object under a.
        kept_columns: further columns of Parquet files that the output has (lines of JSON keep all their keys).
        document_separator: what ends a document in inputs of plain text.
        fix_text, straighten_quotes: see `TextRepair`.
        normalize_space: see `with_plain_spaces`.
        exact_duplicates: whether documents with the text of an earlier one are dropped.
        skip_bad_lines: leave bad lines out instead of stopping at the first.
        keep_originals: whether dropped documents are wanted as they were read.
        most_examples: examples a reason in the report.
    """

    key: str = "text"
    kept_columns: tuple[str, ...] = ()
    document_separator: str | None = None
    fix_text: bool = False
    straighten_quotes: bool = True
    normalize_space: bool = False
    language: LanguageChoice | None = None
    lengths: LengthLimits = LengthLimits()
    exact_duplicates: bool = False
    near: NearChoice | None = None
    skip_bad_lines: bool = False
    keep_originals: bool = False
    most_examples: int = 3
