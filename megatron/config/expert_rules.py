"""How the experts of a layer can be divided over ranks: the rules and the nearest sizes that keep them."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.architecture.feed_forward import MICRO_BATCH
from megatron.config.layout import divisors
from megatron.config.sections.model import ModelConfig, ModelRequest
from megatron.config.sections.parallel import ParallelRequest

_ONE, _TENSOR = "--expert-tensor-parallel-size 1", "--tensor-model-parallel-size"


def expert_ranks(model: ModelRequest, parallel: ParallelRequest) -> int:
    """Over how many ranks the experts of every layer are divided: as many as asked for, but no more than the layer with
    the fewest experts has, as in DeepSpeed; 1 for a dense network.
    """
    counts = model.expert_counts
    return max(1, min(parallel.expert_model_parallel_size, *counts)) if counts else 1


def expert_notices(model: ModelRequest, parallel: ParallelRequest) -> Iterator[str]:
    """What of the sizes that were asked for is not done as it was written."""
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


def expert_problems(model: ModelRequest, parallel: ParallelRequest) -> Iterator[str]:
    """One sentence for everything about experts that does not fit a layout, whatever the number of processes."""
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


def expert_world_problems(model: ModelRequest, parallel: ParallelRequest, world_size: int) -> Iterator[str]:
    """What does not fit so many processes, of which each stage has as many."""
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
