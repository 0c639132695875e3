"""Fixtures of the tests of data: the golden corpus, and a low limit of open files."""

import resource
from pathlib import Path

import pytest

from tests.data.corpora import GOLDEN_LENGTHS, write_corpus
from tests.data.datasets.token_datasets import MANY_SOURCES


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """A pair of token files with the golden document lengths."""
    return write_corpus(tmp_path / "corpus", GOLDEN_LENGTHS)


@pytest.fixture
def few_open_files():
    """A limit below what `MANY_SOURCES` sources take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, MANY_SOURCES), hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
