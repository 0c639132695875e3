"""Runs that others have published, as command lines of the same layout."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from trident.plan.requests import cluster_of, job_of, layout_of, read_plan_request
from trident.plan.search import LayoutEstimate, estimate


class PublishedRun(NamedTuple):
    """A run: its name, its devices, how it is started here, and the share of the devices' peak that it reached.

    Attributes:
        utilization: model FLOPs, without recomputation, over what the devices can do.
        overlaps: messages of gradients overlapped with computation.
    """

    name: str
    devices: int
    flags: str
    utilization: float
    overlaps: bool


def megatron_run(
    billions: str, heads: int, hidden: int, layers: int, tp: int, pp: int, devices: int, batch: int, teraflops: float
) -> PublishedRun:
    """A row of Table 1 of Narayanan et al. 2021, whose FLOP/s count the repeated forward passes of blocks (equation 3):
    A100, samples of 2,048 tokens, vocabulary 51,200, all blocks recomputed. It does not give the micro-batch.
    Gradients were reduced after the last backward pass (`allreduce_gradients` in `megatron/model/distributed.py`).
    """
    head, blocks = 6 * 51200, 24 * layers * hidden * (1 + 2048 / (6 * hidden))  # of a token and channel; one pass
    share = (3 * blocks + head) / (4 * blocks + head)
    shape = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --vocab-size 51200"
    layout = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --global-batch-size {batch}"
    others = "--seq-length 2048 --max-position-embeddings 2048 --recompute-granularity full --zero-stage 0"
    flags = f"{shape} {layout} {others} --micro-batch-size 1 --device a100 --interconnect nvlink3+ib200"
    return PublishedRun(f"GPT {billions}B, tp {tp}, pp {pp}", devices, flags, teraflops / 312 * share, False)


def llama_run(cp: int, devices: int, length: int, batch: int, utilization: float) -> PublishedRun:
    """A row of Table 4 of "The Llama 3 Herd of Models", 2024; the plan has an interleaved schedule of 4 chunks."""
    layout = f"--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --context-parallel-size {cp}"
    sizes = f"--seq-length {length} --max-position-embeddings {length} --global-batch-size {batch}"
    others = "--sequence-parallel --virtual-pipeline-model-parallel-size 4 --micro-batch-size 1 --zero-stage 1"
    flags = f"--model-preset llama-3.1-405b {layout} {sizes} {others} --interconnect nvlink+roce400"
    return PublishedRun(f"Llama 3 405B, tp 8, cp {cp}, pp 16, {length:,} tokens", devices, flags, utilization, True)


PUBLISHED = (
    megatron_run("1.7", 24, 2304, 24, 1, 1, 32, 512, 137),
    megatron_run("7.5", 32, 4096, 36, 4, 1, 128, 512, 142),
    megatron_run("18.4", 48, 6144, 40, 8, 1, 256, 1024, 135),
    megatron_run("39.1", 64, 8192, 48, 8, 2, 512, 1536, 138),
    megatron_run("76.1", 80, 10240, 60, 8, 4, 1024, 1792, 140),
    megatron_run("145.6", 96, 12288, 80, 8, 8, 1536, 2304, 148),
    megatron_run("310.1", 128, 16384, 96, 8, 16, 1920, 2160, 155),
    megatron_run("529.6", 128, 20480, 105, 8, 35, 2520, 2520, 163),
    megatron_run("1008", 160, 25600, 128, 8, 64, 3072, 3072, 163),
    llama_run(1, 8192, 8192, 2048, 0.43),
    llama_run(1, 16384, 8192, 2048, 0.41),
    llama_run(16, 16384, 131072, 128, 0.38),
)


def replanned(run: PublishedRun) -> LayoutEstimate:
    """What the planner says of the run."""
    _, request = read_plan_request([*run.flags.split(), "--bf16", "--planned-devices", str(run.devices)])
    job = dataclasses.replace(job_of(request, cluster_of(request)), overlaps_messages=run.overlaps)
    return estimate(job, layout_of(request, run.devices))
