"""The rows of the summary at the start of a run; test_first_lines.py has those of a real one."""

from __future__ import annotations

from megatron.config import ParallelConfig
from megatron.data.build import SourceUsage
from megatron.data.order.plan import SourcePlan
from megatron.parallel.mesh import ParallelMesh, standard_axes
from megatron.train.start_up.summary import layout_rows, pipeline_rows, rank_grid, shares_text, size_text, summary_lines


def taken(name: str, ratio: float, epochs: float) -> SourceUsage:
    source: SourcePlan = None  # type: ignore[assignment]
    return SourceUsage(source, name, weight=1.0, before=0, count=1, ratio=ratio, epochs=epochs)


def test_the_lines_have_their_texts_in_one_column_between_rules() -> None:
    assert summary_lines([("kernels", "torch for every operation"), ("", "and more")]) == [
        "-" * 80,
        "kernels      torch for every operation",
        "             and more",
        "-" * 80,
    ]


def test_the_size_names_experts_and_frozen_parameters_only_where_there_are_some() -> None:
    assert size_text(5_300_000, 3_800_000, 5_300_000, 5_300_000) == "5.3M parameters (embeddings 1.5M, 28%)"
    large = size_text(235 * 10**9, 234 * 10**9, 10**9, 22 * 10**9)
    assert large == "235B parameters (22.0B active per token; embeddings 1.0B, 0%; trained 1.0B)"


def test_one_rank_has_no_grid() -> None:
    text = "1 rank; 63.0 MiB per rank for weights, gradients and optimizer, plus activations"
    assert layout_rows({"pp": 1, "dp": 1, "tp": 1}, 1, 63 * 2**20) == [("layout", text)]


def test_the_ranks_of_the_largest_run_take_four_rows() -> None:
    divided = layout_rows({"pp": 1, "dp": 4, "tp": 1}, 1, None, 2)
    assert divided[0] == ("layout", "4 ranks = 1 pp x 4 dp x 1 tp, experts over 2, ZeRO stage 1")
    rows = layout_rows({"pp": 8, "dp": 16, "cp": 1, "sp": 1, "tp": 8}, 1, None)
    assert rows[0] == ("layout", "1024 ranks = 8 pp x 16 dp x 8 tp, ZeRO stage 1")
    assert rows[1] == ("", "stage 0   [0-7] [8-15] ... [120-127]")
    assert len(rows) == 5


def test_ranks_that_share_sequences_are_axes_of_the_grid() -> None:
    rows = layout_rows({"pp": 2, "dp": 2, "cp": 2, "sp": 2, "tp": 2}, 1, None)
    assert rows == [
        ("layout", "32 ranks = 2 pp x 2 dp x 2 cp x 2 sp x 2 tp, ZeRO stage 1"),
        ("", "stage 0   [0-7] [8-15]"),
        ("", "stage 1   [16-23] [24-31]"),
    ]


def test_a_pipeline_says_how_long_it_is_idle_and_what_its_stages_hold() -> None:
    assert pipeline_rows(resolved(1, "1f1b", 1), 8) == []
    idle = "idle if all passes take equally long; activations of"
    assert pipeline_rows(resolved(4, "interleaved", 2), 8) == [
        ("pipeline", f"interleaved, 2 chunks a stage: 15.8% {idle} 5.5 4.5 3.5 2.5 micro-batches by stage")
    ]
    # Four micro-batches of 3 units on the first stage and of 6 on the second, which starts 1 later and ends 2 earlier.
    (row,) = pipeline_rows(resolved(2, "1f1b", 1), 4, (1, 2))
    assert row[1].startswith(
        "1f1b: 20.0% idle if all passes take equally long, 33.3% as these chunks cost; activations"
    )
    (row,) = pipeline_rows(resolved(16, "1f1b", 1), 64)
    assert row[1].endswith("activations of 16 15 ... 2 1 micro-batches by stage")


def resolved(stages: int, schedule: str, chunks: int) -> ParallelConfig:
    return ParallelConfig(
        pipeline_model_parallel_size=stages,
        distributed_backend="gloo",
        world_size=stages,
        data_parallel_size=1,
        effective_zero_stage=1,
        schedule_name=schedule,
        chunks_per_rank=chunks,
    )


def test_the_largest_sources_come_first_and_the_rest_in_one_word() -> None:
    assert shares_text([taken("text", 1.0, 0.5)]) == "text 100.0% (0.50 epochs)"
    shares = [taken(f"source_{number}", weight / 15, 1.0) for number, weight in enumerate([1, 2, 3, 4, 5])]
    assert shares_text(shares) == (
        "source_4 33.3% (1.00 epochs), source_3 26.7% (1.00 epochs), source_2 20.0% (1.00 epochs), 2 others 20.0%"
    )


def test_the_grid_counts_as_the_mesh_does() -> None:
    assert rank_grid(1, 3, 1) == ["[0] [1] [2]"]
    for rank in range(8):
        mesh = ParallelMesh.at(standard_axes(8, tp=2, pp=2), rank)
        brackets = rank_grid(2, 2, 2)[mesh.pp.rank].split("[")[1:]
        assert brackets[mesh.batch.rank].rstrip("] ").split()[mesh.tp.rank] == str(rank)
