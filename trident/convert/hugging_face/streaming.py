"""Streams tensors between a checkpoint and a model directory slice by slice, in constant memory.

An import yields pieces for the checkpoint writer, read lazily from the model directory. An export yields slices of the
directory's tensors, read from a checkpoint of any layout. The network is not built: only the names and logical shapes
of its tensors are required.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron import log
from megatron.checkpoint.catalogue import ITEM_BYTES
from megatron.checkpoint.manifests.contents import Manifest
from megatron.checkpoint.reader import read_pieces
from megatron.checkpoint.snapshot import TORCH_TYPES, Snapshot
from megatron.config import ModelConfig
from megatron.errors import CheckpointError, ConversionError
from megatron.model.interface.network import LayerStack
from megatron.model.interface.step_state import states_of
from megatron.model.networks import network_layers
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.pieces import Kind, PieceKey
from megatron.parallel.shard_spec import shard_spec_of
from trident.convert.hugging_face.table.family import Family
from trident.convert.hugging_face.table.tensors import BoundPart, BoundTensor, their_shapes
from trident.convert.hugging_face.weight_files import FLOATING, FileTensor

SLICE_BYTES = 64 * 2**20

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class ImportedPieces:
    """The tensors of a model directory as pieces, read lazily; iterable repeatedly."""

    tensors: Sequence[BoundTensor]
    stored: Mapping[str, FileTensor]

    def snapshot(self) -> Snapshot:
        """The keys and values of all pieces, for the checkpoint writer."""
        listed = tuple((key, dtype) for tensor in self.tensors for key, dtype, _ in self._cut(tensor))
        return Snapshot(listed, self)

    def __iter__(self) -> Iterator[tuple[PieceKey, torch.Tensor]]:
        for tensor in self.tensors:
            for key, dtype, box in self._cut(tensor):
                yield key, self._read(tensor, dtype, box).view(-1)

    def _cut(self, tensor: BoundTensor) -> Iterator[tuple[PieceKey, str, Box]]:
        dtype = self.stored[tensor.parts[0].theirs].dtype
        done = 0
        origin = (0,) * len(tensor.shape)
        for start, stop in slices(tensor.shape, ITEM_BYTES[dtype], SLICE_BYTES):
            numel = math.prod(high - low for low, high in zip(start, stop, strict=True))
            key = PieceKey(tensor.ours, "weight", tensor.shape, origin, tensor.shape, done, done + numel)
            yield key, dtype, (start, stop)
            done += numel

    def _read(self, tensor: BoundTensor, dtype: str, box: Box) -> torch.Tensor:
        start, stop = box
        shape = [high - low for low, high in zip(start, stop, strict=True)]
        values = torch.empty(shape, dtype=TORCH_TYPES[dtype])
        for part in tensor.parts:
            low = tuple(max(a, b) for a, b in zip(start, part.start, strict=True))
            high = tuple(min(a, b) for a, b in zip(stop, part.stop, strict=True))
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            box_in_part = [tuple(corner[d] - part.start[d] for d in part.order) for corner in (low, high)]
            theirs = self.stored[part.theirs].read_box(part, *box_in_part)
            target = tuple(slice(a - first, b - first) for a, b, first in zip(low, high, start, strict=True))
            values[target] = theirs.permute(_inverse(part.order))
        return values


def check_weights(family: Family, tensors: Sequence[BoundTensor], stored: Mapping[str, FileTensor]) -> None:
    """Checks that a model directory has exactly the tensors of the network.

    Raises:
        ConversionError: lists missing and unexpected tensors, and wrong shapes and element types.
    """
    shapes = their_shapes(tensors)
    missing = [name for name in shapes if name not in stored]
    unexpected = [name for name in stored if name not in shapes and not family.is_ignored(name)]
    wrong = [
        f"{name} has shape {list(stored[name].shape)}, not {list(shape)}"
        for name, shape in shapes.items()
        if name in stored and stored[name].shape != shape
    ]
    kinds = [
        f"{name} has element type {stored[name].dtype}, which is not a floating-point type"
        for name in shapes
        if name in stored and stored[name].dtype not in FLOATING
    ]
    mixed = [
        f"{tensor.ours} would be made of {' and '.join(sorted(types))} ({tensor.parts[0].theirs}, ...)"
        for tensor in tensors
        if len(types := {stored[part.theirs].dtype for part in tensor.parts if part.theirs in stored}) > 1
    ]
    problems = [
        f"{what}: {_some(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", wrong),
            ("of another type", [*kinds, *mixed]),
        )
        if names
    ]
    if problems:
        raise ConversionError(
            f"the weights are not those that config.json describes as {family.model_type}. Tensors "
            f"{'; '.join(problems)}. Take config.json and weights from the same model."
        )


def with_table_names(family: Family, stored: Mapping[str, FileTensor]) -> dict[str, FileTensor]:
    """Renames stored tensors with older names or without the family's optional prefix to the names of the table."""
    renamed = {}
    for name, tensor in stored.items():
        older, newer = next((pair for pair in family.older_endings if name.endswith(pair[0])), ("", ""))
        renamed[name.removesuffix(older) + newer] = tensor
    prefix = family.optional_prefix
    if not prefix or any(name.startswith(prefix) for name in renamed):
        return renamed
    return {name if name == family.head else prefix + name: tensor for name, tensor in renamed.items()}


