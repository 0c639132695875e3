"""The mesh: ordered axes of ranks, this rank's position on each, and their process groups.

The role of an axis is what differs between its ranks. Reductions use derived groups, which span the axes of some roles,
so that a new axis takes part in the right sums because of its role. Joining and leaving a run: see `joining.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.config import ParallelRequest
from megatron.config.rules.layout import divisors, layout_problems
from megatron.device import Stopwatch
from megatron.errors import LaunchError
from megatron.kernels.choice import TORCH_KERNELS, Kernels
from megatron.parallel.rank_tree import RankTree
from megatron.parallel.tree_opening import LOOPBACK, open_trees

Role = Literal["stage", "batch", "sequence", "tensor"]

# Slowest first, so that neighbours in `tp` are neighbours on a node.
STANDARD_ROLES: tuple[tuple[str, Role], ...] = (
    ("pp", "stage"),
    ("dp", "batch"),
    ("cp", "sequence"),
    ("sp", "sequence"),
    ("tp", "tensor"),
)

# Background work may take longer than any step; a rank that exits is detected at once all the same.
_BACKGROUND_TIMEOUT = timedelta(hours=12)


@dataclass(frozen=True)
class AxisSize:
    """The size and role of an axis.

    Args:
        role: what differs between the ranks of the axis: layers ("stage"), parts of the same matrices ("tensor"),
            samples ("batch"), or positions of the same samples ("sequence").
    """

    name: str
    size: int
    role: Role


@dataclass(frozen=True)
class ExpertSplit:
    """The division of a layer's experts over the ranks of a stage with different tokens.

    Args:
        size: number of neighbouring ranks over which experts are divided; the others hold copies.
        keeps_tensor: each expert is split over the tensor-parallel ranks, like other matrices; otherwise whole experts
            are divided over these ranks, too.
    """

    size: int = 1
    keeps_tensor: bool = True


@dataclass(frozen=True)
class Axis:
    """An axis of the mesh or a derived group, from the view of one of its ranks.

    Args:
        rank: this process's position on the axis.
        ranks: the global ranks on the axis, in order.
        group: their process group; None if none was opened.
        tree: carries their messages instead of a group, CPU tensors and bytes only; see `messages.py`.
        stopwatch: times their messages, if messages are timed.
        overlaps: sums of input gradients overlap with the products of weight gradients.
    """

    name: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    tree: RankTree | None = field(default=None, compare=False, repr=False)
    stopwatch: Stopwatch | None = field(default=None, compare=False, repr=False)
    overlaps: bool = field(default=True, compare=False, repr=False)

    def timed(self, kind: str = "") -> AbstractContextManager[None]:
        """A context that times a message between the ranks of the axis."""
        return contextlib.nullcontext() if self.stopwatch is None else self.stopwatch.running(kind)

    @classmethod
    def single(cls, name: str, rank: int = 0) -> Axis:
        return cls(name, 0, 1, (rank,), None)


def _spans(*roles: Role) -> dict[str, Collection[str]]:
    """The metadata of a derived group that spans the axes with these roles."""
    return {"roles": roles}


# Groups of experts, see `_expert_axes`.
_OF_EXPERTS: dict[str, Collection[str]] = {"roles": ()}


@dataclass(frozen=True)
class ParallelMesh:
    """This rank's position on every axis, and its groups.

    The last axis is the fastest: with the standard axes and only `pp`, `dp` and `tp` larger than 1 the global rank is
    `(pp * DP + dp) * TP + tp`, DeepSpeed's order.

    Args:
        sizes: the axes in order, slowest first.
        axes: this rank's position on each of them.
        world: all ranks.
        control: all ranks, connected by a tree that carries CPU tensors.
        background: the same with a separate tree, for the one thread that communicates during training.
        embedding: the first and the last stage of this rank's pipeline, which share the word embeddings; a stage
            between them is alone on this axis.
        batch: ranks with different samples.
        loss: ranks over which losses and tokens are summed.
        gradient: ranks over which the gradient of a replicated parameter is averaged.
        model: the ranks that hold one copy of the model.
        ep: expert parallelism: ranks with different experts, which exchange tokens.
        expert_gradient: ranks that hold copies of an expert's parameters and sum their gradients.
        expert_model: the ranks of a stage that hold one copy of all experts of its layers.
        experts: the division of experts.
        kernels: the implementation of each operation, the same on all ranks.
        splits_sequence: the ranks of `tp` have different tokens of the hidden states between matrix products.
    """

    sizes: tuple[AxisSize, ...]
    axes: tuple[Axis, ...]
    world: Axis
    control: Axis
    background: Axis
    embedding: Axis
    device: torch.device
    local_rank: int
    # The derived groups; to add one, add a field with the roles that it spans.
    batch: Axis = field(metadata=_spans("batch"))
    loss: Axis = field(metadata=_spans("batch", "sequence"))
    gradient: Axis = field(metadata=_spans("batch", "sequence"))
    model: Axis = field(metadata=_spans("stage", "tensor"))
    ep: Axis = field(metadata=_OF_EXPERTS)
    expert_gradient: Axis = field(metadata=_OF_EXPERTS)
    expert_model: Axis = field(metadata=_OF_EXPERTS)
    experts: ExpertSplit = ExpertSplit()
    kernels: Kernels = TORCH_KERNELS
    splits_sequence: bool = False

    @classmethod
    def at(
        cls,
        sizes: Sequence[AxisSize],
        rank: int,
        device: torch.device | str = "cpu",
        local_rank: int = 0,
        experts: ExpertSplit = ExpertSplit(),
    ) -> ParallelMesh:
        """The mesh of one rank, without process groups.

        Raises:
            LaunchError: experts cannot be divided over this many ranks.
        """
        columns = [_axis(size.name, sizes, rank, {size.name}) for size in sizes]
        world = _axis("world", sizes, rank, {size.name for size in sizes})
        derived: dict[str, Any] = {
            name: _axis(name, sizes, rank, _with_roles(sizes, *roles)) for name, roles in _derived_groups() if roles
        }
        derived.update(_expert_axes(sizes, rank, experts))
        return cls(
            sizes=tuple(sizes),
            axes=tuple(columns),
            world=world,
            control=dataclasses.replace(world, name="control"),
            background=dataclasses.replace(world, name="background"),
            embedding=_ends(next((axis for axis in columns if axis.name == "pp"), Axis.single("pp", rank)), rank),
            device=torch.device(device),
            local_rank=local_rank,
            experts=experts,
            **derived,
        )

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> ParallelMesh:
        """A mesh of one process, without a process group."""
        return cls.at(standard_axes(1), 0, device)

    def configured(self, parallel: ParallelRequest) -> ParallelMesh:
        """A copy of the mesh for layers that split the sequence and overlap messages as requested."""
        overlaps = parallel.async_tensor_model_parallel_allreduce or parallel.splits_sequence
        axes = tuple(dataclasses.replace(axis, overlaps=overlaps) for axis in self.axes)
        return dataclasses.replace(self, axes=axes, splits_sequence=parallel.splits_sequence)

    def timed_by(self, stopwatch: Stopwatch) -> ParallelMesh:
        """A copy of the mesh that times its messages, except the control messages between all ranks."""
        names = [name for name, _ in _derived_groups()]
        timed: dict[str, Any] = {name: dataclasses.replace(getattr(self, name), stopwatch=stopwatch) for name in names}
        axes = tuple(dataclasses.replace(axis, stopwatch=stopwatch) for axis in self.axes)
        return dataclasses.replace(self, axes=axes, **timed)

    @property
    def stopwatch(self) -> Stopwatch | None:
        """Times the messages; None if they are not timed."""
        return self.model.stopwatch

    def axis(self, name: str) -> Axis:
        """The axis of that name, of size 1 if the mesh has none."""
        return next((axis for axis in self.axes if axis.name == name), Axis.single(name, self.world.rank))

    def axes_of(self, *roles: Role) -> tuple[Axis, ...]:
        """The axes that have one of these roles, in order."""
        return tuple(axis for size, axis in zip(self.sizes, self.axes, strict=True) if size.role in roles)

    @property
    def place(self) -> str:
        """This rank's position on the axes of more than one rank, for reports, such as `dp 1 cp 0 tp 3`."""
        return " ".join(f"{axis.name} {axis.rank}" for axis in self.axes if axis.size > 1)

    @property
    def tp(self) -> Axis:
        """Tensor parallelism."""
        return self.axis("tp")

    @property
    def pp(self) -> Axis:
        """Pipeline parallelism."""
        return self.axis("pp")

    @property
    def dp(self) -> Axis:
        """Data parallelism; a sum over all ranks with other samples takes `batch`."""
        return self.axis("dp")

    @property
    def etp(self) -> Axis:
        """The ranks over which each expert is split."""
        return self.tp if self.experts.keeps_tensor else Axis.single("tp", self.world.rank)

    @property
    def cp(self) -> Axis:
        """Context parallelism: the ranks of a ring."""
        return self.axis("cp")

    @property
    def sp(self) -> Axis:
        """Ulysses parallelism: the ranks that exchange tokens for heads."""
        return self.axis("sp")

    @property
    def sequence_parallel(self) -> Axis:
        """The ranks with different tokens of the hidden states between matrix products: `tp` or this rank alone."""
        return self.tp if self.splits_sequence else Axis.single("tp", self.world.rank)


