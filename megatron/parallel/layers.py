"""The layers that may be split over the tensor axis.

On an axis of size 1 each is the plain layer and communicates nothing. Every parameter carries a `placement`; values are
drawn by whoever knows its global name.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron import kernels
from megatron.errors import ConfigError, DataError
from megatron.parallel.collectives import copy_to, reduce_from
from megatron.parallel.mesh import Axis
from megatron.parallel.placement import Placement, place

TOO_LARGE = "There is an input id in the input that is greater than the highest possible input id"


class ColumnParallelLinear(nn.Module):
    """`y = x W^T + b` with the outputs split: each rank computes its own from the whole input.

    Shapes: x `[..., input]` replicated; result `[..., output/t]`; weight `[output/t, input]`, bias `[output/t]`.

    Raises:
        ConfigError: the axis does not divide the outputs.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        axis: Axis,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_divisible(output_size, axis, "outputs of a linear layer")
        self.axis = axis
        self.weight = _parameter((output_size, input_size), 0, axis, device)
        self.bias = _parameter((output_size,), 0, axis, device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the layer."""
        return F.linear(copy_to(x, self.axis), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """`y = x W^T + b` with the inputs split: the ranks' partial products are summed, then the replicated bias is added.

    Shapes: x `[..., input/t]`; result `[..., output]` replicated; weight `[output, input/t]`, bias `[output]`.

    Raises:
        ConfigError: the axis does not divide the inputs.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        axis: Axis,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_divisible(input_size, axis, "inputs of a linear layer")
        self.axis = axis
        self.weight = _parameter((output_size, input_size), 1, axis, device)
        self.bias = _parameter((output_size,), None, axis, device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the layer."""
        if self.axis.size == 1:
            return F.linear(x, self.weight, self.bias)
        y = reduce_from(F.linear(x, self.weight), self.axis)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """A table of one row per token id, the rows split over the axis; also the weight of the tied head.

    Rows beyond `vocab_size` only pad the table; they stay zero and no id may name them.

    Shapes: ids `[...]` int64; result `[..., h]` replicated; weight `[v/t, h]`.

    Raises:
        ConfigError: the axis does not divide the padded vocabulary.
    """

    def __init__(
        self,
        vocab_size: int,
        padded_vocab_size: int,
        hidden_size: int,
        axis: Axis,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_divisible(padded_vocab_size, axis, "rows of the padded vocabulary")
        self.axis = axis
        self.vocab_size = vocab_size
        rows = padded_vocab_size // axis.size
        self.first_row = axis.rank * rows
        start, stop = (min(edge, vocab_size) for edge in (self.first_row, self.first_row + rows))
        weight = nn.Parameter(torch.zeros(rows, hidden_size, device=device))
        box = Placement((vocab_size, hidden_size), (start, 0), (stop, hidden_size), axis.size > 1)
        self.weight = place(weight, box)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Looks the ids up.

        Raises:
            DataError: an id is negative or not in the vocabulary (on a GPU a device assertion, which costs no wait).
        """
        self._check(ids)
        if self.axis.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.first_row
        foreign = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(foreign, 0), self.weight)  # [..., h]
        return reduce_from(rows.masked_fill(foreign.unsqueeze(-1), 0.0), self.axis)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Looks the ids up."""
        return self.embed(ids)

    def _check(self, ids: torch.Tensor) -> None:
        if ids.is_cuda:
            torch._assert_async(((ids >= 0) & (ids < self.vocab_size)).all(), f"{TOO_LARGE}, or negative")
            return
        if ids.numel() == 0:
            return
        lowest, highest = (int(edge) for edge in torch.aminmax(ids))
        if highest >= self.vocab_size:
            raise DataError(
                f"{TOO_LARGE}: {highest}, and the vocabulary has {self.vocab_size} entries (ids 0 to "
                f"{self.vocab_size - 1}). The data was made with another tokenizer; give its --vocab-file, or "
                f"preprocess the text again."
            )
        if lowest < 0:
            raise DataError(
                f"There is a negative input id ({lowest}) in the input. Ids are 0 to {self.vocab_size - 1}."
            )


class LayerNorm(nn.Module):
    """Layer norm with weight and bias, replicated over the axis.

    Shapes: `[..., h]` to the same.
    """

    def __init__(self, hidden_size: int, eps: float, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = place(nn.Parameter(torch.ones(hidden_size, device=device)), Placement.whole((hidden_size,)))
        self.bias = place(nn.Parameter(torch.zeros(hidden_size, device=device)), Placement.whole((hidden_size,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises the last dimension."""
        return kernels.layer_norm(x, self.weight, self.bias, self.eps)


def check_divisible(number: int, axis: Axis, what: str) -> None:
    """Checks that an axis cuts `number` things into equal parts.

    Raises:
        ConfigError: it does not.
    """
    if number % axis.size:
        raise ConfigError(
            f"{number} {what} cannot be split over {axis.size} ranks (--tensor-model-parallel-size {axis.size}). The "
            f"number must be a multiple of the ranks."
        )


def _parameter(
    shape: tuple[int, ...], dimension: int | None, axis: Axis, device: torch.device | str | None
) -> nn.Parameter:
    """A zero parameter, split along `dimension` or whole."""
    placement = Placement.whole(shape) if dimension is None else Placement.part(shape, dimension, axis.rank, axis.size)
    return place(nn.Parameter(torch.zeros(placement.box_shape, device=device)), placement)
