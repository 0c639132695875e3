"""The facts of the summary at the start of a run, from its configuration and what was built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from megatron import device, log
from megatron.checkpoint.record import Progress
from megatron.config import ControlConfig, ModelConfig, RunConfig
from megatron.config.objective.loss import MASKED
from megatron.config.schedule import global_batch_size, planned_iterations, samples_after
from megatron.data.datasets.build import SplitDatasets, taken_sources
from megatron.data.order.plan import DataPlan
from megatron.engine.ds_config import deepspeed_config
from megatron.engine.engine import Engine
from megatron.engine.memory.closed_form import Partitioning, predicted_bytes
from megatron.engine.memory.held import parameter_groups
from megatron.model.costs import idle_expert_parameters
from megatron.observe.profiling.step_profiler import StepProfiler, profile_notices
from megatron.observe.speed.peaks import peak_flops_per_second
from megatron.observe.speed.workload import Workload
from megatron.observe.start_up.summary import Layout, Length, Share, Size, Summary
from megatron.parallel.kernels import kernels_line
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_max

_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class RunPlace(Protocol):
    """What knows where the run writes its reports."""

    report_folder: Path | None


def show_start(
    config: RunConfig,
    engine: Engine,
    sizes: tuple[int, int, int],
    datasets: SplitDatasets,
    plan: DataPlan,
    progress: Progress,
    places: RunPlace,
    *,
    is_loaded: bool,
) -> StepProfiler:
    """Shows the summary of the run, and prepares what --profile asks for; collective over the mesh.

    Args:
        sizes: see `build.parameter_counts`.
        places: knows the run folder.
        is_loaded: whether the weights come from a checkpoint.
    """
    folder = places.report_folder or Path()
    shares = training_shares(datasets, plan)
    summary = build_summary(config, engine, sizes, shares, progress, folder, is_loaded=is_loaded)
    notices = profile_notices(config.watching, progress.step, summary.length.steps, folder)
    log.info("\n".join([*summary.lines(), *notices]))
    return StepProfiler(config.watching, folder, engine.mesh.world.rank, progress.step)


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
    shares: Sequence[Share],
    progress: Progress,
    folder: Path,
    *,
    is_loaded: bool,
) -> Summary:
    """The summary of a run, see `show_start`; collective over the mesh."""
    mesh, control = engine.mesh, config.control
    total, without_embeddings, trained = sizes
    active = total - idle_expert_parameters(config.model)
    return Summary(
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
        start=f"step {progress.step:,}, " + (f"weights of {control.load}" if is_loaded else "new weights"),
        kernels=_kernels(mesh),
        places=list(_places(control, folder)),
    )


def training_shares(datasets: SplitDatasets, plan: DataPlan) -> list[Share]:
    """What a run takes from each source of its training data."""
    if plan.train is None or datasets.train is None:
        return []
    taken = taken_sources(plan.train, datasets.train, plan.sequence_length)
    return [Share(source.name, source.ratio, source.epochs) for source in taken]


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
    steps = progress.step if config.control.eval_only else planned_iterations(optim, progress.step, consumed)
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
    )
    own = predicted_bytes(parameter_groups(engine), how, engine.mesh.gradient.rank)
    return int(all_reduce_max(torch.tensor([own.on_device], dtype=torch.int64), engine.mesh.control))


def _is_offloaded(entry: object) -> bool:
    return isinstance(entry, dict) and entry.get("device") not in (None, "none")


def _places(control: ControlConfig, folder: Path) -> list[tuple[str, str]]:
    """What is written where."""
    found = [("run folder", f"{folder}: log.txt, metrics.jsonl, config.json")]
    if control.save is not None:
        found.append(("checkpoints", f"{control.save}, every {control.save_interval:,} steps"))
    else:
        found.append(("checkpoints", "none are written (--save)"))
    services = [f"TensorBoard {control.tensorboard_dir}"] if control.tensorboard_dir else []
    services += [f"Weights & Biases project {control.wandb_project}"] if control.wandb_project else []
    return [*found, ("also to", ", ".join(services))] if services else found
