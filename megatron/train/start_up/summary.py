"""The summary of a run, printed by rank 0 before the first step. See config.json in the run folder for all values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from megatron import device, log
from megatron.checkpoint.record import Progress
from megatron.config import KernelConfig, ModelConfig, ParallelConfig, ReportConfig, RunConfig, SavingConfig
from megatron.config.files.deepspeed_file import offloaded_ratio
from megatron.config.flags.legacy import IGNORING
from megatron.config.schedule import global_batch_size, planned_iterations, samples_after
from megatron.data.build import SourceUsage, source_usages
from megatron.engine.cuda_graphs import OFF
from megatron.engine.ds_config import deepspeed_config
from megatron.engine.engine import Engine
from megatron.engine.memory.held import predicted_amounts
from megatron.model.costs import chunk_flops, idle_expert_parameters
from megatron.observe.quantities import short_bytes, short_count
from megatron.observe.speed import Workload, peak_flops_per_second
from megatron.parallel.kernels import kernels_line
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_max
from megatron.parallel.schedule.building import build_schedule, idle_share
from megatron.train.run_data import RunData
from megatron.train.start_up.engine_opening import pipeline_settings, refusal_of_fusion, refusal_of_graphs

Row = tuple[str, str]  # label and text

_WIDTH = 12
_SOURCES = 3
_RULE = "-" * 80
_MOST_STAGES = 8
_GRID_ROWS = _GRID_BRACKETS = _GRID_RANKS = 4

_Item = TypeVar("_Item")


def show_start(
    config: RunConfig,
    engine: Engine,
    sizes: tuple[int, int, int],
    data: RunData,
    progress: Progress,
    folder: Path,
    *,
    is_loaded: bool,
) -> None:
    """Prints the summary of a run; collective over the mesh.

    Args:
        sizes: see `engine_opening.parameter_counts`.
        folder: the run folder.
        is_loaded: the weights come from a checkpoint.
    """
    mesh, active = engine.mesh, sizes[0] - idle_expert_parameters(config.model)
    plan, train = data.plan, data.datasets.train
    shares = [] if plan.train is None or train is None else source_usages(plan.train, train, plan.sequence_length)
    ignored = ", ".join(sentence.partition(f" {IGNORING}")[0] for sentence in config.ignored)
    rows = [
        ("model", f"{size_text(*sizes, active)}: {_shape(config.model, config.precision.shown_name)}"),
        *layout_rows(
            {"pp": mesh.pp.size, "dp": mesh.batch.size, "cp": mesh.cp.size, "sp": mesh.sp.size, "tp": mesh.tp.size},
            engine.zero_stage,
            _memory_bytes(config, engine),
            mesh.ep.size,
        ),
        *_length_rows(config, progress, mesh.batch.size),
        *([("data", shares_text(shares))] if shares else []),
        ("kernels", _kernels(mesh, config.kernels) + _accumulation(config, engine) + _graphs(config, engine)),
        ("start", f"step {progress.step:,}, " + (f"weights of {config.loading.load}" if is_loaded else "new weights")),
        *_places(config.saving, config.report, folder),
        *([("ignored", f"{ignored} (docs/reference/flags.md says why)")] if ignored else []),
    ]
    log.info("\n".join(summary_lines(rows)))


def summary_lines(rows: Iterable[Row]) -> list[str]:
    return [_RULE, *(f"{label:<{_WIDTH}} {text}" for label, text in rows), _RULE]


def workload_of(config: RunConfig, mesh: ParallelMesh, parameters_without_embeddings: int) -> Workload:
    return Workload.of(
        config.model,
        config.data.seq_length,
        recomputes=config.recompute.checkpoint_activations,
        predicted_share=config.head_share,
        device_count=mesh.world.size,
        replica_count=mesh.batch.size,
        parameters_without_embeddings=parameters_without_embeddings,
        peak_flops_per_second=peak_flops_per_second(
            device.device_name(),
            is_half_precision=config.precision.dtype_name != "float32",
            given_teraflops=config.watching.peak_tflops,
        ),
        stages=mesh.pp.size,
        schedule=config.parallel.schedule_name,
        chunks_per_rank=config.parallel.chunks_per_rank,
        chunk_costs=chunk_costs(config),
        micro_batch_size=config.optim.micro_batch_size,
    )


def chunk_costs(config: RunConfig) -> tuple[int, ...]:
    """Forward FLOPs per token of each chunk of the pipeline."""
    settings = pipeline_settings(config)
    placement = settings.placement(config.parallel.pipeline_model_parallel_size)
    return chunk_flops(config.model, settings.work, placement, settings.division)


def size_text(parameters: int, without_embeddings: int, trained: int, active: int) -> str:
    """The parameters of a network as text.

    Args:
        active: parameters used by a token; fewer than all with experts.
    """
    embeddings = parameters - without_embeddings
    parts = [f"embeddings {short_count(embeddings)}, {embeddings / max(1, parameters):.0%}"]
    if active != parameters:
        parts.insert(0, f"{short_count(active)} active per token")
    if trained != parameters:
        parts.append(f"trained {short_count(trained)}")
    return f"{short_count(parameters)} parameters ({'; '.join(parts)})"


def layout_rows(
    sizes: Mapping[str, int], zero_stage: int, memory_bytes: int | None, expert_ranks: int = 1
) -> list[Row]:
    """The layout of the ranks.

    Args:
        sizes: of the axes, slowest first, `pp` and `dp` before the others; cp and sp are omitted if they are 1.
        memory_bytes: the largest size of weights, gradients and optimizer on a rank; None if unknown.
        expert_ranks: number of ranks over which experts are divided.
    """
    memory = ""
    if memory_bytes is not None:
        memory = f"; {short_bytes(memory_bytes)} per rank for weights, gradients and optimizer, plus activations"
    ranks = math.prod(sizes.values())
    if ranks == 1:
        return [("layout", f"1 rank{memory}")]
    axes = " x ".join(f"{size} {name}" for name, size in sizes.items() if size > 1 or name not in ("cp", "sp"))
    experts = f", experts over {expert_ranks}" if expert_ranks > 1 else ""
    text = f"{ranks} ranks = {axes}{experts}, ZeRO stage {zero_stage}{memory}"
    within = ranks // (sizes["pp"] * sizes["dp"])
    return [("layout", text), *(("", row) for row in rank_grid(sizes["pp"], sizes["dp"], within))]


def pipeline_rows(parallel: ParallelConfig, micro_batches: int, chunk_costs: tuple[int, ...] = ()) -> list[Row]:
    """The schedule of a pipeline, its idle share, and the live micro-batches per stage; empty without a pipeline.

    Args:
        chunk_costs: cost of each chunk, in any unit; empty if all cost the same.
    """
    stages = parallel.pipeline_model_parallel_size
    if stages * parallel.chunks_per_rank == 1:
        return []
    sizes = (parallel.schedule_name, stages, parallel.chunks_per_rank, micro_batches)
    schedule = build_schedule(*sizes)
    alive = [f"{count:g}" for count in schedule.stages_alive]
    shown = " ".join(alive if len(alive) <= _MOST_STAGES else [*alive[:2], "...", *alive[-2:]])
    share = f"{idle_share(*sizes, chunk_costs):.1%}"
    costly = f", {share} as these chunks cost" if share != f"{schedule.bubble_ratio:.1%}" else ""
    chunks = f", {schedule.chunks_per_rank} chunks a stage" if schedule.chunks_per_rank > 1 else ""
    return [
        (
            "pipeline",
            f"{schedule.name}{chunks}: {schedule.bubble_ratio:.1%} idle if all passes take equally long{costly}; "
            f"activations of {shown} micro-batches by stage",
        )
    ]


def _length_rows(config: RunConfig, progress: Progress, replicas: int) -> list[Row]:
    """The next step, and the length of the run; empty if there is nothing to train."""
    optim, consumed, length = config.optim, progress.consumed_samples, config.data.seq_length
    steps = progress.step if config.evaluation.eval_only else planned_iterations(optim, progress.step, consumed)
    if steps <= progress.step:
        return []
    samples = samples_after(optim, steps - progress.step, consumed)
    batch, last = global_batch_size(optim, consumed), global_batch_size(optim, samples)
    micro = optim.micro_batch_size
    return [
        (
            "step",
            f"{batch:,} samples x {length:,} = {short_count(batch * length)} tokens, "
            f"{batch // (micro * replicas):,} micro-batches of {micro:,} per replica"
            + f", growing to {last:,} samples"
            * (last != batch),
        ),
        *pipeline_rows(config.parallel, batch // (micro * replicas), chunk_costs(config)),
        ("length", f"{steps:,} steps, {short_count(samples * length)} tokens"),
    ]


def shares_text(shares: Sequence[SourceUsage]) -> str:
    """The shares of the run's largest sources, and the sum of the rest."""
    largest = sorted(shares, key=lambda share: -share.ratio)[:_SOURCES]
    texts = [f"{share.name} {share.ratio:.1%} ({share.epochs:.2f} epochs)" for share in largest]
    if len(shares) > _SOURCES:
        rest = sum(share.ratio for share in shares) - sum(share.ratio for share in largest)
        texts.append(f"{len(shares) - _SOURCES} others {rest:.1%}")
    return ", ".join(texts)


