"""The description next to a pair of token files, and the check that a tokenizer fits it."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.data.formats.sidecar import (
    Sidecar,
    SourceRecord,
    check_replaceable,
    check_tokenizer_fits,
    read_sidecar,
    remove_sidecar,
    sidecar_path,
)
from megatron.errors import ConfigError, DataError, StorageError
from megatron.tokenizers.record import TokenizerRecord
from tests.data.sidecars import write_sidecar

SIDECAR = Sidecar(
    documents=3,
    empty=1,
    skipped=2,
    sequences=3,
    tokens=6,
    append_eod=True,
    tokenizer=TokenizerRecord("GPT2BPETokenizer", "ab" * 32, 500, 499),
    versions={"numpy": "2"},
    sources=(SourceRecord("a.jsonl", 100, "0123456789abcdef"), SourceRecord("-", 7, None)),
)


@dataclass
class Fake:
    """A tokenizer's facts; an end-of-document id below 0 stands for none."""

    name: str = "GPT2BPETokenizer"
    vocab_size: int = 500
    fingerprint: str = "ab" * 32
    eod: int = 499
    behaviour: dict[str, str] = field(default_factory=dict)
    parts: dict[str, list[str]] = field(default_factory=dict)

    @property
    def eod_id(self) -> int:
        if self.eod < 0:
            raise ConfigError("no end-of-document token")
        return self.eod


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """A pair of six tokens with its sidecar."""
    with IndexedWriter(tmp_path / "data", np.uint16) as writer:
        for length in (1, 2, 3):
            writer.add_document([np.arange(length)])
    write_sidecar(tmp_path / "data", SIDECAR)
    return str(tmp_path / "data")


def test_written_data_is_read_back(prefix: str) -> None:
    assert read_sidecar(prefix) == SIDECAR
    assert json.loads(Path(prefix + ".json").read_text())["sources"][0]["path"] == "a.jsonl"
    assert TokenizerRecord.of(Fake()) == SIDECAR.tokenizer
    assert TokenizerRecord.of(Fake(eod=-1)).eod_id is None


def test_the_tokenizer_that_made_the_data_fits_and_no_other(prefix: str, tmp_path: Path) -> None:
    check_tokenizer_fits([prefix, str(tmp_path / "none")], Fake())
    write_sidecar(prefix, replace(SIDECAR, tokenizer=replace(SIDECAR.tokenizer, fingerprint=None)))
    check_tokenizer_fits([prefix], Fake(fingerprint="cd" * 32))
    write_sidecar(prefix, SIDECAR)
    with pytest.raises(
        DataError, match=r"data was made with another tokenizer .*abababababab, 500 .*cdcdcdcdcdcd, 500"
    ):
        check_tokenizer_fits([prefix], Fake(fingerprint="cd" * 32))
    with pytest.raises(DataError, match=r"500 tokens\) than this run's .*501 tokens\).*--vocab-file"):
        check_tokenizer_fits([prefix], Fake(vocab_size=501))


def test_a_sidecar_of_other_data_is_ignored_with_a_warning(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_sidecar(prefix, replace(SIDECAR, tokens=7))
    check_tokenizer_fits([prefix], Fake(vocab_size=501))
    assert "lists 7 tokens, which do not match the 12 bytes" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", "not json", "[" * 100_000, '{"format": "other"}'])
def test_other_files_of_that_name_are_left_alone(tmp_path: Path, text: str) -> None:
    path = sidecar_path(tmp_path / "mine")
    path.write_text(text)
    assert read_sidecar(tmp_path / "mine") is None
    remove_sidecar(tmp_path / "mine")
    assert path.read_text() == text
    with pytest.raises(DataError, match=r"mine\.json exists and does not describe token files"):
        check_replaceable(tmp_path / "mine")


def test_our_own_file_is_replaced_and_removed(prefix: str) -> None:
    check_replaceable(prefix)
    remove_sidecar(prefix)
    assert not Path(prefix + ".json").exists() and read_sidecar(prefix) is None
    check_replaceable(prefix)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, r"data\.json has format version 2, expected 1"),
        ({"tokens": "many"}, r"data\.json is a damaged sidecar \(ValueError"),
        ({"tokens": float("inf")}, r"data\.json is a damaged sidecar \(OverflowError"),
        ({"tokenizer": {}}, r"data\.json is a damaged sidecar \(KeyError: 'fingerprint'\)"),
        ({"sources": 5}, r"data\.json is a damaged sidecar \(TypeError"),
        ({"versions": []}, r"data\.json is a damaged sidecar \(AttributeError"),
    ],
)
def test_damaged_sidecars_are_named(prefix: str, change: dict[str, object], message: str) -> None:
    path = Path(prefix + ".json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=message):
        read_sidecar(prefix)


def test_an_unwritable_path(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"Cannot write .*gone/x\.json"):
        write_sidecar(tmp_path / "gone" / "x", SIDECAR)
