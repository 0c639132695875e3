"""Bytes that a rank sends in a step, by axis, assuming ring collectives.

`tests/trident/plan/test_messages.py` compares them with the messages of a simulated step. Messages whose size does not
grow with hidden states or weights are ignored: sums of losses and norms, maxima of logits, counts of tokens.
"""

from __future__ import annotations

from megatron.parallel.schedule.actions import Placement
from trident.plan.job import Job, Parameters, Stage
from trident.plan.layouts import BLOCKS, Layout
from trident.plan.memory import local_tokens

_FP32 = 4


def sent_in_passes(job: Job, layout: Layout, stage: Stage) -> dict[str, float]:
    """Bytes that a rank of a stage sends in all passes of a step, by axis, except to other stages."""
    model, blocks, passes, k = job.model, stage.blocks, layout.micro_batches, job.weight_bytes
    tokens, again = local_tokens(job, layout), layout.recompute == BLOCKS
    hidden = tokens * model.hidden_size * k
    sent: dict[str, float] = {}
    if layout.tp > 1:
        depths = sum(index >= model.num_layers for index in blocks)
        ends = 2 * (stage.first + stage.last) + depths * _multi_token_gathers(layout)
        gathers = ends + sum(_gathers(job, layout, index) for index in blocks)
        sent["tp"] = passes * gathers * (layout.tp - 1) / layout.tp * hidden
    if layout.sequence > 1:
        groups = max(model.num_query_groups / layout.tp, 1) * model.kv_channels
        ring = (2 + again) * (layout.cp - 1) * k + _FP32 * layout.cp  # fp32 gradients return to their rank
        sent["cp"] = passes * len(blocks) * tokens * 2 * groups * ring * (layout.cp > 1)
        heads = 2 * model.num_attention_heads / layout.tp * model.kv_channels + 2 * groups
        share = (layout.ulysses - 1) / layout.ulysses
        sent["cp"] += passes * len(blocks) * (2 + again) * share * tokens * heads * k
    if layout.ep > 1:
        routed = sum(model.has_experts(block) for block in blocks)
        share = (layout.ep - 1) / layout.ep
        local = hidden / layout.tp if layout.keeps_experts_whole else hidden
        sent["ep"] = passes * routed * (4 + 2 * again) * share * model.moe_router_topk * local
    return sent


def _gathers(job: Job, layout: Layout, index: int) -> float:
    """All-gathers and reduce-scatters of a block over tensor-parallel ranks, forward and backward, in units of hidden
    states; an all-reduce counts twice.
    """
    # The inputs of matrix products are gathered again for the gradients of weights. Latent attention exchanges latents
    # only. Recomputation skips the last sum of a block, except for experts.
    model, again, splits = job.model, layout.recompute == BLOCKS, layout.splits_sequence
    hidden = model.hidden_size
    taken = kept = 1.0
    if model.multi_latent_attention:
        queries = model.q_lora_rank or hidden
        taken, kept = (queries + model.latent_width) / hidden, (queries + model.kv_lora_rank) / hidden
    attention = (2 + (2 + again) * taken + kept + again) if splits else 2 + 2 * taken + 2 * again
    if model.num_query_groups % layout.tp:  # keys and values are replicated: their gradients are summed
        attention += 2 * 2 * model.num_query_groups * model.kv_channels / hidden
    if not model.has_experts(index):
        return attention + (5 + again if splits else 4)
    is_whole = layout.keeps_experts_whole and not model.moe_shared_expert_intermediate_size
    return attention + (0 if is_whole else 4 + 2 * again)


def _multi_token_gathers(layout: Layout) -> float:
    """Gathers of a multi-token prediction depth outside its block: embedding, projection and head."""
    return 11 if layout.splits_sequence else 8 + 1 / layout.tp


def sent_to_stages(job: Job, layout: Layout, placement: Placement, rank: int) -> float:
    """Bytes that a pipeline rank sends to other stages: hidden states to the next chunk, gradients to the previous."""
    owners = [placement.owner(chunk) for chunk in range(placement.chunks)]
    neighbours = [(chunk, other) for chunk in placement.chunks_of(rank) for other in (chunk - 1, chunk + 1)]
    count = sum(0 <= other < len(owners) and owners[other] != rank for _, other in neighbours)
    return layout.micro_batches * count * boundary_bytes(job, layout)


