"""What torch writes in its three forms is read as it is, without torch's own reader."""

from __future__ import annotations

import argparse
import collections
import enum
import pathlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.errors import CheckpointError
from trident.convert.pickles.reader import (
    ForeignArray,
    ForeignObject,
    ForeignTable,
    ForeignTensor,
    read_pickle,
    read_ranges,
    tensors_in,
)

BASE = torch.arange(24.0).reshape(4, 6)
TENSORS: dict[str, torch.Tensor] = {
    "whole": BASE,
    "transposed": BASE.t(),
    "rows": BASE[1:3],
    "half": BASE.half(),
    "bfloat16": BASE.bfloat16(),
    "parameter": torch.nn.Parameter(BASE),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
}
PLAIN: dict[str, Any] = {
    "number": -3,
    "large": 2**100,
    "negative": -(2**70),
    "float": 0.1,
    "none": None,
    "truth": [True, False],
    "text": "grün 漢",
    "bytes": b"\x00\xff",
    "tuple": (1, (2, 3)),
    "keys": {1: "a", (1, 2): "b", "c": {}},
}


class Kind(enum.Enum):
    """Stands for an enumeration of another program."""

    THIRD = 3


Kind.__module__ = "megatron.enums"


@pytest.fixture(scope="module", params=["zip", "older", "protocol 4"])
def read(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("read") / "file.pt"
    others: dict[str, Any] = {
        "namespace": argparse.Namespace(lr=0.5, dtype=torch.float16, numpy=np.float32(3), flag=np.bool_(True)),
        "ordered": collections.OrderedDict(a=BASE),
        "default": collections.defaultdict(int, {"a": 1}),
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "size": BASE.shape,
        "set": {5},
        "path": pathlib.PurePosixPath("a/b"),
        "device": torch.device("cpu"),
    }
    options: dict[str, Any] = {
        "zip": {},
        "older": {"_use_new_zipfile_serialization": False},
        "protocol 4": {"pickle_protocol": 4},
    }[request.param]
    torch.save({"tensors": TENSORS, "plain": PLAIN, **others}, path, **options)
    found = read_pickle(path)
    assert isinstance(found, dict)
    return found


def test_tensors_are_equal_to_the_last_bit(read: dict[str, Any]) -> None:
    found = read["tensors"]
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert isinstance(found[name], ForeignTensor)
        values = found[name].read()
        assert values.dtype == tensor.dtype and torch.equal(values, tensor.detach()), name


def test_plain_values_and_containers(read: dict[str, Any]) -> None:
    assert read["plain"] == PLAIN
    assert read["namespace"] == {"lr": 0.5, "dtype": torch.float16, "numpy": 3.0, "flag": True}
    assert read["default"] == {"a": 1} and read["size"] == (4, 6) and read["set"] == (5,)
    assert isinstance(read["array"], ForeignArray) and read["array"].shape == (2, 3)
    assert read["array"].numbers == tuple(range(6))
    assert str(read["path"]).endswith("b") and read["device"] == "cpu"
    assert [name for name, _ in tensors_in(read["ordered"], "x")] == ["x.a"]


def test_objects_of_foreign_classes_are_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    module = types.ModuleType("megatron.enums")
    module.Kind = Kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.enums", module)
    path = tmp_path / "file.pt"
    torch.save({"kind": Kind.THIRD, "keyed": {Kind.THIRD: 1}}, path)
    found = read_pickle(path)
    kind = found["kind"]
    assert isinstance(kind, ForeignObject) and kind.name == "megatron.enums.Kind"
    assert kind.arguments in ((3,), ("THIRD",))  # Python 3.11.0 to 3.11.3 pickles the name of a member, not its value
    assert kind.fields() == {}
    assert isinstance(found["keyed"], ForeignTable) and found["keyed"].pairs[0][1] == 1


def test_parts_of_a_file_and_bare_pickles(tmp_path: Path) -> None:
    path = tmp_path / "__0_0.distcp"
    torch.save(BASE, tmp_path / "a")
    first = (tmp_path / "a").read_bytes()
    second = pickle.dumps({"b": torch.Size([2])}, 5)
    path.write_bytes(first + second)
    tensor, bare = read_ranges(path, [(0, len(first)), (len(first), len(first) + len(second))])
    assert torch.equal(tensor.read(), BASE) and bare == {"b": (2,)}
    with pytest.raises(CheckpointError, match=f"bytes 5 to {10**6}"):
        read_ranges(path, [(5, 10**6)])


def test_a_file_that_is_missing_or_changes(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no\.pt"):
        read_pickle(tmp_path / "no.pt")
    path = tmp_path / "file.pt"
    torch.save({"a": BASE}, path)
    found = read_pickle(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"file\.pt"):
        found["a"].read()


def test_a_changed_bit_of_an_archive_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"name": "before", "a": BASE}, path)
    whole = path.read_bytes()
    for changed, entry in ((BASE[2].numpy().tobytes(), "data/0"), (b"before", "data.pkl")):
        place = whole.index(changed)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=rf"entry .*{entry}.* is damaged: its checksum is \w{{8}}, expected"):
            read_pickle(path)


def test_an_older_file_whose_storages_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": BASE}, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="must have 96 bytes"):
        read_pickle(path)
