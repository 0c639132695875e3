"""Layers that can be split over the tensor-parallel axis.

On an axis of size 1 each is the plain layer, without communication. Parameters start at zero (norm weights at one) and
have a `shard_spec`; `megatron.model.interface.network` draws their initial values, which depend on global names.

With sequence parallelism, requested by an argument of a layer's call, ranks have different tokens outside of the
layers: a layer gathers its inputs, or scatters its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from megatron.errors import DataError
from megatron.kernels.choice import Implementation
from megatron.kernels.embedding import lookup
from megatron.kernels.float8 import Float8
from megatron.parallel.mesh import Axis
from megatron.parallel.shard_spec import Dimension, ShardSpec, annotate
from megatron.parallel.tensor.collectives import reduce_from, scatter_sequence
from megatron.parallel.tensor.direct_module import DirectModule
from megatron.parallel.tensor.linear import column_linear, deferrable_linear
from megatron.parallel.tensor.weight_gradients import WeightGradientQueue

# A fused operation on a layer's product and bias, in place of their sum. It runs inside the layer, because under ZeRO-3
# the bias is available only there.
Finish = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]

TOO_LARGE = "There is an input id in the input that is greater than the highest possible input id"


class ColumnParallelLinear(DirectModule):
    """`y = x W^T + b` with the outputs split: each rank computes its outputs from the full input.

    Args:
        outputs: the logical output dimensions, one of them split over `axis`; a fused query-key-value layer has
            (heads, 3, head size), a gated unit (2, inner).

    Attributes:
        queue: takes deferred weight gradients of a pipeline schedule; None without one.
        divides_weight: rows of the weight are also used separately, so their order must not change.
        float8: the settings of eight-bit products; None if disabled.

    Shapes: x `[..., input]` replicated; result `[..., output/t]`; weight `[output/t, input]`, bias `[output/t]`, the
        output dimensions merged.

    Raises:
        ConfigError: the axis does not divide the split dimension.
    """

    def __init__(
        self,
        input_size: int,
        outputs: Sequence[Dimension],
        axis: Axis,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.axis = axis
        self.queue: WeightGradientQueue | None = None
        self.divides_weight = False
        self.float8: Float8 | None = None
        weight = ShardSpec((*outputs, Dimension("input", input_size)), is_matrix=True)
        self.weight = annotate(nn.Parameter(torch.zeros(weight.local_shape, device=device).flatten(0, -2)), weight)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None)
        if bias:
            spec = ShardSpec(tuple(outputs))
            self.bias = annotate(nn.Parameter(torch.zeros(spec.local_shape, device=device).flatten()), spec)

    def forward(self, x: torch.Tensor, finish: Finish | None = None, *, splits_sequence: bool = False) -> torch.Tensor:
        """Applies the layer; with `finish`, returns `finish(product, bias)`.

        Args:
            splits_sequence: each rank has its own tokens of x, `[b, s/t, input]`.
        """
        if finish is None:
            return self.product(x, self.bias, splits_sequence)
        return finish(self.product(x, None, splits_sequence), self.bias)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None, splits_sequence: bool) -> torch.Tensor:
        """The layer without `finish`, with this bias."""
        return column_linear(x, self.weight, bias, self.axis, self.queue, self.float8, splits_sequence=splits_sequence)


class RowParallelLinear(DirectModule):
    """`y = x W^T + b` with the inputs split: the ranks' partial products are summed, then the replicated bias is added.

    Args:
        partial: an axis whose ranks add the bias to different tokens, so that the bias gradient is summed over it.

    Attributes:
        queue, float8: as in `ColumnParallelLinear`.

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
        partial: Axis | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.axis = axis
        self.queue: WeightGradientQueue | None = None
        self.float8: Float8 | None = None
        dimensions = (Dimension("output", output_size), Dimension("inputs of a linear layer", input_size, axis))
        weight = ShardSpec(dimensions, is_matrix=True)
        self.weight = annotate(nn.Parameter(torch.zeros(weight.local_shape, device=device)), weight)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None)
        if bias:
            spec = ShardSpec.vector(output_size, partial=partial)
            self.bias = annotate(nn.Parameter(torch.zeros(output_size, device=device)), spec)

    def forward(self, x: torch.Tensor, finish: Finish | None = None, *, splits_sequence: bool = False) -> torch.Tensor:
        """Applies the layer; with `finish`, returns `finish(product, bias)`.

        Args:
            splits_sequence: each rank gets its own tokens of the result, `[b, s/t, output]`.
        """
        weight, bias = self.weight, self.bias
        if self.axis.size == 1 and finish is None:
            return deferrable_linear(x, weight, bias, self.queue, self.float8)
        product = deferrable_linear(x, weight, None, self.queue, self.float8)
        y = scatter_sequence(product, self.axis) if splits_sequence else reduce_from(product, self.axis)
        if finish is not None:
            return finish(y, bias)
        return y if bias is None else y + bias


class VocabParallelEmbedding(nn.Module):
    """An embedding table with one row per token id, its rows split over the axis.

    Rows from `vocab_size` on are padding; they stay zero, and ids that refer to them are rejected.

    Args:
        implementation: of lookup and gradient.
        weight: the table of another layer that this one shares; None creates one.

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
        implementation: Implementation = Implementation.TORCH,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.axis = axis
        self.implementation = implementation
        self.vocab_size = vocab_size
        if weight is None:
            weight = vocabulary_table(vocab_size, padded_vocab_size, hidden_size, axis, device)
        self.weight = weight
        self.first_row = axis.rank * (padded_vocab_size // axis.size)

    def embed(self, ids: torch.Tensor, *, splits_sequence: bool = False) -> torch.Tensor:
        """Looks the ids up.

        Args:
            splits_sequence: each rank gets its own tokens of the result, `[b, s/t, h]`.

        Raises:
            DataError: an id is negative or not in the vocabulary (on a GPU a device assertion, which does not
                synchronize).
        """
        self._check(ids)
        is_whole = self.axis.size == 1
        kernel = self.implementation
        rows = lookup(self.weight, ids, first_row=self.first_row, is_whole=is_whole, implementation=kernel)
        if is_whole:
            return rows
        return scatter_sequence(rows, self.axis) if splits_sequence else reduce_from(rows, self.axis)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
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
                f"There is a negative input id ({lowest}) in the input. Valid ids are 0 to {self.vocab_size - 1}."
            )


def vocabulary_table(
    vocab_size: int,
    padded_vocab_size: int,
    hidden_size: int,
    axis: Axis,
    device: torch.device | str | None,
) -> nn.Parameter:
    """A zero matrix with one row per token id, its rows split over the axis: the word embedding or an output head.

    Shapes: `[v/t, h]`.
    """
    rows = Dimension("rows of the padded vocabulary", vocab_size, axis, padded_vocab_size)
    spec = ShardSpec((rows, Dimension("hidden", hidden_size)), is_matrix=True)
    return annotate(nn.Parameter(torch.zeros(spec.local_shape, device=device)), spec)
