"""The time of a step by part, and the bytes sent on each axis.

Matrix products run at a fraction of the device's peak that falls with their smallest side, all other operations at a
fraction of its memory bandwidth; the host may be slower than both. Messages take the bytes of a ring collective over
the slowest link of their axis. Two kinds overlap with computation: the blocks of ring attention, and sends between
stages, except for the first micro-batch on its way to the last stage and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megatron.config.architecture.positions import ROPE
from trident.plan.job import Job, Stage
from trident.plan.layouts import BLOCKS, Layout, costs_of_schedule
from trident.plan.memory import local_tokens
from trident.plan.messages import boundary_bytes, sent_in_passes, sent_in_step

_FP32 = 4
_BACKWARD = 2.0  # matrix products of a backward pass, relative to the forward pass
_ATTENTION_BACKWARD = 2.5  # fused attention recomputes the scores
# Bytes that an update moves per updated parameter besides weight and optimizer state: the gradient and a half-precision
# copy. And per parameter of a rank: accumulating the gradients, norm and clipping.
_UPDATE_BYTES, _GRADIENT_BYTES = 6.0, 14.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, or of one micro-batch.

    Attributes:
        parts: seconds by part; their sum is the total.
        sent: bytes that a rank sends in a step, by axis.
        idle: fraction of a step that a pipeline rank waits for others.
    """

    parts: Mapping[str, float]
    sent: Mapping[str, float] = field(default_factory=dict)
    idle: float = 0.0

    @cached_property
    def seconds(self) -> float:
        return sum(self.parts.values())


