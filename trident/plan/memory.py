"""Closed-form memory of a rank by kind: state held between steps, and the peak of a step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.config.architecture.positions import ROPE
from megatron.engine.memory.closed_form import Amounts, Partitioning, predicted_bytes
from trident.plan.job import Job, Parameters, Stage
from trident.plan.layouts import BLOCKS, Layout, costs_of_schedule

_FP32 = 4
_MARGIN = 0.05  # allowance for fragmentation and GPU libraries
# Size of a chunk of logits in the loss, see `megatron/parallel/tensor/head_loss.py`.
_LOGITS, _LOGIT_ROWS = 1 << 27, 2048
_CPU_LOGITS, _CPU_LOGIT_ROWS = 1 << 22, 384
# Buckets of gradients that ZeRO 2 holds in half precision, and elements of the weights that ZeRO 3 prefetches.
_BUCKETS_IN_FLIGHT, _PREFETCH = 3, 1_000_000_000


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the peak of a step.

    Attributes:
        weights: model weights.
        gradients: accumulated gradients, and gradients of a backward pass before their accumulation.
        held_gradients: accumulated gradients.
        optimizer: master weights, moments and averaged weights, unless offloaded.
        activations: activations stored for the backward passes of all micro-batches in flight.
        buffers: logits, messages, and recomputed blocks.
        margin: allowance for fragmentation and libraries.
        host: offloaded to host memory, not part of the others.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    held_gradients: int
    margin: int = 0
    host: int = 0

    @property
    def counted(self) -> int:
        """Everything except the margin."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers

    @property
    def total(self) -> int:
        return self.counted + self.margin

    def by_kind(self) -> dict[str, int]:
        """Bytes by name, the largest first."""
        names = ("weights", "gradients", "optimizer", "activations", "buffers", "margin")
        kinds = {name: int(getattr(self, name)) for name in names}
        return dict(sorted(kinds.items(), key=lambda item: -item[1]))


def memory_of(job: Job, layout: Layout) -> Memory:
    """The memory of the fullest pipeline rank."""
    ranks = memory_of_ranks(job, layout)
    return max(ranks, key=lambda memory: memory.total)


def memory_of_ranks(job: Job, layout: Layout) -> list[Memory]:
    """The memory of pipeline ranks; of those with equal blocks only the first, which stores the most activations."""
    costs = costs_of_schedule(layout.schedule, layout.pp, layout.chunks, layout.micro_batches)
    chunks, ranks = job.chunks(costs.placement)
    memories = []
    for rank in ranks:
        largest = max((chunks[chunk] for chunk in costs.placement.chunks_of(rank)), key=len)
        memories.append(_memory_at(job, layout, job.stage(costs.placement, rank), largest, costs.peak_alive[rank]))
    return memories


def _memory_at(job: Job, layout: Layout, stage: Stage, largest: range, alive: int) -> Memory:
    ends, blocks = job.ends_parameters(layout, stage), job.blocks_parameters(layout, stage)
    state = _state(job, layout, ends, blocks)
    gradients, optimizer = state.on_device - state.parameters, state.optimizer
    if job.offloads_optimizer:
        optimizer = 0
    else:
        gradients -= optimizer
    kept = sum(block_activations(job, layout, block) for block in largest)
    activations = int(alive * kept)
    # A backward pass allocates gradients while it frees activations.
    passing = job.weight_bytes * (ends + blocks).total // layout.chunks if layout.zero in (1, 2) else 0
    at_peak = gradients + max(0, passing - kept)
    buffers = _buffers(job, layout, largest, last=stage.last)
    host = state.total - state.on_device
    memory = Memory(state.parameters, at_peak, optimizer, activations, buffers, gradients, host=host)
    return dataclasses.replace(memory, margin=int(memory.counted * _MARGIN))


