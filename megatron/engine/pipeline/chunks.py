"""Which layers of a network a pipeline rank holds: its chunks, and the weights it shares with other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.engine.stages import stage_bounds
from megatron.model.interface.layer_cost import MATRICES_ONLY, TokenWork
from megatron.model.interface.network import LayerSpec, parameter_names
from megatron.parallel.schedule.actions import Placement
from megatron.parallel.schedule.division import BY_COST, Division


@dataclass(frozen=True)
class Chunks:
    """The chunks of one rank, whose layers are in one `LayerStack`, in the order of the network.

    Attributes:
        count: chunks of the whole network.
        specs: this rank's layers.
        layers: the places of each chunk's layers among them.
        first_trained: the first chunk of the network that has a trained parameter: those before it need no backward
            pass.
    """

    count: int
    specs: tuple[LayerSpec, ...]
    layers: dict[int, range]
    first_trained: int = 0

    @classmethod
    def of(
        cls,
        network: Sequence[LayerSpec],
        placement: Placement,
        rank: int,
        frozen: frozenset[str] = frozenset(),
        *,
        division: Division = BY_COST,
        work: TokenWork = MATRICES_ONLY,
        may_be_empty: bool = False,
    ) -> Chunks:
        """The chunks of a pipeline rank.

        Args:
            frozen: global names of the parameters that are not trained.
            division, work, may_be_empty: see `stage_bounds`.

        Raises:
            ConfigError: there are fewer blocks than chunks.
        """
        bounds = stage_bounds(network, placement, division, work, may_be_empty=may_be_empty)
        specs: list[LayerSpec] = []
        layers: dict[int, range] = {}
        for chunk in placement.chunks_of(rank):
            begin = len(specs)
            specs += network[bounds[chunk] : bounds[chunk + 1]]
            layers[chunk] = range(begin, len(specs))
        first_trained = 0
        while frozen and first_trained < placement.chunks - 1:
            if frozen.issuperset(parameter_names(network[bounds[first_trained] : bounds[first_trained + 1]])):
                first_trained += 1
            else:
                break
        return cls(placement.chunks, tuple(specs), layers, first_trained)

    @property
    def has_first(self) -> bool:
        """Whether the network begins here."""
        return 0 in self.layers

    @property
    def has_last(self) -> bool:
        """Whether it ends here, so that this rank sees the loss."""
        return self.count - 1 in self.layers

    def is_last(self, chunk: int) -> bool:
        """Whether the network ends with this chunk."""
        return chunk == self.count - 1

    def passes_gradient(self, chunk: int) -> bool:
        """Whether the gradient of a chunk's output is needed; there is no chunk -1."""
        return chunk >= self.first_trained
