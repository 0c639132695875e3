"""Reads the weights of NVIDIA's `torch_dist` layout, a checkpoint of torch.distributed (`.metadata`, `__0_0.distcp`).

Layers may be stacked along a first dimension; gated matrices are whole ([gate; up]) or stored as two halves.

Source: torch 2.13, `torch/distributed/checkpoint/{metadata,filesystem}.py`; NVIDIA Megatron-LM
`megatron/core/dist_checkpointing/`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.errors import ConversionError
from trident.convert.megatron_format.foreign_model import ForeignModel, RankPart
from trident.convert.megatron_format.torch_files import ImportOptions, StoredRun
from trident.convert.pickles.reader import ForeignObject, ForeignTable, ForeignTensor, read_pickle, read_ranges

_NOT_WEIGHTS = re.compile(
    r"(optimizer|chained_\d+|rng_state|rerun_state|opt_param_scheduler|args|common)\b.*|.*_extra_state.*"
)
_STACKED = re.compile(r"(.*\blayers)\.([a-z_].*)")
_HALVES = re.compile(r"(.*\.linear_fc1\.(?:weight|bias))_([wv])")
_ARGUMENTS = "args"


@dataclass(frozen=True)
class _Stored:
    """A global tensor and its chunks: their offsets and values."""

    name: str
    shape: tuple[int, ...]
    chunks: Sequence[tuple[tuple[int, ...], ForeignTensor]]

    def part(self, layer: int | None = None) -> RankPart:
        """The tensor, or one layer of stacked layers."""
        shape = self.shape if layer is None else self.shape[1:]
        dtype = self.chunks[0][1].dtype

        def read() -> torch.Tensor:
            whole = torch.empty(shape, dtype=dtype)
            filled = 0
            for offsets, tensor in self.chunks:
                values = tensor.read()
                if layer is not None:
                    if not offsets[0] <= layer < offsets[0] + values.shape[0]:
                        continue
                    values, offsets = values[layer - offsets[0]], offsets[1:]
                whole[tuple(slice(low, low + size) for low, size in zip(offsets, values.shape, strict=True))] = values
                filled += values.numel()
            if filled != whole.numel():
                raise ConversionError(
                    f"tensor {self.name} has {whole.numel()} elements, and its chunks hold {filled}. The checkpoint is "
                    "incomplete; copy it again."
                )
            return whole

        return RankPart(shape, dtype, read)


def is_distributed(folder: Path) -> bool:
    """True if a folder is a checkpoint of torch.distributed."""
    return (folder / ".metadata").is_file()


def open_distributed(folder: Path, choices: ImportOptions) -> ForeignModel:
    """Opens the weights of a `torch_dist` checkpoint; raises as `open_foreign` does."""
    shapes, locations = _metadata(folder)
    weights = {name for name in shapes if not _NOT_WEIGHTS.fullmatch(name)}
    loaded = _load(folder, {key: at for key, at in locations.items() if key[0] in weights or key[0] == _ARGUMENTS})
    arguments_file = folder / "common.pt"
    content = read_pickle(arguments_file) if arguments_file.is_file() else {_ARGUMENTS: loaded.get((_ARGUMENTS, None))}
    run = StoredRun.of(content if isinstance(content, dict) else {}, folder, choices, is_core=True)
    tensors = [_stored(name, shapes[name], loaded) for name in sorted(weights)]
    parts = run.parts((0, name, "weight", part) for name, part in _joined_halves(_by_layer(tensors)))
    note = "optimizer states of the torch_dist layout are not read; only weights are imported"
    return run.opened("Megatron-LM (torch_dist)", parts, None, (note,))


Key = tuple[str, tuple[int, ...] | None]
Location = tuple[str, int, int]  # file, first byte, number of bytes


def _metadata(folder: Path) -> tuple[dict[str, tuple[int, ...]], dict[Key, Location]]:
    """The shape of every tensor, and the location of each chunk."""
    metadata = read_pickle(folder / ".metadata")
    fields = metadata.fields() if isinstance(metadata, ForeignObject) else {}
    listed, table = fields.get("state_dict_metadata"), fields.get("storage_data")
    pairs: Iterable[Any] = table.pairs if isinstance(table, ForeignTable) else ()
    if not isinstance(listed, dict) or not pairs:
        raise ConversionError(
            f"{folder / '.metadata'} lists no tensors, so it does not belong to a torch_dist checkpoint."
        )
    shapes = {
        name: entry.fields()["size"]
        for name, entry in listed.items()
        if isinstance(entry, ForeignObject) and isinstance(entry.fields().get("size"), tuple)
    }
    locations: dict[Key, Location] = {}
    for index, info in pairs:
        key, location = (value.fields() if isinstance(value, ForeignObject) else {} for value in (index, info))
        file = location.get("relative_path")
        if (
            not isinstance(file, str)
            or not re.fullmatch(r"[A-Za-z0-9_.-]*\.distcp", file)
            or location.get("transform_descriptors")
        ):
            raise ConversionError(
                f"{folder / '.metadata'} names the file {str(file)[:60]!r} for {key.get('fqn')}; files must end in "
                ".distcp, be next to it and not be transformed."
            )
        entry = file, location.get("offset", 0), location.get("length", 0)
        locations[str(key.get("fqn")), key.get("offset")] = entry
    return shapes, locations


def _load(folder: Path, locations: Mapping[Key, Location]) -> dict[Key, Any]:
    """Reads the chunks, with one child process per file."""
    files: dict[str, list[Key]] = defaultdict(list)
    for key, (file, _, _) in locations.items():
        files[file].append(key)
    loaded: dict[Key, Any] = {}
    for file, keys in files.items():
        ranges = [(locations[key][1], locations[key][1] + locations[key][2]) for key in keys]
        loaded.update(zip(keys, read_ranges(folder / file, ranges), strict=True))
    return loaded


def _stored(name: str, shape: tuple[int, ...], loaded: Mapping[Key, Any]) -> _Stored:
    chunks = [
        (offset or (0,) * len(shape), value)
        for (stored, offset), value in loaded.items()
        if stored == name and isinstance(value, ForeignTensor)
    ]
    for offsets, tensor in chunks:
        ends = zip(offsets, tensor.shape, shape, strict=False)
        is_deep = len(offsets) == len(tensor.shape) == len(shape)
        if not is_deep or any(low + size > limit for low, size, limit in ends):
            raise ConversionError(
                f"a chunk of tensor {name} has shape {list(tensor.shape)} at {list(offsets)}, which is not in "
                f"{list(shape)}. The checkpoint is damaged."
            )
    if not chunks:
        raise ConversionError(f"tensor {name} has no chunks. The checkpoint is incomplete; copy it again.")
    return _Stored(name, shape, chunks)


def _by_layer(tensors: Iterable[_Stored]) -> Iterator[tuple[str, RankPart]]:
    for stored in tensors:
        match = _STACKED.fullmatch(stored.name)
        if match is None:
            yield stored.name, stored.part()
            continue
        for layer in range(stored.shape[0]):
            yield f"{match.group(1)}.{layer}.{match.group(2)}", stored.part(layer)


def _joined_halves(named: Iterable[tuple[str, RankPart]]) -> Iterator[tuple[str, RankPart]]:
    """Joins separately stored halves of gated matrices: w is the gate, v the half that it multiplies."""
    halves: dict[str, dict[str, RankPart]] = defaultdict(dict)
    for name, part in named:
        match = _HALVES.fullmatch(name)
        if match is None:
            yield name, part
            continue
        pair = halves[match.group(1)]
        pair[match.group(2)] = part
        if len(pair) == 2:
            yield match.group(1), _stack(pair["w"], pair["v"])


def _stack(gate: RankPart, up: RankPart) -> RankPart:
    shape = (gate.shape[0] + up.shape[0], *gate.shape[1:])
    return RankPart(shape, gate.dtype, lambda: torch.cat([gate.read(), up.read()]))