def step_time_of(job: Job, layout: Layout) -> StepTime:
    """The time of a step on the slowest pipeline rank, including the time it waits for the others."""
    # It waits for passes of other ranks: in 1F1B one pass of each, before its first and after its last.
    costs = costs_of_schedule(layout.schedule, layout.pp, layout.chunks, layout.micro_batches)
    _, ranks = job.chunks(costs.placement)
    passes = [(_pass(job, layout, job.stage(costs.placement, rank)), rank) for rank in ranks]
    total = sum(each.seconds * ranks[rank] for each, rank in passes)
    slowest, rank = max(passes, key=lambda item: item[0].seconds)
    parts = {name: seconds * layout.micro_batches for name, seconds in slowest.parts.items()}
    work = slowest.seconds * layout.micro_batches
    stage = job.stage(costs.placement, rank)
    ends, share = job.ends_parameters(layout, stage), job.blocks_parameters(layout, stage)
    sent = sent_in_step(job, layout, costs.placement, rank)
    cluster, device = job.cluster, job.cluster.device
    stages = cluster.bandwidth(layout.pp, cluster.devices // layout.pp)
    reach = cluster.bandwidth(layout.expert_copies, 1 if layout.keeps_experts_whole else layout.tp)
    parts["gradients and weights"] = sent["dp"] / cluster.bandwidth(layout.replicas, layout.tp)
    parts["gradients and weights"] += sent["dp of experts"] / reach + sent["embedding"] / stages
    kept = ends.total * (_FP32 + job.end_state_bytes) + share.total * (_FP32 + job.block_state_bytes)
    divided = layout.replicas if layout.zero_stage(job.weight_bytes) else 1
    moved = (2 * kept + _UPDATE_BYTES * (ends + share).total) / divided
    parts["update"] = (moved + _GRADIENT_BYTES * (ends + share).total) / device.memory_bandwidth
    if job.is_orthogonalized:
        parts["matrix messages"] = sent["dp of matrices"] / cluster.bandwidth(layout.replicas, layout.tp)
        parts["matrix messages"] += sent["tp of matrices"] / cluster.bandwidth(layout.tp, 1)
    again = 1 / 3 if layout.recompute == BLOCKS else 0.0
    launched = layout.micro_batches * len(stage.blocks) * (1 + again)
    host = launched * device.host_seconds_per_layer + device.host_seconds_per_step
    parts["host"] = max(0.0, host - work - parts["update"])
    if layout.pp > 1:
        waits = layout.micro_batches * costs.idle / (1 - costs.idle)  # in passes
        others = (total - slowest.seconds) / (layout.pp - 1)
        parts["idle"] = waits * others * (1 + parts["host"] / work)
        crossings = 2 * (layout.pp * layout.chunks - 1)
        size = boundary_bytes(job, layout)
        parts["pipeline messages"] = crossings * _seconds(size, stages, cluster.links.latency)
    idle = parts.get("idle", 0.0) / sum(parts.values())
    return StepTime(parts, {axis: count for axis, count in sent.items() if count}, idle)


def _pass(job: Job, layout: Layout, stage: Stage) -> StepTime:
    """Time of a micro-batch on a stage, forward and backward."""
    device, model, blocks = job.cluster.device, job.model, stage.blocks
    tokens, tp = local_tokens(job, layout), layout.tp
    again = 1.0 if layout.recompute == BLOCKS else 0.0
    products = sum(job.block_costs[block].flops_per_token for block in blocks) * tokens / tp
    width = min(tokens, model.hidden_size, min(model.ffn_hidden_size, model.moe_ffn_hidden_size) / tp)
    head = job.head_flops * tokens / tp if stage.last else 0.0
    rate = device.peak * _product_share(job, width)
    matrices = products * (1 + _BACKWARD + again) / rate
    matrices += head * (1 + _BACKWARD) / (device.peak * _product_share(job, min(tokens, model.hidden_size)))
    causal = 1.0 if model.bidirectional else 0.5
    pairs = sum(job.block_costs[block].flops_per_token_pair for block in blocks) * tokens * job.sequence_length
    repeated = 1 + _ATTENTION_BACKWARD + (layout.recompute == BLOCKS or layout.recomputes_attention)
    attention = pairs / tp * causal * repeated / (device.peak * _attention_share(job, layout))
    traffic = _traffic(job, layout, blocks) * (1 + again / 2.5) + (head / model.hidden_size * 2 * job.weight_bytes)
    others = traffic / (device.memory_bandwidth * device.traffic_share)
    computed = {"products": matrices, "attention": attention, "memory traffic": others}
    return StepTime({**computed, **_messages(job, layout, stage, attention)})


def _product_share(job: Job, side: float) -> float:
    """Fraction of the peak that a matrix product with this smallest side reaches."""
    device = job.cluster.device
    return device.product_share * side / (side + device.saturation)


def _attention_share(job: Job, layout: Layout) -> float:
    """Fraction of the peak that fused attention reaches, less with short samples and narrow heads."""
    # Ring attention processes one block of a sample at a time.
    device, length, channels = job.cluster.device, job.sequence_length / layout.cp, job.model.kv_channels
    of_length, of_channels = device.attention_saturation
    return device.attention_share * length / (length + of_length) * channels / (channels + of_channels)


def _traffic(job: Job, layout: Layout, blocks: Sequence[int]) -> float:
    """Bytes that a micro-batch moves outside matrix products and attention, forward and backward.

    Elements per token: norms and residual additions, the activation, biases, rotations, and concatenating the gradients
    of queries, keys and values.
    """
    model, tokens, tp = job.model, local_tokens(job, layout), layout.tp
    within = tp if layout.splits_sequence else 1
    queries, gated = model.num_attention_heads * model.kv_channels / tp, model.attention_output_gate
    projected = queries + 2 * model.num_query_groups * model.kv_channels / tp
    elements = 30 * model.hidden_size / within + 2 * projected + 10 * queries * gated
    if model.position_embedding_type == ROPE:
        elements += 4 * projected
    routers = tp if layout.keeps_experts_whole else 1  # ranks that route different tokens
    total = 0.0
    for block in blocks:
        width = model.moe_router_topk * model.moe_ffn_hidden_size if model.has_experts(block) else model.ffn_hidden_size
        inner = (8 if model.gated_linear_unit else 5) * width / tp
        biases = (projected + width / tp + 2 * model.hidden_size / within) * model.add_bias_linear
        routed = 8 * model.moe_router_topk * model.hidden_size / routers if model.has_experts(block) else 0
        total += elements + inner + biases + routed
    return total * tokens * job.weight_bytes


def _messages(job: Job, layout: Layout, stage: Stage, attention: float) -> dict[str, float]:
    """Seconds of a micro-batch's messages that do not overlap with computation."""
    cluster, latency, blocks = job.cluster, job.cluster.links.latency, stage.blocks
    sent = sent_in_passes(job, layout, stage)
    passes = layout.micro_batches
    parts = {}
    if layout.tp > 1:
        calls = len(blocks) * (4 + 2 * (layout.recompute == BLOCKS))
        calls *= 2 if layout.splits_sequence else 1
        parts["tensor messages"] = _seconds(sent["tp"] / passes, cluster.bandwidth(layout.tp, 1), calls * latency)
    if layout.sequence > 1:
        ring = _seconds(sent["cp"] / passes, cluster.bandwidth(layout.sequence, layout.tp), len(blocks) * 6 * latency)
        parts["sequence messages"] = max(0.0, ring - attention) if layout.ulysses == 1 else ring
    if layout.ep > 1:
        reach = cluster.bandwidth(layout.ep, 1 if layout.keeps_experts_whole else layout.tp)  # neighbours
        parts["expert messages"] = _seconds(sent["ep"] / passes, reach, len(blocks) * 4 * latency)
    return parts


def _seconds(count: float, bandwidth: float, latency: float) -> float:
    return count / bandwidth + latency
