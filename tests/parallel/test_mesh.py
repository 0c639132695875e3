"""The mesh: order of ranks, derived groups, how many process groups a rank creates, and timeouts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.device import Stopwatch
from megatron.errors import LaunchError
from megatron.parallel import messages
from megatron.parallel.mesh import Axis, AxisSize, ExpertSplit, ParallelMesh, build_mesh, check_layout, standard_axes
from tests.helpers.ranks import run_ranks

MINUTE = timedelta(minutes=1)


# Every axis larger than 1, and one that the package does not know.
FULL = (
    AxisSize("pp", 3, "stage"),
    AxisSize("dp", 2, "batch"),
    AxisSize("other", 2, "batch"),
    AxisSize("toy", 2, "sequence"),
    AxisSize("tp", 2, "tensor"),
)
DERIVED = ("batch", "loss", "gradient", "model", "ep", "expert_gradient", "expert_model", "embedding")


def _all_groups(mesh: ParallelMesh) -> list[Axis]:
    return [*mesh.axes, mesh.world, mesh.control, *(getattr(mesh, name) for name in DERIVED)]


@pytest.mark.parametrize("rank", range(16))
def test_ranks_are_numbered_in_deepspeed_order(rank: int) -> None:
    mesh = ParallelMesh.at(standard_axes(16, tp=2, pp=4), rank)
    assert (mesh.pp.size, mesh.dp.size, mesh.tp.size) == (4, 2, 2)
    assert (mesh.pp.rank * 2 + mesh.dp.rank) * 2 + mesh.tp.rank == rank
    assert [axis.name for axis in mesh.axes] == ["pp", "dp", "cp", "sp", "tp"]
    assert [axis.name for axis in mesh.axes_of("stage", "tensor")] == ["pp", "tp"]


def test_derived_groups_span_the_axes_of_their_roles() -> None:
    mesh = ParallelMesh.at(FULL, 0)
    assert mesh.batch.ranks == (0, 4, 8, 12)
    assert mesh.loss.ranks == mesh.gradient.ranks == (0, 2, 4, 6, 8, 10, 12, 14)
    assert mesh.expert_gradient.ranks == mesh.gradient.ranks and mesh.ep.ranks == (0,)
    assert mesh.model.ranks == (0, 1, 16, 17, 32, 33)
    assert mesh.embedding.ranks == (0, 32)
    assert mesh.axes_of("sequence", "batch") == mesh.axes[1:4]
    assert mesh.axis("toy").ranks == (0, 2) and mesh.cp == Axis("cp", 0, 1, (0,))


def test_experts_have_a_grid_of_their_own() -> None:
    """Ranks with different tokens, neighbours with different experts: of dp and the ring, or of these and tp."""
    sizes = standard_axes(16, tp=2, pp=2, cp=2)
    split = ParallelMesh.at(sizes, 2, experts=ExpertSplit(2))
    assert (split.ep.ranks, split.expert_gradient.ranks) == ((0, 2), (2, 6)) and split.etp == split.tp
    assert split.expert_model.ranks == (0, 1, 2, 3) and split.gradient.ranks == (0, 2, 4, 6)
    over_both = ParallelMesh.at(sizes, 2, experts=ExpertSplit(4))
    assert (over_both.ep.ranks, over_both.expert_gradient.ranks) == ((0, 2, 4, 6), (2,))
    whole = ParallelMesh.at(sizes, 2, experts=ExpertSplit(4, keeps_tensor=False))
    assert (whole.ep.ranks, whole.expert_gradient.ranks) == ((0, 1, 2, 3), (2, 6))
    assert whole.etp.ranks == (2,) and whole.expert_model.ranks == whole.ep.ranks and whole.tp.size == 2
    copies = ParallelMesh.at(sizes, 2, experts=ExpertSplit(1, keeps_tensor=False))
    assert copies.expert_gradient.ranks == tuple(range(8)) and copies.ep.ranks == (2,)
    with pytest.raises(LaunchError, match="--expert-model-parallel-size 3 does not divide the 4 ranks.* 1, 2, 4"):
        ParallelMesh.at(sizes, 2, experts=ExpertSplit(3))


@pytest.mark.parametrize("experts", [ExpertSplit(), ExpertSplit(2), ExpertSplit(4, keeps_tensor=False)])
def test_all_groups_partition_the_world(experts: ExpertSplit) -> None:
    meshes = [ParallelMesh.at(FULL, rank, experts=experts) for rank in range(48)]
    for name, *groups in zip(*[[axis.name for axis in _all_groups(meshes[0])], *map(_all_groups, meshes)], strict=True):
        for rank, group in enumerate(groups):
            assert group.ranks[group.rank] == rank and len(group.ranks) == group.size, name
            assert all(groups[other].ranks == group.ranks for other in group.ranks), name


def test_embedding_is_shared_by_the_ends_of_a_pipeline_only() -> None:
    places = [ParallelMesh.at(standard_axes(6, tp=2, pp=3), rank).embedding for rank in range(6)]
    assert [place.ranks for place in places] == [(0, 4), (1, 5), (2,), (3,), (0, 4), (1, 5)]
    assert [place.rank for place in places] == [0, 0, 0, 0, 1, 1]
    assert ParallelMesh.at(standard_axes(2, tp=2), 1).embedding == Axis("embedding", 0, 1, (1,))


@pytest.mark.parametrize(
    ("world", "tp", "pp", "words"),
    [(6, 4, 1, "Use 4 or 8,"), (2, 2, 2, "Use 4,"), (3, 2, 1, "requires a multiple of 2 processes, but")],
)
def test_layout_that_does_not_fit_names_the_legal_ones(world: int, tp: int, pp: int, words: str) -> None:
    with pytest.raises(LaunchError, match=words) as failure:
        check_layout(world, tp, pp)
    assert f"--tensor-model-parallel-size {tp}" in str(failure.value)
    assert "1 x 1" in str(failure.value)


def test_inner_axes_that_do_not_divide_the_replicas_are_rejected() -> None:
    with pytest.raises(LaunchError, match=r"6 copies of the model \(12 ranks / 2 x 1.*cp 2 x sp 2 = 4"):
        standard_axes(12, tp=2, cp=2, sp=2)


def test_reports_say_where_a_rank_is() -> None:
    sizes = standard_axes(16, tp=2, cp=2, sp=2)
    assert [ParallelMesh.at(sizes, rank).place for rank in (0, 13)] == ["dp 0 cp 0 sp 0 tp 0", "dp 1 cp 1 sp 0 tp 1"]
    assert ParallelMesh.single().place == ""


@pytest.mark.parametrize("rank", [0, 2730, 4095])
def test_a_rank_creates_only_the_groups_it_is_in(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = dist.new_group, []

    def counted(ranks: list[int] | None = None, **options: Any) -> Any:
        asked.append((tuple(ranks or ()), options["timeout"]))
        return real(ranks, **options)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4096)
    try:
        monkeypatch.setattr(dist, "new_group", counted)
        mesh = build_mesh(standard_axes(4096, tp=8, pp=16), "cpu", 0, MINUTE)
    finally:
        dist.destroy_process_group()
    distinct = {axis.ranks for axis in _all_groups(mesh) if 1 < axis.size < 4096}
    assert distinct == {mesh.tp.ranks, mesh.pp.ranks, mesh.dp.ranks, mesh.model.ranks} | (
        {mesh.embedding.ranks} if mesh.embedding.size == 2 else set()
    )
    assert sorted(ranks for ranks, _ in asked) == sorted([*distinct, (rank,)])
    assert {timeout for _, timeout in asked} == {MINUTE}
    assert len({id(axis.group) for axis in _all_groups(mesh)}) == len(distinct) + 2  # and this rank alone, and WORLD
    assert mesh.world.group is mesh.control.group is mesh.background.group is not None
    assert mesh.ep.group is mesh.sp.group is not None


def test_sizes_must_make_up_the_world() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with pytest.raises(LaunchError, match="The axes dp 3 x tp 2 make 6 ranks, and 4 take part"):
            build_mesh((AxisSize("dp", 3, "batch"), AxisSize("tp", 2, "tensor")), "cpu", 0, MINUTE)
    finally:
        dist.destroy_process_group()


def _uneven(rank: int) -> list[tuple[str, list[float]]]:
    """Sums ranks over every group of two meshes, the second built where ranks have different numbers of groups."""
    dist.init_process_group("gloo", timeout=MINUTE)
    build_mesh(standard_axes(6, pp=3, tp=2), "cpu", 0, MINUTE)
    dist.new_group([0, 1])  # torch counts it on its members only
    sizes = (AxisSize("dp", 1, "batch"), AxisSize("pp", 3, "stage"), AxisSize("toy", 2, "sequence"))
    mesh = build_mesh(sizes, "cpu", 0, timedelta(seconds=47), experts=ExpertSplit(2))
    for axis in _all_groups(mesh):
        total = messages.all_reduce_sum(torch.tensor([float(rank)]), axis)
        assert total.item() == sum(axis.ranks), axis
        if axis is mesh.control:
            assert axis.tree is not None and axis.group is None
            continue
        assert dist.get_world_size(axis.group) == axis.size and dist.get_rank(axis.group) == axis.rank
        seconds = axis.group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        assert seconds == 47, axis
    return [(axis.name, list(axis.ranks)) for axis in _all_groups(mesh)]


def test_groups_work_and_carry_their_timeout_whatever_was_created_before() -> None:
    assert ("loss", [0, 1]) in run_ranks(_uneven, 6)[0]


def test_a_stopwatch_times_the_axes_but_not_what_steers_the_run() -> None:
    mesh = ParallelMesh.at(standard_axes(8, tp=2, pp=2), 0)
    assert mesh.stopwatch is None
    with mesh.tp.timed():
        pass
    watch = Stopwatch()
    timed = mesh.timed_by(watch)
    assert timed == mesh and timed.stopwatch is watch
    assert all(axis.stopwatch is watch for axis in (timed.tp, timed.pp, timed.batch, timed.loss, timed.gradient))
    assert timed.control.stopwatch is timed.world.stopwatch is timed.background.stopwatch is None
    watch.start()
    with timed.tp.timed():
        pass
    assert len(watch.take().parts) == 1
