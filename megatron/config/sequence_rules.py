"""Rules for runs whose ranks share each sequence: what its length and heads must be, and what cannot be divided."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.config.layout import divisors
from megatron.config.objective.loss import MASKED, LossConfig
from megatron.config.sections.computation import KernelConfig
from megatron.config.sections.data import DataConfig
from megatron.config.sections.model import ModelRequest
from megatron.config.sections.optim import OptimRequest
from megatron.config.sections.parallel import ULYSSES, ParallelRequest


def sequence_problems(
    model: ModelRequest,
    parallel: ParallelRequest,
    optim: OptimRequest,
    loss: LossConfig,
    kernels: KernelConfig,
    data: DataConfig,
) -> Iterator[str]:
    """One sentence for everything that keeps a sequence from being divided as was asked."""
    is_shared = parallel.sequence_size > 1
    if not (is_shared or parallel.splits_sequence) or parallel.sequence_size < 1 or any(parallel.problems()):
        return  # nothing is divided, or it was said already why not
    yield from _length_problems(model, parallel, optim, loss, data.seq_length)
    yield from _heads_problems(model, parallel)
    if parallel.ring_size > 1:
        yield from _ring_problems(model, parallel, loss)
    if kernels.compile and is_shared:
        yield (
            f"--compile does not go with {_asked(parallel)}: ranks exchange messages in the middle of a block. Drop "
            "--compile."
        )


def sequence_notices(parallel: ParallelRequest) -> Iterator[str]:
    """What of the sizes that were asked for divides nothing."""
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        yield (
            "--sequence-parallel has no effect with --tensor-model-parallel-size 1, whose one rank has all tokens. Use "
            "--tensor-model-parallel-size 2, or --context-parallel-size 2, which divides tokens without dividing "
            "matrices."
        )


def length_unit(parallel: ParallelRequest, *, causal: bool) -> int:
    """What lengths must be multiples of: a ring cuts causal samples into two blocks a rank, and each rank's tokens are
    divided once more over the tensor-parallel ranks under sequence parallelism.
    """
    ring = parallel.ring_size
    within = parallel.tensor_model_parallel_size if parallel.splits_sequence else 1
    return math.lcm(2 * ring if causal and ring > 1 else ring, parallel.sequence_size * within)


def padded_length(length: int, parallel: ParallelRequest, *, causal: bool) -> int:
    """The length to which samples are padded so that ranks can share them."""
    unit = length_unit(parallel, causal=causal)
    return -(-length // unit) * unit


def _unpadded(model: ModelRequest, loss: LossConfig, length: int) -> str | None:
    """Why samples are not padded to a length, as the end of a sentence; None if they are."""
    if model.num_experts > 1:
        return "routers would see padding"
    if model.bidirectional and loss.objective != MASKED:
        return "earlier tokens would see padding"
    if model.rope_scaling_type in ("dynamic", "longrope"):
        return f"--rope-scaling-type {model.rope_scaling_type} depends on the length"
    if length > model.max_position_embeddings:
        return f"padding needs --max-position-embeddings {length}"
    return None


def _asked(parallel: ParallelRequest) -> str:
    """The flags that have ranks share sequences, as they were given."""
    sizes = {
        "--context-parallel-size": parallel.context_parallel_size,
        "--ds-sequence-parallel-size": parallel.ds_sequence_parallel_size,
    }
    return " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def _dividing(parallel: ParallelRequest) -> str:
    """The flags that say what lengths must be multiples of, as they were given."""
    within = f"--tensor-model-parallel-size {parallel.tensor_model_parallel_size} --sequence-parallel"
    return " ".join(filter(None, [_asked(parallel), within if parallel.splits_sequence else ""]))


def _length_problems(
    model: ModelRequest, parallel: ParallelRequest, optim: OptimRequest, loss: LossConfig, sequence_length: int
) -> Iterator[str]:
    """Lengths that cannot be divided, where samples are not padded."""
    unit = length_unit(parallel, causal=not model.bidirectional)
    lengths = {"--seq-length": (sequence_length,), **optim.curriculum_length_flags}
    way = "fewer ranks" if parallel.sequence_size > 1 else "drop --sequence-parallel"
    for name, values in lengths.items():
        odd = next((value for value in values if value % unit), None)
        reason = None if odd is None else _unpadded(model, loss, odd // unit * unit + unit)
        if odd is not None and reason is not None:
            lower = odd // unit * unit
            yield (
                f"{name} {odd} cannot be divided over {_dividing(parallel)}: lengths must be multiples of {unit}. Use "
                f"{f'{lower} or ' if lower else ''}{lower + unit}, or {way}; {reason}."
            )


def _heads_problems(model: ModelRequest, parallel: ParallelRequest) -> Iterator[str]:
    """Every rank that exchanges tokens for heads must get equally many; groups of keys and values are replicated."""
    tensor, ulysses = parallel.tensor_model_parallel_size, parallel.ulysses_size
    heads = model.num_attention_heads // max(1, tensor)
    if heads > 0 and heads % ulysses:
        ways = [size for size in divisors(heads) if size <= ulysses]
        of_each = f" of each tensor-parallel rank (--tensor-model-parallel-size {tensor})" if tensor > 1 else ""
        yield (
            f"{heads} attention heads{of_each} cannot be exchanged between {ulysses} ranks ({_asked(parallel)}). Heads "
            f"must be a multiple of the ranks; use {ways[-1]}, or --context-parallel-size with --cp-comm-type p2p, "
            "which does not divide heads."
        )


def _ring_problems(model: ModelRequest, parallel: ParallelRequest, loss: LossConfig) -> Iterator[str]:
    way = f"Use --cp-comm-type {ULYSSES}, whose ranks see whole samples"
    asked = f"--cp-comm-type {parallel.cp_comm_type}"
    if loss.has_prefixes:
        yield f"--objective {loss.objective} does not go with {asked}: prefixes are seen by tokens before them. {way}."
    if model.attention_dropout > 0:
        yield (
            f"--attention-dropout {model.attention_dropout:g} does not go with {asked}, whose blocks of attention have "
            f"no dropout. Use --attention-dropout 0, or --cp-comm-type {ULYSSES}."
        )
