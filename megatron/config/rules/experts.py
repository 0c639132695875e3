"""Mixture of experts: routing, and the division of experts over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.architecture.feed_forward import MICRO_BATCH
from megatron.config.rules.layout import divisors
from megatron.config.rules.rule import model_rule, request_rule, run_rule, world_rule
from megatron.config.run_sections import ReadFlags, RunSections
from megatron.config.sections.model import ModelConfig, ModelRequest
from megatron.config.sections.parallel import ParallelRequest

_ONE, _TENSOR = "--expert-tensor-parallel-size 1", "--tensor-model-parallel-size"


def expert_ranks(model: ModelRequest, parallel: ParallelRequest) -> int:
    """The effective degree of expert parallelism: as requested, but at most the number of experts of any MoE layer, as
    in DeepSpeed; 1 for a dense network.
    """
    counts = model.expert_counts
    return max(1, min(parallel.expert_model_parallel_size, *counts)) if counts else 1


def expert_notices(model: ModelRequest, parallel: ParallelRequest) -> Iterator[str]:
    """Yields a notice if experts are divided over fewer ranks than requested."""
    size, requested = expert_ranks(model, parallel), parallel.expert_model_parallel_size
    if size >= requested:
        return
    if model.expert_counts:
        yield (
            f"--expert-model-parallel-size {requested} is reduced to {size}, the smallest number of experts in a layer."
        )
    else:
        yield f"--expert-model-parallel-size {requested} has no effect: the network is dense (--num-experts 1)."


def balancing_notices(model: ModelConfig, *, is_by_choice: bool) -> Iterator[str]:
    """Yields a notice if gradients depend on the micro-batch size, unless the user selected the scope."""
    is_over_micro_batch = model.moe_aux_loss_scope == MICRO_BATCH and model.moe_aux_loss_coeff > 0
    if model.expert_counts and is_over_micro_batch and not is_by_choice:
        yield (
            "The load-balancing loss is computed per micro-batch, as in Megatron-LM, so gradients depend on "
            "--micro-batch-size. With --moe-aux-loss-scope global they do not."
        )


@model_rule
def _counts(model: ModelRequest) -> Iterator[str]:
    """One number for each MoE layer; --num-experts is the largest."""
    counts = model.moe_expert_counts
    if not counts:
        return
    shown = " ".join(map(str, counts))
    layers = model.expert_layers
    if len(counts) != layers:
        yield (
            f"--num-experts {shown} has {len(counts)} values, but {layers} of {model.num_layers} layers are MoE layers "
            f"(--num-layers, --moe-layer-pattern). Give {layers} values, or one for all layers."
        )
    if max(counts) != model.num_experts:
        yield (
            f"--num-experts {model.num_experts} is not the largest of --moe-expert-counts {shown}. Drop --num-experts, "
            "which is derived from them."
        )


@model_rule
def _layers_and_choices(model: ModelRequest) -> Iterator[str]:
    if model.num_experts < 2:
        return
    if not model.expert_layers:
        pattern = " ".join(map(str, model.moe_layer_pattern))
        yield (
            f"--num-experts {model.num_experts} with --moe-layer-pattern {pattern}: none of the {model.num_layers} "
            "layers is an MoE layer. Use a pattern that selects one, or drop --num-experts."
        )
    fewest = min((count for count in model.moe_expert_counts if count > 1), default=model.num_experts)
    if model.moe_router_topk > fewest:
        yield f"--moe-router-topk {model.moe_router_topk} is more than --num-experts {fewest}. Use at most {fewest}."


@model_rule
def _groups(model: ModelRequest) -> Iterator[str]:
    """Groups must have equal size, and a token's groups must fit its number of experts."""
    if model.num_experts < 2:
        return
    groups, chosen, top_k = model.moe_router_num_groups, model.moe_router_group_topk, model.moe_router_topk
    if (groups is None and chosen is None) or groups == 0:
        return
    if groups is None or chosen is None:
        given, other = ("group-topk", "num-groups") if groups is None else ("num-groups", "group-topk")
        yield (
            f"--moe-router-{given} {chosen if groups is None else groups} requires --moe-router-{other}. Set both, or "
            "drop it."
        )
        return
    counts = sorted({count for count in model.moe_expert_counts if count > 1} or {model.num_experts})
    uneven = next((count for count in counts if count % groups), None)
    if uneven is not None:
        sizes = (size for size in range(1, counts[0] + 1) if not any(count % size for count in counts))
        nearest = min(sizes, key=lambda size: abs(size - groups))
        yield (
            f"--num-experts {uneven} is not divisible by --moe-router-num-groups {groups}. Use --moe-router-num-groups "
            f"{nearest}."
        )
        return
    group_size = min(counts) // groups
    least, most = -(-top_k // group_size), min(groups, top_k)
    if not least <= chosen <= most:
        yield (
            f"--moe-router-group-topk {chosen} is out of range: with --moe-router-topk {top_k} and "
            f"--moe-router-num-groups {groups} of {group_size} experts it must be from {least} to {most}. Use "
            f"--moe-router-group-topk {min(max(chosen, least), most)}."
        )
    elif (scored := model.moe_router_group_scored_experts) > group_size:
        yield (
            f"--moe-router-group-scored-experts {scored} is more than the {group_size} experts of a group "
            f"(--num-experts {min(counts)}, --moe-router-num-groups {groups}). Use at most {group_size}."
        )


@model_rule
def _single_expert(model: ModelRequest) -> Iterator[str]:
    if model.num_experts > 1 and model.moe_router_topk == 1 and not model.keeps_scores:
        yield (
            f"--moe-router-topk 1 with --num-experts {model.num_experts} requires --moe-router-pre-softmax: otherwise "
            "the weight of the single expert is always 1 and the router gets no gradient."
        )


@run_rule
def _over_ranks(run: RunSections) -> Iterator[str]:
    model, parallel = run.model, run.parallel
    counts = sorted(set(model.expert_counts))
    if not counts:
        return
    size, ranks = expert_ranks(model, parallel), parallel.tensor_model_parallel_size
    uneven = [count for count in counts if count % size]
    if uneven:
        fitting = [each for each in divisors(counts[0]) if not any(count % each for count in counts)]
        yield (
            f"{_requested(size, parallel)} does not divide --num-experts {uneven[0]}: every rank must hold the same "
            f"number. Use {_any_of(fitting)}{' that also divides the ranks of a stage' * (len(fitting) > 1)}."
        )
    expert_tensor = parallel.expert_tensor_parallel_size
    if expert_tensor is not None and expert_tensor not in (1, ranks):
        options = f"1 or {ranks}" if ranks > 1 else f"1, or {_TENSOR} {expert_tensor}"
        yield (
            f"--expert-tensor-parallel-size {expert_tensor} is not supported: experts are either not split, or split "
            f"over {_TENSOR} {ranks}. Use {options}."
        )
    elif not parallel.splits_each_expert and not parallel.splits_sequence:
        yield (
            f"{_ONE} with {_TENSOR} {ranks} requires --sequence-parallel, without which all tensor-parallel ranks have "
            "the same tokens. Add it, or drop --expert-tensor-parallel-size."
        )


@request_rule
def _split_or_whole(run: ReadFlags) -> Iterator[str]:
    parallel = run.parallel
    if run.values.get("legacy.enable_expert_tensor_parallelism") and not parallel.splits_each_expert:
        yield (
            "--enable-expert-tensor-parallelism contradicts --expert-tensor-parallel-size "
            f"{parallel.expert_tensor_parallel_size}, which does not split experts. Drop one of them."
        )


@world_rule
def _over_world(run: RunSections, world_size: int) -> Iterator[str]:
    model, parallel = run.model, run.parallel
    size, tensor = expert_ranks(model, parallel), parallel.tensor_model_parallel_size
    stage = world_size // parallel.pipeline_model_parallel_size
    ranks = stage if not parallel.splits_each_expert else stage // tensor
    if size > 1 and ranks % size:
        counts = model.expert_counts
        fitting = [each for each in divisors(ranks) if not any(count % each for count in counts)]
        available = f"this run has {world_size} {'process' if world_size == 1 else 'processes'}"
        tensor_ranks = "" if parallel.splits_each_expert or tensor == 1 else f" x tensor {tensor}"
        yield (
            f"{_requested(size, parallel)} does not divide the {ranks} ranks (data x context{tensor_ranks}) of a "
            f"stage: {available}. Use {_any_of(fitting)}, or a multiple of {world_size // ranks * size} processes."
        )


def _requested(size: int, parallel: ParallelRequest) -> str:
    """The flag, with the effective size if it differs."""
    requested = parallel.expert_model_parallel_size
    reduced = "" if size == requested else f", reduced to {size} as some layer has {size} experts,"
    return f"--expert-model-parallel-size {requested}{reduced}"


def _any_of(sizes: list[int]) -> str:
    return f"{'one of ' if len(sizes) > 1 else ''}{', '.join(map(str, sizes))}"