def without_copies(family: Family, stored: Mapping[str, FileTensor], *, is_tied: bool) -> dict[str, FileTensor]:
    """Removes duplicates that some files contain: a tied head, and the family's copies. If only the head of a tied
    pair is stored, it becomes the embedding.

    Raises:
        ConversionError: a copy differs from its original.
    """
    if is_tied and family.head in stored and family.embedding not in stored:
        stored = {family.embedding if name == family.head else name: tensor for name, tensor in stored.items()}
    pairs = [*([(family.head, family.embedding)] if is_tied else []), *family.copies]
    copies = {copy for copy, original in pairs if copy in stored and original in stored}
    for copy, original in pairs:
        if copy in copies and _are_different(stored[copy], stored[original]):
            if copy == family.head:
                raise ConversionError(
                    f"config.json has tie_word_embeddings true, but {copy} differs from {original}. Versions of "
                    'transformers disagree about such a model; set "tie_word_embeddings": false if the head is untied.'
                )
            raise ConversionError(f"{copy} must be a copy of {original}, but differs. Download the model again.")
    return {name: tensor for name, tensor in stored.items() if name not in copies}


def without_later_layers(family: Family, stored: Mapping[str, FileTensor], layers: int) -> dict[str, FileTensor]:
    """Removes layers after the last one, which only serve multi-token prediction."""
    kept = {name: tensor for name, tensor in stored.items() if not family.is_later(name, layers)}
    if len(kept) < len(stored):
        first = next(name for name in stored if name not in kept)
        log.warning(
            f"{len(stored) - len(kept)} tensors are not imported ({first}, ...): they belong to layers after the "
            f"{layers} of the network, which predict further tokens (multi-token prediction) and not the next one"
        )
    return kept


@dataclass(frozen=True)
class CheckpointSource:
    """Slices of the weights of a checkpoint of any layout, or of their averages, by `kind`."""

    folder: Path
    manifest: Manifest
    kind: Kind = "weight"

    def dtype_of(self, name: str) -> str:
        """The stored element type of a tensor.

        Raises:
            CheckpointError: the checkpoint has no weights of it.
        """
        catalogue = self.manifest.catalogue
        kind = catalogue.source_kind(name, self.kind)
        if kind is None:
            raise CheckpointError(
                f"tensor {name} is not in {self.folder}, which holds {len(catalogue.names())} tensors. The checkpoint "
                "does not match its own configuration; use another one."
            )
        return catalogue.dtype(name, kind)

    def read(self, name: str, shape: tuple[int, ...], box: Box) -> torch.Tensor:
        """Reads and verifies a box of a tensor.

        Raises:
            DamagedError: the checkpoint is damaged.
        """
        start, stop = box
        size = tuple(high - low for low, high in zip(start, stop, strict=True))
        key = PieceKey(name, self.kind, shape, start, stop, 0, math.prod(size))
        return read_pieces(self.folder, self.manifest, [key])[0].view(size)


