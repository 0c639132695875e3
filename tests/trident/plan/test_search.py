"""Ranked layouts are legal and fit; the lines of a plan."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

import pretrain_bert
from megatron.config import NO_PROGRAM
from megatron.config.parse import read_flags
from megatron.errors import ConfigError
from megatron.parallel.schedule.actions import Placement
from megatron.parallel.schedule.building import build_schedule, schedule_costs
from megatron.parallel.schedule.division import EVENLY
from megatron.parallel.schedule.schedule_files import schedule_text
from megatron.parallel.schedule.simulation import simulate
from trident.plan.job import Stage
from trident.plan.layouts import Layout, costs_of_schedule
from trident.plan.report import plan_lines
from trident.plan.requests import (
    cluster_of,
    command_lines,
    job_of,
    layout_of,
    layout_problems,
    next_fitting,
    plan_request,
    read_plan_request,
    request_lines,
)
from trident.plan.search import LayoutPlan, estimate, layouts, neighbours
from trident.plan.step_time import _pass, step_time_of

LLAMA_70B = (
    *("--model-preset", "llama-3-70b", "--planned-devices", "512", "--device", "h100", "--bf16"),
    *("--global-batch-size", "1024", "--seq-length", "8192"),
)


class Planned(NamedTuple):
    """A plan of 512 devices, what made it, and the processor's seconds."""

    words: list[str]
    plan: LayoutPlan
    problems: Callable[[Layout], Sequence[str]]
    seconds: float


@pytest.fixture(scope="module")
def large() -> Planned:
    """Planned once."""
    words, request = read_plan_request(LLAMA_70B)
    began_at = time.process_time()
    plan, problems = plan_request(words, request)
    return Planned(words, plan, problems, time.process_time() - began_at)


@pytest.mark.full
def test_a_plan_of_512_devices_takes_seconds_and_names_legal_layouts_that_fit(large: Planned) -> None:
    words, plan = large.words, large.plan
    assert large.seconds < 30
    assert plan.considered > 1000
    assert len(plan.best) == 10
    rates = [each.tokens_per_second for each in plan.best]
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[0] >= 0.98 * rates[1]
    for each in plan.best:
        assert each.fits
        assert each.layout.devices == 512
        assert each.layout.global_batch == 1024
        assert not read_flags([*words, *each.layout.flags()]).problems
    assert sum(plan.best[0].time.parts.values()) == pytest.approx(plan.best[0].time.seconds)


def test_flags_of_the_layout_are_kept() -> None:
    words, request = read_plan_request([*LLAMA_70B, "--tensor-model-parallel-size", "8", "--micro-batch-size", "2"])
    plan, _ = plan_request(words, request)
    assert {(each.layout.tp, each.layout.micro_batch) for each in plan.best} == {(8, 2)}


@pytest.mark.parametrize(
    ("flag", "axis"), [("--context-parallel-size", "cp"), ("--ds-sequence-parallel-size", "ulysses")]
)
def test_the_flags_of_a_layout_replace_every_axis_of_the_command(flag: str, axis: str) -> None:
    words, request = read_plan_request(["--model-preset", "llama-3-8b", "--planned-devices", "8", "--bf16", flag, "2"])
    plan, _ = plan_request(words, request)
    assert {getattr(each.layout, axis) for each in plan.best} == {2}
    first = plan.best[0].layout
    other = dataclasses.replace(first, cp=1, ulysses=1, dp=first.dp * first.sequence, micro_batch=1, micro_batches=1)
    again = layout_of(read_flags([*words, *other.flags()]).request(), 8)
    assert (again.cp, again.ulysses, again.dp) == (1, 1, other.dp)


@pytest.mark.parametrize(
    ("flags", "attribute", "value"),
    [
        (("--micro-batch-size", "32"), "micro_batch", 32),
        (("--zero-stage", "0"), "zero", 0),
        (("--pipeline-schedule", "zb-h1"), "schedule", "zb-h1"),
        (("--no-sequence-parallel",), "splits_sequence", False),
        (
            ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--seq-length", "127"),
            *("splits_sequence", True),  # although samples have to be padded
        ),
    ],
)
def test_a_given_value_is_kept_even_if_a_plan_would_not_try_it(
    flags: tuple[str, ...], attribute: str, value: object
) -> None:
    base = ("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4", "--seq-length", "128")
    words, request = read_plan_request([*base, "--max-position-embeddings", "128", "--planned-devices", "16", *flags])
    plan, _ = plan_request(words, request)
    assert plan.best
    assert {getattr(each.layout, attribute) for each in plan.best} == {value}


