"""Undoes the spacing of data sets that were published as words between blanks, so that a tokenizer meets plain text.

The rules run in their order. A pair of quotes or brackets loses the white space inside of it.

Source: bigscience Megatron-DeepSpeed `tasks/zeroshot_gpt/detokenizer.py`. Left out is a rule for `/' 5/`, which there
replaces the digit by the text of a pattern.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

Rule = Callable[[str], str]


def _replace(*pairs: tuple[str, str]) -> tuple[Rule, ...]:
    return tuple(lambda text, pair=pair: text.replace(*pair) for pair in pairs)  # type: ignore[misc]


def _trim_inside(opening: str, closing: str) -> Rule:
    pattern = re.compile(f"{re.escape(opening)}([^{re.escape(closing)}]*){re.escape(closing)}")
    return lambda text: pattern.sub(lambda inside: opening + inside.group(1).strip() + closing, text)


def _words_between_white_space(text: str) -> int:
    return len(text.split())


def _words_between_blanks(text: str) -> int:
    """A line end between blanks counts as a word, as it does in the published perplexities of these data sets."""
    return len(text.strip().split(" "))


@dataclass(frozen=True)
class Detokenizer:
    """How a data set was spaced.

    Attributes:
        rules: what makes plain text of it.
        count_words: the number of words that an adjusted perplexity refers to, in the text as published.
    """

    rules: tuple[Rule, ...]
    count_words: Callable[[str], int]

    def __call__(self, text: str) -> str:
        """The plain text."""
        for rule in self.rules:
            text = rule(text)
        return text


_WIKITEXT = (
    *_replace(("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")),
    *_replace(*((f" {mark} ", f"{mark} ") for mark in ":;.!?,")),
    _trim_inside("(", ")"),
    _trim_inside("[", "]"),
    _trim_inside("{", "}"),
    _trim_inside('"', '"'),
    _trim_inside("'", "'"),
    *_replace(("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}")),
    *_replace((" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")),
)
_PENN_TREEBANK = _replace(
    (" '", "'"), (" \n", "\n"), ("\n ", "\n"), (" n't", "n't"), (" N ", "1 "), ("$ 1", "$1"), ("# 1", "#1")
)

DETOKENIZERS = {
    "none": Detokenizer((), _words_between_white_space),
    "wikitext": Detokenizer(_WIKITEXT, _words_between_blanks),
    "ptb": Detokenizer(_PENN_TREEBANK, _words_between_blanks),
}
