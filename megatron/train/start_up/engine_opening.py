"""Builds and checks the engine of a run, and finds its frozen parameters."""

from __future__ import annotations

import fnmatch
import math
import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron import device, log
from megatron.checkpoint.record import Record
from megatron.config import FinetuningConfig, LoadingConfig, ModelConfig, RunConfig
from megatron.config.sections.computation import INDUCTOR
from megatron.config.sections.reporting import MEGATRON_STYLE, ReportConfig
from megatron.engine.cuda_graphs import AUTO, any_failed_on, graph_refusal
from megatron.engine.deepspeed_internals.parameters import whole_numel
from megatron.engine.ds_config import buckets_of, deepspeed_config
from megatron.engine.engine import Engine
from megatron.engine.freezing import NOTHING_FROZEN, FreezeSpec, frozen_names, is_frozen
from megatron.engine.gradients.gradient_stats import NOISE, NORMS, ZEROS
from megatron.engine.gradients.update_gate import StepChecks
from megatron.engine.optimizers.plans import plan_of
from megatron.engine.pipeline.passes import PipelineSettings
from megatron.errors import LaunchError
from megatron.kernels.choice import is_installed
from megatron.kernels.float8 import MULTIPLE, Float8
from megatron.kernels.products import can_add_product
from megatron.model.costs import token_work
from megatron.model.gpt import BLOCKS
from megatron.model.interface.network import LayerKind, LayerSpec, LayerStack, parameter_names
from megatron.model.networks import network_layers
from megatron.observe.console import size_line, trained_line
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_sum
from megatron.parallel.schedule.division import Division
from megatron.parallel.shard_spec import shard_spec_of
from megatron.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.tensor.weight_gradients import add_by_product
from megatron.train.objectives import build_objective, step_settings


def open_engine(config: RunConfig, mesh: ParallelMesh, record: Record | None) -> tuple[Engine, tuple[int, int, int]]:
    """Builds the engine and logs the size of its network, see `parameter_counts`; collective over the mesh."""
    freezing = find_freezing(config.finetuning, config.loading, network_layers(config.model, mesh), mesh, record)
    engine = build_engine(config, mesh, freezing)
    check_layers(engine, config.model.num_layers)
    sizes = parameter_counts(engine)
    if config.report.log_style == MEGATRON_STYLE:
        log.info(size_line(mesh.tp.rank, mesh.pp.rank, *sizes[:2]))
    if freezing.frozen:
        log.info(trained_line(sizes[2], sizes[0]))
    if config.loss.reweight_loss_based_on_position_frequency:
        log.info("Using loss reweighting")
    return engine, sizes


def build_engine(config: RunConfig, mesh: ParallelMesh, freezing: FreezeSpec = NOTHING_FROZEN) -> Engine:
    """Builds the training engine of a resolved configuration."""
    if config.kernels.compile:
        check_compiler(config.kernels.compile_backend, mesh.device)
    settings = deepspeed_config(config)
    buckets = buckets_of(settings, mesh.gradient.size)
    if config.parallel.ddp_reduce_scatter_with_fp32_accumulation:
        buckets = buckets._replace(exchanged_dtype=getattr(torch, config.precision.dtype_name))
    engine = Engine(
        network_layers(config.model, mesh),
        build_objective(config, mesh),
        plan_of(config.optim),
        mesh,
        settings,
        step_settings(config, mesh),
        config.random.seed,
        freezing,
        pipeline_settings(config),
        StepChecks(
            config.safety.skip_spikes,
            measured_of_gradients(config.report),
            config.safety.check_for_nan_in_loss_and_grad,
        ),
        buckets,
    )
    choose_products(config, engine)
    if config.kernels.compile:
        engine.stack.compile_blocks(config.random.seed, mesh.device, config.kernels.compile_backend)
    add = engine.view.product_adder(engine.steps.dtype)
    if config.kernels.gradient_accumulation_fusion and refusal_of_fusion(config, engine) is None and add is not None:
        add_by_product(engine.stack.modules(), add)
    if config.kernels.cuda_graphs == AUTO and refusal_of_graphs(config, engine) is None:
        engine.passes.use_graphs(device.GraphCapturer(mesh.device, mesh.stopwatch, any_failed_on(mesh)))
    return engine


