"""Which layers of a network a pipeline rank holds: its chunks, and the weights it shares with other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from megatron.engine.stages import stage_bounds
from megatron.model.interface.network import LayerSpec, LayerStack
from megatron.parallel.mesh import Axis, ParallelMesh
from megatron.parallel.schedule.actions import Placement


@dataclass(frozen=True)
class Chunks:
    """The chunks of one rank, whose layers are in one `LayerStack`, in the order of the network.

    Attributes:
        count: chunks of the whole network.
        specs: this rank's layers.
        layers: the places of each chunk's layers among them.
    """

    count: int
    specs: tuple[LayerSpec, ...]
    layers: dict[int, range]

    @classmethod
    def of(cls, network: Sequence[LayerSpec], placement: Placement, rank: int) -> Chunks:
        """The chunks of a pipeline rank.

        Raises:
            ConfigError: there are fewer blocks than chunks.
        """
        bounds = stage_bounds(network, placement.chunks)
        specs: list[LayerSpec] = []
        layers: dict[int, range] = {}
        for chunk in placement.chunks_of(rank):
            begin = len(specs)
            specs += network[bounds[chunk] : bounds[chunk + 1]]
            layers[chunk] = range(begin, len(specs))
        return cls(placement.chunks, tuple(specs), layers)

    @property
    def has_first(self) -> bool:
        """Whether the network begins here."""
        return 0 in self.layers

    @property
    def has_last(self) -> bool:
        """Whether it ends here, so that this rank sees the loss."""
        return self.count - 1 in self.layers


def tied_weights(
    network: Sequence[LayerSpec], stack: LayerStack, mesh: ParallelMesh
) -> list[tuple[nn.Parameter, Axis]]:
    """The weights that both this rank and another one of its pipeline hold, each with the axis of the ranks that do."""
    names = {spec.name for spec, _ in stack.named_layers()}
    tied: list[tuple[nn.Parameter, Axis]] = []
    for spec in network:
        here = {spec.name, spec.tied_to} & names if spec.tied_to is not None else set()
        if len(here) == 1:
            tied.append((stack.weight_of(here.pop()), mesh.embedding))
    return tied
