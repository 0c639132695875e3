"""Builds the layers of a rank for DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron.engine.deepspeed_internals.experts import PlacedInit, mark_expert
from megatron.engine.deepspeed_internals.parameters import mark_parameter, partition_of
from megatron.engine.deepspeed_setup import quiet
from megatron.engine.freezing import freeze, is_frozen
from megatron.engine.gradients.gradient_sum import Partial
from megatron.engine.grid import ModelParallelUnit
from megatron.model.interface.network import LayerSpec, LayerStack, build_layer
from megatron.parallel.mesh import Axis, ParallelMesh
from megatron.parallel.rng import draw_weights_
from megatron.parallel.shard_spec import shard_spec_of


def build_stack(
    specs: Sequence[LayerSpec],
    mesh: ParallelMesh,
    settings: Mapping[str, Any],
    dtype: torch.dtype,
    seed: int,
    frozen: frozenset[str] = frozenset(),
) -> LayerStack:
    """Builds and initializes this rank's layers.

    Args:
        specs: the layers.
        settings: the DeepSpeed configuration; under ZeRO-3 each layer is partitioned as soon as it is built.
        dtype: of the weights.
        seed: seed of the initial parameter values.
        frozen: global names of the parameters that are not trained.
    """
    if settings["zero_optimization"]["stage"] == 3:
        stack = _partitioned_stack(specs, mesh, settings, seed)
    else:
        stack = LayerStack(specs, seed=seed, initial_values=mesh.kernels.initial_values).to(dtype)
    freeze(stack.parameters(), frozen)
    _mark_for_deepspeed(stack, mesh)
    return stack


def _partitioned_stack(
    specs: Sequence[LayerSpec], mesh: ParallelMesh, settings: Mapping[str, Any], seed: int
) -> LayerStack:
    """Builds layer by layer under `zero.Init`: a rank holds at most one unpartitioned layer, and initializes only its
    own shard.
    """
    # The settings determine the dtype: DeepSpeed replaces an explicit one by bfloat16 on devices without float16, such
    # as many CPUs (`runtime/zero/partition_parameters.py`, `_set_dtype`).
    zero = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": settings["zero_optimization"],
        **{name: settings[name] for name in ("bf16", "fp16") if name in settings},
    }

    def build(spec: LayerSpec, shared: nn.Parameter | None) -> nn.Module:
        with PlacedInit(
            mesh,
            data_parallel_group=mesh.gradient.group,
            config_dict_or_path=zero,
            mem_efficient_linear=False,  # True replaces torch.nn.functional.linear in the whole process
            mpu=ModelParallelUnit(mesh),
        ):
            return build_layer(spec, shared)  # a shared weight is already partitioned

    with quiet():
        stack = LayerStack(specs, build=build)
    for parameter in stack.parameters():
        spec, part = shard_spec_of(parameter), partition_of(parameter)
        if spec.is_matrix and part is not None:
            name: str = parameter.global_name  # type: ignore[attr-defined]
            first, kernel = spec.replicas(mesh).rank * part.numel(), mesh.kernels.initial_values
            draw_weights_(part, spec, seed, name, first=first, implementation=kernel)
    return stack


def _mark_for_deepspeed(stack: LayerStack, mesh: ParallelMesh) -> None:
    for parameter in stack.parameters():
        spec = shard_spec_of(parameter)
        mark_expert(parameter, mesh)
        mark_parameter(parameter, is_counted=spec.is_counted(mesh), is_tied_copy=spec.is_tied_copy)


def tied_weights(
    network: Sequence[LayerSpec], stack: LayerStack, mesh: ParallelMesh
) -> list[tuple[nn.Parameter, Axis]]:
    """The weights that this rank shares with another stage of its pipeline, each with the axis of both stages."""
    names = {spec.name for spec, _ in stack.named_layers()}
    tied: dict[int, tuple[nn.Parameter, Axis]] = {}
    for spec in network:
        here = {spec.name, spec.tied_to} & names if spec.tied_to is not None else set()
        if len(here) == 1:
            weight = stack.weight_of(here.pop())
            tied[id(weight)] = weight, mesh.embedding
    return list(tied.values())


def partial_parameters(stack: LayerStack) -> Partial:
    """By axis, the trained parameters whose gradients come from different tokens on each of its ranks."""
    groups: dict[tuple[int, ...], tuple[Axis, list[nn.Parameter]]] = {}
    for parameter in stack.parameters():
        for axis in () if is_frozen(parameter) else shard_spec_of(parameter).summed_over:
            if axis.size > 1:
                groups.setdefault(axis.ranks, (axis, []))[1].append(parameter)
    return list(groups.values())
