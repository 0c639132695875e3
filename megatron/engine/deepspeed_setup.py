"""Initialization of DeepSpeed on the mesh's process groups with a torch optimizer, and timing of its messages."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import deepspeed
import torch
from torch import nn

from megatron import log
from megatron.config.files.deepspeed_file import offloaded_ratio
from megatron.device import Stopwatch, as_local_rank
from megatron.engine.buckets.bucket_queue import Buckets
from megatron.engine.buckets.parameter_groups import NO_CHUNKS, parameter_groups
from megatron.engine.deepspeed_internals.experts import EXPERT_GROUP, is_expert, optimizers_for_experts
from megatron.engine.deepspeed_internals.parameters import mark_parameter
from megatron.engine.deepspeed_internals.pipeline_stage import BuiltStage
from megatron.engine.deepspeed_internals.set_up import (
    keep_on_device,
    replaced_backend,
    skip_optimizer_check,
    skip_shared_memory_build,
)
from megatron.engine.ds_config import without_ratio
from megatron.engine.freezing import NOTHING_FROZEN, FreezeSpec, is_frozen
from megatron.engine.grid import ModelParallelUnit
from megatron.engine.optimizers.plan import OptimizerPlan
from megatron.errors import ConfigError
from megatron.kernels.choice import Implementation
from megatron.kernels.optimizer import keep_compiler_unloaded
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import TRANSFER
from megatron.parallel.shard_spec import shard_spec_of

_TRANSFERS = frozenset({"send", "recv", "isend", "irecv"})
_COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "reduce", "broadcast")

# Warnings that torch prints at every step of some layouts: DeepSpeed's pipeline stages exchange activations inside a
# backward pass (gradients cross stages explicitly, so none is lost; see tests/parity), and DeepSpeed calls functions
# that torch has renamed.
_HARMLESS_WARNINGS = (
    r"c10d::broadcast_: an autograd kernel was not registered",
    r"`torch\.distributed\.all_gather_into_tensor` is deprecated",
    r"`torch\.distributed\.reduce_scatter_tensor` is deprecated",
)


def join_deepspeed() -> None:
    """Initializes DeepSpeed's communication on the process groups of the mesh; idempotent."""
    skip_shared_memory_build()
    skip_optimizer_check()
    keep_compiler_unloaded()
    for text in _HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=text)
    with quiet():
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def initialize(
    settings: Mapping[str, Any],
    plan: OptimizerPlan[Any],
    mesh: ParallelMesh,
    module: nn.Module,
    freezing: FreezeSpec,
    buckets: Buckets,
    tied: Sequence[nn.Parameter] = (),
    chunks: Mapping[int, int] = NO_CHUNKS,
) -> Any:
    """Wraps a module and its optimizer in a DeepSpeed engine; see `build_optimizer` for `tied` and `chunks`."""
    ratio = offloaded_ratio(settings["zero_optimization"])
    settings = without_ratio(settings)
    stage = settings["zero_optimization"]["stage"]
    # DeepSpeed counts samples over all ranks that average gradients, even if several of them share a sample.
    settings["train_batch_size"] = settings["train_batch_size"] // mesh.batch.size * mesh.gradient.size
    _warn_of_narrow_accumulation(settings, mesh)
    if notice := averaging_notice(settings, mesh.gradient.size, buckets):
        log.info(notice)
    elements = buckets.elements if stage in (1, 2) else None
    optimizer = build_optimizer(
        plan, module, mesh, freezing, tied, chunks, bucket_elements=elements, is_offloaded=_is_offloaded(settings)
    )
    has_experts = any(group.get("moe") for group in optimizer.param_groups)
    with_experts = optimizers_for_experts(has_experts and stage > 0)
    # DeepSpeed flattens parameters and keeps views of them. With autograd enabled, the views would keep gradient
    # accumulation on the stream of this call, which prevents capture as a CUDA graph.
    with torch.no_grad(), quiet(), as_local_rank(mesh.device), with_experts:
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config=settings,
            mpu=None if isinstance(module, BuiltStage) else ModelParallelUnit(mesh),
            dist_init_required=False,
        )
    if ratio < 1 and _is_offloaded(settings):
        keep_on_device(engine.optimizer, ratio, mesh.device)
    log.info(
        f"DeepSpeed info: version={deepspeed.__version__}, engine={type(engine).__name__}, "
        f"optimizer={type(engine.optimizer).__name__}, ZeRO stage={stage}"
    )
    return engine


def _is_offloaded(settings: Mapping[str, Any]) -> bool:
    """True if the optimizer's state is in host memory and updated there."""
    zero = settings["zero_optimization"]
    return bool(zero.get("cpu_offload")) or (zero.get("offload_optimizer") or {}).get("device", "none") == "cpu"


def _warn_of_narrow_accumulation(settings: Mapping[str, Any], mesh: ParallelMesh) -> None:
    accumulation = settings.get("data_types", {}).get("grad_accum_dtype", "fp32")
    if accumulation != "fp32" and mesh.world.rank == 0:
        log.warning(
            f"gradients are accumulated in {accumulation}, as set by the --deepspeed_config file (data_types, "
            f"grad_accum_dtype): small ones are lost over many micro-batches. Remove the entry to accumulate in fp32."
        )


