"""A vocabulary and files of sentences, made once."""

import pytest

from megatron.data.datasets.masked.vocabulary import MaskedVocabulary
from tests.data.datasets.masked.corpora import tokenizer_of, write_sentences


@pytest.fixture(scope="session")
def word_tokenizer(tmp_path_factory):
    return tokenizer_of(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="session")
def vocabulary(word_tokenizer):
    return MaskedVocabulary.of(word_tokenizer, needs_all=True)


@pytest.fixture(scope="session")
def sentences(tmp_path_factory):
    return write_sentences(tmp_path_factory.mktemp("sentences") / "corpus_text_sentence")