def exported_values(
    source: CheckpointSource,
    parts: Sequence[tuple[BoundTensor, BoundPart]],
    dtype: torch.dtype,
) -> Iterator[torch.Tensor]:
    """The values of a tensor of the model directory in order, as contiguous slices.

    Args:
        parts: its parts from top to bottom; rows before them are zeros.
    """
    _, first = parts[0]
    if first.first_row:
        yield torch.zeros((first.first_row, *first.row_shape), dtype=dtype)
    for tensor, part in parts:
        inverse = _inverse(part.order)
        for start, stop in slices(part.ordered_shape, 4, SLICE_BYTES):
            low = tuple(part.start[d] + start[inverse[d]] for d in range(len(inverse)))
            high = tuple(part.start[d] + stop[inverse[d]] for d in range(len(inverse)))
            values = source.read(tensor.ours, tensor.shape, (low, high))
            yield values.permute(part.order).to(dtype).contiguous()


def network_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The logical shapes of all parameters in the order of the layers, then of all states that outputs depend on."""
    stack = LayerStack(network_layers(config, ParallelMesh.single("meta")))
    return {name: shard_spec_of(values).shape for name, values in (*stack.named_parameters(), *needed_states(stack))}


def needed_states(stack: LayerStack) -> Iterator[tuple[str, torch.Tensor]]:
    """The states that the outputs of a network depend on, by global name, such as a router's expert bias."""
    return ((state.global_name, state) for state in states_of(stack) if not state.is_optional)  # type: ignore[attr-defined]


def optional_states(config: ModelConfig) -> set[str]:
    """The names of states that only affect training."""
    stack = LayerStack(network_layers(config, ParallelMesh.single("meta")))
    return {state.global_name for state in states_of(stack) if state.is_optional}  # type: ignore[attr-defined]


def slices(shape: tuple[int, ...], item_bytes: int, limit_bytes: int) -> Iterator[Box]:
    """Boxes (start, stop) of at most `limit_bytes` that cover a tensor, each a contiguous range of elements, in order.

    A row of the last dimension is never cut; an empty tensor is one box.
    """
    if not shape or 0 in shape:
        yield (0,) * len(shape), shape
        return
    last = len(shape) - 1
    cut = next((d for d in range(last) if item_bytes * math.prod(shape[d + 1 :]) <= limit_bytes), last)
    rest = shape[cut + 1 :]
    rows = shape[cut] if cut == last > 0 else max(1, limit_bytes // (item_bytes * math.prod(rest)))
    for fixed in itertools.product(*map(range, shape[:cut])):
        for first in range(0, shape[cut], rows):
            end = min(first + rows, shape[cut])
            yield (*fixed, first, *(0 for _ in rest)), (*(index + 1 for index in fixed), end, *rest)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(dimension) for dimension in range(len(order)))


def _are_different(one: FileTensor, other: FileTensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    dimensions = len(one.shape)
    part = BoundPart(one.name, (0,) * dimensions, one.shape, tuple(range(dimensions)), min(1, dimensions - 1), 0)
    for start, stop in slices(one.shape, ITEM_BYTES[one.dtype], SLICE_BYTES):
        ours, theirs = (tensor.read_box(part, start, stop).view(torch.uint8) for tensor in (one, other))
        if not torch.equal(ours, theirs):
            return True
    return False


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
