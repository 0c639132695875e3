"""Files are pickled whole or not at all, and a refusing file system is a sentence."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
import torch

from megatron.errors import StorageError
from trident.convert.megatron_output.output_tensors import write_object


def test_a_value_comes_back(tmp_path: Path) -> None:
    value = {"args": argparse.Namespace(num_layers=2), "tensor": torch.arange(4.0)}
    write_object(tmp_path / "new" / "file.pt", value)
    read = torch.load(tmp_path / "new" / "file.pt", weights_only=False)
    assert read["args"] == argparse.Namespace(num_layers=2)
    assert torch.equal(read["tensor"], value["tensor"])


def test_nothing_is_overwritten_and_a_refusal_is_reported(tmp_path: Path) -> None:
    write_object(tmp_path / "file.pt", 1)
    with pytest.raises(StorageError, match=r"cannot write .*file.pt: File exists. Free space there"):
        write_object(tmp_path / "file.pt", 2)
    with pytest.raises(StorageError, match=r"cannot write .*file.pt/inner.pt: "):
        write_object(tmp_path / "file.pt" / "inner.pt", 2)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a device that is always full")
def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "open", lambda path, mode: open("/dev/full", "wb"))
    with pytest.raises(StorageError, match=r"cannot write .*file.pt: "):
        write_object(tmp_path / "file.pt", torch.zeros(100_000))