def rank_grid(stages: int, replicas: int, ranks_per_replica: int) -> list[str]:
    """The ranks as text: a row for each pipeline stage, a bracket for each replica in it, abridged for large runs.

    Ranks are ordered as in the mesh: within a stage of a replica first, then over replicas, then over stages.

    Args:
        ranks_per_replica: ranks per stage of a replica.
    """
    rows = []
    for stage in _ends(range(stages), _GRID_ROWS):
        if stage is None:
            rows.append("  ...")
            continue
        first = stage * replicas * ranks_per_replica
        brackets = [
            "..." if replica is None else _bracket(first + replica * ranks_per_replica, ranks_per_replica)
            for replica in _ends(range(replicas), _GRID_BRACKETS)
        ]
        rows.append((f"stage {stage:<3} " if stages > 1 else "") + " ".join(brackets))
    return rows


def _bracket(first: int, count: int) -> str:
    ranks = range(first, first + count)
    return f"[{first}-{ranks[-1]}]" if count > _GRID_RANKS else f"[{' '.join(map(str, ranks))}]"


def _ends(items: Sequence[_Item], most: int) -> list[_Item | None]:
    """All items; of more than `most`, the first ones, None and the last one."""
    return list(items) if len(items) <= most else [*items[: most - 2], None, items[-1]]


