"""What a tokenizer puts around texts: before a prompt, and never after one."""

from pathlib import Path

import pytest

from megatron.tokenizers.prompts import (
    encode_continuation,
    encode_document,
    encode_prompt,
    start_ids,
    strip_special_tokens,
)
from tests.tokenizers.framed import FRAMES, framed_tokenizer
from tests.trident.evaluate.fakes import EOD, ByteTokenizer

BYTES = ByteTokenizer()


@pytest.mark.parametrize("frame", FRAMES)
def test_a_prompt_begins_as_texts_do_and_does_not_end(frame: str, tmp_path: Path) -> None:
    tokenizer = framed_tokenizer(tmp_path, frame)
    begin, end = (tokenizer.special_ids[text] for text in ("<s>", "</s>"))
    first = [begin] if "<s>" in frame else []
    assert encode_prompt(tokenizer, "a cat") == [*first, *tokenizer.encode_bare("a cat")]
    assert encode_prompt(tokenizer, "") == start_ids(tokenizer) == (first or [end])
    assert encode_prompt(tokenizer, "<s>a cat") == [begin, *tokenizer.encode_bare("a cat")]


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("context", ["", " ", "def choose(", "def choose( "])
def test_only_the_continuation_is_predicted(frame: str, context: str, tmp_path: Path) -> None:
    tokenizer = framed_tokenizer(tmp_path, frame)
    tokens, first = encode_continuation(tokenizer, context, "self, seq)")
    assert first >= 1 and tokens[0] == (start_ids(tokenizer)[0] if "<s>" in frame or not context.strip() else tokens[0])
    targets = tokenizer.decode(tokens[first:])
    assert targets == context[len(context.rstrip()) :] + "self, seq)"


def test_without_a_token_to_begin_with_there_is_no_start() -> None:
    tokenizer = ByteTokenizer(has_eod=False)
    assert start_ids(tokenizer) == [] == encode_prompt(tokenizer, "")
    assert encode_continuation(tokenizer, "", "ab") == ([*b"ab"], 0)
    assert strip_special_tokens(tokenizer, [*b"ab", EOD]) == [*b"ab", EOD]
    assert encode_continuation(BYTES, "", "ab") == ([EOD, *b"ab"], 1)


@pytest.mark.parametrize("frame", FRAMES)
def test_a_document_is_its_text(frame: str, tmp_path: Path) -> None:
    tokenizer = framed_tokenizer(tmp_path, frame)
    inner = encode_document(tokenizer, "a cat")
    assert inner == strip_special_tokens(tokenizer, [*tokenizer.encode("a cat"), tokenizer.eod_id])
    assert tokenizer.decode(inner) == "a cat"
    assert strip_special_tokens(tokenizer, [tokenizer.eod_id]) == [] == encode_document(tokenizer, "")
