"""The rules of Gopher, each with a text that keeps it and one that breaks it."""

from __future__ import annotations

import pytest

from tests.trident.corpus.cleaning.texts import PROSE
from trident.corpus.cleaning.filters.quality import GopherQuality


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (PROSE, None),
        ("the and " * 24, "quality: number of words"),
        ("the and " * 50_001, "quality: number of words"),
        ("a b of " * 40, "quality: mean word length"),
        ("extraordinarily unbelievable " * 40, "quality: mean word length"),
        (PROSE + " ####" * 4, "quality: hashes a word"),
        (PROSE + " and... so…" * 10, "quality: ellipses a word"),
        ("\n".join(f"- {word} the and more" for word in PROSE.split()), "quality: lines with a bullet"),
        (
            "\n".join(f"{word} the and some more words which are many more than ten…" for word in PROSE.split()),
            "quality: lines with an ellipsis",
        ),
        (PROSE + " 1234 5678 9012" * 15, "quality: words with a letter"),
        (PROSE[: PROSE.index(" and that is")], "quality: stop words"),
    ],
)
def test_quality(text: str, reason: str | None) -> None:
    rejection = GopherQuality(2).rejections([text])[0]
    assert (rejection.reason if rejection else None) == reason


def test_other_languages_have_other_stop_words() -> None:
    text = PROSE[: PROSE.index(" and that is")]
    assert GopherQuality(0).rejections([text]) == [None]