def _kernels(mesh: ParallelMesh, config: KernelConfig) -> str:
    """The implementations of operations, in one word if all are the same, and --compile."""
    used = {implementation.value for implementation in vars(mesh.kernels).values()}
    line = f"{used.pop()} for every operation" if len(used) == 1 else kernels_line(mesh.kernels).partition(": ")[2]
    return line + (f"; blocks compiled ({config.compile_backend})" if config.compile else "")


def _accumulation(config: RunConfig, engine: Engine) -> str:
    """The reason why --gradient-accumulation-fusion has no effect."""
    refusal = refusal_of_fusion(config, engine) if config.kernels.gradient_accumulation_fusion else None
    return "" if refusal is None else f"; gradient accumulation not fused: {refusal}"


def _graphs(config: RunConfig, engine: Engine) -> str:
    if config.kernels.cuda_graphs == OFF:
        return ""
    refusal = refusal_of_graphs(config, engine)
    return "; micro-batches as CUDA graphs" if refusal is None else f"; no CUDA graphs: {refusal}"


def _shape(model: ModelConfig, dtype: str) -> str:
    experts = f", {model.num_experts} experts" if model.num_experts > 1 else ""
    return (
        f"{model.num_layers} layers, hidden {model.hidden_size:,}, {model.num_attention_heads} heads{experts}, "
        f"vocabulary {model.padded_vocab_size:,}, {dtype}"
    )


def _memory_bytes(config: RunConfig, engine: Engine) -> int | None:
    """The predicted maximum over the ranks; None for 8-bit moments, which the closed form does not support."""
    if config.optim.use_bnb_optimizer:
        return None
    zero = deepspeed_config(config)["zero_optimization"]
    amounts = predicted_amounts(
        engine,
        offloads_optimizer=_is_offloaded(zero.get("offload_optimizer")),
        offloads_parameters=_is_offloaded(zero.get("offload_param")),
        offloaded_ratio=offloaded_ratio(zero),
    )
    return int(all_reduce_max(torch.tensor([amounts.on_device], dtype=torch.int64), engine.mesh.control))


def _is_offloaded(entry: object) -> bool:
    return isinstance(entry, dict) and entry.get("device") not in (None, "none")


def _places(saving: SavingConfig, report: ReportConfig, folder: Path) -> Iterator[Row]:
    yield "run folder", f"{folder}: log.txt, metrics.jsonl, config.json"
    if saving.save is not None:
        when = f"every {saving.save_interval:,} steps" if saving.save_interval else "where the run ends"
        yield "checkpoints", f"{saving.save}, {when}"
    else:
        yield "checkpoints", "none are written (--save)"
    services = [f"TensorBoard {report.tensorboard_dir}"] if report.tensorboard_dir else []
    services += [f"Weights & Biases project {report.wandb_project}"] if report.wandb_project else []
    if services:
        yield "also to", ", ".join(services)
