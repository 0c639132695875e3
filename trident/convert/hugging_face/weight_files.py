"""Reads and writes the safetensors files of a Hugging Face directory and their index.

Every file is checked once, then any box of any tensor can be read. Nothing is unpickled or memory-mapped. Files of a
given maximum size are written tensor by tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.catalogue import ITEM_BYTES
from megatron.checkpoint.layout import shared_copies, whole
from megatron.checkpoint.saving import safetensors_header
from megatron.checkpoint.snapshot import TORCH_TYPES
from megatron.checkpoint.storage import DISK, append, opened, read_range, write_text, writing
from megatron.errors import ConversionError
from megatron.files.plain import parse_json, read_plain_json
from megatron.parallel.pieces import PieceKey
from trident.convert.hugging_face.table.tensors import BoundPart

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Element types that can be trained.
FLOATING = ("F64", "F32", "BF16", "F16")

_LARGEST_HEADER_BYTES = 100 * 2**20
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack", "model.ckpt")


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file of weights.

    Args:
        dtype: element type, as in safetensors.
        start_bytes: offset of its values in the file.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start_bytes: int

    def read_box(self, part: BoundPart, start: tuple[int, ...], stop: tuple[int, ...]) -> torch.Tensor:
        """Reads a box of a part, with the dimensions in the file's order.

        Args:
            part: the part of this tensor.
            start, stop: the box in the ordered shape of the part.

        Raises:
            ConversionError: the file cannot be read.
        """
        item_bytes = ITEM_BYTES[self.dtype]
        first_bytes = self.start_bytes + part.first_row * math.prod(self.shape[1:]) * item_bytes
        box = tuple(high - low for low, high in zip(start, stop, strict=True))
        key = PieceKey(self.name, "weight", part.ordered_shape, start, stop, 0, math.prod(box))
        copies = shared_copies(whole(self.name, "weight", part.ordered_shape), key)
        values = torch.empty(math.prod(box), dtype=TORCH_TYPES[self.dtype])
        target = values.view(torch.uint8).numpy().data
        try:
            with opened(DISK, self.path.resolve()) as (handle, _):
                for source, destination, length in zip(
                    copies.source.tolist(), copies.destination.tolist(), copies.length.tolist(), strict=True
                ):
                    view = target[destination * item_bytes : (destination + length) * item_bytes]
                    read_range(DISK, handle, view, first_bytes + source * item_bytes)
        except OSError as failure:
            raise ConversionError(f"cannot read tensor {self.name} from {self.path}: {failure}.") from failure
        return values.view(box)


def read_weight_files(folder: Path, tied_head: str = "") -> dict[str, FileTensor]:
    """The tensors of a model directory by name.

    Args:
        tied_head: a tensor that some writers list in the index without storing it.

    Raises:
        ConversionError: a safetensors file is missing or damaged, or two hold the same tensor.
    """
    tensors: dict[str, FileTensor] = {}
    weight_map = _weight_map(folder)
    names = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_FILE]
    for name in names:
        for tensor in read_header(folder / name):
            if tensor.name in tensors:
                raise ConversionError(
                    f"tensor {tensor.name} is in {tensors[tensor.name].path.name} and in {name} of {folder}. Download "
                    "the model again."
                )
            tensors[tensor.name] = tensor
    for tensor_name, file in (weight_map or {}).items():
        if tensor_name not in tensors and tensor_name == tied_head:
            continue
        if tensor_name not in tensors or tensors[tensor_name].path.name != file:
            raise ConversionError(
                f"{folder / INDEX_FILE} lists tensor {tensor_name} in {file}, which does not hold it. Download the "
                "model again."
            )
    return tensors


def read_header(path: Path) -> list[FileTensor]:
    """The tensors of a safetensors file, in the order of their values.

    Source: safetensors README, "Format": 8 bytes little-endian header length, JSON header, the tensors without gaps.

    Raises:
        ConversionError: the file is missing or invalid.
    """
    try:
        with opened(DISK, path.resolve()) as (handle, size_bytes):  # a hub cache contains links
            length = bytearray(8)
            read_range(DISK, handle, memoryview(length), 0)
            header_bytes = int.from_bytes(length, "little")
            if not 2 <= header_bytes <= min(_LARGEST_HEADER_BYTES, size_bytes - 8):
                raise _damaged(path, f"its header would have {header_bytes} bytes, and the file has {size_bytes}")
            text = bytearray(header_bytes)
            read_range(DISK, handle, memoryview(text), 8)
    except OSError as failure:
        raise ConversionError(
            f"cannot read {path}: {failure.strerror or failure}. Download the model again, all of its files."
        ) from failure
    try:
        header = parse_json(bytes(text))
    except ValueError as failure:
        raise _damaged(path, f"its header is not JSON ({failure})") from failure
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = [_entry(path, name, entry, 8 + header_bytes) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: tensor.start_bytes)
    expected = 8 + header_bytes
    for tensor in tensors:
        if tensor.start_bytes != expected:
            raise _damaged(path, f"tensor {tensor.name} starts at byte {tensor.start_bytes}, not at {expected}")
        expected += math.prod(tensor.shape) * ITEM_BYTES.get(tensor.dtype, 1)
    if expected != size_bytes:
        raise _damaged(path, f"it has {size_bytes} bytes, and its header describes {expected}")
    return tensors


def read_json_file(path: Path, what: str) -> dict[str, Any]:
    """Reads a JSON object from a file of a model directory.

    Raises:
        ConversionError: the file is missing or is not a JSON object.
    """
    try:
        value = read_plain_json(path)
    except OSError as failure:
        raise ConversionError(
            f"cannot read {path}, {what}: {failure.strerror or failure}. Give a directory that transformers can load."
        ) from failure
    except ValueError as failure:
        raise ConversionError(f"{path}, {what}, is not JSON: {failure}. Download the model again.") from failure
    if not isinstance(value, dict):
        raise ConversionError(f"{path}, {what}, holds no JSON object. Download the model again.")
    return value


def _weight_map(folder: Path) -> Mapping[str, str] | None:
    """The file of each tensor; None for a model of one file."""
    if (folder / SINGLE_FILE).exists():
        return None
    if not (folder / INDEX_FILE).exists():
        pickled = [name for name in _PICKLED if (folder / name).exists()]
        pickled += sorted(path.name for path in folder.glob("pytorch_model-*.bin"))
        if pickled:
            raise ConversionError(
                f"{folder} holds its weights only as {', '.join(pickled[:3])}, which is not read: loading a pickle "
                "runs whatever code is in it. Download the safetensors files of the model, or write them from a source "
                "you trust: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)."
            )
        raise ConversionError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}. Give the directory of a downloaded model."
        )
    weight_map = read_json_file(folder / INDEX_FILE, "the index of the weights").get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) and Path(file).name == file for file in weight_map.values())
    ):
        raise ConversionError(f"{folder / INDEX_FILE} has no weight_map of file names. Download the model again.")
    return weight_map


def _entry(path: Path, name: str, entry: Any, base_bytes: int) -> FileTensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, end]
    except (TypeError, KeyError, ValueError):
        raise _damaged(path, f"the entry of tensor {name} lacks its type, shape or offsets") from None
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise _damaged(path, f"the entry of tensor {name} has impossible numbers")
    if dtype not in ITEM_BYTES and dtype != "BOOL":
        raise ConversionError(
            f"tensor {name} in {path} has the element type {dtype}. Quantized weights cannot be trained; take the "
            f"model in {', '.join(FLOATING[1:])}."
        )
    if end - start != math.prod(shape) * ITEM_BYTES.get(dtype, 1):
        raise _damaged(path, f"tensor {name} of shape {shape} has {end - start} bytes")
    return FileTensor(path, name, dtype, tuple(shape), base_bytes + start)


def _damaged(path: Path, problem: str) -> ConversionError:
    return ConversionError(f"{path} is damaged: {problem}. Download it again.")


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write.

    Args:
        dtype: element type, as in safetensors.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def plan_files(tensors: Sequence[PlannedTensor], largest_bytes: int) -> dict[str, list[PlannedTensor]]:
    """Assigns tensors to files of at most this size, unless a file has a single tensor."""
    groups: list[list[PlannedTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.size_bytes > largest_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.size_bytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": group for number, group in enumerate(groups, 1)}


def write_files(
    folder: Path,
    files: Mapping[str, Sequence[PlannedTensor]],
    values: Callable[[PlannedTensor], Iterable[torch.Tensor]],
) -> None:
    """Writes the files, and the index of several files.

    Args:
        values: yields the values of a tensor in order, as contiguous slices of its element type.

    Raises:
        StorageError: a file cannot be written.
    """
    for name, tensors in files.items():
        # Wider element types first, so that every tensor is aligned; sorted is stable.
        ordered = sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype])
        # transformers refuses files whose metadata lacks the format in some versions.
        listed = [(tensor.name, tensor.dtype, tensor.shape) for tensor in ordered]
        header, _ = safetensors_header({"format": "pt"}, listed)
        size_bytes = len(header) + sum(tensor.size_bytes for tensor in ordered)
        with writing(DISK, folder / name, size_bytes) as handle:
            append(DISK, handle, memoryview(header))
            for tensor in ordered:
                for part in values(tensor):
                    append(DISK, handle, part.view(-1).view(torch.uint8).numpy().data)
    if len(files) > 1:
        every = [tensor for tensors in files.values() for tensor in tensors]
        index = {
            "metadata": {"total_size": sum(tensor.size_bytes for tensor in every)},
            "weight_map": {tensor.name: name for name, tensors in files.items() for tensor in tensors},
        }
        write_json(folder / INDEX_FILE, index)


def write_json(path: Path, value: object) -> None:
    """Writes a JSON file in the format of Hugging Face's libraries.

    Raises:
        StorageError: the file cannot be written.
    """
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
