"""The detokenizers against texts as they were published and as they should read."""

from __future__ import annotations

import pytest

from trident.evaluate.tasks.perplexity import DETOKENIZERS

WIKITEXT = DETOKENIZERS["wikitext"]
PTB = DETOKENIZERS["ptb"]


@pytest.mark.parametrize(
    ("published", "plain"),
    [
        ("a well @-@ known song", "a well-known song"),
        ("1 @,@ 000 @.@ 5 km", "1,000.5 km"),
        ("first ; second : third , end . Next ! Yes ? No", "first; second: third, end. Next! Yes? No"),
        ("( in 1999 ) and [ sic ] and { set }", "(in 1999) and [sic] and {set}"),
        ('he said " hello " to', 'he said "hello" to'),
        ("the ' big ' one", "the 'big' one"),
        ("the dogs ' house", "the dogs' house"),
        ("it is Ada 's book", "it is Ada's book"),
        (" \n = Title = \n \n text", "\n= Title =\n\ntext"),
        (" = = Part = = \n", " == Part ==\n"),
        ("= = = Sub = = =", "=== Sub ==="),
        ("20 ° C", "20°C"),
        ("x N y", "x 1 y"),
        ("<unk> stays", "<unk> stays"),
        ('an odd " quote', 'an odd " quote'),
        ("", ""),
    ],
)
def test_wikitext(published: str, plain: str) -> None:
    assert WIKITEXT(published) == plain


@pytest.mark.parametrize(
    ("published", "plain"),
    [
        ("do n't say it 's \n so", "don't say it's\nso"),
        ("about N million", "about1 million"),  # upstream's rule drops the blank before the number
        ("cost $ N and # N", "cost $1 and # N"),
    ],
)
def test_penn_treebank(published: str, plain: str) -> None:
    assert PTB(published) == plain


def test_words_are_counted_in_the_text_as_published() -> None:
    text = " \n = Title = \n \n a @-@ b . \n "
    assert WIKITEXT.count_words(text) == len(["=", "Title", "=", "\n", "\n", "a", "@-@", "b", "."])
    assert DETOKENIZERS["none"].count_words(" a  b\n c ") == 3


def test_a_long_run_of_blanks_in_an_open_quote_takes_no_long_time() -> None:
    assert WIKITEXT('"' + " " * 200_000 + "x").endswith("x")