def test_flags_that_leave_no_layout_are_named() -> None:
    words, request = read_plan_request([*LLAMA_70B, "--pipeline-model-parallel-size", "3", "--zero-stage", "1"])
    with pytest.raises(ConfigError, match=r"satisfies --pipeline-model-parallel-size 3, --zero-stage 1\. Drop a flag"):
        plan_request(words, request)


def test_a_bert_has_a_plan() -> None:
    base = ("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4", "--seq-length", "128")
    flags = [*base, "--max-position-embeddings", "128", "--planned-devices", "4"]
    *_, command = command_lines(flags, pretrain_bert.PROGRAM, 4, ["x"])
    assert command.startswith("x --tensor-model-parallel-size ")


def test_host_time_that_is_cut_into_stages_idles_like_other_work() -> None:
    _, request = read_plan_request([*LLAMA_70B, "--pipeline-model-parallel-size", "4", "--global-batch-size", "512"])
    cluster = cluster_of(request, 512)
    layout = dataclasses.replace(layout_of(request, 512), micro_batches=1)
    slow = dataclasses.replace(cluster.device, host_seconds_per_layer=10.0)
    job = job_of(request, dataclasses.replace(cluster, device=slow))
    assert estimate(job, layout).time.idle == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches"),
    [("v-1f1b", 4, 125), ("v-1f1b", 8, 515), ("v-1f1b", 8, 1029), ("zbv", 4, 600), ("interleaved-zb", 8, 1029)],
)
def test_the_idle_ratio_of_many_micro_batches(name: str, ranks: int, micro_batches: int) -> None:
    simulated = schedule_costs(name, ranks, 2, micro_batches).idle
    assert costs_of_schedule(name, ranks, 2, micro_batches).idle == pytest.approx(simulated, rel=0.05, abs=0.002)
    assert costs_of_schedule(name, ranks, 2, 10_000 * ranks).idle >= 0.0


def test_no_fitting_layout_is_faster_or_simpler_at_nearly_the_same_speed() -> None:
    words, request = read_plan_request(["--model-preset", "llama-3-8b", "--planned-devices", "8", "--bf16"])
    plan, problems = plan_request(words, request)
    everything = [each for each in (estimate(plan.job, layout) for layout in layouts(plan.job, {})) if each.fits]
    fastest = max(each.tokens_per_second for each in plan.best)
    faster = [each for each in everything if each.tokens_per_second > fastest]
    assert len(everything) > 100
    assert all(problems(each.layout) for each in faster)
    near = [each.layout for each in everything if each.tokens_per_second >= 0.98 * fastest]
    assert all(problems(layout) for layout in near if _divided(layout) < _divided(plan.best[0].layout))


def _divided(layout: Layout) -> int:
    return sum(size > 1 for size in (layout.tp, layout.cp, layout.ulysses, layout.ep, layout.pp))


def test_the_simplest_of_layouts_within_two_percent_comes_first() -> None:
    argv = ["--model-preset", "llama-3.2-1b", "--planned-devices", "8", "--bf16", "--global-batch-size", "64"]
    plan, _ = plan_request(*read_plan_request([*argv, "--seq-length", "2048"]))
    first, second, *_ = plan.best
    assert str(first.layout) == "dp 8, ZeRO 1, recompute none, micro-batch 2"
    assert "ZeRO 2" in str(second.layout) and 1 < second.tokens_per_second / first.tokens_per_second < 1.02


@pytest.mark.full
def test_no_neighbour_of_the_first_that_fits_is_faster(large: Planned) -> None:
    job, first = large.plan.job, large.plan.best[0]
    changed = [estimate(job, layout) for _, layout in neighbours(job, first.layout) if not large.problems(layout)]
    assert any(not each.fits for each in changed)
    assert all(each.tokens_per_second <= first.tokens_per_second / 0.98 for each in changed if each.fits)


def test_a_neighbour_that_is_as_fast_is_explained() -> None:
    argv = ["--model-preset", "gpt2-124m", "--planned-devices", "8", "--bf16", "--global-batch-size", "64"]
    lines = list(request_lines([*argv, "--pipeline-model-parallel-size", "1"], ["x"]))
    (selective,) = (line for line in lines if "recompute selective: " in line)
    assert re.fullmatch(r".*: same speed, same memory: attention \+([\d.]+) s, host -\1 s", selective)


