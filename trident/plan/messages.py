"""Bytes that a rank sends in a step, by axis, with ring collectives.

`tests/trident/plan/test_messages.py` compares them with what a simulated step records. Messages whose size does not
grow with hidden states or weights are left out: sums of losses and norms, maxima of logits, counts of tokens.
"""

from __future__ import annotations

from megatron.parallel.schedule.actions import Placement
from trident.plan.job import Job, Parameters, Stage
from trident.plan.layouts import BLOCKS, Layout
from trident.plan.memory import local_tokens

_FP32 = 4


def sent_in_passes(job: Job, layout: Layout, stage: Stage) -> dict[str, float]:
    """Bytes that a rank of a stage sends in all passes of a step, by axis, but to other stages."""
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
        ring = (2 + again) * (layout.cp - 1) * k + _FP32 * layout.cp  # gradients in fp32 end where they came from
        sent["cp"] = passes * len(blocks) * tokens * 2 * groups * ring * (layout.cp > 1)
        heads = 2 * model.num_attention_heads / layout.tp * model.kv_channels + 2 * groups
        share = (layout.ulysses - 1) / layout.ulysses
        sent["cp"] += passes * len(blocks) * (2 + again) * share * tokens * heads * k
    if layout.ep > 1:
        routed = sum(model.has_experts(block) for block in blocks)
        share = (layout.ep - 1) / layout.ep
        own = hidden / layout.tp if layout.keeps_experts_whole else hidden
        sent["ep"] = passes * routed * (4 + 2 * again) * share * model.moe_router_topk * own
    return sent


def _gathers(job: Job, layout: Layout, index: int) -> float:
    """How many times a block gathers hidden states over tensor-parallel ranks, or scatters their sums, forward and
    backward; an all-reduce is two. What a product takes in is gathered anew for the gradient of its weight, and of
    latents only they are exchanged. Blocks that are computed again leave out the last sum, but for experts.
    """
    model, again, splits = job.model, layout.recompute == BLOCKS, layout.splits_sequence
    hidden = model.hidden_size
    taken = kept = 1.0
    if model.multi_latent_attention:
        queries = model.q_lora_rank or hidden
        taken, kept = (queries + model.latent_width) / hidden, (queries + model.kv_lora_rank) / hidden
    attention = (2 + (2 + again) * taken + kept + again) if splits else 2 + 2 * taken + 2 * again
    if model.num_query_groups % layout.tp:  # all ranks have all keys and values, whose gradients they sum
        attention += 2 * 2 * model.num_query_groups * model.kv_channels / hidden
    if not model.has_experts(index):
        return attention + (5 + again if splits else 4)
    is_whole = layout.keeps_experts_whole and not model.moe_shared_expert_intermediate_size
    return attention + (0 if is_whole else 4 + 2 * again)


def _multi_token_gathers(layout: Layout) -> float:
    """The same of what a depth of multi-token prediction has beside its block: embedding, joining and head."""
    return 11 if layout.splits_sequence else 8 + 1 / layout.tp


def sent_to_stages(job: Job, layout: Layout, placement: Placement, rank: int) -> float:
    """Bytes that a pipeline rank sends to others in a step: hidden states to the next chunk, gradients to the last."""
    owners = [placement.owner(chunk) for chunk in range(placement.chunks)]
    neighbours = [(chunk, other) for chunk in placement.chunks_of(rank) for other in (chunk - 1, chunk + 1)]
    count = sum(0 <= other < len(owners) and owners[other] != rank for _, other in neighbours)
    return layout.micro_batches * count * boundary_bytes(job, layout)


def boundary_bytes(job: Job, layout: Layout) -> float:
    """Bytes of the hidden states of a micro-batch between two stages."""
    within = layout.tp if layout.splits_sequence else 1
    return local_tokens(job, layout) * job.model.hidden_size * job.weight_bytes / within


def sent_for_gradients(job: Job, layout: Layout, parameters: Parameters) -> tuple[float, float]:
    """Bytes that a rank sends in a step to average gradients and to gather weights: of what all replicas have, and of
    experts.

    Gradients are sent in fp32 at stages 0 and 1, once a step; at stage 2 in the dtype of the weights in every pass, and
    at stage 3 the weights themselves twice a pass. Stage 0 is 1 where weights are in half precision.
    """
    k, passes, gathers = job.weight_bytes, layout.micro_batches, 2 + (layout.recompute == BLOCKS)
    of_stages = 2 * k, _FP32 + k, (2 * passes + 1) * k, passes * (gathers + 1) * k
    of_element = of_stages[layout.zero_stage(k)]
    copies = layout.expert_copies // layout.ep
    counts = (parameters.dense, layout.replicas), (parameters.experts, copies)
    dense, experts = ((ranks - 1) / ranks * of_element * count for count, ranks in counts)
    return dense, experts


def sent_for_tied_weights(job: Job, layout: Layout, stage: Stage) -> float:
    """Bytes that the ranks with the two copies of the embedding send each other in a step to sum their gradients."""
    if layout.pp == 1 or stage.first == stage.last or job.model.untie_embeddings_and_output_weights:
        return 0.0
    divided = layout.replicas if layout.zero_stage(job.weight_bytes) else 1
    return _FP32 * job.model.padded_vocab_size * job.model.hidden_size / layout.tp / divided


def sent_for_matrices(job: Job, layout: Layout, share: Parameters) -> dict[str, float]:
    """Bytes that a rank sends to bring the matrices of its blocks together and to divide them again, in fp32.

    What it owns of a shard stays. Experts are lists of matrices, which tensor-parallel ranks do not bring together.
    """
    sent: dict[str, float] = {}
    is_divided = layout.zero_stage(job.weight_bytes) > 0
    for name, count, ranks in (
        ("dp", share.dense, layout.replicas),
        ("dp", share.experts, layout.expert_copies // layout.ep),
        ("tp", share.dense / layout.replicas, layout.tp),
    ):
        # Without ZeRO each rank has all of a shard to begin with, and wants all of it back.
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
    everything = share + job.ends_parameters(layout, stage)
    sent["dp"], sent["dp of experts"] = sent_for_gradients(job, layout, everything)
    return sent
