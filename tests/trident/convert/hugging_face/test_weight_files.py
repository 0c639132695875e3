"""Files of weights: what is damaged, missing, pickled or of another type is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron.errors import ConversionError
from trident.convert.hugging_face.table.tensors import BoundPart
from trident.convert.hugging_face.weight_files import INDEX_FILE, SINGLE_FILE, read_json_file, read_weight_files

VALUES = torch.arange(60, dtype=torch.float32).view(6, 10)


def write_file(path: Path, header: dict[str, Any] | bytes, content: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("first_row", "ordered", "order", "start", "stop", "expected"),
    [
        (0, (6, 10), (0, 1), (1, 2), (3, 5), VALUES[1:3, 2:5]),
        (2, (4, 10), (0, 1), (0, 0), (4, 10), VALUES[2:]),
        (0, (6, 2, 5), (2, 0, 1), (0, 1, 0), (6, 2, 5), VALUES.view(6, 2, 5)[:, 1:]),
    ],
)
def test_a_box_of_a_part_is_read(
    tmp_path: Path,
    first_row: int,
    ordered: tuple[int, ...],
    order: tuple[int, ...],
    start: tuple[int, ...],
    stop: tuple[int, ...],
    expected: torch.Tensor,
) -> None:
    save_file({"other": torch.ones(3), "w": VALUES}, tmp_path / SINGLE_FILE)
    size = dict(zip(order, ordered, strict=True))
    own = tuple(size[dimension] for dimension in range(len(order)))
    part = BoundPart("w", (0,) * len(own), own, order, len(own) - 1, first_row)
    assert part.ordered_shape == ordered
    assert torch.equal(read_weight_files(tmp_path)["w"].read_box(part, start, stop), expected)


def test_a_file_that_vanished_is_named(tmp_path: Path) -> None:
    save_file({"w": VALUES}, tmp_path / SINGLE_FILE)
    tensor = read_weight_files(tmp_path)["w"]
    (tmp_path / SINGLE_FILE).unlink()
    part = BoundPart("w", (0, 0), (6, 10), (0, 1), 1, 0)
    with pytest.raises(ConversionError, match=f"cannot read tensor w from {tmp_path}"):
        tensor.read_box(part, (0, 0), (1, 1))


def test_files_of_an_index_are_joined_and_links_followed(tmp_path: Path) -> None:
    save_file({"a": VALUES}, tmp_path / "blob")
    (tmp_path / "model-1.safetensors").symlink_to(tmp_path / "blob")
    save_file({"b": VALUES}, tmp_path / "model-2.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    found = read_weight_files(tmp_path)
    assert {name: tensor.shape for name, tensor in found.items()} == {"a": (6, 10), "b": (6, 10)}


@pytest.mark.parametrize(
    ("header", "content", "says"),
    [
        (b"{ ", b"", "is not JSON"),
        (b"[]", b"", "is not a JSON object"),
        (entry(offsets=(0, 8)), b"1234", r"it has \d+ bytes, and its header describes \d+"),
        (entry(offsets=(4, 12)), b"123412341234", r"tensor w starts at byte \d+, not at"),
        (entry(shape=(3,)), b"12341234", r"tensor w of shape \[3\] has 8 bytes"),
        (entry(shape=(-2,)), b"12341234", "the entry of tensor w has impossible numbers"),
        ({"w": {"dtype": "F32"}}, b"", "the entry of tensor w lacks its type, shape or offsets"),
    ],
)
def test_damage_is_described(tmp_path: Path, header: Any, content: bytes, says: str) -> None:
    write_file(tmp_path / SINGLE_FILE, header, content)
    with pytest.raises(ConversionError, match=f"{SINGLE_FILE} is damaged: .*{says}"):
        read_weight_files(tmp_path)


def test_an_impossible_header_length_is_described(tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).write_bytes((2**40).to_bytes(8, "little") + b"{}")
    with pytest.raises(ConversionError, match="its header would have 1099511627776 bytes, and the file has 10"):
        read_weight_files(tmp_path)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    write_file(tmp_path / SINGLE_FILE, entry("F8_E4M3", (8,)), b"12341234")
    with pytest.raises(ConversionError, match="tensor w in .* has the element type F8_E4M3"):
        read_weight_files(tmp_path)


def test_pickles_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConversionError, match=r"only as pytorch_model.bin, .* a pickle .*save_pretrained\(NEW_DIR\)"):
        read_weight_files(tmp_path)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(ConversionError, match="only as pytorch_model-00001-of-00002.bin"):
        read_weight_files(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=f"{tmp_path} has neither {SINGLE_FILE} nor"):
        read_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}, "cannot read .*model-2.safetensors"),
        ({"weight_map": {"b": "model-1.safetensors"}}, "tensor b in model-1.safetensors, which does not hold it"),
        ({"weight_map": {"a": "../model-1.safetensors"}}, "has no weight_map of file names"),
        ({}, "has no weight_map of file names"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, index: dict[str, Any], says: str) -> None:
    save_file({"a": VALUES}, tmp_path / "model-1.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ConversionError, match=says):
        read_weight_files(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file({"a": VALUES, f"b{number}": VALUES.clone()}, tmp_path / f"model-{number}.safetensors")
    weight_map = {"a": "model-1.safetensors", "b2": "model-2.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConversionError, match=r"tensor a is in model-1.safetensors and in model-2.safetensors"):
        read_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"), [(None, "cannot read"), ("{", "is not JSON"), ("[1]", "holds no JSON object")]
)
def test_a_json_file_is_checked(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConversionError, match=says):
        read_json_file(path, "the configuration of the model")