@pytest.mark.parametrize("flags", [["--context-parallel-size", "2"], ["--ds-sequence-parallel-size", "2"]])
def test_a_ring_does_not_recompute_attention_by_itself(flags: list[str]) -> None:
    argv = ["--model-preset", "llama-3.2-1b", "--planned-devices", "2", "--bf16", "--seq-length", "8192", *flags]
    kept, again = (
        estimate(job_of(request, cluster_of(request)), layout_of(request, 2))
        for more in ([], ["--recompute-granularity", "selective"])
        for _, request in [read_plan_request([*argv, *more])]
    )
    is_ring = kept.layout.cp > 1
    assert (kept.memory.activations == again.memory.activations) == is_ring
    assert (kept.time == again.time) == is_ring
    assert ("recompute selective" in dict(neighbours(kept.job, kept.layout))) != is_ring


@pytest.mark.full
def test_the_plan_ends_with_the_command(large: Planned) -> None:
    lines = list(plan_lines(large.plan, large.problems, ["x"], 15 * 10**12, 2.0))
    text = "\n".join(lines)
    assert lines[0].startswith("70.6B parameters, 1,024 samples of 8,192 tokens a step (8.4M tokens), 512 x h100")
    assert lines[-1].startswith("x --tensor-model-parallel-size ")
    for word in ("activations", "optimizer", "gradients", "margin", "by axis: tp", "device hours,", "does not fit"):
        assert word in text


def test_a_network_that_fits_nowhere_is_shown_with_its_smallest_layout() -> None:
    lines = list(request_lines(["--model-preset", "llama-3.1-405b", "--planned-devices", "8", "--bf16"], ["x"]))
    assert "fits into 79.2 GiB" in lines[1]
    assert "recompute full" in lines[2]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--device", "abacus"), "unknown --device abacus"),
        (("--interconnect", "string"), "unknown --interconnect string"),
        (("--nodes", "3"), "--nodes 3 does not divide 512"),
    ],
)
def test_unknown_hardware_is_refused(words: tuple[str, ...], sentence: str) -> None:
    given, request = read_plan_request([*LLAMA_70B, *words])
    with pytest.raises(ConfigError, match=sentence):
        plan_request(given, request)


def test_a_plan_divides_blocks_as_the_run_does() -> None:
    words = ["--model-preset", "llama-3-8b", "--planned-devices", "8", "--bf16", "--pipeline-model-parallel-size", "8"]
    words += ["--seq-length", "8192", "--global-batch-size", "32", "--micro-batch-size", "1"]
    _, request = read_plan_request(words)
    job, layout = job_of(request, cluster_of(request)), layout_of(request, 8)
    chunks, ranks = job.chunks(Placement.loop(8, 1))
    assert [len(blocks) for blocks in chunks] == [4, 5, 5, 4, 4, 4, 4, 2]
    assert dict(ranks) == {0: 1, 1: 2, 3: 4, 7: 1}
    even = dataclasses.replace(job, division=EVENLY)
    assert step_time_of(job, layout).seconds < 0.9 * step_time_of(even, layout).seconds
    _, request = read_plan_request([*words, "--decoder-last-pipeline-num-layers", "3"])
    chunks, _ = job_of(request, cluster_of(request)).chunks(Placement.loop(8, 1))
    assert [len(blocks) for blocks in chunks] == [4, 5, 4, 4, 4, 4, 4, 3]


PYRAMID = (
    *("--num-layers", "4", "--num-experts", "32", "32", "64", "64", "--hidden-size", "1024"),
    *("--num-attention-heads", "16", "--seq-length", "8192", "--max-position-embeddings", "8192"),
    *("--planned-devices", "64", "--global-batch-size", "64", "--bf16", "--attention-dropout", "0"),
)
LONG = (
    *("--model-preset", "mixtral-8x7b", "--planned-devices", "16", "--bf16", "--global-batch-size", "2"),
    *("--seq-length", "32768"),
)