def measured_of_gradients(report: ReportConfig) -> list[str]:
    """The gradient statistics to report besides the norm."""
    flags = {
        NORMS: report.log_grad_norm,
        ZEROS: report.log_num_zeros_in_grad,
        NOISE: report.log_gradient_noise_scale,
    }
    return [kind for kind, is_set in flags.items() if is_set]


def choose_products(config: RunConfig, engine: Engine) -> None:
    """Enables fp8 for the matrix products of --fp8-format."""
    blocks = config.precision.float8_blocks(config.model.num_layers)
    if not blocks:
        return
    count, fitting = use_float8(engine.stack, Float8.of(config.precision), blocks)
    if fitting < count:
        log.warning(
            f"--fp8-format {config.precision.fp8_format}: {count - fitting} of {count} matrices on a rank have sizes "
            f"that are not multiples of {MULTIPLE}, and remain in bf16."
        )


def use_float8(stack: LayerStack, float8: Float8, blocks: Collection[int]) -> tuple[int, int]:
    """Enables fp8 for the matrices of attention and dense feed-forward layers in these blocks.

    Returns:
        the number of such matrices on this rank, and the number with suitable sizes.
    """
    names = {f"{BLOCKS}.{index}" for index in blocks}
    count = fitting = 0
    for spec, module in stack.named_layers():
        for layer in module.modules() if spec.name in names else ():
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                layer.float8 = float8
                *outputs, inputs = shard_spec_of(layer.weight).local_shape
                count += 1
                fitting += math.prod(outputs) % MULTIPLE == 0 and inputs % MULTIPLE == 0
    return count, fitting


def refusal_of_graphs(config: RunConfig, engine: Engine) -> str | None:
    """See `graph_refusal`."""
    return graph_refusal(config, engine.mesh.device.type, by_hooks=engine.view.takes_by_hooks)


