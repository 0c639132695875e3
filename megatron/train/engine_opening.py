"""The engine of a run: built, counted and checked."""

from __future__ import annotations

import torch

from megatron import log
from megatron.checkpoint.record import Record
from megatron.config import RunConfig
from megatron.config.running.report import UPSTREAMS_STYLE
from megatron.engine.ds_config import deepspeed_config
from megatron.engine.engine import Engine
from megatron.engine.freezing import EVERYTHING_IS_TRAINED, Freezing
from megatron.errors import LaunchError
from megatron.model.interface.network import LayerKind
from megatron.model.networks import network_layers
from megatron.observe.console import size_line, trained_line
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_sum
from megatron.train.objectives import build_objective, step_settings
from megatron.train.restarts.freezing import find_freezing


def open_engine(config: RunConfig, mesh: ParallelMesh, record: Record | None) -> tuple[Engine, tuple[int, int, int]]:
    """Builds the engine and shows the size of its network, see `parameter_counts`; collective over the mesh."""
    freezing = find_freezing(config.finetuning, config.loading, network_layers(config.model, mesh), mesh, record)
    engine = build_engine(config, mesh, freezing)
    check_layers(engine, config.model.num_layers)
    sizes = parameter_counts(engine)
    if config.report.log_style == UPSTREAMS_STYLE:
        log.info(size_line(mesh.tp.rank, mesh.pp.rank, *sizes[:2]))
    if freezing.frozen:
        log.info(trained_line(sizes[2], sizes[0]))
    if config.loss.reweight_loss_based_on_position_frequency:
        log.info("Using loss reweighting")
    return engine, sizes


def build_engine(config: RunConfig, mesh: ParallelMesh, freezing: Freezing = EVERYTHING_IS_TRAINED) -> Engine:
    """The training engine of a resolved configuration."""
    return Engine(
        network_layers(config.model, mesh),
        build_objective(config, mesh),
        config.optim,
        config.precision,
        mesh,
        deepspeed_config(config),
        step_settings(config),
        config.random.seed,
        config.safety.skip_spikes,
        freezing,
    )


def parameter_counts(engine: Engine) -> tuple[int, int, int]:
    """Parameter counts of the whole network, of the network without embeddings, and of what is trained; collective over
    the mesh.
    """
    counts = torch.zeros(3, dtype=torch.float64, device=engine.mesh.device)
    for spec, numel, is_trained in engine.counted_parameters():
        counts[0] += numel
        counts[1] += 0 if spec.kind is LayerKind.EMBEDDING else numel
        counts[2] += numel if is_trained else 0
    total, without_embeddings, trained = map(int, all_reduce_sum(counts, engine.mesh.model).tolist())
    return total, without_embeddings, trained


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
