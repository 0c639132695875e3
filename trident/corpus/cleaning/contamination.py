"""Evaluation texts inside training texts: runs of words that both contain, and how documents are cut around them.

Source: upstream's `tools/openwebtext/filter_ngrams.py` and its defaults; the idea is Brown et al. 2020, Language Models
are Few-Shot Learners, appendix C.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.errors import ConfigError, DataError
from trident.corpus.cleaning.documents.clean_options import ContaminationChoice
from trident.corpus.cleaning.documents.words import Hashes, Words, WordSplitter
from trident.corpus.inputs.block import InputBlock
from trident.corpus.inputs.input_blocks import blocks, check_inputs
from trident.corpus.inputs.input_paths import STANDARD_INPUT, expand_inputs, layout_of

_BLOCK_BYTES = 1 << 20
_FILTER_BITS = (16, 26)
_SENTENCE_END = re.compile(r"[.!?。！？]")


class Match(NamedTuple):
    """A run of words that an evaluation text has too: its characters, and the number of the run."""

    start: int
    stop: int
    run: int


@dataclass(frozen=True)
class RunSet:
    """The runs of one length that evaluation texts have.

    Args:
        first: number of the first run among the runs of all lengths.
        maybe: whether a run with these low bits may be there, which is faster to look up than the sorted hashes.

    Shapes:
        hashes: uint64 [n], sorted; ignored: bool [n]; maybe: bool [a power of two].
    """

    length: int
    first: int
    hashes: Hashes
    ignored: npt.NDArray[np.bool_]
    maybe: npt.NDArray[np.bool_]

    @staticmethod
    def of(length: int, first: int, hashes: Hashes) -> RunSet:
        """A set of hashes, none of which is ignored."""
        hashes = np.unique(hashes)
        least, most = _FILTER_BITS
        maybe = np.zeros(1 << min(max(least, (len(hashes) * 16).bit_length()), most), np.bool_)
        maybe[hashes & np.uint64(len(maybe) - 1)] = True
        return RunSet(length, first, hashes, np.zeros(len(hashes), np.bool_), maybe)

    def find(self, hashes: Hashes) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Which of the hashes are there, and the number of each."""
        candidates = np.flatnonzero(self.maybe[hashes & np.uint64(len(self.maybe) - 1)])
        places = np.minimum(np.searchsorted(self.hashes, hashes[candidates]), len(self.hashes) - 1)
        there = (self.hashes[places] == hashes[candidates]) & ~self.ignored[places]
        return candidates[there], places[there] + self.first


class EvaluationSets:
    """The runs of words of all evaluation texts.

    A text with fewer words than a run gives one shorter run, if it has at least `shortest_run` words.

    Raises:
        ConfigError: a file is missing or of another kind, or none gives a run.
        DataError: a file is damaged.
    """

    def __init__(self, choice: ContaminationChoice) -> None:
        self.choice = choice
        self.sets: list[RunSet] = []
        files = _files(choice.files)
        by_length: dict[int, list[Hashes]] = {}
        splitter = WordSplitter()
        for block in blocks(files, _BLOCK_BYTES, "\n"):
            words = splitter.split(list(_evaluation_texts(block)))
            counts = np.diff(words.bounds)
            for length in sorted({min(count, choice.run) for count in counts.tolist()}):
                if length >= choice.shortest_run:
                    hashes, fits = words.runs(length)
                    if length < choice.run:
                        fits = np.zeros(len(fits), np.bool_)
                        fits[words.bounds[:-1][counts == length]] = True
                    by_length.setdefault(length, []).append(hashes[fits])
        for length, parts in sorted(by_length.items()):
            self.sets.append(RunSet.of(length, len(self), np.concatenate(parts)))
        if not self.sets:
            raise ConfigError(
                f"--decontaminate {' '.join(choice.files)}: no text in them has {choice.shortest_run} words or more, "
                "so nothing could ever match. Check the files, or lower --min-ngram."
            )

    def __len__(self) -> int:
        return sum(len(run_set.hashes) for run_set in self.sets)

    def ignore(self, occurrences: npt.NDArray[np.int64]) -> int:
        """Leaves out runs that occur more often in the corpus than the choice allows; gives how many there are.

        Shapes:
            occurrences: int64 [len(self)].
        """
        too_many = occurrences > self.choice.maximum_occurrences
        self.sets = [
            replace(run_set, ignored=too_many[run_set.first : run_set.first + len(run_set.hashes)])
            for run_set in self.sets
        ]
        return int(np.count_nonzero(too_many))

    def matches(self, words: Words) -> list[list[Match]]:
        """For each text the runs that it shares with evaluation texts, from left to right."""
        by_document: list[list[Match]] = [[] for _ in range(len(words.bounds) - 1)]
        for run_set in self.sets:
            hashes, fits = words.runs(run_set.length)
            places, runs = run_set.find(hashes)
            kept = fits[places]
            places, runs = places[kept], runs[kept]
            texts = np.searchsorted(words.bounds, places, side="right") - 1
            stops = words.ends[places + run_set.length - 1]
            for text, *match in zip(
                texts.tolist(), words.starts[places].tolist(), stops.tolist(), runs.tolist(), strict=True
            ):
                by_document[text].append(Match(*match))
        for matches in by_document:
            matches.sort()
        return by_document


