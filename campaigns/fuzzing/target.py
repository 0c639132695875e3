"""A kind of file that is fuzzed, and the errors of its readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from campaigns.fuzzing.mutations import Mutation


class Broken(Exception):
    """Something was accepted that violates a rule."""


def check(holds: bool, sentence: str) -> None:
    """Raises `Broken` with the sentence unless it holds."""
    if not holds:
        raise Broken(sentence)


@dataclass(frozen=True)
class Target:
    """One kind of file.

    Args:
        files: names of the undamaged files a case begins with; one of the tuples is drawn.
        read: takes the folder of the case, the undamaged folder and a source of randomness.
        position: what a refusal must name besides a file.
        share: of all cases, relative to the other targets.
        longest_letters: of a refusal.
        names: what a refusal must say to name the file.
    """

    name: str
    files: tuple[tuple[str, ...], ...]
    mutations: Mapping[str, Mutation]
    read: Callable[[Path, Path, Random], None]
    position: str = ""
    share: float = 1.0
    longest_letters: int = 4000
    names: str = r"/case/|/undamaged?|split-paths|data prefix"  # files of a case, those it names, the flag that does
