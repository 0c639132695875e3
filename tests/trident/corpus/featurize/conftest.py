"""Shards of windows, made on the spot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.data.formats.indexed_writer import IndexedWriter
from tests.trident.corpus.featurize.small_windows import RECORD, small
from trident.corpus.featurize.featurize_corpus import featurize_tokens


@pytest.fixture
def shards(tmp_path: Path) -> tuple[str, ...]:
    """Three shards of one long document and a short one."""
    with IndexedWriter(tmp_path / "in", np.uint16) as writer:
        writer.add_document([np.arange(90)])
        writer.add_document([[5]])
    return featurize_tokens(f"{tmp_path}/in", f"{tmp_path}/w", RECORD, small(num_shards=3), 1).shards
