"""Blocks to token ids: end-of-document ids, empty documents, sentences, and bad lines."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.corpus.inputs.block import InputBlock
from megatron.corpus.preprocess.encode import BlockEncoder, EncodeOptions
from megatron.tokenizers.tokenizer import TokenizerChoice

LINES = b'{"text": "some text"}\n{"text": ""}\n{"text": "more"}\n'


def block(data: bytes) -> InputBlock:
    return InputBlock("in.jsonl", 0, len(data), data, len(data))


@pytest.mark.parametrize("append_eod", [True, False])
def test_ids_are_the_tokenizers_and_empty_documents_are_skipped(choice: TokenizerChoice, append_eod: bool) -> None:
    encoder = BlockEncoder(EncodeOptions(choice, append_eod=append_eod))
    end = [encoder.tokenizer.eod_id] if append_eod else []
    expected = [encoder.tokenizer.encode(text) + end for text in ("some text", "more")]
    encoded = encoder.encode(block(LINES))
    ids = encoded.keys[0].ids
    assert ids is not None and ids.dtype == encoder.dtype
    assert ids.tolist() == [*expected[0], *expected[1]] and encoded.keys[0].lengths.tolist() == list(map(len, expected))
    assert (encoded.lines, encoded.empty, encoded.keys[0].documents) == (3, 1, 2)


def test_a_bad_line_stops_the_block_unless_it_is_skipped(choice: TokenizerChoice) -> None:
    data = LINES + b"no json\n"
    stopped = BlockEncoder(EncodeOptions(choice)).encode(block(data))
    assert stopped.keys == () and [bad.line for bad in stopped.bad] == [3]
    skipped = BlockEncoder(EncodeOptions(choice, skip_bad_lines=True)).encode(block(data))
    assert skipped.keys[0].documents == 2 and skipped.bad_count == 1


def test_each_key_and_level_names_a_pair(choice: TokenizerChoice) -> None:
    assert EncodeOptions(choice, ("text", "title")).prefixes("out") == ("out_text_document", "out_title_document")


def test_the_cached_layout_takes_wide_ids(choice: TokenizerChoice) -> None:
    assert BlockEncoder(EncodeOptions(choice, is_cached=True)).dtype == np.int32
