"""The mesh: ordered axes of ranks, this rank's place on each, and the process groups they make up.

An axis says by its role what its ranks do not share. Every reduction names a derived group, which spans the axes of
some roles, so that a new axis joins the right sums by saying its role. Nothing here joins or leaves a run; see
`joining.py`.
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

# Slowest first: neighbours in `tp` are neighbours on a node.
STANDARD_ROLES: tuple[tuple[str, Role], ...] = (
    ("pp", "stage"),
    ("dp", "batch"),
    ("cp", "sequence"),
    ("sp", "sequence"),
    ("tp", "tensor"),
)

# Work in the background may take longer than any step; a rank that ends is noticed at once all the same.
_BACKGROUND_TIMEOUT = timedelta(hours=12)


@dataclass(frozen=True)
class AxisSize:
    """One direction of the grid.

    Args:
        role: what the ranks of the axis do not share: they hold other layers ("stage") or other parts of the same
            matrices ("tensor"), or compute on other samples ("batch") or other positions of the same samples
            ("sequence").
    """

    name: str
    size: int
    role: Role


@dataclass(frozen=True)
class ExpertSplit:
    """How the experts of a layer are divided over the ranks of a stage: a second grid of the ranks that have different
    tokens.

    Args:
        size: over how many of these ranks, neighbours, experts are divided; the rest hold copies.
        keeps_tensor: whether each expert is split over the tensor-parallel ranks, like other matrices; if not, those
            are among the ranks over which whole experts are divided.
    """

    size: int = 1
    keeps_tensor: bool = True


@dataclass(frozen=True)
class Axis:
    """Ranks that communicate with each other, as this rank sees them: an axis of the grid or a derived group.

    Args:
        rank: this process's position on the axis.
        ranks: the global ranks on the axis, in order.
        group: their process group; None only where no process group was opened.
        tree: what carries their messages instead of a group, CPU tensors and bytes only; see `messages.py`.
        stopwatch: times the messages between them, where somebody wants to know.
    """

    name: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    tree: RankTree | None = field(default=None, compare=False, repr=False)
    stopwatch: Stopwatch | None = field(default=None, compare=False, repr=False)

    def timed(self, kind: str = "") -> AbstractContextManager[None]:
        """Around each message between the ranks of the axis."""
        return contextlib.nullcontext() if self.stopwatch is None else self.stopwatch.running(kind)

    @classmethod
    def single(cls, name: str, rank: int = 0) -> Axis:
        """An axis with this process alone on it."""
        return cls(name, 0, 1, (rank,), None)


def _spans(*roles: Role) -> dict[str, Collection[str]]:
    """Says which axes a derived group spans: the axes with these roles."""
    return {"roles": roles}


# Of the second grid, see `_expert_axes`.
_OF_EXPERTS: dict[str, Collection[str]] = {"roles": ()}


@dataclass(frozen=True)
class ParallelMesh:
    """This rank's place on every axis, and the groups it communicates in.

    The last axis is the fastest: with the standard axes and only `pp`, `dp` and `tp` larger than 1 the global rank is
    `(pp * DP + dp) * TP + tp`, DeepSpeed's order.

    Args:
        sizes: the axes in order, slowest first.
        axes: this rank's place on each of them.
        world: all ranks.
        control: all ranks, connected by a tree that carries CPU tensors.
        background: the same with a tree of its own, for the one thread that communicates while training goes on.
        embedding: the first and the last pipeline stage of this rank's column, which share the word embeddings; the
            ranks between them are alone on it.
        batch: ranks that read different samples.
        loss: ranks over which losses and tokens are summed.
        gradient: ranks over which the gradient of a replicated parameter is averaged.
        model: the ranks that hold one copy of the model.
        ep: expert parallelism: ranks with different experts, which exchange tokens.
        expert_gradient: ranks over which the gradient of an expert's parameter is summed; they hold copies of it.
        expert_model: the ranks of a stage that hold one copy of all experts of its layers.
        experts: how experts are divided.
        kernels: which implementation of each operation these ranks use; the same on all of them.
        splits_sequence: whether the ranks of `tp` have different tokens of the hidden states between matrix products.
    """

    sizes: tuple[AxisSize, ...]
    axes: tuple[Axis, ...]
    world: Axis
    control: Axis
    background: Axis
    embedding: Axis
    device: torch.device
    local_rank: int
    # The derived groups. One more is one more line: a field that says which roles it spans.
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
        """The place of a rank in a grid, without process groups.

        Raises:
            LaunchError: experts cannot be divided over as many ranks.
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
        """A mesh of this process alone, without a process group."""
        return cls.at(standard_axes(1), 0, device)

    def timed_by(self, stopwatch: Stopwatch) -> ParallelMesh:
        """The same mesh, which times its messages, except the control messages between all ranks."""
        names = [name for name, _ in _derived_groups()]
        timed: dict[str, Any] = {name: dataclasses.replace(getattr(self, name), stopwatch=stopwatch) for name in names}
        axes = tuple(dataclasses.replace(axis, stopwatch=stopwatch) for axis in self.axes)
        return dataclasses.replace(self, axes=axes, **timed)

    @property
    def stopwatch(self) -> Stopwatch | None:
        """What times the messages, if anything does."""
        return self.model.stopwatch

    def axis(self, name: str) -> Axis:
        """The axis of that name; of size 1 where the mesh was built without it."""
        return next((axis for axis in self.axes if axis.name == name), Axis.single(name, self.world.rank))

    def axes_of(self, *roles: Role) -> tuple[Axis, ...]:
        """The axes that have one of these roles, in order."""
        return tuple(axis for size, axis in zip(self.sizes, self.axes, strict=True) if size.role in roles)

    @property
    def place(self) -> str:
        """This rank's place on the axes that divide anything, for reports, such as `dp 1 cp 0 tp 3`."""
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
        """Ulysses: the ranks that exchange tokens for heads."""
        return self.axis("sp")

    @property
    def sequence_parallel(self) -> Axis:
        """The ranks that have different tokens of the hidden states between matrix products (`--sequence-parallel`):
        those of `tp`, or this one alone.
        """
        return self.tp if self.splits_sequence else Axis.single("tp", self.world.rank)