def _files(values: Sequence[str]) -> Sequence[str]:
    """Evaluation files, after patterns and folders are opened.

    Raises:
        ConfigError: one cannot be read or is of another kind.
    """
    try:
        files = expand_inputs(values, "\n")
        check_inputs(files)
    except ConfigError as failure:
        raise ConfigError([text.replace("--input", "--decontaminate") for text in failure.problems]) from failure
    for path in files:
        if path == STANDARD_INPUT or layout_of(path, "\n") == "parquet":
            raise ConfigError(f"--decontaminate {path} is not read here. Give .jsonl or .txt files.")
    return files


def pieces_around(text: str, matches: Sequence[Match], choice: ContaminationChoice) -> list[str]:
    """What is left of a text when its matches are cut out.

    Matches that overlap are one. `margin` characters on either side are cut with them, and from there up to the nearest
    sentence end. Pieces with fewer characters than `shortest_piece` are dropped too.
    """
    pieces = []
    begin = 0
    for start, stop in _joined(matches):
        if stop + choice.margin <= begin:
            continue
        pieces.append(text[begin : _last_sentence_end(text, begin, start - choice.margin)].strip())
        end = _SENTENCE_END.search(text, min(stop + choice.margin, len(text)))
        begin = len(text) if end is None else end.end()
    pieces.append(text[begin:].strip())
    return [piece for piece in pieces if len(piece) >= max(1, choice.shortest_piece)]


def _joined(matches: Sequence[Match]) -> list[tuple[int, int]]:
    """Where matches that overlap begin and end together."""
    joined: list[tuple[int, int]] = []
    for match in matches:
        if joined and match.start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], match.stop))
        else:
            joined.append((match.start, match.stop))
    return joined


def _last_sentence_end(text: str, begin: int, stop: int) -> int:
    """Where the last sentence between two places ends; `begin` if none does."""
    return max([text.rfind(mark, begin, max(begin, stop + 1)) + 1 for mark in ".!?。！？"] + [begin])


def _evaluation_texts(block: InputBlock) -> Iterator[str]:
    """Every text of a block: lines of plain text, or all strings in a line of JSON, however deeply nested."""
    data = block.read()
    offset = block.start
    for line in data.split(b"\n"):
        try:
            text = line.decode("utf-8-sig")
            if block.layout == "text":
                yield text
            elif text.strip():
                yield from _strings(json.loads(text))
        except (ValueError, RecursionError) as failure:
            raise DataError(
                f"{block.source}: byte offset {offset}: the line cannot be read ({failure}). --decontaminate takes "
                "lines of JSON, and plain text in files that end in .txt."
            ) from failure
        offset += len(line) + 1


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