def refusal_of_fusion(config: RunConfig, engine: Engine) -> str | None:
    """The reason why weight gradient products cannot accumulate into the gradient sums; None if they can."""
    kernels, parallel, optim = config.kernels, config.parallel, config.optim
    is_staged = parallel.pipeline_model_parallel_size > 1
    can_add = engine.view.product_adder(engine.steps.dtype) is not None
    has_product = can_add_product(torch.empty(0, device=engine.mesh.device), engine.steps.dtype)
    reasons = {
        "DeepSpeed accumulates gradients in ZeRO stage 3": engine.zero_stage == 3,
        "DeepSpeed's pipeline engine runs the stages": is_staged and parallel.pipeline_engine == "deepspeed",
        f"no {config.precision.dtype_name} product accumulates into float32 on this device": not has_product,
        "blocks are compiled": kernels.compile,
        "a CUDA graph does the same in every micro-batch": (
            kernels.cuda_graphs == AUTO and refusal_of_graphs(config, engine) is None
        ),
        "--log-gradient-noise-scale measures the gradients of single micro-batches": (
            config.report.log_gradient_noise_scale
        ),
        "ZeRO stage 2 averages the gradients of each micro-batch over the ranks": (
            engine.zero_stage == 2 and engine.mesh.gradient.size > 1
        ),
        "gradients are not accumulated in float32": not can_add,
        "the gradients of the only micro-batch are the sums (ZeRO stage 0)": (
            engine.zero_stage == 0 and optim.global_batch_size <= optim.micro_batch_size * engine.mesh.batch.size
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def pipeline_settings(config: RunConfig) -> PipelineSettings:
    parallel = config.parallel
    return PipelineSettings(
        parallel.schedule_name,
        parallel.chunks_per_rank,
        parallel.pipeline_engine == "deepspeed",
        Division.of(parallel),
        token_work(config.model, config.data.seq_length, config.head_share),
    )


def check_compiler(backend: str, target: torch.device) -> None:
    """Checks that inductor has the compilers it needs.

    Raises:
        LaunchError: one is missing.
    """
    if backend != INDUCTOR:
        return
    name = shlex.split(device.environment("CXX") or "g++")[0]
    if target.type == "cpu" and shutil.which(name) is None:
        raise LaunchError(
            f"--compile requires a C++ compiler, and {name} was not found (set CXX to use another). Install one, for "
            "example with `apt-get install g++`, or drop --compile."
        )
    if target.type == "cuda" and not is_installed("triton"):
        raise LaunchError(
            "--compile requires Triton on a GPU, which is not installed (it comes with PyTorch for CUDA on Linux). "
            "Install it, or drop --compile."
        )


def parameter_counts(engine: Engine) -> tuple[int, int, int]:
    """Parameter counts of the network: total, without embeddings, trained; collective over the mesh."""
    counts = torch.zeros(3, dtype=torch.float64, device=engine.mesh.device)
    counted: set[int] = set()
    for spec, layer in engine.stack.named_layers():
        local = [each for each in layer.parameters() if shard_spec_of(each).is_counted(engine.mesh)]
        for parameter in (each for each in local if id(each) not in counted):
            numel = whole_numel(parameter) * _shards(parameter, engine.mesh)
            counts[0] += numel
            counts[1] += 0 if spec.kind is LayerKind.EMBEDDING else numel
            counts[2] += 0 if is_frozen(parameter) else numel
        counted.update(map(id, local))
    total, without_embeddings, trained = map(int, all_reduce_sum(counts, engine.mesh.model).tolist())
    return total, without_embeddings, trained


def _shards(parameter: nn.Parameter, mesh: ParallelMesh) -> int:
    """Number of shards of a parameter that this rank counts: its own, and those of expert-parallel peers."""
    if mesh.ep.name not in shard_spec_of(parameter).split_axes:
        return 1
    return mesh.ep.size if mesh.experts.keeps_tensor or mesh.tp.rank == 0 else 0


def check_layers(engine: Engine, num_layers: int) -> None:
    """Checks the number of transformer blocks that all stages built; collective over the pipeline.

    Raises:
        LaunchError: it is not `num_layers`.
    """
    blocks = sum(spec.kind is LayerKind.BLOCK for spec, _ in engine.stack.named_layers())
    built = torch.tensor([blocks], dtype=torch.int64, device=engine.mesh.device)
    total = int(all_reduce_sum(built, engine.mesh.pp))
    if total != num_layers:
        raise LaunchError(
            f"the {engine.mesh.pp.size} pipeline stages hold {total} transformer layers, not the {num_layers} of "
            "--num-layers. This is a bug in the partitioning; use another --pipeline-model-parallel-size and report it."
        )


_SHOWN = 3


def check_patterns(finetuning: FinetuningConfig, model: ModelConfig) -> None:
    """Checks --freeze before the ranks connect; parameter names are the same in every layout.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    if finetuning.freeze:
        frozen_names(finetuning.freeze, parameter_names(network_layers(model, ParallelMesh.single("meta"))))


def find_freezing(
    finetuning: FinetuningConfig,
    loading: LoadingConfig,
    network: Sequence[LayerSpec],
    mesh: ParallelMesh,
    record: Record | None,
) -> FreezeSpec:
    """The frozen parameters, with those that the checkpoint lacks because they were frozen when it was saved.

    Args:
        record: of the checkpoint that the run resumes from, or whose weights it loads.

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    continued = record if loading.takes_optimizer_state else None
    before = () if continued is None else _patterns(continued.config)
    began_at = {} if continued is None else continued.began_at
    if not finetuning.freeze and not before and not began_at:
        return NOTHING_FROZEN
    names = parameter_names(network)
    frozen = frozen_names(finetuning.freeze, names) if finetuning.freeze else frozenset()
    thawed = frozenset(name for pattern in before for name in fnmatch.filter(names, pattern)) - frozen
    counts = {name: count for name, count in began_at.items() if name not in frozen}
    weights = {} if continued is None else {name: continued.averaged_from.get(name, 0.0) for name in counts}
    if continued is not None and thawed:
        counts.update(dict.fromkeys(sorted(thawed), continued.optimizer_updates))
        weights.update(dict.fromkeys(sorted(thawed), continued.averaging_weight))
        if mesh.world.rank == 0:
            log.warning(
                f"{len(thawed)} parameters that were frozen are trained from here on ({_listed(sorted(thawed))}): "
                "their moments start from zero."
            )
    return FreezeSpec(frozen, thawed, counts, {name: weight for name, weight in weights.items() if weight})


def _patterns(saved: Mapping[str, Any]) -> Sequence[str]:
    sections = (section for section in saved.values() if isinstance(section, Mapping))
    return next((tuple(map(str, section["freeze"])) for section in sections if section.get("freeze")), ())


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
