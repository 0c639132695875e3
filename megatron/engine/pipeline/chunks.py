"""The chunks of a pipeline rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.model.interface.layer_cost import MATRICES_ONLY, TokenWork
from megatron.model.interface.network import LayerKind, LayerSpec, LayerStack, parameter_names
from megatron.parallel.schedule.actions import Placement
from megatron.parallel.schedule.division import BY_COST, Division


@dataclass(frozen=True)
class Chunks:
    """The chunks of one rank, whose layers are in one `LayerStack`, in the order of the network.

    Attributes:
        count: number of chunks of the whole network.
        specs: this rank's layers.
        layers: the indices of each chunk's layers in `specs`.
        first_trained: the first chunk of the network with a trained parameter; earlier ones need no backward pass.
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
            start = len(specs)
            specs += network[bounds[chunk] : bounds[chunk + 1]]
            layers[chunk] = range(start, len(specs))
        first_trained = 0
        while frozen and first_trained < placement.chunks - 1:
            if frozen.issuperset(parameter_names(network[bounds[first_trained] : bounds[first_trained + 1]])):
                first_trained += 1
            else:
                break
        return cls(placement.chunks, tuple(specs), layers, first_trained)

    @property
    def has_first(self) -> bool:
        return 0 in self.layers

    @property
    def has_last(self) -> bool:
        """True if this rank has the last chunk and computes the loss."""
        return self.count - 1 in self.layers

    def numbers(self, stack: LayerStack) -> dict[int, int]:
        """The chunk of each parameter of this rank's layers, by the parameter's id."""
        layers = [layer for _, layer in stack.named_layers()]
        pairs = ((chunk, layers[index]) for chunk, indices in self.layers.items() for index in indices)
        return {id(parameter): chunk for chunk, layer in pairs for parameter in layer.parameters()}

    def is_last(self, chunk: int) -> bool:
        """Returns True for the last chunk of the network."""
        return chunk == self.count - 1

    def passes_gradient(self, chunk: int) -> bool:
        """Returns True if the gradient of a chunk's output is needed; False for chunk -1."""
        return chunk >= self.first_trained


def stage_bounds(
    specs: Sequence[LayerSpec],
    placement: Placement,
    division: Division = BY_COST,
    work: TokenWork = MATRICES_ONLY,
    *,
    may_be_empty: bool = False,
) -> list[int]:
    """The boundaries of the chunks in the list of layers: chunk `i` runs `specs[bounds[i]:bounds[i + 1]]`.

    Boundaries are between blocks. Layers before the first block belong to the first chunk, layers after the last block
    to the last. A layer's cost is its FLOPs; if the network does not state them, a block's is its parameter count.

    Args:
        work: the computation per token.
        may_be_empty: if there are fewer blocks than chunks, the last chunks get none.

    Raises:
        ConfigError: there are fewer blocks than chunks.
    """
    blocks = [index for index, spec in enumerate(specs) if spec.kind is LayerKind.BLOCK]
    filled = Placement(placement.owners[: len(blocks)]) if may_be_empty else placement
    costs = [spec.cost.flops(work.pairs) for spec in specs]
    if not any(costs):
        costs = [spec.cost.parameters if spec.kind is LayerKind.BLOCK else 0 for spec in specs]
    ends = (sum(costs[: blocks[0]]), int(work.head_share * sum(costs[blocks[-1] + 1 :]))) if blocks else (0, 0)
    counts = division.counts([costs[index] for index in blocks], ends, filled)
    bounds, taken = [0], 0
    for count in [*counts, *[0] * (placement.chunks - filled.chunks)][:-1]:
        taken += count
        bounds.append(blocks[taken] if taken < len(blocks) else blocks[-1] + 1)
    return [*bounds, len(specs)]