@pytest.mark.parametrize(
    ("argv", "sizes", "more"),
    [
        (PYRAMID, {1, 2, 4, 8, 16, 32}, lambda each: each.ep == 32),  # 64 would leave some layer with too few
        (LONG, {1, 2, 4, 8}, lambda each: each.ep > each.dp and each.cp > 1),
        ((*LONG, "--expert-tensor-parallel-size", "1"), {1, 2, 4, 8}, lambda each: each.ep > each.dp * each.cp),
    ],
    ids=["pyramid", "context", "whole"],
)
def test_experts_are_divided_as_the_run_would_divide_them(
    argv: tuple[str, ...], sizes: set[int], more: Callable[[Layout], bool]
) -> None:
    words, request = read_plan_request(argv)
    cluster = cluster_of(request)
    job, problems = job_of(request, cluster), layout_problems(words, cluster.devices, request.program)
    tried = list(layouts(job, {"keeps_experts_whole": "--expert-tensor-parallel-size" in argv}))
    assert {layout.ep for layout in tried} == sizes
    some = [layout for layout in tried if more(layout) and layout.splits_sequence == (layout.tp > 1)]
    assert some and not problems(some[0]) and not problems(some[-1])
    again = layout_of(read_flags([*words, *some[-1].flags()]).request(), cluster.devices)
    assert dataclasses.replace(again, schedule=some[-1].schedule) == some[-1]


