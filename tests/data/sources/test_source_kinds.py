"""What a data prefix names: layouts of token files, and fingerprints."""

from pathlib import Path

import numpy as np
import pytest

from megatron.data.build import data_fingerprint
from megatron.data.formats.index_layout import CACHED_HEADER, CACHED_MAGIC
from megatron.data.formats.indexed import IndexedDataset
from megatron.errors import DataError
from tests.data.corpora import GOLDEN_LENGTHS, write_corpus
from tests.data.datasets.token_datasets import build, config, rows_of


def test_the_fingerprint_distinguishes_files(tmp_path, corpus):
    other = write_corpus(tmp_path / "other", list(reversed(GOLDEN_LENGTHS)))
    facts = data_fingerprint(config("1", corpus, "1", other))
    assert facts[corpus]["tokens"] == 80 and facts[corpus]["sequences"] == 10 and facts[corpus]["dtype"] == "int32"
    assert facts[corpus]["sha256"] != facts[other]["sha256"]


def write_cached_copy(prefix: str, copy: str) -> str:
    """The same tokens in the `TNTIDX` layout."""
    indexed = IndexedDataset(prefix)
    ends = np.concatenate([[0], np.cumsum(indexed.lengths, dtype=np.int64)])
    header = CACHED_HEADER.pack(CACHED_MAGIC, 1, 4, 4, len(indexed), len(indexed), len(indexed.documents))
    tables = (np.arange(len(indexed) + 1), ends, indexed.lengths, indexed.documents)
    Path(copy + ".idx").write_bytes(header + b"".join(table.astype("<i8").tobytes() for table in tables))
    Path(copy + ".bin").write_bytes(Path(prefix + ".bin").read_bytes())
    return copy


def test_every_layout_of_token_files_can_be_trained_on(tmp_path, corpus):
    cached = write_cached_copy(corpus, str(tmp_path / "cached"))
    expected = rows_of(build(config(corpus, data_impl="mmap"))[0].train)
    for data in (config(corpus), config(cached), config(cached, data_impl="lazy"), config(cached, data_impl="cached")):
        assert rows_of(build(data)[0].train) == expected


@pytest.mark.parametrize("data_impl", ["lazy", "cached", "mmap"])
def test_a_layout_that_the_files_do_not_have_is_refused(tmp_path, corpus, data_impl):
    prefix = write_cached_copy(corpus, str(tmp_path / "cached")) if data_impl == "mmap" else corpus
    found = "cached or lazy" if data_impl == "mmap" else "mmap"
    message = f"--data-impl {data_impl} was given, but {prefix}.idx has the layout {found}.*use --data-impl {found}"
    with pytest.raises(DataError, match=message):
        build(config(prefix, data_impl=data_impl))
