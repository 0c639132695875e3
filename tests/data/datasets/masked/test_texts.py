"""Documents and streams as rows, and rows with hidden tokens."""

import numpy as np
import pytest

from megatron.config import MaskingConfig
from megatron.data.datasets.masked.masked_options import MaskedOptions
from megatron.data.datasets.masked.texts import MaskedRows, TextRows
from megatron.data.datasets.row_dataset import RowDataset
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.data.order.plan import Segment
from megatron.errors import DataError
from tests.data.datasets.masked.corpora import CLS, MASK, PAD, SEP, VOCABULARY, write_texts

LENGTH = 10
EOD = VOCABULARY - 1


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts") / "corpus_text_document", [3, 30, 8, 0, 1, 7], end=EOD)


def words_of(tokens, is_text):
    return tokens[is_text].tolist()


def test_a_document_a_row_cut_or_padded(texts, vocabulary):
    rows = TextRows.of_documents(texts, 0, 6, LENGTH, vocabulary)
    tokens, is_text, segments = rows.read(np.arange(6))
    assert len(rows) == 6 and tokens.shape == is_text.shape == segments.shape == (6, LENGTH)
    for number in range(6):
        document = texts.get(number).tolist()[:-1][: LENGTH - 2]  # without its end-of-document token
        used = len(document) + 2
        assert tokens[number].tolist() == [CLS, *document, SEP] + [PAD] * (LENGTH - used)
        assert words_of(tokens[number], is_text[number]) == document
        assert segments[number].tolist() == [0] * used + [1] * (LENGTH - used)
    assert "token 5 of the file (byte offset 10)" in rows.locate(1, 2)


def test_text_that_runs_on_over_documents(texts, vocabulary):
    rows = TextRows.of_stream(texts, 1, 6, LENGTH, vocabulary)
    tokens, is_text, _ = rows.read(np.arange(len(rows)))
    stream = np.concatenate([texts.get(number) for number in range(1, 6)])
    assert len(rows) == -(-len(stream) // (LENGTH - 2)) and (tokens[:, 0] == CLS).all()
    joined = [words_of(*row) for row in zip(tokens, is_text, strict=True)]
    pieces = [stream[first : first + LENGTH - 2].tolist() for first in range(0, len(stream), LENGTH - 2)]
    assert joined == [piece[:-1] if piece[-1] == EOD else piece for piece in pieces]
    assert EOD in {word for row in joined for word in row}


def test_tokens_that_the_tokenizer_put_around_documents_are_not_doubled(tmp_path, vocabulary):
    with IndexedWriter(tmp_path / "around", np.int32) as writer:
        for document in ([CLS, 7, 8, SEP], [CLS, *range(7, 20), SEP], [CLS]):
            writer.add_document([document])
    rows = TextRows.of_documents(IndexedDataset(tmp_path / "around"), 0, 3, LENGTH, vocabulary)
    tokens, is_text, _ = rows.read(np.arange(3))
    assert tokens.tolist() == [[CLS, 7, 8, SEP] + [PAD] * 6, [CLS, *range(7, 15), SEP], [CLS, SEP] + [PAD] * 8]
    assert is_text.sum(axis=1).tolist() == [2, 8, 0]
    assert "token 5 of the file" in rows.locate(1, 1)


@pytest.fixture(scope="module")
def masked(texts, vocabulary):
    options = MaskedOptions(MaskingConfig(masked_samples="stream", mask_prob=0.4))
    rows = TextRows.of_stream(texts, 0, 6, LENGTH, vocabulary)
    return MaskedRows(RowDataset(rows, 0, len(rows), [Segment(1, 3, 20 * len(rows))]), 11, LENGTH, options, vocabulary)


def test_a_row_is_masked_anew_in_every_pass_and_the_same_for_every_reader(masked, texts, vocabulary):
    passes: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for number in range(len(masked)):
        sample = masked.read(number)
        assert (sample.tokens == sample.labels)[~sample.loss_mask].all() and not sample.loss_mask[0]
        assert not sample.token_types.any() and sample.is_swapped is None and sample.prefix_mask is None
        passes.setdefault(tuple(sample.labels.tolist()), set()).add(tuple(sample.tokens.tolist()))
    assert all(len(shown) > 5 for text, shown in passes.items() if sum(token > SEP for token in text) > 5)
    assert any(MASK in tokens for shown in passes.values() for tokens in shown)
    assert masked[17].tolist() == masked.read(17).tokens.tolist()
    assert masked.spans(4) == masked.dataset.spans(4) and masked.locate(4, 1) == masked.dataset.locate(4, 1)


def test_a_token_of_another_vocabulary_is_located(tmp_path, vocabulary):
    with IndexedWriter(tmp_path / "other", np.int32) as writer:
        writer.add_document([[7, 500, 8]])
    options = MaskedOptions(MaskingConfig(masked_samples="documents"))
    rows = TextRows.of_documents(IndexedDataset(tmp_path / "other"), 0, 1, LENGTH, vocabulary)
    dataset = MaskedRows(RowDataset(rows, 0, 1, [Segment(1, 3, 1)]), 11, LENGTH, options, vocabulary)
    with pytest.raises(DataError, match=r"token 1 of the file \(byte offset 4\) has id 500, but the vocabulary has 67"):
        dataset.read(0)
