"""Which sequences belong to training, validation and test: the texts of the data flags, made into ranges and weights.

Source: bigscience Megatron-DeepSpeed `megatron/data/dataset_utils.py` and `megatron/arguments.py` (weighted split paths);
NVIDIA Megatron-LM `megatron/core/datasets/blended_megatron_dataset_config.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.errors import ConfigError

_EXAMPLE = '"NAME: 0.7 0:0.95 PREFIX, 0.3 0:0.95 PREFIX"'


@dataclass(frozen=True)
class SourceRange:
    """One token file and the share of its sequences that a group uses, with its weight in the group.

    Args:
        prefix: data prefix, the path without suffix.
        weight: share of the group's samples; weights of a group need not sum to 1.
        start, end: fractions of the file for `--*-weighted-split-paths`, else None.
    """

    prefix: str
    weight: float
    start: float | None = None
    end: float | None = None


def split_fractions(split: str) -> tuple[float, float, float]:
    """Reads `969,30,1`, `969/30/1` or `1` into fractions for training, validation and test that sum to 1.

    Raises:
        ConfigError: not numbers, a negative or infinite number, more than three of them, or nothing but zeros.
    """
    separator = next((mark for mark in (",", "/") if mark in split), None)
    words = split.split(separator) if separator else [split]
    if len(words) > 3:
        raise ConfigError(f"--split {split} has {len(words)} parts; it takes up to three: training, validation, test.")
    try:
        parts = [float(word) for word in words]
    except ValueError:
        raise ConfigError(f"--split {split} is not a list of numbers; write for example --split 969,30,1.") from None
    if any(not math.isfinite(part) or part < 0 for part in parts) or sum(parts) <= 0:
        raise ConfigError(f"--split {split} must hold numbers of at least 0, not all of them 0; for example 969,30,1.")
    first, second, third = (*parts, 0.0, 0.0)[:3]
    total = first + second + third
    return first / total, second / total, third / total


def split_boundaries(split: str, size: int, rule: str = "bigscience") -> tuple[int, int, int, int]:
    """Cuts `size` sequences into three consecutive ranges: [b0, b1), [b1, b2), [b2, b3).

    Rounding leaves a surplus or a gap at the end; bigscience takes it from all three upper boundaries, NVIDIA rounds running sums
    and has none.

    Args:
        rule: "bigscience" or "nvidia".

    Raises:
        ConfigError: `split` is not understood.
    """
    fractions = split_fractions(split)
    bounds = [0]
    if rule == "nvidia":
        running = 0.0
        for fraction in fractions:
            running += fraction
            bounds.append(round(running * size))
    else:
        for fraction in fractions:
            bounds.append(bounds[-1] + round(fraction * size))
        surplus = bounds[3] - size
        bounds[1:] = [bound - surplus for bound in bounds[1:]]
    clipped = [min(max(bound, 0), size) for bound in bounds]
    return clipped[0], clipped[1], clipped[2], clipped[3]


def fraction_boundaries(start: float, end: float, size: int) -> tuple[int, int]:
    """The range of sequences that `START:END` of a weighted split path names."""
    return round(start * size), round(end * size)


def parse_data_path(words: Sequence[str], flag: str = "--data-path") -> tuple[tuple[SourceRange, ...], bool]:
    """Reads `PREFIX` or `WEIGHT PREFIX WEIGHT PREFIX …`; the second value says whether it was a blend.

    Raises:
        ConfigError: not alternating weights and prefixes, or a weight that is no number of at least 0.
    """
    if len(words) == 1:
        return (SourceRange(words[0], 1.0),), False
    if not words or len(words) % 2:
        raise ConfigError(
            f"{flag} {' '.join(words)} has {len(words)} words; give one prefix, or WEIGHT PREFIX pairs such as "
            f"{flag} 0.7 first_text_document 0.3 second_text_document."
        )
    sources = tuple(
        SourceRange(prefix, _weight(weight, f"{flag} {weight} {prefix}"))
        for weight, prefix in zip(words[::2], words[1::2], strict=True)
    )
    _check_some_weight(sources, flag)
    return sources, True


def parse_weighted_group(text: str, flag: str) -> tuple[str, tuple[SourceRange, ...]]:
    """Reads `NAME: WEIGHT START:END PREFIX, …` into the group's name and its sources.

    Raises:
        ConfigError: another shape, fractions outside 0 ≤ START < END ≤ 1, or a weight that is no number of at least 0.
    """
    name, colon, rest = text.strip().strip('"').partition(":")
    if not colon or not name.strip() or not rest.strip():
        raise ConfigError(f"{flag} {text!r} must look like {_EXAMPLE}.")
    sources = tuple(_weighted_source(entry, flag) for entry in rest.split(","))
    _check_some_weight(sources, flag)
    return name.strip(), sources


def _weighted_source(entry: str, flag: str) -> SourceRange:
    words = entry.split()
    if len(words) != 3:
        raise ConfigError(f"{flag}: {entry.strip()!r} has {len(words)} words, not WEIGHT START:END PREFIX; write {_EXAMPLE}.")
    start_text, _, end_text = words[1].partition(":")
    try:
        start, end = float(start_text), float(end_text)
    except ValueError:
        raise ConfigError(f"{flag}: {words[1]!r} in {entry.strip()!r} is not START:END, for example 0:0.95.") from None
    if not 0 <= start < end <= 1:
        raise ConfigError(f"{flag}: {words[1]} in {entry.strip()!r} must satisfy 0 ≤ START < END ≤ 1.")
    return SourceRange(words[2], _weight(words[0], f"{flag} {entry.strip()}"), start, end)


def _weight(word: str, where: str) -> float:
    try:
        weight = float(word)
    except ValueError:
        raise ConfigError(f"{where}: the weight {word!r} is not a number. Give WEIGHT PREFIX pairs, or one prefix.") from None
    if not math.isfinite(weight) or weight < 0:
        raise ConfigError(f"{where}: the weight {word} must be a number of at least 0.")
    return weight


def _check_some_weight(sources: Sequence[SourceRange], flag: str) -> None:
    if not sum(source.weight for source in sources) > 0:
        raise ConfigError(f"{flag}: all weights are 0; at least one data set needs a weight above 0.")
