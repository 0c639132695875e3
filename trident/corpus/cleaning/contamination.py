"""Decontamination: finds word runs of evaluation texts in training texts, and cuts documents around them.

Source: upstream's `tools/openwebtext/filter_ngrams.py` and its defaults, after Brown et al. 2020, Language Models are
Few-Shot Learners, appendix C.
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
    """A word run shared with an evaluation text: its range of characters, and the index of the run."""

    start: int
    stop: int
    run: int


@dataclass(frozen=True)
class RunSet:
    """The runs of one length in evaluation texts.

    Args:
        first: index of the first run among the runs of all lengths.
        maybe: filter by the low bits of a hash, faster than a lookup in the sorted hashes.

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
        """Creates a set of hashes without ignored ones."""
        hashes = np.unique(hashes)
        least, most = _FILTER_BITS
        maybe = np.zeros(1 << min(max(least, (len(hashes) * 16).bit_length()), most), np.bool_)
        maybe[hashes & np.uint64(len(maybe) - 1)] = True
        return RunSet(length, first, hashes, np.zeros(len(hashes), np.bool_), maybe)

    def find(self, hashes: Hashes) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Returns the indices of the hashes that are in the set, and the index of the run of each."""
        candidates = np.flatnonzero(self.maybe[hashes & np.uint64(len(self.maybe) - 1)])
        slots = np.minimum(np.searchsorted(self.hashes, hashes[candidates]), len(self.hashes) - 1)
        is_known = (self.hashes[slots] == hashes[candidates]) & ~self.ignored[slots]
        return candidates[is_known], slots[is_known] + self.first


class EvaluationSets:
    """The word runs of all evaluation texts.

    A text with fewer words than a run yields one shorter run, if it has at least `shortest_run` words.

    Raises:
        ConfigError: a file is missing or unsupported, or no run was found.
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
                f"--decontaminate {' '.join(choice.files)}: no text has {choice.shortest_run} words or more, so "
                "nothing can match. Check the files, or decrease --min-ngram."
            )

    def __len__(self) -> int:
        return sum(len(run_set.hashes) for run_set in self.sets)

    def ignore(self, occurrences: npt.NDArray[np.int64]) -> int:
        """Ignores runs that occur in the corpus more often than allowed; returns their number.

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
        """Returns the runs that each text shares with evaluation texts, from left to right."""
        by_document: list[list[Match]] = [[] for _ in range(len(words.bounds) - 1)]
        for run_set in self.sets:
            hashes, fits = words.runs(run_set.length)
            positions, runs = run_set.find(hashes)
            kept = fits[positions]
            positions, runs = positions[kept], runs[kept]
            texts = np.searchsorted(words.bounds, positions, side="right") - 1
            stops = words.ends[positions + run_set.length - 1]
            for text, *match in zip(
                texts.tolist(), words.starts[positions].tolist(), stops.tolist(), runs.tolist(), strict=True
            ):
                by_document[text].append(Match(*match))
        for matches in by_document:
            matches.sort()
        return by_document


def _files(values: Sequence[str]) -> Sequence[str]:
    """Returns the evaluation files, with patterns and folders expanded.

    Raises:
        ConfigError: a file cannot be read or is not supported.
    """
    try:
        files = expand_inputs(values, "\n")
        check_inputs(files)
    except ConfigError as failure:
        raise ConfigError([text.replace("--input", "--decontaminate") for text in failure.problems]) from failure
    for path in files:
        if path == STANDARD_INPUT or layout_of(path, "\n") == "parquet":
            raise ConfigError(f"--decontaminate {path} is not supported. Use .jsonl or .txt files.")
    return files


def parts_around(text: str, matches: Sequence[Match], choice: ContaminationChoice) -> list[str]:
    """Returns the parts of a text around its matches.

    Overlapping matches are joined. On either side `margin` characters and the rest up to the nearest sentence end are
    removed, too, and finally all parts with fewer characters than `shortest_piece`.
    """
    parts = []
    part_start = 0
    for start, stop in _joined(matches):
        if stop + choice.margin <= part_start:
            continue
        parts.append(text[part_start : _last_sentence_end(text, part_start, start - choice.margin)].strip())
        end = _SENTENCE_END.search(text, min(stop + choice.margin, len(text)))
        part_start = len(text) if end is None else end.end()
    parts.append(text[part_start:].strip())
    return [part for part in parts if len(part) >= max(1, choice.shortest_piece)]


def _joined(matches: Sequence[Match]) -> list[tuple[int, int]]:
    """Returns the ranges of joined overlapping matches."""
    joined: list[tuple[int, int]] = []
    for match in matches:
        if joined and match.start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], match.stop))
        else:
            joined.append((match.start, match.stop))
    return joined


def _last_sentence_end(text: str, start: int, stop: int) -> int:
    """Returns the last sentence end between two positions; `start` if there is none."""
    return max([text.rfind(mark, start, max(start, stop + 1)) + 1 for mark in ".!?。！？"] + [start])


def _evaluation_texts(block: InputBlock) -> Iterator[str]:
    """Yields the texts of a block: lines of plain text, or all strings in a JSON line, at any depth."""
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
                f"{block.source}: byte offset {offset}: the line cannot be read ({failure}). --decontaminate reads "
                "JSON lines, and plain text in .txt files."
            ) from failure
        offset += len(line) + 1


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
