"""A lazily read checkpoint of another program: its network, progress, and the shards of its tensors."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.layout import KINDS, whole
from megatron.checkpoint.record import Progress
from megatron.checkpoint.snapshot import TORCH_TYPES, Snapshot
from megatron.config import ModelConfig
from megatron.errors import ConversionError
from megatron.parallel.pieces import Kind, PieceKey
from trident.convert.megatron_format.names import our_names
from trident.convert.megatron_format.sharding_rules import ShardingRule, StoredRowOrder, tensor_rules
from trident.convert.pickles.reader import ForeignTensor

_TYPE_NAMES = {dtype: name for name, dtype in TORCH_TYPES.items()}


@dataclass(frozen=True)
class RankPart:
    """The shard of a tensor stored by one tensor-parallel rank; `read` returns its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, tensor: ForeignTensor) -> RankPart:
        """The shard in a tensor of a file."""
        return cls(tensor.shape, tensor.dtype, tensor.read)


StoredParts = dict[tuple[str, Kind], tuple[RankPart, ...]]


@dataclass(frozen=True)
class TrainingState:
    """The progress of the run.

    Args:
        updates: optimizer updates, for Adam's bias correction.
        flags: stored flags of the run, by field.
    """

    progress: Progress = field(default_factory=Progress)
    updates: int = 0
    loss_scale: Mapping[str, float] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ForeignModel:
    """A checkpoint of another program.

    Args:
        format: description of its format.
        parts: the shards of all tensor-parallel ranks, by global name and kind.
        notes: warnings for the user, such as the reason for missing moments.
    """

    format: str
    path: Path
    model: ModelConfig
    order: StoredRowOrder
    parts: StoredParts
    state: TrainingState = field(default_factory=TrainingState)
    notes: tuple[str, ...] = ()

    @property
    def has_moments(self) -> bool:
        return any(kind == "exp_avg" for _, kind in self.parts)

    def without_moments(self) -> ForeignModel:
        """A copy with weights only, at iteration 0."""
        parts = {key: value for key, value in self.parts.items() if key[1] == "weight"}
        return dataclasses.replace(self, parts=parts, state=TrainingState(flags=self.state.flags))

    def check(self) -> None:
        """Checks that every tensor of the network is present with its shape, and no other.

        Raises:
            ConversionError: lists missing and unexpected tensors, and wrong shapes.
        """
        rules = tensor_rules(self.model)
        for (name, _), parts in self.parts.items():
            rule = rules.get(name)
            if rule is None or rule.split is None or rule.rows == "vocabulary":
                continue
            if rule.shape[rule.split] % len(parts):
                raise ConversionError(
                    f"{name} has {rule.shape[rule.split]} blocks, which cannot be divided over {len(parts)} "
                    "tensor-parallel ranks; upstream then stores copies, which are not converted. Save the checkpoint "
                    "with fewer ranks first."
                )
        kinds: tuple[Kind, ...] = ("weight", "exp_avg", "exp_avg_sq") if self.has_moments else ("weight",)
        missing = [f"{name} ({kind})" for name in rules for kind in kinds if (name, kind) not in self.parts]
        unexpected = sorted({name for name, _ in self.parts if name not in rules})
        wrong = [
            f"{name} has shape {list(part.shape)}, not {list(expected)}"
            for (name, _), parts in self.parts.items()
            if name in rules
            for part in parts
            if part.shape != (expected := _expected_shape(rules[name], parts))
        ]
        problems = [
            f"{what}: {', '.join(names[:6])}{f' and {len(names) - 6} more' if len(names) > 6 else ''}"
            for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong))
            if names
        ]
        if problems:
            raise ConversionError(
                f"the tensors in {self.path} do not match the network that its arguments describe; "
                f"{'; '.join(problems)}. The files are incomplete, or of another network."
            )


def _expected_shape(rule: ShardingRule, parts: Sequence[RankPart]) -> tuple[int, ...]:
    rows = None
    if rule.rows == "vocabulary":
        rows = max(rule.shape[0], sum(part.shape[0] for part in parts if part.shape))
        rows += -rows % len(parts)
    return rule.stored_shape(len(parts), rows)


