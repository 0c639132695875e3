"""Bytes on a rank by kind, in closed form: what is held between steps, and what a step adds at its peak."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.config.architecture.positions import ROPE
from megatron.engine.memory.closed_form import Amounts, Partitioning, predicted_bytes
from trident.plan.job import Job, Parameters, Stage
from trident.plan.layouts import BLOCKS, Layout, costs_of_schedule

_FP32 = 4
# What an allocator cannot use between blocks of memory, and what the libraries of a GPU take: an allowance.
_MARGIN = 0.05
# Logits that the loss holds at once, see `megatron/parallel/tensor/head_loss.py`.
_LOGITS, _LOGIT_ROWS = 1 << 27, 2048
_CPU_LOGITS, _CPU_LOGIT_ROWS = 1 << 22, 384
# Elements of a bucket of gradients that ZeRO stage 2 averages at once, and of the weights that stage 3 gathers ahead.
REDUCE_BUCKET = 500_000_000
_PREFETCH = 1_000_000_000


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the peak of a step.

    Attributes:
        weights: what the network computes with.
        gradients: their sums, and those of a backward pass until they are added.
        held_gradients: their sums.
        optimizer: fp32 copies of the weights, moments and means of weights, unless they are in the host's memory.
        activations: what forward passes keep for backward passes, of all that are under way.
        buffers: logits, messages, and blocks that are recomputed.
        margin: allowance for fragmentation and libraries.
        host: what is in the memory of the host, which is none of the others.
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
        """All but the margin."""
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
    """The memory of the pipeline rank that needs the most."""
    ranks = memory_of_ranks(job, layout)
    return max(ranks, key=lambda memory: memory.total)


def memory_of_ranks(job: Job, layout: Layout) -> list[Memory]:
    """The memory of the pipeline ranks; of those with equal blocks the first, which holds the most activations."""
    costs = costs_of_schedule(layout.schedule, layout.pp, layout.chunks, layout.micro_batches)
    chunks, ranks = job.chunks(costs.placement)
    found = []
    for rank in ranks:
        largest = max((chunks[chunk] for chunk in costs.placement.chunks_of(rank)), key=len)
        found.append(_memory_at(job, layout, job.stage(costs.placement, rank), largest, costs.peak_alive[rank]))
    return found


def _memory_at(job: Job, layout: Layout, stage: Stage, largest: range, alive: int) -> Memory:
    """The memory of a rank of a stage, whose largest chunk is given."""
    ends, blocks = job.ends_parameters(layout, stage), job.blocks_parameters(layout, stage)
    state = _state(job, layout, ends, blocks)
    gradients, optimizer = state.on_device - state.parameters, state.optimizer
    if job.offloads_optimizer:
        optimizer = 0
    else:
        gradients -= optimizer
    kept = sum(block_activations(job, layout, block) for block in largest)
    activations = int(alive * kept)
    # A backward pass leaves gradients while it frees activations.
    passing = job.weight_bytes * (ends + blocks).total // layout.chunks if layout.zero in (1, 2) else 0
    at_peak = gradients + max(0, passing - kept)
    buffers = _buffers(job, layout, largest, last=stage.last)
    host = state.total - state.on_device
    memory = Memory(state.parameters, at_peak, optimizer, activations, buffers, gradients, host=host)
    return dataclasses.replace(memory, margin=int(memory.counted * _MARGIN))


def _state(job: Job, layout: Layout, ends: Parameters, blocks: Parameters) -> Amounts:
    """Bytes of weights, gradients and optimizer."""
    stage = layout.zero_stage(job.weight_bytes)
    counts = [ends.dense, blocks.dense, blocks.experts]
    ranks = [layout.replicas, layout.replicas, layout.expert_copies // layout.ep]
    states = [job.end_state_bytes, job.block_state_bytes, job.block_state_bytes]
    how = Partitioning(stage, layout.replicas, job.offloads_optimizer, weight_bytes=job.weight_bytes)
    return predicted_bytes([[count] for count in counts], how, ranks, states)


def local_tokens(job: Job, layout: Layout) -> int:
    """Tokens of a micro-batch on a rank, between products that do not split them."""
    return layout.micro_batch * job.sequence_length // layout.sequence


def block_activations(job: Job, layout: Layout, index: int) -> int:
    """Bytes that the forward pass of a block keeps for its backward pass, of one micro-batch."""
    tokens, tp = local_tokens(job, layout), layout.tp
    within = tp if layout.splits_sequence else 1
    if layout.recompute == BLOCKS:
        return tokens * job.model.hidden_size * job.weight_bytes // within
    return _whole_activations(job, layout, index)


def _whole_activations(job: Job, layout: Layout, index: int) -> int:
    """The same of a block of which at most attention is recomputed.

    In elements a token: inputs and outputs of two norms, the projection to queries, keys and values, rotated copies,
    the output of attention, its gate, that gate's sigmoid and their product, and input and output of the activation.
    Statistics of rows are in fp32.
    """
    model, tokens, tp = job.model, local_tokens(job, layout), layout.tp
    within = tp if layout.splits_sequence else 1
    heads = model.num_attention_heads / tp
    elements = 4 * model.hidden_size / within + _attention_elements(job, tp, within)
    elements += _feed_forward_elements(job, index) / tp
    if index >= model.num_layers:  # what is joined, its norms and the norm of the result
        elements += 7 * model.hidden_size / within
    statistics = 0.0 if layout.recomputes_attention else heads * _FP32
    scores = 0.0
    if not job.has_fused_kernels and model.num_query_groups < model.num_attention_heads:
        scores = 0.0 if layout.recomputes_attention else heads * job.sequence_length
    return int(tokens * ((elements + scores) * job.weight_bytes + statistics))


def _attention_elements(job: Job, tp: int, within: int) -> float:
    """Elements a token that attention keeps on a rank, between its norm and its output matrix."""
    model, size, heads = job.model, job.model.kv_channels, job.model.num_attention_heads / tp
    if model.multi_latent_attention:  # latents before and after their norms; queries, keys and padded values; results
        latents = 2 * (model.q_lora_rank or 0) + model.latent_width + model.kv_lora_rank
        return heads * (4 * size + model.v_head_dim) + latents / within
    groups = max(model.num_query_groups / tp, 1)
    copies = (model.position_embedding_type == ROPE) + model.qk_layernorm
    return ((2 + 3 * model.attention_output_gate) * heads + 2 * groups + copies * (heads + groups)) * size


def _feed_forward_elements(job: Job, index: int) -> float:
    """Elements a token that the feed-forward of a block keeps, over all tensor-parallel ranks."""
    model = job.model
    inputs = 2 if model.gated_linear_unit else 1
    kept = inputs + 1 + (0 if job.has_fused_kernels or not model.gated_linear_unit else 1)
    if not model.has_experts(index):
        return kept * model.ffn_hidden_size
    routed = model.moe_router_topk * (kept * model.moe_ffn_hidden_size + 2 * model.hidden_size)
    shared = kept * model.moe_shared_expert_intermediate_size
    return routed + shared + (kept * model.ffn_hidden_size if model.moe_residual else 0)


def _buffers(job: Job, layout: Layout, blocks: range, *, last: bool) -> int:
    """Bytes that are there for parts of a step only."""
    model, tokens = job.model, local_tokens(job, layout)
    hidden = tokens * model.hidden_size * job.weight_bytes
    needed = 0
    if layout.splits_sequence:
        needed += 2 * hidden  # tokens of all tensor-parallel ranks, in a product and in its backward pass
    if layout.recompute == BLOCKS and len(blocks):
        needed += _whole_activations(job, layout, blocks[0])
    if layout.pp > 1:
        needed += 4 * hidden // (layout.tp if layout.splits_sequence else 1)
    if layout.zero == 2:
        needed += job.weight_bytes * min(REDUCE_BUCKET, job.block_parameters(0, layout).total * max(1, len(blocks)))
    if layout.zero == 3:
        whole = sum(job.block_parameters(block, layout).total for block in blocks)
        needed += job.weight_bytes * min(whole, _PREFETCH)
    if last:
        needed += _head_buffers(job, layout)
    return int(needed)


def _head_buffers(job: Job, layout: Layout) -> int:
    """A chunk of logits, the gradients of hidden states, and those of the head's weight, summed in fp32 over chunks."""
    model, tokens = job.model, local_tokens(job, layout)
    columns = model.padded_vocab_size // layout.tp
    values, least = (_LOGITS, _LOGIT_ROWS) if job.has_fused_kernels else (_CPU_LOGITS, _CPU_LOGIT_ROWS)
    tokens *= 1 + model.mtp_num_layers
    rows = min(tokens, max(least, values // columns))
    weight = columns * model.hidden_size
    sums = _FP32 * weight if rows < tokens else job.weight_bytes * weight
    return rows * columns * job.weight_bytes + sums + 2 * tokens * model.hidden_size * job.weight_bytes