def test_given_numbers_of_blocks_exclude_layouts() -> None:
    words = ["--num-layers", "24", "--hidden-size", "256", "--num-attention-heads", "8", "--seq-length", "256"]
    words += ["--max-position-embeddings", "256", "--bf16", "--planned-devices", "16", "--global-batch-size", "64"]
    words += ["--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "23"]
    words, request = read_plan_request(words)
    plan, _ = plan_request(words, request)
    assert plan.best
    assert {layout.chunks for layout in layouts(plan.job, {"pp": 2})} == {1}, "the last rank has one block, not two"
    assert not list(layouts(plan.job, {"pp": 4})), "and four ranks have no block for two of them"


def test_whole_experts_are_kept_in_every_layout() -> None:
    words, request = read_plan_request([*LONG, "--expert-tensor-parallel-size", "1", "--micro-batch-size", "1"])
    plan, _ = plan_request(words, request)
    assert plan.best and all(each.layout.keeps_experts_whole for each in plan.best)
    assert "--expert-tensor-parallel-size 1 " in " ".join(plan.best[0].layout.flags())


def test_parameters_and_messages_of_whole_experts() -> None:
    _, request = read_plan_request(LONG)
    job = job_of(request, cluster_of(request, 16))
    common = {"pp": 1, "dp": 2, "splits_sequence": True, "schedule": "1f1b", "chunks": 1, "zero": 1}
    split = Layout(2, 4, 1, 8, **common, recompute="full", micro_batch=1, micro_batches=1)  # type: ignore[arg-type]
    whole = dataclasses.replace(split, keeps_experts_whole=True)
    of_split, of_whole = (job.block_parameters(0, layout).experts for layout in (split, whole))
    assert of_whole == 2 * of_split and (split.expert_copies, whole.expert_copies) == (8, 16)
    assert estimate(job, whole).time.sent["ep"] == estimate(job, split).time.sent["ep"] / 2


SMALL = (
    *("--num-layers", "32", "--hidden-size", "256", "--num-attention-heads", "4", "--seq-length", "128"),
    *("--max-position-embeddings", "128", "--planned-devices", "8", "--bf16", "--attention-dropout", "0"),
)


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A schedule of 4 ranks, 2 chunks on each, and 8 micro-batches."""
    path = tmp_path / "mine.csv"
    path.write_text(schedule_text(build_schedule("zbv", 4, 2, 8)))
    return str(path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("flags", "is_kept"),
    [
        ("--enable-zbh1-pipeline", lambda each: each.schedule == "zb-h1"),
        ("--num-layers-per-virtual-pipeline-stage 8", lambda each: each.pp * each.chunks == 4),
        ("--num-layers-per-virtual-pipeline-stage 32", lambda each: each.pp == 1),
        ("--context-parallel-size 2 --cp-comm-type a2a", lambda each: (each.cp, each.ulysses) == (1, 2)),
        (
            "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
            lambda each: (each.cp, each.ulysses) == (2, 2),
        ),
        ("--pipeline-schedule FILE", lambda each: (each.pp, each.chunks, each.micro_batches) == (4, 2, 8)),
    ],
)
def test_alternative_flags_are_kept_and_the_command_has_the_layout(
    flags: str, is_kept: Callable[[Layout], bool], file: str
) -> None:
    argv = [*SMALL, *flags.replace("FILE", file).split()]
    if "FILE" not in flags:
        argv += ["--pipeline-model-parallel-size", "4"] * ("zbh1" in flags) + ["--global-batch-size", "64"]
    plan, problems = plan_request(*read_plan_request(argv))
    assert plan.best and all(is_kept(each.layout) and not problems(each.layout) for each in plan.best)
    *_, command = request_lines(argv, ["x", *argv])
    _, again = read_plan_request(command.split()[1:])
    read, best = layout_of(again, 8), plan.best[0].layout
    assert dataclasses.replace(read, keeps_experts_whole=False) == best


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline-model-parallel-size 4 --enable-zbh1-pipeline",
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2",
        "--pipeline-model-parallel-size 4 --pipeline-schedule FILE --virtual-pipeline-model-parallel-size 2",
        "--context-parallel-size 2 --cp-comm-type a2a --attention-dropout 0.1",
    ],
)
def test_the_fastest_layout_does_not_keep_the_flags_of_the_command(flags: str, file: str) -> None:
    argv = [*SMALL, "--micro-batch-size", "1", "--global-batch-size", "16", *flags.replace("FILE", file).split()]
    *_, command = command_lines(argv, NO_PROGRAM, 8, ["x", *argv])
    assert layout_of(read_plan_request(command.split()[1:])[1], 8).global_batch == 16
    for word in (file, "--enable-zbh1-pipeline", "--num-layers-per-virtual-pipeline-stage", "--cp-comm-type"):
        assert word not in command
    words, request = read_plan_request(argv)
    assert next_fitting(words, request, cluster_of(request))[1] is not None


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--pipeline-model-parallel-size 2", r"is for 4 ranks \(--pipeline-model-parallel-size 2\)"),
        ("--virtual-pipeline-model-parallel-size 3", r"is for 2 chunks per rank \(--virtual-pipeline-.* 3\)"),
        ("--global-batch-size 12", r"satisfies --pipeline-schedule .*mine.csv for 8 micro-batches\. Drop"),
    ],
)
def test_contradictions_of_a_file_with_a_schedule_are_refused(flags: str, sentence: str, file: str) -> None:
    argv = [*SMALL, "--pipeline-schedule", file, *flags.split()]
    with pytest.raises(ConfigError, match=sentence):
        list(request_lines(argv, ["x"]))


def test_a_command_whose_file_is_for_other_micro_batches_is_refused(file: str) -> None:
    argv = [*SMALL, "--pipeline-schedule", file, "--micro-batch-size", "1", "--global-batch-size", "16"]
    argv += ["--pipeline-model-parallel-size", "4", "--virtual-pipeline-model-parallel-size", "2"]
    assert next(command_lines(argv, NO_PROGRAM, 8, ["x"])).startswith("this command, which fits")
    with pytest.raises(ConfigError, match=r"mine.csv is for 8 micro-batches \(a step has 16: --global-batch-size\)"):
        list(command_lines([*argv, "--global-batch-size", "32"], NO_PROGRAM, 8, ["x"]))


def test_the_time_of_unequal_pipeline_ranks_equals_a_simulation() -> None:
    argv = [*SMALL, "--pipeline-model-parallel-size", "4", "--micro-batch-size", "1", "--global-batch-size", "16"]
    _, request = read_plan_request([*argv, "--vocab-size", "50000"])
    cluster = cluster_of(request)
    cluster = dataclasses.replace(
        cluster, device=dataclasses.replace(cluster.device, host_seconds_per_layer=0.0, host_seconds_per_step=0.0)
    )
    job, layout = dataclasses.replace(job_of(request, cluster), division=EVENLY), layout_of(request, 8)
    chunks, _ = job.chunks(Placement.loop(4, 1))
    costs = [_pass(job, layout, Stage(each, not each.start, each.stop == 32)).seconds for each in chunks]
    assert max(costs) > 1.5 * min(costs)
    schedule = build_schedule("1f1b", 4, 1, layout.micro_batches)
    end = max(span.end for span in simulate(schedule.orders, schedule.placement, chunk_costs=costs)) / 3
    found = step_time_of(job, layout).parts
    passes = ("products", "attention", "memory traffic")
    assert found["idle"] + sum(found[name] for name in passes) == pytest.approx(end)


def test_small_networks_are_counted_in_their_own_unit() -> None:
    first, *_ = request_lines([*SMALL, "--num-layers", "1", "--vocab-size", "1000"], ["x"])
    assert first.startswith("1.1M parameters, 8 samples of 128 tokens a step (1.0K tokens)")