def averaging_notice(settings: Mapping[str, Any], ranks: int, buckets: Buckets) -> str | None:
    """A notice that gradients are averaged in half precision; None if they are not."""
    half = next((name for name in ("bf16", "fp16") if settings.get(name, {}).get("enabled")), "fp32")
    dtype, stage = settings.get("communication_data_type", half), settings["zero_optimization"]["stage"]
    if dtype == "fp32" or stage < 2 or ranks == 1 or (stage == 2 and buckets.exchanged_dtype is not None):
        return None
    flag = "--ddp-reduce-scatter-with-fp32-accumulation or " if stage == 2 else ""
    return (
        f"gradients: ZeRO stage {stage} averages each micro-batch over {ranks} ranks in {dtype}, with rounding errors "
        f'(docs/training.md); avoid them with {flag}"communication_data_type": "fp32" in a --deepspeed_config file'
    )


def build_optimizer(
    plan: OptimizerPlan[Any],
    module: nn.Module,
    mesh: ParallelMesh,
    freezing: FreezeSpec = NOTHING_FROZEN,
    tied: Sequence[nn.Parameter] = (),
    chunks: Mapping[int, int] = NO_CHUNKS,
    *,
    bucket_elements: int | None = None,
    is_offloaded: bool = False,
) -> torch.optim.Optimizer:
    """Builds the optimizer with its parameter groups.

    Trained parameters are grouped by weight decay (matrices only), `lr_multiplier` (the factor of the group's learning
    rate), the first update of their training, the optimizer's own `group_entries`, and whether they are experts'.

    Args:
        tied, chunks, bucket_elements: see `parameter_groups`.
        is_offloaded: the optimizer updates in host memory, which GPU-only implementations do not support.

    Raises:
        ConfigError: the implementation is not installed, or the optimizer cannot be offloaded.
    """
    if is_offloaded and plan.offload_refusal is not None:
        raise ConfigError(plan.offload_refusal)
    decays = (plan.optim.weight_decay, 0.0)

    def kind_of(parameter: nn.Parameter) -> tuple[bool, float, int, Any, bool]:
        spec, entries = shard_spec_of(parameter), tuple(sorted(plan.group_entries(parameter).items()))
        thawed_at = freezing.began_at.get(getattr(parameter, "global_name", ""), 0)
        return not spec.is_matrix, spec.lr_multiplier, thawed_at, entries, is_expert(parameter)

    trained = [parameter for parameter in module.parameters() if not is_frozen(parameter)]
    groups: list[dict[str, Any]] = []
    for members in parameter_groups(trained, kind_of, mesh, tied, chunks, bucket_elements):
        is_vector, multiplier, _, entries, is_of_experts = kind_of(members[0])
        rates = {"weight_decay": decays[is_vector], "is_decayed": not is_vector, "lr_multiplier": multiplier}
        groups.append({"params": members, **rates, **dict(entries), **(EXPERT_GROUP if is_of_experts else {})})
    if not groups:  # all layers of this rank are frozen, but an optimizer needs a parameter
        groups = [{"params": [_placeholder(module)], "weight_decay": 0.0, "is_decayed": False, "lr_multiplier": 1.0}]
    implementation = Implementation.TORCH if is_offloaded else mesh.kernels.optimizer
    return plan.build(groups, implementation)


def set_rates(optimizer: torch.optim.Optimizer, learning_rate: float, weight_decay: float | None = None) -> None:
    """Sets the learning rate of every group of `build_optimizer`, and the weight decay of groups that have one."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_multiplier"]
        if weight_decay is not None:
            group["weight_decay"] = weight_decay if group["is_decayed"] else 0.0


def _placeholder(module: nn.Module) -> nn.Parameter:
    """A new parameter of one element, outside all layers, without a gradient and in no checkpoint."""
    like = next(module.parameters())
    placeholder = nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device))
    mark_parameter(placeholder, is_counted=False)
    module.register_parameter("placeholder", placeholder)
    return placeholder


@contextlib.contextmanager
def timed_messages(stopwatch: Stopwatch | None) -> Iterator[None]:
    """Times DeepSpeed's messages in the block; sends and receives between stages count as "transfer"."""
    if stopwatch is None:
        yield
        return
    with replaced_backend(lambda backend: _TimedBackend(backend, stopwatch)):
        yield


class _TimedBackend:
    """DeepSpeed's communication backend with a stopwatch around each message."""

    def __init__(self, backend: Any, stopwatch: Stopwatch) -> None:
        self._backend = backend
        self._stopwatch = stopwatch

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backend, name)
        if name not in _TRANSFERS and not name.startswith(_COLLECTIVES):
            return value

        def timed(*arguments: Any, **options: Any) -> Any:
            with self._stopwatch.running(TRANSFER if name in _TRANSFERS else ""):
                return value(*arguments, **options)

        return timed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses DeepSpeed's set-up messages: standard output is reserved for results."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level if level > logging.WARNING else logging.WARNING)
