"""Rows read by the `datasets` library: the same texts in the requested order, or a clear error."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.errors import ConfigError, DataError
from trident.corpus.inputs.block import parse_block
from trident.corpus.inputs.hub_rows import (
    datasets_library,
    drawn_rows,
    is_hub_name,
    open_rows,
    row_blocks,
)
from trident.corpus.inputs.input_paths import expand_inputs
from trident.corpus.inputs.tables import is_saved_data

datasets = pytest.importorskip("datasets", reason="the datasets package is not installed")
TEXTS = [f"text {number}" for number in range(3000)]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own cache is left alone, and it stays off the network and quiet."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text, "meta": {"n": str(n)}}) + "\n" for n, text in enumerate(TEXTS)))
    return str(path)


def texts(inputs: list[str], split: str | None, rows: range | np.ndarray, key: str = "text") -> list[str]:
    found = open_rows(inputs, split)
    blocks = list(found.drawn_blocks([key], rows, 4000))
    assert [block.start for block in blocks] == [sum(one.size for one in blocks[:n]) for n in range(len(blocks))]
    return [text for block in blocks for text in parse_block(block, [key], False).texts[0]]


def test_files_give_their_rows_in_order_or_drawn(source: str, tmp_path: Path) -> None:
    assert texts([source], None, range(len(TEXTS))) == TEXTS
    assert texts([source], "train[10:20]", range(10)) == TEXTS[10:20]
    drawn = drawn_rows(len(TEXTS), 1500, 7)
    expected = np.arange(len(TEXTS))
    np.random.default_rng(7).shuffle(expected)
    assert texts([source], None, drawn) == [TEXTS[number] for number in expected[:1500]]
    assert texts([source], None, range(2), "meta.n") == ["0", "1"]
    assert texts([source], None, range(0)) == []
    packed = tmp_path / "more.json.gz"
    packed.write_bytes(gzip.compress(Path(source).read_bytes()))
    assert open_rows([source, str(packed)], None).rows == 6000


def test_folders_of_save_to_disk_and_their_splits(source: str, tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"text": TEXTS[:10]}, split="test")
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "rest": table.select(range(3))}).save_to_disk(tmp_path / "several")
    one, several = f"{tmp_path}/one", f"{tmp_path}/several"
    assert is_saved_data(one) and is_saved_data(several) and not is_saved_data(str(tmp_path))
    assert texts([one], None, range(10)) == texts([one], "test", range(10)) == TEXTS[:10]
    with pytest.raises(
        ConfigError, match=r"--input \S*/one is a dataset written by save_to_disk\. Use --input hf://\S*/one"
    ):
        expand_inputs([str(tmp_path)])
    assert texts([str(next(Path(one).glob("*.arrow")))], None, range(10)) == TEXTS[:10]
    assert open_rows([several], None).rows == 10 and open_rows([several], "rest").rows == 3
    with pytest.raises(DataError, match=r"one is the split test, not train\. Remove --split"):
        open_rows([one], "train")
    with pytest.raises(DataError, match=r"has no split 'valid' \(--split\); it has 'train', 'rest'"):
        open_rows([several], "valid")


def test_a_folder_is_divided_into_splits_by_the_library(source: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, count in (("train", 5), ("test", 2)):
        lines = [json.dumps({"text": text}) for text in TEXTS[:count]]
        (tmp_path / "data" / f"{name}.jsonl").write_text("\n".join(lines))
    assert [open_rows([f"{tmp_path}/data"], split).rows for split in (None, "train", "test")] == [5, 5, 2]


def test_hub_names_are_recognized(source: str) -> None:
    assert is_hub_name("stas/openwebtext-10k") and is_hub_name("wikitext:wikitext-103-v1")
    for other in (
        source,
        "gone.jsonl",
        "gone.jsonl.gz",
        "in/*",
        "in.json?",
        "sqlite:///a.db",
        str(Path(source).parent),
    ):
        assert not is_hub_name(other), other


def test_errors_are_sentences(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"--input nobody/nothing \(--split train\) cannot be read by the datasets lib"):
        open_rows(["nobody/nothing"], None)
    with pytest.raises(DataError, match=r"--split valid\) cannot be read by the datasets library: Unknown split"):
        open_rows([source], "valid")
    with pytest.raises(ConfigError, match=r"--input a/b .*in\.jsonl: give files of one kind, or one dataset"):
        open_rows(["a/b", source], None)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"lists files that end in \.jsonl, \.txt; to count, shuffle or split them"):
        open_rows([source, f"{tmp_path}/a.txt"], None)
    with pytest.raises(DataError, match=r"in\.jsonl \(train\): no column 'words' \(--json-keys\); it has 'text'"):
        texts([source], None, range(1), "words")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError, match=r"--input a/b \(a name that is not a file.* requires the datasets package: pip inst"
    ):
        open_rows(["a/b"], None)


datasets = pytest.importorskip("datasets", reason="datasets need the datasets package")


def test_rows_come_in_order() -> None:
    texts = [f"text {number}" for number in range(3000)]
    blocks = list(row_blocks(datasets.Dataset.from_dict({"text": texts}), "some", 20000))
    assert len(blocks) == 2 and blocks[1].start == blocks[0].size and blocks[0].source == "some"
    assert [text for block in blocks for text in parse_block(block, ["text"], skip_bad=False).texts[0]] == texts


def test_failures_are_one_sentence_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def with_format(self, name: str) -> Any:
            return self

        def iter(self, batch_size: int) -> Any:
            raise OSError("disk error")
            yield

    with pytest.raises(DataError, match="some: rows from 0 on cannot be read: disk error"):
        list(row_blocks(Broken(), "some", 1000))

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="--input x requires the datasets package"):
        datasets_library("--input x")
