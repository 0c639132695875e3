"""The facts of the summary at the start of a run, from its configuration and what was built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron import device, log
from megatron.checkpoint.record import Progress
from megatron.config import ModelConfig, ReportConfig, RunConfig, SavingConfig
from megatron.config.flags.legacy import IGNORING
from megatron.config.objective.loss import MASKED
from megatron.config.schedule import global_batch_size, planned_iterations, samples_after
from megatron.data.build import taken_sources
from megatron.engine.ds_config import deepspeed_config, offloaded_ratio
from megatron.engine.engine import Engine
from megatron.engine.memory.closed_form import Partitioning, predicted_bytes
from megatron.engine.memory.held import parameter_groups
from megatron.model.costs import idle_expert_parameters
from megatron.observe.speed.peaks import peak_flops_per_second
from megatron.observe.speed.workload import Workload
from megatron.observe.start_up.summary import Layout, Length, Size, SourceShare, StartSummary
from megatron.parallel.kernels import kernels_line
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_max
from megatron.train.run_data import RunData

_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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
    """Shows the summary of the run; collective over the mesh.

    Args:
        sizes: see `engine_opening.parameter_counts`.
        folder: the run folder.
        is_loaded: whether the weights come from a checkpoint.
    """
    shares = training_shares(data)
    log.info("\n".join(build_summary(config, engine, sizes, shares, progress, folder, is_loaded=is_loaded).lines()))


def workload_of(config: RunConfig, mesh: ParallelMesh, parameters_without_embeddings: int) -> Workload:
    """What a step consists of, and what the devices could do."""
    return Workload.of(
        config.model,
        config.data.seq_length,
        recomputes=config.recompute.checkpoint_activations,
        predicted_share=config.masking.mask_prob if config.loss.objective == MASKED else 1.0,
        device_count=mesh.world.size,
        replica_count=mesh.batch.size,
        parameters_without_embeddings=parameters_without_embeddings,
        peak_flops_per_second=peak_flops_per_second(
            device.device_name(),
            is_half_precision=config.precision.dtype_name != "float32",
            given_teraflops=config.watching.peak_tflops,
        ),
        stages=mesh.pp.size,
        micro_batch_size=config.optim.micro_batch_size,
    )


def build_summary(
    config: RunConfig,
    engine: Engine,
    sizes: tuple[int, int, int],
    shares: Sequence[SourceShare],
    progress: Progress,
    folder: Path,
    *,
    is_loaded: bool,
) -> StartSummary:
    """The summary of a run, see `show_start`; collective over the mesh."""
    mesh = engine.mesh
    total, without_embeddings, trained = sizes
    active = total - idle_expert_parameters(config.model)
    return StartSummary(
        size=Size(total, without_embeddings, active, trained, _shape(config.model, config.precision.dtype_name)),
        layout=Layout(
            mesh.pp.size,
            mesh.batch.size,
            mesh.world.size // (mesh.pp.size * mesh.batch.size),
            engine.zero_stage,
            _memory_bytes(config, engine),
        ),
        length=_length(config, progress),
        shares=shares,
        start=f"step {progress.step:,}, " + (f"weights of {config.loading.load}" if is_loaded else "new weights"),
        kernels=_kernels(mesh),
        places=list(_places(config.saving, config.report, folder)),
        ignored=[sentence.partition(f" {IGNORING}")[0] for sentence in config.ignored],
    )


def training_shares(data: RunData) -> list[SourceShare]:
    """What a run takes from each source of its training data."""
    plan, train = data.plan, data.datasets.train
    if plan.train is None or train is None:
        return []
    taken = taken_sources(plan.train, train, plan.sequence_length)
    return [SourceShare(source.name, source.ratio, source.epochs) for source in taken]


def _kernels(mesh: ParallelMesh) -> str:
    """Which operations have which implementation; in one word if all have the same."""
    used = {implementation.value for implementation in vars(mesh.kernels).values()}
    return f"{used.pop()} for every operation" if len(used) == 1 else kernels_line(mesh.kernels).partition(": ")[2]


def _shape(model: ModelConfig, dtype: str) -> str:
    experts = f", {model.num_experts} experts" if model.num_experts > 1 else ""
    return (
        f"{model.num_layers} layers, hidden {model.hidden_size:,}, {model.num_attention_heads} heads{experts}, "
        f"vocabulary {model.padded_vocab_size:,}, {dtype}"
    )


def _length(config: RunConfig, progress: Progress) -> Length:
    optim, consumed = config.optim, progress.consumed_samples
    steps = progress.step if config.evaluation.eval_only else planned_iterations(optim, progress.step, consumed)
    samples = samples_after(optim, max(0, steps - progress.step), consumed)
    return Length(
        first_step=progress.step,
        steps=steps,
        global_batch_size=global_batch_size(optim, consumed),
        last_batch_size=global_batch_size(optim, samples),
        micro_batch_size=optim.micro_batch_size,
        sequence_length=config.data.seq_length,
        tokens=samples * config.data.seq_length,
    )


def _memory_bytes(config: RunConfig, engine: Engine) -> int | None:
    """The most bytes that a rank's device holds; None for an optimizer that the closed form does not know."""
    if config.optim.optimizer != "adam":
        return None
    zero = deepspeed_config(config)["zero_optimization"]
    how = Partitioning(
        engine.zero_stage,
        engine.mesh.gradient.size,
        offloads_optimizer=_is_offloaded(zero.get("offload_optimizer")),
        offloads_parameters=_is_offloaded(zero.get("offload_param")),
        weight_bytes=_WEIGHT_BYTES[config.precision.dtype_name],
        offloaded_ratio=offloaded_ratio(zero),
    )
    own = predicted_bytes(parameter_groups(engine), how, engine.mesh.gradient.rank)
    return int(all_reduce_max(torch.tensor([own.on_device], dtype=torch.int64), engine.mesh.control))


def _is_offloaded(entry: object) -> bool:
    return isinstance(entry, dict) and entry.get("device") not in (None, "none")


def _places(saving: SavingConfig, report: ReportConfig, folder: Path) -> list[tuple[str, str]]:
    """What is written where."""
    places = [("run folder", f"{folder}: log.txt, metrics.jsonl, config.json")]
    if saving.save is not None:
        places.append(("checkpoints", f"{saving.save}, every {saving.save_interval:,} steps"))
    else:
        places.append(("checkpoints", "none are written (--save)"))
    services = [f"TensorBoard {report.tensorboard_dir}"] if report.tensorboard_dir else []
    services += [f"Weights & Biases project {report.wandb_project}"] if report.wandb_project else []
    return [*places, ("also to", ", ".join(services))] if services else places
