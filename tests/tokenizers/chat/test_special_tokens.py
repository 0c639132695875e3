"""Guarding contents, and encoding around special tokens."""

import pytest

from megatron.errors import DataError
from megatron.tokenizers.chat.special_tokens import Guard, SpecialTokens, private_characters
from tests.tokenizers.chat.tokenizers_with_tokens import hugging_face_with

TOKENS = ("<usr>", "</s>", "<s>")


@pytest.fixture(scope="module")
def special(tmp_path_factory):
    return SpecialTokens(hugging_face_with(tmp_path_factory.mktemp("hf"), TOKENS, "</s>"))


@pytest.mark.parametrize(
    ("content", "guarded"),
    [
        ("a<usr>b", "a<|usr>b"),
        (" <s> ", " <|s> "),
        ("plain", "plain"),
        ("", ""),
        ("  ", "  "),
        ("ends with <us", "ends with <us|"),
        ("sr> begins", "|sr> begins"),
        (" > ", " |> "),
        ("a < b", "a < b"),
    ],
)
def test_marks_stand_where_a_token_could_be_read(content, guarded, special):
    guard = Guard(special, [content])
    assert guard.mark_tokens(content) == guarded.replace("|", guard.mark)


def test_private_characters_are_those_that_no_text_has():
    first, second = private_characters(["a", "\U000f0000\U000f0002"], 2)
    assert private_characters(["a"], 2) == ["\U000f0000", "\U000f0001"]
    assert (first, second) == ("\U000f0001", "\U000f0003")
    with pytest.raises(DataError, match="every private-use character"):
        private_characters(["".join(map(chr, range(0xF0000, 0xFFFFE)))], 1)


def test_pieces_end_at_tokens_and_at_cuts(tmp_path):
    special = SpecialTokens(hugging_face_with(tmp_path, ("<usr>", "</s>"), "</s>"))
    text = "ab<usr>cdef</s>"
    pieces = list(special.split(text, [1, 9, 15]))
    assert [text[first:last] for first, last, _ in pieces] == ["a", "b", "<usr>", "cd", "ef", "</s>"]
    assert [number for _, _, number in pieces if number is not None] == [special.ids["<usr>"], special.ids["</s>"]]
    assert special.first_after(text, 0, len(text)) == (2, 7)
    assert special.first_after(text, 3, 14) is None
    assert (special.end_at(text, 2), special.end_at(text, 3)) == (7, 3)


def test_tokenizer_that_makes_special_tokens_of_letters_is_refused(tmp_path):
    special = SpecialTokens(hugging_face_with(tmp_path, ("<usr>", "§", "</s>"), "</s>"))
    with pytest.raises(DataError, match="letters of '§' as a special token"):
        special.encode("§", "\U000f0000")
