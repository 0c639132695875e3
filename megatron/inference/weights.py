"""Weights of any checkpoint into a network that is only going to be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from megatron.checkpoint import Found, load_newest
from megatron.errors import CheckpointError
from megatron.model.gpt import DenseGPT
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.pieces import PieceKey
from megatron.parallel.placement import placement_of


def load_weights(model: DenseGPT, directory: Path, mesh: ParallelMesh, known: Found | None = None) -> Found:
    """Fills the network from the newest checkpoint that verifies, whatever layout wrote it; collective over the mesh.

    Args:
        known: what `newest_record` found in the directory.

    Raises:
        CheckpointError: there is no checkpoint, or it does not fit the network.
    """
    loaded = load_newest(directory, lambda: wanted_weights(model), mesh, known=known)
    if loaded is None:
        raise CheckpointError(
            f"there is no checkpoint in {directory} (--load {directory}). Give the folder a run saved to."
        )
    return loaded


def wanted_weights(model: nn.Module) -> Iterator[tuple[PieceKey, Callable[[torch.Tensor], None]]]:
    """This rank's part of every weight and the function that puts it in place; padded vocabulary rows stay."""
    for name, parameter in model.named_parameters():
        place = placement_of(parameter)
        key = PieceKey(name, "weight", place.shape, place.start, place.stop, 0, 0)
        if key.box_numel:
            box = parameter.detach()[tuple(slice(0, side) for side in place.box_shape)]
            yield PieceKey(name, "weight", place.shape, place.start, place.stop, 0, key.box_numel), _placer(box)


def _placer(box: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def accept(values: torch.Tensor) -> None:
        box.copy_(values.view(box.shape))

    return accept