def requested_axes(parallel: ParallelRequest, world_size: int) -> tuple[AxisSize, ...]:
    """The standard axes of the layout that a section of the configuration asks for; raises as `standard_axes`."""
    return standard_axes(
        world_size,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        cp=parallel.ring_size,
        sp=parallel.ulysses_size,
    )


def requested_experts(parallel: ParallelRequest) -> ExpertSplit:
    """How a section of the configuration asks for experts to be divided."""
    return ExpertSplit(parallel.expert_model_parallel_size, parallel.splits_each_expert)


def standard_axes(world_size: int, *, tp: int = 1, pp: int = 1, cp: int = 1, sp: int = 1) -> tuple[AxisSize, ...]:
    """The standard axes in their order, `dp` taking the ranks that the others leave.

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
    """Checks that whole model copies fill the world.

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
    """Creates the process groups of the mesh, and the trees, within a process group that is open already.

    Called by all ranks. A rank creates only the groups it is in. Groups of the same ranks are one group, the group of
    all ranks is the open one, and all axes of size 1 share a group of this rank alone: a real one, because DeepSpeed
    takes None for everybody.

    Args:
        timeout: how long a collective of any of the groups waits for the other ranks, in the open group too.
        host: where all ranks can reach rank 0.

    Raises:
        LaunchError: the product of the sizes is not the number of ranks, or experts cannot be divided over as many.
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
    # Every rank goes through the same list in the same order, and at each entry all ranks of a group create it or all
    # have it already, so none waits for a rank that waits for another. Only `embedding` leaves ranks out: it is last.
    axes = tuple(groups.give(axis) for axis in mesh.axes)
    derived: dict[str, Any] = {name: groups.give(getattr(mesh, name)) for name, _ in _derived_groups()}
    derived["embedding"] = groups.give(mesh.embedding)
    derived.update(world=groups.give(mesh.world), control=groups.control, background=groups.background)
    return dataclasses.replace(mesh, axes=axes, **derived)


class _Groups:
    """The process groups this rank has so far, by their ranks."""

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
            self._even_out(control)
        self.give(Axis.single("self", world.rank))

    def give(self, axis: Axis) -> Axis:
        """The axis with its process group."""
        if axis.ranks not in self._by_ranks:
            self._by_ranks[axis.ranks] = self._new(axis.name, axis.ranks)
        return dataclasses.replace(axis, group=self._by_ranks[axis.ranks])

    def _new(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        return dist.new_group(list(ranks), timeout=self._timeout, use_local_synchronization=True, group_desc=name)

    def _even_out(self, control: RankTree) -> None:
        """Gives every rank the same number of groups, because torch makes that number part of a new group's name.

        Ranks with different numbers, as an earlier mesh with a pipeline leaves them, would wait under different names.
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
    """The groups of the grid of experts, in which neighbours hold different ones."""
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
    """The ranks that share this one's place on every axis that is not spanned."""
    strides = [math.prod(size.size for size in sizes[index + 1 :]) for index in range(len(sizes))]
    corner, steps = rank, []
    for size, stride in zip(sizes, strides, strict=True):
        if size.name in spanned:
            corner -= rank // stride % size.size * stride
            steps.append(range(0, size.size * stride, stride))
    ranks = tuple(corner + sum(offsets) for offsets in itertools.product(*steps))
    return Axis(name, ranks.index(rank), len(ranks), ranks)


def _ends(pipeline: Axis, rank: int) -> Axis:
    """The first and the last rank of a pipeline; for a rank between them, itself alone."""
    ends = tuple(sorted({pipeline.ranks[0], pipeline.ranks[-1]}))
    return Axis("embedding", ends.index(rank), len(ends), ends) if rank in ends else Axis.single("embedding", rank)
