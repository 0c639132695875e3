"""Windows back to a `.bin/.idx` pair."""

from __future__ import annotations

import tempfile
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.data.formats.parquet_windows import WindowFile
from megatron.data.formats.sidecar import read_sidecar
from megatron.errors import ConfigError, DataError
from megatron.tokenizers.record import TokenizerRecord
from tests.trident.corpus.featurize.small_windows import RECORD, small
from trident.corpus.featurize import shards as featurize_shards
from trident.corpus.featurize import windows_to_tokens as featurize_back
from trident.corpus.featurize.featurize_corpus import WindowOptions, featurize_tokens
from trident.corpus.featurize.window_cutting import Cutting
from trident.corpus.featurize.windows_to_tokens import windows_to_tokens

pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 599), max_size=30), max_size=3), max_size=8),
    st.integers(3, 10),
    st.data(),
)
def test_tokens_to_windows_and_back_lose_nothing(documents: list[list[list[int]]], length: int, data: Any) -> None:
    special = data.draw(st.integers(0, 2))
    options = WindowOptions(
        min_sequence_length=1,
        max_sequence_length=length,
        num_special_token_reserved=special,
        stride=data.draw(st.one_of(st.none(), st.integers(1, length - special))),
        mask_overlap=data.draw(st.booleans()),
        num_shards=data.draw(st.integers(1, 4)),
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(featurize_shards, "_DOCUMENTS_AT_ONCE", data.draw(st.integers(1, 4))),
        patch.object(featurize_back, "_POSITIONS_AT_ONCE", data.draw(st.integers(1, 40))),
        patch.object(Cutting, "rows_at_once", data.draw(st.integers(1, 5))),
    ):
        with IndexedWriter(f"{folder}/in", np.uint16) as writer:
            for document in documents:
                writer.add_document([np.array(sequence, np.uint16) for sequence in document])
        result = featurize_tokens(f"{folder}/in", f"{folder}/w", RECORD, options, 1)
        back = windows_to_tokens([f"{folder}/w"], f"{folder}/out")
        expected = [list(chain(*document)) for document in documents if any(document)]
        read = IndexedDataset(f"{folder}/out")
        assert [read[number].tolist() for number in range(len(read))] == expected
        assert result.tally.kept == back.tokens == read.tokens and back.windows == result.tally.windows
        assert sum(WindowFile(path).rows for path in result.shards) == result.tally.windows


def test_each_window_of_other_tools_becomes_a_document(tmp_path: Path) -> None:
    path = str(tmp_path / "x.parquet")
    columns = {"input_ids": [[5, 6, 0], [9, 0, 0]], "attention_mask": [[0, 1, 1], [0, 0, 0]], "labels": [[5, 6, 0]] * 2}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    result = windows_to_tokens([path], f"{tmp_path}/out", append_eod=True, tokenizer=RECORD)
    assert IndexedDataset(tmp_path / "out")[0].tolist() == [6, 0, 599]
    assert (result.documents, result.empty, result.whole) == (1, 1, False)
    windows_to_tokens([path], f"{tmp_path}/plain")
    assert IndexedDataset(tmp_path / "plain").dtype == np.int32 and read_sidecar(tmp_path / "plain") is None
    with pytest.raises(ConfigError, match=r"--append-eod: .*x\.parquet does not record the end-of-document id"):
        windows_to_tokens([path], f"{tmp_path}/none", append_eod=True)
    with pytest.raises(DataError, match=r"row 0 has input_ids outside of 0 to 4: 5 at position 0"):
        windows_to_tokens([path], f"{tmp_path}/none", TokenizerRecord("few", None, 5, 4))
    assert not list(tmp_path.glob("*none*"))


def test_incompatible_windows_are_rejected(tmp_path: Path, shards: tuple[str, ...]) -> None:
    out = f"{tmp_path}/out"
    with pytest.raises(DataError, match=r"w-00001-of-00003: row 0 does not continue the previous window"):
        windows_to_tokens(shards[1:], out)
    with pytest.raises(DataError, match=r"w-00002-of-00003: row 0 does not continue the previous window"):
        windows_to_tokens([shards[0], shards[2]], out)
    table = pyarrow.parquet.read_table(shards[0])
    ids = table.column("input_ids").to_pylist()
    ids[1][3] = 77
    notes = pyarrow.parquet.read_metadata(shards[0]).metadata
    changed = table.set_column(0, "input_ids", pyarrow.array(ids, table.schema.field(0).type))
    pyarrow.parquet.write_table(changed.replace_schema_metadata(notes), f"{tmp_path}/changed")
    with pytest.raises(DataError, match="changed: row 1 differs from the previous window"):
        windows_to_tokens([f"{tmp_path}/changed"], out)
    masks = table.column("attention_mask").to_pylist()
    masks[1][3] = 0.0
    changed = table.set_column(1, "attention_mask", pyarrow.array(masks, table.schema.field(1).type))
    pyarrow.parquet.write_table(changed.replace_schema_metadata(notes), f"{tmp_path}/changed")
    with pytest.raises(DataError, match="changed: row 1 has a mask other than tokens first, then padding"):
        windows_to_tokens([f"{tmp_path}/changed"], out)
    other = featurize_tokens(f"{tmp_path}/in", f"{tmp_path}/other", RECORD, small(stride=15), 1).shards
    with pytest.raises(DataError, match="differ in windows, special tokens or tokenizer"):
        windows_to_tokens([*shards, *other], out)
    with pytest.raises(
        DataError, match=r"made with another tokenizer \(tiny, 600 tokens\) than the one given \(few, 5"
    ):
        windows_to_tokens(shards, out, TokenizerRecord("few", None, 5, 4))
    assert not list(tmp_path.glob("out*")) and not list(tmp_path.glob(".*"))
