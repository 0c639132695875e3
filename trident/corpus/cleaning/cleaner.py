"""The part of cleaning that runs in every worker: blocks of documents to cleaned lines and hashes for duplicates."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trident.corpus.cleaning.contamination import EvaluationSets, Match, parts_around
from trident.corpus.cleaning.documents.clean_options import CleanOptions
from trident.corpus.cleaning.documents.entries import DocumentEntry, line_of, read_entries
from trident.corpus.cleaning.documents.repair import TextRepair, with_plain_spaces
from trident.corpus.cleaning.documents.words import WordSplitter
from trident.corpus.cleaning.filters.language import LanguageFilter
from trident.corpus.cleaning.filters.quality import GopherQuality
from trident.corpus.cleaning.filters.rejections import (
    BAD_LINE,
    CONTAMINATED,
    CUT,
    EMPTY,
    REPAIRED,
    SPACES,
    DocumentFilter,
    Rejection,
    length_filters,
)
from trident.corpus.cleaning.filters.repetition import GopherRepetition
from trident.corpus.cleaning.near_duplicates.signatures import Signer
from trident.corpus.inputs.block import InputBlock
from trident.corpus.workers.pool import BlockWork, Message

SHOWN_CHARACTERS = 80
_BEFORE_A_CHANGE = 20
_COMPARED_CHARACTERS = 8**4


class DroppedDocument(NamedTuple):
    """A dropped document of a block.

    Args:
        number: its index in the block.
        shown: the beginning of its text.
        offset: byte offset of a bad line's fault in the block.
    """

    number: int
    reason: str
    detail: str
    shown: str
    offset: int = 0


class TextChange(NamedTuple):
    """The first difference in a changed text, before and after."""

    number: int
    what: str
    before: str
    after: str


@dataclass
class CleanedBlock:
    """The result of cleaning a block, as far as it depends on single documents.

    Args:
        lines: of the block, bad and blank ones included.
        passed: indices of the documents that were not dropped.
        output: their lines; `sizes` has the bytes and `pieces` the number of lines of each.
        originals: the original lines of all documents, if requested; `original_sizes` has the bytes.
        digests: hash of each passed text, if exact duplicates are removed.
        runs: occurrences of evaluation runs, if counted; `run_texts` has the text of each.
        signatures, band_keys: see `Signer`, if near duplicates are removed.

    Shapes:
        passed, sizes, pieces: int64 [p]; original_sizes: int64 [lines] or [0]; runs, run_texts: int64 [r];
        digests: uint64 [p, 2] or [0, 2]; signatures: uint16 [p, permutations] or [0, 0];
        band_keys: uint64 [p, bands] or [0, 0].
    """

    lines: int
    dropped: list[DroppedDocument] = field(default_factory=list)
    changed: list[TextChange] = field(default_factory=list)
    passed: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    sizes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    pieces: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    original_sizes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    digests: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros((0, 2), np.uint64))
    runs: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    run_texts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    signatures: npt.NDArray[np.uint16] = field(default_factory=lambda: np.zeros((0, 0), np.uint16))
    band_keys: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros((0, 0), np.uint64))
    output: bytes = b""
    originals: bytes = b""


class Cleaner:
    """Cleans blocks; made once, or once in each worker where processes cannot inherit it.

    Args:
        evaluation: what must not occur, if it is read already.
        counts: only count the occurrences of each evaluation run in a block, instead of cleaning.

    Raises:
        ConfigError: a library is missing, or a value is one that it cannot work with.
    """

    def __init__(self, options: CleanOptions, evaluation: EvaluationSets | None = None, counts: bool = False) -> None:
        self.options = options
        self.counts = counts
        self._repair = TextRepair(options.straighten_quotes) if options.fix_text else None
        self._filters = list(_filters(options))
        self._repetition = GopherRepetition() if options.gopher_repetition else None
        self._signer = Signer(options.near) if options.near is not None else None
        if evaluation is None and options.contamination is not None:
            evaluation = EvaluationSets(options.contamination)
        self.evaluation = evaluation
        needs_words = self._repetition is not None or evaluation is not None or self._signer is not None
        self._splitter = WordSplitter() if needs_words else None

    def clean(self, block: InputBlock) -> CleanedBlock:
        """Repairs and filters every document of a block.

        Raises:
            DataError: the block cannot be read.
        """
        options = self.options
        entries = read_entries(block, (options.key, *options.kept_columns), options.document_separator)
        if self.counts:
            return self._count(entries)
        cleaned = CleanedBlock(len(entries))
        texts: dict[int, str] = {}
        for number, entry in enumerate(entries):
            if entry.bad is not None:
                shown = (entry.raw or b"")[: SHOWN_CHARACTERS * 4].decode("utf-8", "replace")[:SHOWN_CHARACTERS]
                cleaned.dropped.append(DroppedDocument(number, BAD_LINE, entry.bad.reason, shown, entry.bad.offset))
                if not options.skip_bad_lines:
                    return cleaned
            elif entry.text is not None:
                texts[number] = self._repaired(number, entry.text, cleaned)
        self._drop(texts, [Rejection(EMPTY) if not text.strip() else None for text in texts.values()], cleaned)
        for judge in self._filters:
            self._drop(texts, judge(list(texts.values())), cleaned)
        pieces: dict[int, list[str]] = {}
        if self._splitter is not None:
            self._judge_words(self._splitter, texts, pieces, cleaned)
        cleaned.dropped.sort()
        self._pack(entries, texts, pieces, cleaned)
        return cleaned

    def _count(self, entries: Sequence[DocumentEntry]) -> CleanedBlock:
        """Returns all occurrences of evaluation runs in a block."""
        cleaned = CleanedBlock(len(entries))
        if self._splitter is not None and self.evaluation is not None:
            texts = [entry.text for entry in entries if entry.text is not None]
            matches = self.evaluation.matches(self._splitter.split(texts))
            cleaned.runs = np.array([match.run for block_matches in matches for match in block_matches], np.int64)
            cleaned.run_texts = np.repeat(np.arange(len(texts)), [len(block_matches) for block_matches in matches])
            if self.options.exact_duplicates:
                cleaned.digests = _digests(texts)
        return cleaned

    def _judge_words(
        self, splitter: WordSplitter, texts: dict[int, str], pieces: dict[int, list[str]], cleaned: CleanedBlock
    ) -> None:
        """Applies everything that needs words: repetition, contamination and signatures."""
        index_of = {number: index for index, number in enumerate(texts)}
        words = splitter.split(list(texts.values()))
        if self._repetition is not None:
            self._drop(texts, self._repetition.rejections(list(texts.values()), words), cleaned)
        if self.evaluation is not None:
            matches = self.evaluation.matches(words)
            self._drop(
                texts,
                [self._cut(number, text, matches[index_of[number]], pieces, cleaned) for number, text in texts.items()],
                cleaned,
            )
        if self._signer is not None:
            left = words.of([index_of[number] for number in texts])
            cleaned.signatures, cleaned.band_keys = self._signer.sign(list(texts.values()), left)

    def _cut(
        self, number: int, text: str, matches: Sequence[Match], pieces: dict[int, list[str]], cleaned: CleanedBlock
    ) -> Rejection | None:
        choice = self.options.contamination
        if not matches or choice is None:
            return None
        shown = text[matches[0].start : matches[0].stop][: 4 * SHOWN_CHARACTERS]
        if choice.drops:
            return Rejection(CONTAMINATED, shown)
        cut = parts_around(text, matches, choice)
        if not cut or len(cut) > choice.maximum_pieces:
            return Rejection(CONTAMINATED, f"{len(cut)} pieces left: {shown}")
        pieces[number] = cut
        cleaned.changed.append(TextChange(number, CUT, shown[:SHOWN_CHARACTERS], f"{len(cut)} pieces left"))
        return None

    def _repaired(self, number: int, text: str, cleaned: CleanedBlock) -> str:
        if self._repair is not None:
            better = self._repair.repaired(text)
            if better != text:
                cleaned.changed.append(_change(number, REPAIRED, text, better))
                text = better
        if self.options.normalize_space:
            better = with_plain_spaces(text)
            if better != text:
                cleaned.changed.append(_change(number, SPACES, text, better))
                text = better
        return text

    @staticmethod
    def _drop(texts: dict[int, str], rejections: Sequence[Rejection | None], cleaned: CleanedBlock) -> None:
        """Removes rejected texts from `texts`."""
        for number, rejection in zip(list(texts), rejections, strict=True):
            if rejection is not None:
                shown = texts.pop(number)[:SHOWN_CHARACTERS]
                cleaned.dropped.append(DroppedDocument(number, rejection.reason, rejection.detail, shown))

    def _pack(
        self,
        entries: Sequence[DocumentEntry],
        texts: dict[int, str],
        pieces: dict[int, list[str]],
        cleaned: CleanedBlock,
    ) -> None:
        options = self.options
        lines = [
            b"".join([line_of(entries[number], options.key, piece) + b"\n" for piece in pieces.get(number, (text,))])
            for number, text in texts.items()
        ]
        cleaned.passed = np.fromiter(texts, np.int64, len(texts))
        cleaned.sizes = np.array([len(line) for line in lines], np.int64)
        cleaned.pieces = np.array([len(pieces.get(number, "1")) for number in texts], np.int64)
        cleaned.output = b"".join(lines)
        if options.exact_duplicates:
            cleaned.digests = _digests(texts.values())
        if options.keep_originals:
            originals = [entry.raw if entry.raw is not None else _unwritten(entry, options.key) for entry in entries]
            cleaned.original_sizes = np.array([len(line) for line in originals], np.int64)
            cleaned.originals = b"".join(originals)


class CleanWork(BlockWork[CleanedBlock]):
    """Cleans blocks."""

    title = "cleaning"

    def __init__(self, cleaner: Cleaner) -> None:
        self.cleaner = cleaner

    def recipe(self) -> tuple[Callable[..., CleanWork], tuple[Any, ...]]:
        return _rebuilt, (self.cleaner.options, self.cleaner.evaluation, self.cleaner.counts)

    def run(self, block: InputBlock) -> CleanedBlock:
        return self.cleaner.clean(block)

    def pack(self, result: CleanedBlock) -> Message:
        kinds: dict[str, Any] = {}
        buffers: list[Any] = []
        for name in (entry.name for entry in fields(result)):
            value = getattr(result, name)
            if isinstance(value, bytes):
                kinds[name] = None
                buffers.append(value)
            elif isinstance(value, np.ndarray):
                kinds[name] = [value.dtype.str, list(value.shape)]
                buffers.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        counts = {"lines": result.lines, "dropped": result.dropped, "changed": result.changed}
        return Message({**counts, "kinds": kinds}, buffers)

    def unpack(self, facts: dict[str, Any], buffers: list[bytearray], reply: Callable[[Any], None]) -> CleanedBlock:
        cleaned = CleanedBlock(
            facts["lines"],
            [DroppedDocument(*entry) for entry in facts["dropped"]],
            [TextChange(*entry) for entry in facts["changed"]],
        )
        for (name, kind), data in zip(facts["kinds"].items(), buffers, strict=True):
            setattr(cleaned, name, bytes(data) if kind is None else np.frombuffer(data, kind[0]).reshape(kind[1]))
        return cleaned


def _rebuilt(options: CleanOptions, evaluation: EvaluationSets | None, counts: bool) -> CleanWork:
    return CleanWork(Cleaner(options, evaluation, counts))


def text_digest(text: str) -> bytes:
    """Returns a 16-byte digest that is equal for texts that differ only in spaces and Unicode composition (NFC).

    BLAKE2b: the probability of a collision among n texts is about n² / 2^129.
    """
    plain = " ".join(text.split())
    if not plain.isascii():
        plain = unicodedata.normalize("NFC", plain)
    return hashlib.blake2b(plain.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _digests(texts: Iterable[str]) -> npt.NDArray[np.uint64]:
    return np.frombuffer(b"".join([text_digest(text) for text in texts]), np.uint64).reshape(-1, 2)


def _filters(options: CleanOptions) -> Iterator[DocumentFilter]:
    """Yields the enabled filters, cheap ones first."""
    yield from length_filters(options.lengths)
    if options.gopher_quality:
        yield GopherQuality(options.minimum_stop_words).rejections
    if options.language is not None:
        yield LanguageFilter(options.language).rejections


def _change(number: int, what: str, before: str, after: str) -> TextChange:
    """Returns a change with the text around the first difference."""
    first = 0  # found in large steps first, since texts are long and mostly equal
    step = _COMPARED_CHARACTERS
    while step:
        while before[first : first + step] == after[first : first + step] and first + step <= len(before):
            first += step
        step //= 8
    start = max(0, first - _BEFORE_A_CHANGE)
    return TextChange(number, what, before[start : start + SHOWN_CHARACTERS], after[start : start + SHOWN_CHARACTERS])


def _unwritten(entry: DocumentEntry, key: str) -> bytes:
    """Returns the JSON line for an input without lines; empty if it was not text."""
    return b"" if entry.text is None else line_of(entry, key, entry.text)
