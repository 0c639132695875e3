"""Experts: how tokens are routed to them, and how those of a layer are divided over ranks."""

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
    """The number of ranks that the experts of every layer are divided over: as many as requested, but no more than the
    layer with the fewest experts has, as in DeepSpeed; 1 for a dense network.
    """
    counts = model.expert_counts
    return max(1, min(parallel.expert_model_parallel_size, *counts)) if counts else 1


def expert_notices(model: ModelRequest, parallel: ParallelRequest) -> Iterator[str]:
    """A notice that experts are divided over fewer ranks than requested."""
    size, wanted = expert_ranks(model, parallel), parallel.expert_model_parallel_size
    if size >= wanted:
        return
    if model.expert_counts:
        yield (
            f"--expert-model-parallel-size {wanted}: some layer has {size} experts, so the experts of every layer are "
            f"divided over {size} ranks."
        )
    else:
        yield f"--expert-model-parallel-size {wanted} divides nothing: the network is dense (--num-experts 1)."


def balancing_notices(model: ModelConfig, *, is_by_choice: bool) -> Iterator[str]:
    """A notice that gradients depend on the micro-batch size, unless the user has chosen the scope that makes them."""
    is_over_micro_batch = model.moe_aux_loss_scope == MICRO_BATCH and model.moe_aux_loss_coeff > 0
    if model.expert_counts and is_over_micro_batch and not is_by_choice:
        yield (
            "Experts are balanced over the tokens of a micro-batch, as in Megatron-LM, so that gradients depend on "
            "--micro-batch-size. With --moe-aux-loss-scope global they do not."
        )


@model_rule
def _counts(model: ModelRequest) -> Iterator[str]:
    """Numbers of experts by layer: one for each layer that has some, and the largest equals --num-experts."""
    counts = model.moe_expert_counts
    if not counts:
        return
    shown = " ".join(map(str, counts))
    layers = model.expert_layers
    if len(counts) != layers:
        yield (
            f"--num-experts {shown} has {len(counts)} numbers, and {layers} of the {model.num_layers} layers "
            f"have experts (--num-layers, --moe-layer-pattern). Give {layers} numbers, or one for all layers."
        )
    if max(counts) != model.num_experts:
        yield (
            f"--num-experts {model.num_experts} is not the largest of --moe-expert-counts {shown}. Drop "
            "--num-experts, which follows from them."
        )


@model_rule
def _layers_and_choices(model: ModelRequest) -> Iterator[str]:
    if model.num_experts < 2:
        return
    if not model.expert_layers:
        pattern = " ".join(map(str, model.moe_layer_pattern))
        yield (
            f"--num-experts {model.num_experts} with --moe-layer-pattern {pattern} gives none of the "
            f"{model.num_layers} layers experts. Use a pattern with a 1 for one of them, or drop --num-experts."
        )
    fewest = min((count for count in model.moe_expert_counts if count > 1), default=model.num_experts)
    if model.moe_router_topk > fewest:
        yield (
            f"--moe-router-topk {model.moe_router_topk} is more than --num-experts {fewest}. A token "
            f"cannot go to more experts than there are."
        )


@model_rule
def _groups(model: ModelRequest) -> Iterator[str]:
    """Groups of equal size, of which a token takes as many as it has experts at most."""
    if model.num_experts < 2:
        return
    groups, chosen, top_k = model.moe_router_num_groups, model.moe_router_group_topk, model.moe_router_topk
    if (groups is None and chosen is None) or groups == 0:
        return
    if groups is None or chosen is None:
        given, other = ("group-topk", "num-groups") if groups is None else ("num-groups", "group-topk")
        yield (
            f"--moe-router-{given} {chosen if groups is None else groups} needs --moe-router-{other}. Give both, "
            "or drop it."
        )
        return
    counts = sorted({count for count in model.moe_expert_counts if count > 1} or {model.num_experts})
    uneven = next((count for count in counts if count % groups), None)
    if uneven is not None:
        sizes = (size for size in range(1, counts[0] + 1) if not any(count % size for count in counts))
        nearest = min(sizes, key=lambda size: abs(size - groups))
        yield (
            f"--num-experts {uneven} cannot be divided into --moe-router-num-groups {groups} of equal size. Use "
            f"--moe-router-num-groups {nearest}."
        )
        return
    within = min(counts) // groups
    least, most = -(-top_k // within), min(groups, top_k)
    if not least <= chosen <= most:
        yield (
            f"--moe-router-group-topk {chosen} does not go with --moe-router-topk {top_k} and "
            f"--moe-router-num-groups {groups} of {within} experts: a token's experts lie in {least} to {most} "
            f"groups. Use --moe-router-group-topk {min(max(chosen, least), most)}."
        )
    elif (counted := model.moe_router_group_scored_experts) > within:
        yield (
            f"--moe-router-group-scored-experts {counted} is more than the {within} experts of a group "
            f"(--num-experts {min(counts)}, --moe-router-num-groups {groups}). Use at most {within}."
        )


@model_rule
def _single_expert(model: ModelRequest) -> Iterator[str]:
    if model.num_experts > 1 and model.moe_router_topk == 1 and not model.keeps_scores:
        yield (
            f"--moe-router-topk 1 with --num-experts {model.num_experts} needs --moe-router-pre-softmax. The "
            "weights of the chosen experts sum to 1, so the weight of a single one is constant and the router "
            "would learn nothing."
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
            f"{_asked(size, parallel)} does not divide --num-experts {uneven[0]}: every rank must hold equally many. "
            f"Use {_any_of(fitting)}{', whichever divides the ranks of a stage too' * (len(fitting) > 1)}."
        )
    within = parallel.expert_tensor_parallel_size
    if within is not None and within not in (1, ranks):
        options = f"1 or {ranks}" if ranks > 1 else f"1, or {_TENSOR} {within}"
        yield (
            f"--expert-tensor-parallel-size {within} is refused: experts are whole, or split as all matrices are, over "
            f"{_TENSOR} {ranks}. Use {options}."
        )
    elif not parallel.splits_each_expert and not parallel.splits_sequence:
        yield (
            f"{_ONE} with {_TENSOR} {ranks} needs --sequence-parallel, without which the tensor-parallel ranks have "
            "the same tokens and would compute the same. Add it, or drop --expert-tensor-parallel-size."
        )


@request_rule
def _split_or_whole(run: ReadFlags) -> Iterator[str]:
    parallel = run.parallel
    if run.values.get("legacy.enable_expert_tensor_parallelism") and not parallel.splits_each_expert:
        yield (
            f"--enable-expert-tensor-parallelism contradicts --expert-tensor-parallel-size "
            f"{parallel.expert_tensor_parallel_size}, with which experts are whole. Drop one of them."
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
        started = f"{world_size} {'was' if world_size == 1 else 'were'} started"
        whole = "" if parallel.splits_each_expert or tensor == 1 else f" x tensor {tensor}"
        yield (
            f"{_asked(size, parallel)} does not divide the {ranks} ranks (data x context{whole}) of a stage that could "
            f"hold different experts: {started}. Use {_any_of(fitting)}, or start a multiple of "
            f"{world_size // ranks * size}."
        )


def _asked(size: int, parallel: ParallelRequest) -> str:
    """The flag, and the size that it comes to where that is another."""
    wanted = parallel.expert_model_parallel_size
    less = "" if size == wanted else f" comes to {size} ranks, as many as some layer has experts, and {size}"
    return f"--expert-model-parallel-size {wanted}{less}"


def _any_of(sizes: list[int]) -> str:
    return f"{'one of ' if len(sizes) > 1 else ''}{', '.join(map(str, sizes))}"
