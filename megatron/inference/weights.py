"""Loads the weights of any checkpoint into a network for inference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from megatron import log
from megatron.checkpoint import Found, load_newest
from megatron.errors import CheckpointError
from megatron.model.interface.network import LayerStack
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.pieces import PieceKey, filling_weights


def load_weights(model: LayerStack, directory: Path, mesh: ParallelMesh, known: Found | None = None) -> Found:
    """Loads the newest checkpoint that verifies, whatever layout wrote it; collective over the mesh. That it was loaded
    is said on standard error: standard output is for what the program finds with it.

    Args:
        known: the result of `newest_record` for the directory.

    Raises:
        CheckpointError: there is no checkpoint, or it does not fit the network.
    """
    loaded = load_newest(directory, lambda: wanted_weights(model), mesh, known=known, announce=log.info)
    if loaded is None:
        raise CheckpointError(
            f"there is no checkpoint in {directory} (--load {directory}). Give the folder to which a run saved its "
            f"checkpoints."
        )
    return loaded


def wanted_weights(model: nn.Module) -> Iterator[tuple[PieceKey, Callable[[torch.Tensor], None]]]:
    """This rank's shard of every weight, with the function that copies it into place; see `filling_weights`."""
    return filling_weights(model.parameters())
