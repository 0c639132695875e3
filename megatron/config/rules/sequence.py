"""Sequence length, and ranks that split sequences: context parallelism and sequence parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.architecture.positions import LEARNED
from megatron.config.objective.loss import MASKED, LossConfig
from megatron.config.rules.layout import divisors
from megatron.config.rules.rule import notice, request_rule, run_rule
from megatron.config.run_sections import ReadFlags, RunSections
from megatron.config.sections.model import ModelRequest
from megatron.config.sections.optim import OptimRequest
from megatron.config.sections.parallel import RING, RING_OF_ULYSSES, ULYSSES, ParallelRequest


@run_rule
def _positions(run: RunSections) -> Iterator[str]:
    model, data = run.model, run.data
    rows = model.max_position_embeddings  # unset in a request that is refused for that reason
    if model.position_embedding_type == LEARNED and isinstance(rows, int) and rows < data.seq_length:
        yield (
            f"--max-position-embeddings {rows} is less than --seq-length {data.seq_length}. Use "
            f"--max-position-embeddings {data.seq_length} or a shorter sequence length."
        )


@notice
def _context(run: ReadFlags) -> Iterator[str]:
    model, length = run.model, run.values.get("data.seq_length", 0)
    if model.uses_rope and model.max_position_embeddings < length:
        yield (
            f"--seq-length {length} is more than --max-position-embeddings {model.max_position_embeddings}, the "
            "context length of the network."
        )


@notice
def _one_tensor_rank(run: RunSections) -> Iterator[str]:
    parallel = run.parallel
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        yield (
            "--sequence-parallel has no effect with --tensor-model-parallel-size 1. Use --tensor-model-parallel-size "
            "2, or --context-parallel-size 2, which splits sequences without splitting matrices."
        )


@run_rule
def _rings_and_groups(run: RunSections) -> Iterator[str]:
    parallel = run.parallel
    sizes, ranks = parallel.hierarchical_context_parallel_sizes, parallel.context_parallel_size
    shown = " ".join(map(str, sizes))
    if parallel.cp_comm_type != RING_OF_ULYSSES:
        if sizes:
            yield (
                f"--hierarchical-context-parallel-sizes {shown} requires --cp-comm-type {RING_OF_ULYSSES}, not "
                f"{parallel.cp_comm_type}. Drop one of them."
            )
    elif len(sizes) != 2 or sizes[0] * sizes[1] != ranks:
        yield (
            f"--cp-comm-type {RING_OF_ULYSSES} requires two --hierarchical-context-parallel-sizes, ranks per group and "
            f"groups in the ring, whose product is --context-parallel-size {ranks}{f', got {shown}' if sizes else ''}. "
            f"Set them, or use --cp-comm-type {RING}."
        )
    if parallel.ds_sequence_parallel_size > 1 and ranks > 1 and parallel.cp_comm_type != RING:
        yield (
            f"--ds-sequence-parallel-size {parallel.ds_sequence_parallel_size} cannot be combined with --cp-comm-type "
            f"{parallel.cp_comm_type}: both exchange tokens for heads. Drop one of them."
        )


@request_rule
def _shared_sequences(run: RunSections) -> Iterator[str]:
    model, parallel, loss = run.model, run.parallel, run.loss
    is_shared = parallel.sequence_size > 1
    if not (is_shared or parallel.splits_sequence) or parallel.sequence_size < 1 or any(_rings_and_groups(run)):
        return  # nothing is split, or `_rings_and_groups` reports why not
    yield from _length_problems(model, parallel, run.optim, loss, run.data.seq_length)
    yield from _heads_problems(model, parallel)
    if parallel.ring_size > 1:
        yield from _ring_problems(model, parallel, loss)
    if run.kernels.compile and is_shared:
        yield (
            f"--compile cannot be combined with {sharing_flags(parallel)}: ranks communicate inside a block. Drop "
            "--compile."
        )


def sharing_flags(parallel: ParallelRequest) -> str:
    """The given flags that split sequences over ranks."""
    sizes = {
        "--context-parallel-size": parallel.context_parallel_size,
        "--ds-sequence-parallel-size": parallel.ds_sequence_parallel_size,
    }
    return " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def _unpadded(model: ModelRequest, loss: LossConfig, length: int) -> str | None:
    """The reason that samples are not padded to a length, as the end of a sentence; None if they are."""
    if model.num_experts > 1:
        return "padding would reach the routers"
    if model.bidirectional and loss.objective != MASKED:
        return "earlier tokens would attend to padding"
    if model.rope_scaling_type in ("dynamic", "longrope"):
        return f"--rope-scaling-type {model.rope_scaling_type} depends on the length"
    if length > model.max_position_embeddings:
        return f"padding needs --max-position-embeddings {length}"
    return None


def _dividing(parallel: ParallelRequest) -> str:
    """The given flags that require lengths to be multiples."""
    tensor = f"--tensor-model-parallel-size {parallel.tensor_model_parallel_size} --sequence-parallel"
    return " ".join(filter(None, [sharing_flags(parallel), tensor if parallel.splits_sequence else ""]))


def _length_problems(
    model: ModelRequest, parallel: ParallelRequest, optim: OptimRequest, loss: LossConfig, sequence_length: int
) -> Iterator[str]:
    """Lengths must be divisible if samples are not padded."""
    unit = parallel.length_unit(causal=not model.bidirectional)
    lengths = {"--seq-length": (sequence_length,), **optim.curriculum_length_flags}
    way = "fewer ranks" if parallel.sequence_size > 1 else "drop --sequence-parallel"
    for name, values in lengths.items():
        odd = next((value for value in values if value % unit), None)
        reason = None if odd is None else _unpadded(model, loss, odd // unit * unit + unit)
        if odd is not None and reason is not None:
            lower = odd // unit * unit
            yield (
                f"{name} {odd} cannot be split over {_dividing(parallel)}: it must be a multiple of {unit}, as "
                f"{reason}. Use {f'{lower} or ' if lower else ''}{lower + unit}, or {way}."
            )


def _heads_problems(model: ModelRequest, parallel: ParallelRequest) -> Iterator[str]:
    """Ranks that exchange tokens for heads must get the same number of heads; key/value heads are replicated."""
    tensor, ulysses = parallel.tensor_model_parallel_size, parallel.ulysses_size
    heads = model.num_attention_heads // max(1, tensor)
    if heads > 0 and heads % ulysses:
        sizes = [size for size in divisors(heads) if size <= ulysses]
        of_each = f" of each tensor-parallel rank (--tensor-model-parallel-size {tensor})" if tensor > 1 else ""
        yield (
            f"{heads} attention heads{of_each} cannot be exchanged between {ulysses} ranks "
            f"({sharing_flags(parallel)}). Heads must be a multiple of the ranks; use {sizes[-1]}, or "
            "--context-parallel-size with --cp-comm-type p2p, which does not divide heads."
        )


def _ring_problems(model: ModelRequest, parallel: ParallelRequest, loss: LossConfig) -> Iterator[str]:
    way = f"Use --cp-comm-type {ULYSSES}"
    option = f"--cp-comm-type {parallel.cp_comm_type}"
    if loss.has_prefixes:
        yield f"--objective {loss.objective} cannot be combined with {option}, which does not support prefixes. {way}."
    if model.attention_dropout > 0:
        yield (
            f"--attention-dropout {model.attention_dropout:g} cannot be combined with {option}, which does not support "
            f"dropout. Use --attention-dropout 0, or --cp-comm-type {ULYSSES}."
        )
