"""Tensors cut at random into boxes and flat ranges, as any layout might."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from megatron.parallel.pieces import Kind, PieceKey

State = Mapping[tuple[str, Kind], torch.Tensor]

SHAPES: dict[str, tuple[int, ...]] = {
    "embedding.word_embeddings.weight": (13, 6),
    "decoder.layers.0.mlp.linear_fc2.weight": (6, 20),
    "decoder.layers.0.mlp.linear_fc2.bias": (6,),
    "scale": (),
}


def make_state(
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    kinds: tuple[Kind, ...] = ("master", "exp_avg", "exp_avg_sq"),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> dict[tuple[str, Kind], torch.Tensor]:
    """Random global tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {
        (name, kind): torch.randn(shape, generator=generator).to(dtype)
        for name, shape in shapes.items()
        for kind in kinds
    }


def cut_keys(name: str, kind: Kind, shape: tuple[int, ...], random_cuts: random.Random) -> list[PieceKey]:
    """Cuts one tensor into a grid of boxes and each box into flat ranges."""
    sides = []
    for size in shape:
        borders = sorted({0, size, *(random_cuts.randint(0, size) for _ in range(random_cuts.randint(0, 2)))})
        sides.append(list(itertools.pairwise(borders)))
    keys = []
    for box in itertools.product(*sides):
        start, stop = tuple(a for a, _ in box), tuple(b for _, b in box)
        numel = math.prod(b - a for a, b in box)
        borders = sorted({0, numel, *(random_cuts.randint(0, numel) for _ in range(random_cuts.randint(0, 2)))})
        keys += [PieceKey(name, kind, shape, start, stop, first, last) for first, last in itertools.pairwise(borders)]
    return keys


def cut_out(tensor: torch.Tensor, key: PieceKey) -> torch.Tensor:
    """The values of a piece by plain indexing: the reference for the package's index arithmetic."""
    box = tensor[tuple(slice(a, b) for a, b in zip(key.start, key.stop, strict=True))]
    return box.reshape(-1)[key.first : key.last].clone()


def cut_for_ranks(
    state: State, ranks: int, seed: int, kinds: Mapping[Kind, Kind] | None = None
) -> list[list[tuple[PieceKey, torch.Tensor]]]:
    """Cuts a whole state and deals the pieces to ranks; every element exactly once."""
    random_cuts = random.Random(seed)
    dealt: list[list[tuple[PieceKey, torch.Tensor]]] = [[] for _ in range(ranks)]
    for (name, kind), tensor in state.items():
        for key in cut_keys(name, (kinds or {}).get(kind, kind), tuple(tensor.shape), random_cuts):
            dealt[random_cuts.randrange(ranks)].append((key, cut_out(tensor, key)))
    return dealt


@dataclass
class Sink:
    """Wants the pieces of one layout and collects what it is given."""

    expected: list[tuple[PieceKey, torch.Tensor]]
    got: dict[int, torch.Tensor] = field(default_factory=dict)

    def wanted(self) -> Iterator[tuple[PieceKey, Callable[[torch.Tensor], None]]]:
        """The wanted pieces in the form that loading expects."""
        for number, (key, _) in enumerate(self.expected):
            yield key, lambda values, number=number: self.got.__setitem__(number, values.clone())

    def check(self) -> None:
        """Checks that every piece came, with the right values."""
        assert sorted(self.got) == list(range(len(self.expected)))
        for number, (key, values) in enumerate(self.expected):
            assert torch.equal(self.got[number].to(values.dtype), values), key


def whole_sink(state: State) -> Sink:
    """Wants every tensor whole, as one process would."""
    return Sink(
        [
            (PieceKey(name, kind, tuple(t.shape), (0,) * t.dim(), tuple(t.shape), 0, t.numel()), t.reshape(-1))
            for (name, kind), t in state.items()
        ]
    )