def _state(job: Job, layout: Layout, ends: Parameters, blocks: Parameters) -> Amounts:
    stage = layout.zero_stage(job.weight_bytes)
    counts = [ends.dense, blocks.dense, blocks.experts]
    ranks = [layout.replicas, layout.replicas, layout.expert_copies // layout.ep]
    states = [job.end_state_bytes, job.block_state_bytes, job.block_state_bytes]
    partitioning = Partitioning(stage, layout.replicas, job.offloads_optimizer, weight_bytes=job.weight_bytes)
    return predicted_bytes([[count] for count in counts], partitioning, ranks, states)


def local_tokens(job: Job, layout: Layout) -> int:
    """Tokens of a micro-batch on a rank, without sequence parallelism over tensor-parallel ranks."""
    return layout.micro_batch * job.sequence_length // layout.sequence


def block_activations(job: Job, layout: Layout, index: int) -> int:
    """Bytes that a block stores of one micro-batch for its backward pass."""
    tokens, tp = local_tokens(job, layout), layout.tp
    within = tp if layout.splits_sequence else 1
    if layout.recompute == BLOCKS:
        return tokens * job.model.hidden_size * job.weight_bytes // within
    return _whole_activations(job, layout, index)


def _whole_activations(job: Job, layout: Layout, index: int) -> int:
    """Bytes that a block stores without recomputation, or with recomputed attention.

    Elements per token: inputs and outputs of two norms, the projection to queries, keys and values, rotated copies, the
    output of attention, its gate, that gate's sigmoid and their product, and input and output of the activation. Row
    statistics are in fp32.
    """
    model, tokens, tp = job.model, local_tokens(job, layout), layout.tp
    within = tp if layout.splits_sequence else 1
    heads = model.num_attention_heads / tp
    elements = 4 * model.hidden_size / within + _attention_elements(job, tp, within)
    elements += _feed_forward_elements(job, index) / tp
    if index >= model.num_layers:  # multi-token prediction: two inputs, their norms and the final norm
        elements += 7 * model.hidden_size / within
    statistics = 0.0 if layout.recomputes_attention else heads * _FP32
    scores = 0.0
    if not job.has_fused_kernels and model.num_query_groups < model.num_attention_heads:
        scores = 0.0 if layout.recomputes_attention else heads * job.sequence_length
    return int(tokens * ((elements + scores) * job.weight_bytes + statistics))


def _attention_elements(job: Job, tp: int, within: int) -> float:
    """Elements per token that attention stores on a rank, between its norm and its output projection."""
    model, size, heads = job.model, job.model.kv_channels, job.model.num_attention_heads / tp
    if model.multi_latent_attention:  # latents before and after their norms; queries, keys and padded values; results
        latents = 2 * (model.q_lora_rank or 0) + model.latent_width + model.kv_lora_rank
        return heads * (4 * size + model.v_head_dim) + latents / within
    groups = max(model.num_query_groups / tp, 1)
    copies = (model.position_embedding_type == ROPE) + model.qk_layernorm
    return ((2 + 3 * model.attention_output_gate) * heads + 2 * groups + copies * (heads + groups)) * size


def _feed_forward_elements(job: Job, index: int) -> float:
    """Elements per token that the MLP of a block stores on all tensor-parallel ranks together."""
    model = job.model
    inputs = 2 if model.gated_linear_unit else 1
    kept = inputs + 1 + (0 if job.has_fused_kernels or not model.gated_linear_unit else 1)
    if not model.has_experts(index):
        return kept * model.ffn_hidden_size
    routed = model.moe_router_topk * (kept * model.moe_ffn_hidden_size + 2 * model.hidden_size)
    shared = kept * model.moe_shared_expert_intermediate_size
    return routed + shared + (kept * model.ffn_hidden_size if model.moe_residual else 0)


def _buffers(job: Job, layout: Layout, blocks: range, *, last: bool) -> int:
    """Bytes allocated for parts of a step only."""
    model, tokens = job.model, local_tokens(job, layout)
    hidden = tokens * model.hidden_size * job.weight_bytes
    needed = 0
    if layout.splits_sequence:
        needed += 2 * hidden  # gathered tokens of a matrix product, forward and backward
    if layout.recompute == BLOCKS and len(blocks):
        needed += _whole_activations(job, layout, blocks[0])
    if layout.pp > 1:
        needed += 4 * hidden // (layout.tp if layout.splits_sequence else 1)
    if layout.zero == 2:
        held = job.block_parameters(0, layout).total * max(1, len(blocks))
        needed += job.weight_bytes * min(_BUCKETS_IN_FLIGHT * job.bucket_elements(layout.replicas), held)
    if layout.zero == 3:
        whole = sum(job.block_parameters(block, layout).total for block in blocks)
        needed += job.weight_bytes * min(whole, _PREFETCH)
    if last:
        needed += _head_buffers(job, layout)
    return int(needed)


def _head_buffers(job: Job, layout: Layout) -> int:
    """Bytes of a chunk of logits, gradients of hidden states, and the head's gradient, summed in fp32 over chunks."""
    model, tokens = job.model, local_tokens(job, layout)
    columns = model.padded_vocab_size // layout.tp
    values, least = (_LOGITS, _LOGIT_ROWS) if job.has_fused_kernels else (_CPU_LOGITS, _CPU_LOGIT_ROWS)
    tokens *= 1 + model.mtp_num_layers
    rows = min(tokens, max(least, values // columns))
    weight = columns * model.hidden_size
    sums = _FP32 * weight if rows < tokens else job.weight_bytes * weight
    return rows * columns * job.weight_bytes + sums + 2 * tokens * model.hidden_size * job.weight_bytes
