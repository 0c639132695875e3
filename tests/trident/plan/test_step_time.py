"""Seconds of a step that messages of gradients and weights take."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.config.sections.parallel import default_bucket_elements
from trident.plan.job import Job, Parameters
from trident.plan.layouts import Layout
from trident.plan.messages import bucket_count
from trident.plan.requests import cluster_of, job_of, layout_of, read_plan_request
from trident.plan.step_time import exposed_seconds, step_time_of

LLAMA_8B = "--model-preset llama-3-8b --planned-devices 64 --device h100 --bf16 --seq-length 4096 --micro-batch-size 1"
NAME = "gradients and weights"


def planned(flags: str) -> tuple[Job, Layout]:
    _, request = read_plan_request([*LLAMA_8B.split(), "--global-batch-size", "256", *flags.split()])
    return job_of(request, cluster_of(request)), layout_of(request, 64)


def seconds(flags: str, **changes: object) -> float:
    """Of gradients and weights, with another job."""
    job, layout = planned(flags)
    return step_time_of(dataclasses.replace(job, **changes), layout).parts[NAME]  # type: ignore[arg-type]


def simulated(sending: float, computing: float, buckets: int) -> float:
    """Time from the end of a backward pass to the end of the last message."""
    sent_at = 0.0
    for index in range(buckets):
        sent_at = max(sent_at, computing * (index + 1) / buckets) + sending / buckets
    return sent_at - computing


def simulated_forward(sending: float, computing: float, buckets: int) -> float:
    """Time by which a forward pass is longer because it waits for weights."""
    computed_at = 0.0
    for index in range(buckets):
        computed_at = max(computed_at, sending * (index + 1) / buckets) + computing / buckets
    return computed_at - computing


@pytest.mark.parametrize("sending", [0.1, 0.9, 1.0, 1.1, 5.0])
@pytest.mark.parametrize("buckets", [1, 2, 7, 100])
def test_exposed_time_equals_a_simulation_of_each_bucket(sending: float, buckets: int) -> None:
    expected = pytest.approx(exposed_seconds(sending, 1.0, buckets))
    assert simulated(sending, 1.0, buckets) == expected
    assert simulated_forward(sending, 1.0, buckets) == expected


def test_at_least_the_last_bucket_is_exposed() -> None:
    assert exposed_seconds(1.0, 10.0, 4) == 0.25
    assert exposed_seconds(8.0, 4.0, 4) == 5.0
    assert exposed_seconds(8.0, 4.0, 1) == 8.0
    assert exposed_seconds(0.0, 4.0, 0) == 0.0


@pytest.mark.parametrize(
    ("flags", "size", "count"),
    [
        ("", None, 126),  # 8.03e9 parameters of 64e6
        ("--tensor-model-parallel-size 8", None, 26),  # of 40e6
        ("--tensor-model-parallel-size 8", 10**8, 11),
        ("--tensor-model-parallel-size 8 --context-parallel-size 8", None, 26),
        ("--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8", None, 0),  # one replica
        ("--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 4", None, 104),
    ],
)
def test_the_number_of_buckets(flags: str, size: int | None, count: int) -> None:
    job, layout = planned(flags)
    parameters = Parameters(job.parameters // layout.tp // layout.pp)
    job = dataclasses.replace(job, bucket_elements=lambda ranks: size or default_bucket_elements(ranks))
    assert bucket_count(job, layout, parameters) == count


def test_experts_have_buckets_of_their_own() -> None:
    job, layout = planned("")
    experts = dataclasses.replace(layout, ep=8)  # each of 8 copies
    assert bucket_count(job, experts, Parameters(64_000_001, 80_000_000)) == 2 + 2


@pytest.mark.parametrize(
    ("stage", "sent"),
    [(1, 6), (2, 2 * 4 + 2), (3, 4 * 3 * 2)],  # bytes per parameter in a step of 4 micro-batches
)
def test_messages_that_do_not_overlap_take_the_time_of_their_bytes(stage: int, sent: int) -> None:
    """In nodes of 8 cards of 50 GB/s: 400 GB/s."""
    job, _ = planned("")
    expected = pytest.approx(job.parameters * 63 / 64 * sent / 400e9)
    assert seconds(f"--zero-stage {stage}", overlaps_messages=False) == expected
    assert (seconds(f"--zero-stage {stage}") == expected) == (stage == 3)


@pytest.mark.parametrize(("recompute", "passes"), [("--no-checkpoint-activations", 3), ("--checkpoint-activations", 4)])
def test_messages_overlap_with_one_micro_batch_of_zero_1_and_all_of_zero_2(recompute: str, passes: int) -> None:
    """A backward pass takes as long as two forward passes, or three."""
    job, layout = planned(recompute)
    parts = step_time_of(job, layout).parts
    computing = sum(parts[name] for name in ("products", "attention", "memory traffic")) / layout.micro_batches
    unit, latency = job.parameters * 63 / 64 / 400e9, 126 * job.cluster.links.latency
    last = exposed_seconds(4 * unit + latency, computing * (1 - 1 / passes), 126)
    first = exposed_seconds(2 * unit + latency, computing / passes, 126)
    each = exposed_seconds(2 * unit + latency, computing * (1 - 1 / passes), 126)
    assert seconds(f"{recompute} --zero-stage 1") == pytest.approx(last + first)
    assert seconds(f"{recompute} --zero-stage 2") == pytest.approx(4 * each + first)


def test_buckets_between_nodes_hide_most_of_the_messages() -> None:
    """Of 8 billion parameters on 64 devices."""
    for flags in ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2"):
        whole = seconds(flags, overlaps_messages=False)
        assert seconds(flags) < seconds(flags, bucket_elements=lambda _: 10**10) < whole * 1.01


def test_gradients_of_experts_use_the_cards_of_their_copies() -> None:
    """With 8 experts in each node their copies are one per node; with 2 there are 4."""
    flags = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024 --expert-model-parallel-size"
    bandwidths = []
    for size in (8, 2):
        job, layout = planned(f"{flags} {size}")
        step = step_time_of(dataclasses.replace(job, overlaps_messages=False), layout)
        bandwidths.append(step.sent["dp of experts"] / (step.parts[NAME] - step.sent["dp"] / 400e9))
    assert bandwidths == pytest.approx([50e9, 200e9])


def test_flags_set_overlap_and_buckets() -> None:
    job = planned("--no-overlap-grad-reduce --ddp-bucket-size 5000")[0]
    assert not job.overlaps_messages and job.bucket_elements(64) == 5000
    job = planned("")[0]
    assert job.overlaps_messages and [job.bucket_elements(ranks) for ranks in (2, 64)] == [40_000_000, 64_000_000]
