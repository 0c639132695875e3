"""The L2 norm of the weights of each layer, from the pieces of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from megatron.engine.engine import Engine
from megatron.engine.gradients.gradient_stats import layer_of
from megatron.engine.state import owned_pieces
from megatron.objective.metric import Metric, Reduction, metrics_of
from megatron.parallel.messages import all_reduce_sum


@torch.no_grad()
def weight_norms(engine: Engine) -> torch.Tensor:
    """The L2 norm of the weights of each of `engine.layer_names`, on every rank; collective over all ranks.

    Measures the optimizer's fp32 weights, and the network's frozen weights. An element that several ranks hold or
    several layers share counts once.

    Shapes: result `[layers]` float64, on the device of the mesh.
    """
    indices = {name: index for index, name in enumerate(engine.layer_names)}
    norms: list[torch.Tensor] = []
    layers: list[int] = []
    for key, tensor in owned_pieces(engine, with_optimizer=False):
        if key.kind in ("weight", "master") and not key.is_optional:
            layers.append(layer_of(key.name, indices))
            norms.append(torch.linalg.vector_norm(tensor, dtype=torch.float64).to(engine.mesh.device))
    squares = torch.zeros(len(indices), dtype=torch.float64, device=engine.mesh.device)
    if norms:
        squares.index_add_(0, torch.tensor(layers, device=squares.device), torch.stack(norms).square())
    return all_reduce_sum(squares, engine.mesh.world).sqrt()


def norm_metrics(layers: Sequence[str], norms: torch.Tensor) -> Iterator[Metric]:
    """The metrics of a step whose weights were measured. Shapes: norms `[layers]`."""
    values = norms.tolist()
    named = {f"weight_norms/{layer}": norm for layer, norm in zip(layers, values, strict=True)}
    return metrics_of({"weight_norm": math.hypot(*values), **named}, Reduction.LAST)
