"""Files of weights as Hugging Face's own library reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megatron.errors import StorageError
from trident.convert.hugging_face.weight_files import PlannedTensor, plan_files, write_files, write_json

VALUES = {
    "a": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
    "b": torch.arange(5, dtype=torch.float32),
    "c": torch.arange(6, dtype=torch.float16).view(2, 3),
}
PLANNED = [
    PlannedTensor(name, {2: "BF16", 4: "F32"}[values.element_size()] if name != "c" else "F16", tuple(values.shape))
    for name, values in VALUES.items()
]


def by_row(tensor: PlannedTensor) -> list[torch.Tensor]:
    return [row.contiguous() for row in VALUES[tensor.name]]


@pytest.mark.parametrize(
    ("largest_bytes", "expected"),
    [
        (1000, [["a", "b", "c"]]),
        (44, [["a", "b"], ["c"]]),
        (20, [["a"], ["b"], ["c"]]),  # a is larger than a file may be, and alone
    ],
)
def test_files_of_a_chosen_size(tmp_path: Path, largest_bytes: int, expected: list[list[str]]) -> None:
    files = plan_files(PLANNED, largest_bytes)
    assert [[tensor.name for tensor in group] for group in files.values()] == expected
    write_files(tmp_path, files, by_row)
    found = {}
    for name in files:
        with safe_open(tmp_path / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            found.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 (no mapping)
    assert all(
        torch.equal(found[name], values) and found[name].dtype == values.dtype for name, values in VALUES.items()
    )
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if index.exists():
        described = json.loads(index.read_text())
        assert described["metadata"] == {"total_size": 56}
        assert described["weight_map"] == {tensor.name: name for name, tensors in files.items() for tensor in tensors}


def test_a_refused_write_is_named(tmp_path: Path) -> None:
    files = plan_files(PLANNED, 1000)
    with pytest.raises(StorageError, match=r"cannot write .*/missing/model.safetensors"):
        write_files(tmp_path / "missing", files, by_row)
    with pytest.raises(StorageError, match=r"cannot write .*/missing/config.json"):
        write_json(tmp_path / "missing" / "config.json", {})