def collect(stored: Iterable[tuple[int, str, Kind, RankPart]], ranks: int, *, is_tied: bool, path: Path) -> StoredParts:
    """Groups stored shards by global name.

    Args:
        stored: (tensor-parallel rank, their name, kind, shard); of duplicates, the first is used.
        ranks: tensor-parallel ranks that wrote the checkpoint.

    Raises:
        ConversionError: a name is unknown, or some ranks have a tensor that others do not.
    """
    listed = list(stored)
    ours = our_names(dict.fromkeys(name for _, name, _, _ in listed), is_tied=is_tied)
    by_rank: dict[tuple[str, Kind], dict[int, RankPart]] = defaultdict(dict)
    for rank, name, kind, part in listed:
        our_name = ours[name]
        if our_name is not None:
            by_rank[our_name, kind].setdefault(rank, part)
    for (name, kind), parts in by_rank.items():
        if len(parts) != ranks:
            raise ConversionError(
                f"{path} holds {name} ({kind}) of {len(parts)} tensor-parallel ranks, not of {ranks}. Files are "
                "missing; copy the checkpoint again."
            )
    return {key: tuple(parts[rank] for rank in range(ranks)) for key, parts in by_rank.items()}


def count_of(value: Any) -> int | None:
    """A counter stored as a number or a tensor of one element; None for anything else."""
    if isinstance(value, ForeignTensor) and value.numel == 1:
        value = value.read().item()
    return int(value) if isinstance(value, int | float) else None


def highest_step(entries: Iterable[Any]) -> int | None:
    """The highest `step` in states of tensors or parameter groups; None if missing."""
    counts = [count_of(entry["step"]) for entry in entries if isinstance(entry, dict) and "step" in entry]
    return max((count for count in counts if count is not None), default=None)


@dataclass(frozen=True)
class ForeignPieces:
    """The tensors of a foreign checkpoint as pieces, read one at a time; iterable repeatedly.

    Args:
        average: average replicated tensors that differ between ranks, instead of raising an error.
    """

    source: ForeignModel
    average: bool = False

    def snapshot(self) -> Snapshot:
        """The keys and values of all pieces, for the checkpoint writer."""
        listed = tuple((key, _TYPE_NAMES[dtype]) for key, dtype, _ in self._listed())
        return Snapshot(listed, self)

    def __iter__(self) -> Iterator[tuple[PieceKey, torch.Tensor]]:
        for key, dtype, rule in self._listed():
            yield key, self.tensor(rule, key.kind).to(dtype).reshape(-1)

    def tensor(self, rule: ShardingRule, kind: Kind) -> torch.Tensor:
        """Reads a whole tensor.

        Raises:
            ConversionError: a replicated tensor differs between ranks.
        """
        parts = [part.read() for part in self.source.parts[rule.name, kind]]
        if rule.split is None and len(parts) > 1:
            parts = [self._replicated(rule.name, kind, parts)]
        return rule.joined(parts, self.source.order)

    def _replicated(self, name: str, kind: Kind, parts: list[torch.Tensor]) -> torch.Tensor:
        if all(torch.equal(part, parts[0]) for part in parts[1:]):
            return parts[0]
        values = torch.stack([part.to(torch.float32) for part in parts])
        if self.average:
            return values.mean(dim=0).to(parts[0].dtype)
        difference = float((values.amax(dim=0) - values.amin(dim=0)).max())
        raise ConversionError(
            f"the {len(parts)} tensor-parallel ranks of {self.source.path} hold different values of {name} ({kind}), "
            f"which should be equal; the largest difference is {difference:.3g}. Runs such as BLOOM's drifted like "
            "this; --average-replicated takes the mean, as the published conversion of BLOOM did."
        )

    def _listed(self) -> Iterator[tuple[PieceKey, torch.dtype, ShardingRule]]:
        rules = tensor_rules(self.source.model)
        for kind in KINDS:
            for name, rule in rules.items():
                parts = self.source.parts.get((name, kind))
                if parts is not None:
                    dtype = parts[0].dtype if kind == "weight" else torch.float32
                    yield whole(name, kind, rule.shape), dtype, rule