def boundary_bytes(job: Job, layout: Layout) -> float:
    """Size of the hidden states of a micro-batch between two stages."""
    within = layout.tp if layout.splits_sequence else 1
    return local_tokens(job, layout) * job.model.hidden_size * job.weight_bytes / within


def bytes_per_parameter(job: Job, layout: Layout) -> tuple[int, int]:
    """Size of a step's messages of gradients and of weights among data-parallel ranks, per parameter of a rank."""
    # ZeRO 0 and 1 reduce fp32 gradients once per step; 2 scatters gradients in the weights' dtype in every pass; 3 also
    # gathers the weights twice per pass. With half-precision weights, stage 0 is stage 1.
    k, passes, gathers = job.weight_bytes, layout.micro_batches, 2 + (layout.recompute == BLOCKS)
    by_stage = (2 * k, 0), (_FP32, k), (passes * k, k), (passes * k, passes * gathers * k)
    return by_stage[layout.zero_stage(k)]


def _divided(layout: Layout, parameters: Parameters) -> tuple[tuple[int, int], ...]:
    """Dense parameters and parameters of experts, each with the number of ranks that average their gradients."""
    return (parameters.dense, layout.replicas), (parameters.experts, layout.expert_copies // layout.ep)


def bucket_count(job: Job, layout: Layout, parameters: Parameters) -> int:
    """Messages that carry a rank's gradients once; a pipeline chunk shares none with another."""
    return sum(
        layout.chunks * -(-count // (layout.chunks * job.bucket_elements(ranks)))
        for count, ranks in _divided(layout, parameters)
        if ranks > 1
    )


def sent_for_tied_weights(job: Job, layout: Layout, stage: Stage) -> float:
    """Bytes that a rank sends in a step to sum the gradients of tied embedding weights."""
    if layout.pp == 1 or stage.first == stage.last or job.model.untie_embeddings_and_output_weights:
        return 0.0
    divided = layout.replicas if layout.zero_stage(job.weight_bytes) else 1
    return _FP32 * job.model.padded_vocab_size * job.model.hidden_size / layout.tp / divided


def sent_for_matrices(job: Job, layout: Layout, share: Parameters) -> dict[str, float]:
    """Bytes that a rank sends to gather the matrices of its blocks and scatter them again, in fp32.

    Matrices of experts are not gathered over tensor-parallel ranks.
    """
    sent: dict[str, float] = {}
    is_divided = layout.zero_stage(job.weight_bytes) > 0
    divided = (("dp", *each) for each in _divided(layout, share))
    for name, count, ranks in (*divided, ("tp", share.dense / layout.replicas, layout.tp)):
        # Without ZeRO each rank starts with the whole shard, and receives all of it back.
        moved = count if name == "dp" and not is_divided else 2 * count / (ranks if name == "dp" else 1)
        key = f"{name} of matrices"
        sent[key] = sent.get(key, 0.0) + _FP32 * moved * (ranks - 1) / ranks
    return sent


def sent_in_step(job: Job, layout: Layout, placement: Placement, rank: int) -> dict[str, float]:
    """Bytes that a pipeline rank sends in a step, by axis."""
    stage = job.stage(placement, rank)
    share = job.blocks_parameters(layout, stage)
    sent = sent_in_passes(job, layout, stage)
    sent["pp"] = sent_to_stages(job, layout, placement, rank)
    sent["embedding"] = sent_for_tied_weights(job, layout, stage)
    if job.is_orthogonalized:
        sent |= sent_for_matrices(job, layout, share)
    everything, size = share + job.ends_parameters(layout, stage), sum(bytes_per_parameter(job, layout))
    for name, (count, ranks) in zip(("dp", "dp of experts"), _divided(layout, everything), strict=True):
        sent[name] = (ranks - 1) / ranks * size * count
    return sent