def requested_axes(parallel: ParallelRequest, world_size: int) -> tuple[AxisSize, ...]:
    """The standard axes of a configured layout; raises as `standard_axes`."""
    return standard_axes(
        world_size,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        cp=parallel.ring_size,
        sp=parallel.ulysses_size,
    )


def requested_experts(parallel: ParallelRequest) -> ExpertSplit:
    """The configured division of experts."""
    return ExpertSplit(parallel.expert_model_parallel_size, parallel.splits_each_expert)


def standard_axes(world_size: int, *, tp: int = 1, pp: int = 1, cp: int = 1, sp: int = 1) -> tuple[AxisSize, ...]:
    """The standard axes in order; `dp` takes the remaining ranks.

    Raises:
        LaunchError: the sizes do not divide the number of ranks.
    """
    check_layout(world_size, tp, pp)
    inner = cp * sp
    copies = world_size // (tp * pp)
    if copies % inner:
        raise LaunchError(
            f"{copies} copies of the model ({world_size} ranks / {tp} x {pp} ranks of a copy) cannot be divided into "
            f"cp {cp} x sp {sp} = {inner}. Use sizes whose product divides {copies}."
        )
    sizes = {"pp": pp, "dp": copies // inner, "cp": cp, "sp": sp, "tp": tp}
    return tuple(AxisSize(name, sizes[name], role) for name, role in STANDARD_ROLES)


def check_layout(world_size: int, tp_size: int, pp_size: int) -> None:
    """Checks that the world size is a multiple of the ranks of one model copy.

    Raises:
        LaunchError: tp x pp does not divide the number of processes.
    """
    for problem in layout_problems(world_size, tp_size, pp_size):
        raise LaunchError(problem)


def build_mesh(
    sizes: Sequence[AxisSize],
    device: torch.device | str,
    local_rank: int,
    timeout: timedelta,
    host: str = LOOPBACK,
    experts: ExpertSplit = ExpertSplit(),
) -> ParallelMesh:
    """Creates the process groups and trees of the mesh within an initialized process group; collective.

    A rank creates only its own groups. Groups of the same ranks are one group, the group of all ranks is the existing
    one, and all axes of size 1 share a real group of this rank alone, because DeepSpeed takes None for all ranks.

    Args:
        timeout: of collectives in all of the groups, the existing one included.
        host: an address of rank 0 that all ranks can reach.

    Raises:
        LaunchError: the product of the sizes is not the world size, or experts cannot be divided over this many ranks.
    """
    world_size = dist.get_world_size()
    if math.prod(size.size for size in sizes) != world_size:
        shown = " x ".join(f"{size.name} {size.size}" for size in sizes)
        raise LaunchError(
            f"The axes {shown} make {math.prod(size.size for size in sizes)} ranks, and {world_size} take part. Use "
            f"sizes whose product is {world_size}."
        )
    if dist.get_backend() in ("gloo", "nccl"):
        distributed_c10d._set_pg_timeout(timeout)
    mesh = ParallelMesh.at(sizes, dist.get_rank(), device, local_rank, experts)
    groups = _Groups(mesh.world, timeout, host)
    # No deadlock: all ranks process the same list in the same order, and either all ranks of a group create it or all
    # have it already. Only `embedding` omits some ranks, so it comes last.
    axes = tuple(groups.open(axis) for axis in mesh.axes)
    derived: dict[str, Any] = {name: groups.open(getattr(mesh, name)) for name, _ in _derived_groups()}
    derived["embedding"] = groups.open(mesh.embedding)
    derived.update(world=groups.open(mesh.world), control=groups.control, background=groups.background)
    return dataclasses.replace(mesh, axes=axes, **derived)


class _Groups:
    """The process groups of this rank so far, by their ranks."""

    def __init__(self, world: Axis, timeout: timedelta, host: str) -> None:
        self._timeout = timeout
        self._by_ranks: dict[tuple[int, ...], dist.ProcessGroup | None] = {world.ranks: dist.group.WORLD}
        self.control = dataclasses.replace(world, name="control", group=dist.group.WORLD)
        self.background = dataclasses.replace(world, name="background", group=dist.group.WORLD)
        if world.size > 1 and dist.get_backend() != "fake":
            store = distributed_c10d._get_default_store()
            store = dist.PrefixStore(f"trees{store.add(f'trees_of_rank{world.rank}', 1)}", store)
            control, background = open_trees(
                store, world.rank, world.size, host, (timeout, _BACKGROUND_TIMEOUT), timeout
            )
            self.control = dataclasses.replace(self.control, group=None, tree=control)
            self.background = dataclasses.replace(self.background, group=None, tree=background)
            self._equalize_counts(control)
        self.open(Axis.single("self", world.rank))

    def open(self, axis: Axis) -> Axis:
        """Returns the axis with its process group."""
        if axis.ranks not in self._by_ranks:
            self._by_ranks[axis.ranks] = self._new(axis.name, axis.ranks)
        return dataclasses.replace(axis, group=self._by_ranks[axis.ranks])

    def _new(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        return dist.new_group(list(ranks), timeout=self._timeout, use_local_synchronization=True, group_desc=name)

    def _equalize_counts(self, control: RankTree) -> None:
        """Gives every rank the same number of groups.

        Torch names a new group by their number, so ranks with different numbers, as an earlier mesh with a pipeline
        leaves them, would wait under different names.
        """
        most = int(control.maximum(np.array(_group_count())))
        for _ in range(most - _group_count()):
            self._new("filler", [dist.get_rank()])


def _group_count() -> int:
    return len(distributed_c10d._world.pg_names)


def _derived_groups() -> list[tuple[str, tuple[Role, ...]]]:
    """Name and spanned roles of every derived group; those of experts span none."""
    return [
        (entry.name, entry.metadata["roles"]) for entry in dataclasses.fields(ParallelMesh) if "roles" in entry.metadata
    ]


def _with_roles(sizes: Sequence[AxisSize], *roles: Role) -> set[str]:
    return {size.name for size in sizes if size.role in roles}


def _expert_axes(sizes: Sequence[AxisSize], rank: int, split: ExpertSplit) -> dict[str, Axis]:
    """The groups of experts; neighbours hold different ones."""
    roles: tuple[Role, ...] = ("batch", "sequence") if split.keeps_tensor else ("batch", "sequence", "tensor")
    whole = _axis("expert ranks", sizes, rank, _with_roles(sizes, *roles))
    if whole.size % split.size:
        raise LaunchError(
            f"--expert-model-parallel-size {split.size} does not divide the {whole.size} ranks that have different "
            f"tokens. Use one of {', '.join(map(str, divisors(whole.size)))}."
        )
    first = whole.rank // split.size * split.size
    neighbours = whole.ranks[first : first + split.size]
    parts = _with_roles(sizes, "tensor") if split.keeps_tensor else set()
    holders = tuple(sorted(part for other in neighbours for part in _axis("", sizes, other, parts).ranks))
    by_name = {
        "ep": neighbours,
        "expert_gradient": whole.ranks[whole.rank % split.size :: split.size],
        "expert_model": holders,
    }
    return {name: Axis(name, ranks.index(rank), len(ranks), ranks) for name, ranks in by_name.items()}


def _axis(name: str, sizes: Sequence[AxisSize], rank: int, spanned: Collection[str]) -> Axis:
    """The ranks that have this one's position on every axis that is not spanned."""
    strides = [math.prod(size.size for size in sizes[index + 1 :]) for index in range(len(sizes))]
    corner, steps = rank, []
    for size, stride in zip(sizes, strides, strict=True):
        if size.name in spanned:
            corner -= rank // stride % size.size * stride
            steps.append(range(0, size.size * stride, stride))
    ranks = tuple(corner + sum(offsets) for offsets in itertools.product(*steps))
    return Axis(name, ranks.index(rank), len(ranks), ranks)


def _ends(pipeline: Axis, rank: int) -> Axis:
    """The first and the last rank of a pipeline; for a rank between them, only itself."""
    ends = tuple(sorted({pipeline.ranks[0], pipeline.ranks[-1]}))
    return Axis("embedding", ends.index(rank), len(ends), ends) if rank in ends else Axis.single("embedding", rank)
