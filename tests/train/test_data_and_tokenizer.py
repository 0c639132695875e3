"""A run whose tokenizer is not that of its data is refused before anything is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.config import parse
from megatron.errors import DataError
from megatron.tokenizers.tokenizer import build_tokenizer
from megatron.train.build import open_run
from tests.helpers.tiny_run import write_tiny_corpus
from tests.helpers.vocabulary import hard_documents, write_vocabulary
from trident.corpus.preprocess.encode import EncodeOptions
from trident.corpus.preprocess.preprocess_corpus import preprocess
from trident.corpus.workers.progress_line import ProgressLine


def test_data_of_another_tokenizer_is_rejected(tmp_path: Path) -> None:
    corpus = write_tiny_corpus(tmp_path)
    (tmp_path / "other").mkdir()
    choice = write_vocabulary(tmp_path / "other", 520)
    text = tmp_path / "in.jsonl"
    text.write_text("".join(json.dumps({"text": words}) + "\n" for words in hard_documents(20)))
    preprocess((str(text),), str(tmp_path / "mine"), EncodeOptions(choice), 1, ProgressLine(None, 1, lambda line: None))
    made, given = build_tokenizer(choice), build_tokenizer(parse(corpus.flags()).data)
    message = (
        rf"mine_text_document was made with another tokenizer \(GPT2BPETokenizer, fingerprint {made.fingerprint[:12]}, "
        rf"{made.vocab_size} tokens\) than this run's \(GPT2BPETokenizer, {given.fingerprint[:12]}, 600 tokens\)"
    )
    prefixes = ("0.5", corpus.prefix, "0.5", f"{tmp_path}/mine_text_document")
    with (
        pytest.raises(DataError, match=message),
        open_run(parse(corpus.flags(data_path=prefixes))),
    ):
        pass
