"""Data sets of the datasets library: their rows in order, in blocks; what is wrong with a name is one sentence."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from megatron.corpus.documents import parse_block
from megatron.corpus.hub import HubSource, hub_blocks, hub_size
from megatron.errors import ConfigError, DataError
from tests.corpus.test_featurize import write_jsonl

datasets = pytest.importorskip("datasets", reason="--dataset-name needs the datasets package")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubSource:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "folder").mkdir()
    write_jsonl(tmp_path / "folder" / "train.jsonl", [f"text {number}" for number in range(3000)])
    return HubSource(f"{tmp_path}/folder")


def texts(source: HubSource, *rows: int) -> list[str]:
    found = []
    for block in hub_blocks(source, ["text"], 20000, *rows):
        found += parse_block(block, ["text"], skip_bad=False).texts[0]
    return found


def test_rows_come_in_order(source: HubSource) -> None:
    assert texts(source) == [f"text {number}" for number in range(3000)]
    assert texts(source, 1500, 1503) == ["text 1500", "text 1501", "text 1502"] and texts(source, 5, 5) == []
    blocks = list(hub_blocks(source, ["text"], 20000))
    assert len(blocks) == 2 and blocks[1].start == blocks[0].size and blocks[0].source.endswith("folder:train")
    assert hub_size(source)[0] == 3000 and hub_size(source)[1] > 20000


def test_what_is_not_there_is_one_sentence(source: HubSource, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no column 'body' \(--json-key\); it has 'text'"):
        hub_blocks(source, ["body"], 1000)
    with pytest.raises(ConfigError, match=r"--dataset-split-type test\) cannot be loaded: ValueError"):
        hub_blocks(HubSource(source.name, None, "test"), ["text"], 1000)

    class Broken:
        def iter(self, batch_size: int) -> Any:
            raise OSError("disk error")
            yield

    class Rows(list[int]):
        column_names = ("text",)

        def select_columns(self, names: Any) -> Any:
            return self

        def with_format(self, name: str) -> Any:
            return Broken()

    with monkeypatch.context() as patched:
        patched.setattr(datasets, "load_dataset", lambda *names, **more: Rows())
        with pytest.raises(DataError, match="folder:train: rows from 0 on cannot be read: disk error"):
            list(hub_blocks(source, ["text"], 1000))

    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ConfigError, match="--dataset-name .*folder needs the datasets package"):
        hub_blocks(source, ["text"], 1000)
