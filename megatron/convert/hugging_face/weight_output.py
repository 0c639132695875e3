"""Writes safetensors files of a chosen size, tensor by tensor, with the index that names the file of each tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.checkpoint.manifest import ITEM_BYTES
from megatron.checkpoint.storage import Storage, append, write_text, writing
from megatron.checkpoint.writer import safetensors_header
from megatron.convert.hugging_face.weight_files import INDEX_FILE, SINGLE_FILE


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that will be written.

    Args:
        dtype: its element type as safetensors names it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """How many bytes its values take."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def plan_files(tensors: Sequence[PlannedTensor], largest_bytes: int) -> dict[str, list[PlannedTensor]]:
    """File names and the tensors of each; a file is at most so large unless it holds a single tensor."""
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
    storage: Storage | None = None,
) -> None:
    """Writes the files, and the index where there are several.

    Args:
        values: the values of a tensor from its first to its last, as contiguous slices of its element type.

    Raises:
        StorageError: the file system refused.
    """
    storage = storage or Storage()
    for name, tensors in files.items():
        _write_file(folder / name, tensors, values, storage)
    if len(files) > 1:
        every = [tensor for tensors in files.values() for tensor in tensors]
        index = {
            "metadata": {"total_size": sum(tensor.size_bytes for tensor in every)},
            "weight_map": {tensor.name: name for name, tensors in files.items() for tensor in tensors},
        }
        write_json(folder / INDEX_FILE, index, storage)


def write_json(path: Path, value: object, storage: Storage | None = None) -> None:
    """Writes a JSON file as Hugging Face's libraries do.

    Raises:
        StorageError: the file system refused.
    """
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", storage)


def _write_file(
    path: Path,
    tensors: Sequence[PlannedTensor],
    values: Callable[[PlannedTensor], Iterable[torch.Tensor]],
    storage: Storage,
) -> None:
    # Wider element types first, so that every tensor is aligned; sorted is stable.
    ordered = sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype])
    # transformers refuses files whose metadata lacks the format in some versions.
    header, _ = safetensors_header({"format": "pt"}, [(tensor.name, tensor.dtype, tensor.shape) for tensor in ordered])
    size_bytes = len(header) + sum(tensor.size_bytes for tensor in ordered)
    with writing(storage, path, size_bytes) as handle:
        append(storage, handle, memoryview(header))
        for tensor in ordered:
            for part in values(tensor):
                append(storage, handle, part.view(-1).view(torch.uint8).numpy().data)
