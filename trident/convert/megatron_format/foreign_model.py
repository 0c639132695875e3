"""A checkpoint of another program that is open but not read: its network, progress, and the parts of its tensors."""

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
    """What one tensor-parallel rank stored of a tensor; `read` gives its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, tensor: ForeignTensor) -> RankPart:
        """A tensor of a file."""
        return cls(tensor.shape, tensor.dtype, tensor.read)


StoredParts = dict[tuple[str, Kind], tuple[RankPart, ...]]


@dataclass(frozen=True)
class TrainingState:
    """How far the run had come.

    Args:
        updates: updates of the optimizer, which Adam's bias correction counts.
        flags: flags of the run by field, as far as they are stored.
    """

    progress: Progress = field(default_factory=Progress)
    updates: int = 0
    loss_scale: Mapping[str, float] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ForeignModel:
    """A checkpoint of another program.

    Args:
        format: what it is, in words.
        parts: of each tensor and kind, by our name, what each tensor-parallel rank stored.
        notes: what the user should know, such as why there are no moments.
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
        """The same, as if only weights were stored, from iteration 0."""
        parts = {key: value for key, value in self.parts.items() if key[1] == "weight"}
        return dataclasses.replace(self, parts=parts, state=TrainingState(flags=self.state.flags))

    def check(self) -> None:
        """Checks that every tensor of the network is there in its shape, and nothing else.

        Raises:
            ConversionError: names what is missing, unexpected or of another shape.
        """
        rules = tensor_rules(self.model)
        for (name, _), parts in self.parts.items():
            rule = rules.get(name)
            if rule is None or rule.split is None or rule.rows == "vocabulary":
                continue
            if rule.shape[rule.split] % len(parts):
                raise ConversionError(
                    f"{name} has {rule.shape[rule.split]} blocks, which {len(parts)} tensor-parallel ranks cannot "
                    "divide among them; upstream then stores copies, which are not converted. Save the checkpoint "
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
    """Sorts tensors by our names.

    Args:
        stored: (tensor-parallel rank, their name, kind, part) of every stored tensor; of a tensor that several files
            hold, the first counts.
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
    """A counter that is stored as a number or as a tensor of one element; None for anything else."""
    if isinstance(value, ForeignTensor) and value.numel == 1:
        value = value.read().item()
    return int(value) if isinstance(value, int | float) else None


def highest_step(places: Iterable[Any]) -> int | None:
    """The highest counter `step` in the states of tensors or in parameter groups; None where there is none."""
    counts = [count_of(place["step"]) for place in places if isinstance(place, dict) and "step" in place]
    return max((count for count in counts if count is not None), default=None)


@dataclass(frozen=True)
class ForeignPieces:
    """The tensors of a foreign checkpoint as pieces of ours, read one at a time; iterable many times.

    Args:
        average: of a tensor that every rank holds whole, take the mean where ranks differ; else they must be equal.
    """

    source: ForeignModel
    average: bool = False

    def snapshot(self) -> Snapshot:
        """What the checkpoint writer needs: the list of pieces, and their values."""
        listed = tuple((key, _TYPE_NAMES[dtype]) for key, dtype, _ in self._listed())
        return Snapshot(listed, self)

    def __iter__(self) -> Iterator[tuple[PieceKey, torch.Tensor]]:
        for key, dtype, rule in self._listed():
            yield key, self.tensor(rule, key.kind).to(dtype).reshape(-1)

    def tensor(self, rule: ShardingRule, kind: Kind) -> torch.Tensor:
        """One of our tensors, whole.

        Raises:
            ConversionError: ranks differ in a tensor that they should hold alike.
        """
        parts = [part.read() for part in self.source.parts[rule.name, kind]]
        if rule.split is None and len(parts) > 1:
            parts = [self._agreed(rule.name, kind, parts)]
        return rule.joined(parts, self.source.order)

    def _agreed(self, name: str, kind: Kind, parts: list[torch.Tensor]) -> torch.Tensor:
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
