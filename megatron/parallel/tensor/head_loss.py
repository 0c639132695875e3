"""The losses of an output head without materializing the logits of a micro-batch.

The head is the widest layer of a network: its logits `[b, s, v/t]` and their gradient take more memory than the
activations of many blocks, and reading and writing them takes more time than the softmax. Here logits are computed in
chunks of rows, which stay in cache on a CPU. The weight of each token in the minimized sum is known in advance, so the
gradient of a chunk is computed at once, in place of its logits, and added to the gradients of the hidden states and of
the weight: the usual three matrix products with a single chunk of logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from megatron.kernels.choice import Implementation
from megatron.kernels.cross_entropy import LossGradients, cross_entropy_, logit_gradient, logit_statistics
from megatron.kernels.products import add_product_, linear, matrix_product, needs_widening, product_in_float32
from megatron.kernels.softcap import softcapped
from megatron.parallel.mesh import Axis
from megatron.parallel.tensor.collectives import PendingTokens, start_all_reduce, start_summing
from megatron.parallel.tensor.cross_entropy import TokenLosses, VocabularySlice, losses_of

# Logits of a chunk, and its minimum rows: with fewer, adding to the weight gradient costs more than the products.
# Measured on a CPU with 2 MiB of L2 cache per core. On a GPU each chunk but the first reads and writes the weight
# gradient, 8 bytes per parameter, so chunks are large: 1 GiB in half precision, in whole tiles of a matrix product.
_CHUNK_VALUES_CPU, _CHUNK_ROWS_CPU = 1 << 22, 384
_CHUNK_VALUES_GPU, _CHUNK_ROWS_GPU, _TILE_ROWS_GPU = 1 << 29, (2048, 8192), 256


class FactoredLogits(NamedTuple):
    """Logits as factors: `hidden weight^T`, soft-capped.

    Shapes: hidden `[b, s, h]`, weight `[v/t, h]`, source `[b, s/t, h]`.

    Attributes:
        softcap: the cap of `megatron.kernels.softcap`, if any.
        source: with sequence parallelism, this rank's tokens of hidden, which receive the gradient in its place.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    softcap: float | None = None
    source: torch.Tensor | None = None

    def at(self, rows: torch.Tensor) -> torch.Tensor:
        """The logits of some tokens. Shapes: rows `[n]` int64, as indices into `[b * s]`; result `[n, v/t]`."""
        logits = linear(self.hidden.flatten(0, 1)[rows], self.weight)
        return logits if self.softcap is None else softcapped(logits, self.softcap)


class LossTerms(NamedTuple):
    """The minimized loss: (1 - e) cross-entropy + e cross-entropy with the uniform distribution + c (log normalizer)^2.

    Attributes:
        label_smoothing: e.
        z_loss_coeff: c.
    """

    label_smoothing: float = 0.0
    z_loss_coeff: float = 0.0


class HeadGradients(NamedTuple):
    """The gradients of the minimized loss, None where not needed, multiplied by a factor, None for 1.

    Shapes: source and of_hidden `[b, s or s/t, h]`, weight and of_weight `[v/t, h]`; factor `[]`.
    """

    source: torch.Tensor
    weight: torch.Tensor
    of_weight: torch.Tensor | None
    of_hidden: torch.Tensor | None
    factor: torch.Tensor | None

    def attached_to(self, value: torch.Tensor) -> torch.Tensor:
        """The value of the minimized loss with these gradients as its backward pass. Shapes: `[]`."""
        return _Attach.apply(value, *self)  # type: ignore[no-any-return]


class HeadLosses(NamedTuple):
    """The losses of every token, without derivatives, and the gradients of the minimized loss.

    Attributes:
        gradients: None if autograd is disabled.
    """

    tokens: TokenLosses
    gradients: HeadGradients | None


def head_losses(
    logits: FactoredLogits,
    labels: torch.Tensor,
    weights: torch.Tensor,
    axis: Axis,
    vocab_size: int,
    terms: LossTerms,
    *,
    factor: torch.Tensor | None = None,
    chunk_rows: int | None = None,
    implementation: Implementation = Implementation.TORCH,
) -> HeadLosses:
    """The losses of every token, and the gradients of their weighted sum.

    On a CPU without instructions for half precision the products are computed in float32, see `needs_widening`.

    Shapes: labels `[b, s]` int64, weights `[b, s]`.

    Args:
        weights: the weight of each token in the minimized sum; the losses of tokens of weight 0 are not computed.
        axis: the tensor-parallel axis that splits the vocabulary.
        vocab_size: vocabulary size without padding.
        factor: the factor of the gradients, best the later derivative of the sum: then float16 gradients have the range
            that the loss scale was chosen for, and need no further multiplication. 0 counts as 1. `[]`.
        chunk_rows: maximum number of tokens whose logits are held at once; does not affect the losses.
    """
    source, weight = logits.hidden if logits.source is None else logits.source, logits.weight
    is_trained = torch.is_grad_enabled() and (source.requires_grad or weight.requires_grad)
    with torch.no_grad():
        tokens = _Tokens.of(logits.hidden, labels, weights)
        head = _Head(logits, axis, vocab_size, terms, implementation)
        sums = _GradientSums(logits, source, tokens, axis) if is_trained else None
        if factor is not None:
            factor = factor.masked_fill(factor == 0, 1.0)  # backward divides by it
        losses = []
        for chunk in _chunks(len(tokens.labels), chunk_rows or head.chunk_rows):
            part = tokens.chunk(chunk, head.dtype, head.vocabulary.first)
            product = head.multiplied(part.hidden)
            if sums is None:
                losses.append(head.losses(product, part.labels))
                continue
            scaled = part.weights if factor is None else part.weights * factor
            losses.append(head.losses_and_gradient_(product, part.labels, scaled))
            sums.add(chunk, product, part.hidden, head.weight)
        gradients = None if sums is None else HeadGradients(source, weight, sums.of_weight(), sums.of_hidden(), factor)
        return HeadLosses(tokens.spread(losses), gradients)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, hidden, weight, *gradients):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, derivative):  # type: ignore[no-untyped-def]
        of_weight, of_hidden, factor = ctx.saved_tensors
        ratio = derivative if factor is None else derivative / factor
        if ratio.is_cuda or ratio != 1:  # comparing on a GPU would make the host wait
            for gradient in (of_hidden, of_weight):
                if gradient is not None:
                    gradient.mul_(ratio)
        return None, of_hidden, of_weight, None, None, None


class _Tokens(NamedTuple):
    """The counted tokens of a micro-batch. Shapes: hidden `[n, h]`; labels, weights and indices `[n]`.

    Attributes:
        indices: of these tokens in the micro-batch; None if all are counted.
        shape: the shape of the micro-batch's labels.
    """

    hidden: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    indices: torch.Tensor | None
    shape: torch.Size

    @classmethod
    def of(cls, hidden: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> _Tokens:
        """The tokens with a weight, or all if none has; all on a GPU, where the host would wait for their number."""
        rows, flat, weight = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), weights.reshape(-1)
        indices = None if hidden.is_cuda else weight.nonzero().squeeze(1)
        if indices is None or len(indices) in (0, len(weight)):
            return cls(rows, flat, weight, None, labels.shape)
        return cls(rows[indices], flat[indices], weight[indices], indices, labels.shape)

    def chunk(self, chunk: slice, dtype: torch.dtype, first: int) -> _Tokens:
        """A chunk of the tokens, with hidden states in another dtype and labels relative to `first`."""
        hidden, labels, weights = self[:3]
        if chunk != slice(0, len(labels)):
            hidden, labels, weights = hidden[chunk], labels[chunk], weights[chunk]
        return self._replace(hidden=hidden.to(dtype), labels=labels - first if first else labels, weights=weights)

    def spread(self, losses: list[TokenLosses]) -> TokenLosses:
        """Concatenates the losses of chunks, with 0 for tokens that are not counted. Shapes: `[b, s]`."""
        uniform = [part.uniform for part in losses if part.uniform is not None]
        return TokenLosses(
            self.scattered(_joined([part.cross_entropy for part in losses])),
            self.scattered(_joined([part.log_normalizer for part in losses])),
            self.scattered(_joined(uniform)) if uniform else None,
        )

    def scattered(self, values: torch.Tensor) -> torch.Tensor:
        """Scatters values of the counted tokens to the micro-batch, with 0 elsewhere."""
        if self.indices is not None:
            values = values.new_zeros(self.shape.numel(), *values.shape[1:]).index_copy_(0, self.indices, values)
        return values.view(*self.shape, *values.shape[1:])


class _Head:
    """Logits, losses and gradients of a chunk of tokens, in one reused buffer."""

    def __init__(
        self,
        logits: FactoredLogits,
        axis: Axis,
        vocab_size: int,
        terms: LossTerms,
        implementation: Implementation,
    ) -> None:
        weight = logits.weight.detach()
        is_converted = needs_widening(weight) or (not weight.is_cuda and weight.dtype is torch.float16)
        self.dtype = torch.float32 if is_converted else weight.dtype
        self.weight = weight.to(self.dtype)
        self.softcap, self.axis, self.terms, self.implementation = logits.softcap, axis, terms, implementation
        self.vocabulary = VocabularySlice.of(axis, weight.shape[0], vocab_size)
        self._buffer: torch.Tensor | None = None

    @property
    def chunk_rows(self) -> int:
        """The default number of tokens of a chunk."""
        columns = max(1, self.weight.shape[0])
        if self.weight.is_cuda:
            return _chunk_rows_on_gpu(columns)
        return max(_CHUNK_ROWS_CPU, _CHUNK_VALUES_CPU // columns)

    def multiplied(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits without soft-cap, in a buffer that the next call reuses. Shapes: `[n, h]` to `[n, v/t]`."""
        if self._buffer is None:  # the first chunk is the largest
            self._buffer = hidden.new_empty(hidden.shape[0], self.weight.shape[0])
        logits = self._buffer if len(self._buffer) == len(hidden) else self._buffer[: hidden.shape[0]]
        add_product_(logits, hidden, self.weight.t(), replaces=True)
        return logits

    def losses(self, product: torch.Tensor, labels: torch.Tensor) -> TokenLosses:
        """The losses of each token; labels are relative to the slice's first id. Shapes: `[n]`."""
        statistics = logit_statistics(
            product,
            labels,
            self.vocabulary.valid,
            softcap=self.softcap,
            with_logit_sum=self.terms.label_smoothing > 0,
            implementation=self.implementation,
        )
        return losses_of(statistics, self.axis, self.vocabulary)

    def losses_and_gradient_(self, product: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> TokenLosses:
        """As `losses`, and replaces the logits by the gradient of the weighted sum of minimized losses."""
        smoothing, coefficient = self.terms
        is_plain = self.axis.size == 1 and self.softcap is None and not smoothing and not coefficient
        if is_plain and self.implementation is Implementation.CSRC:
            return TokenLosses(*cross_entropy_(product, labels, weights, self.vocabulary.valid), None)
        losses = self.losses(product, labels)
        logit_gradient(
            product,
            labels,
            losses.log_normalizer,
            LossGradients(
                of_label=weights * (1 - smoothing) if smoothing else weights,
                of_normalizer=2 * coefficient * losses.log_normalizer * weights if coefficient else None,
                of_uniform=weights * smoothing if smoothing else None,
            ),
            self.vocabulary.valid,
            self.vocabulary.vocab_size,
            softcap=self.softcap,
            in_place=True,
            implementation=self.implementation,
        )
        return losses


class _GradientSums:
    """The gradients of hidden states and weight, accumulated over chunks.

    Over several chunks, the gradient of a half-precision weight is summed in float32: otherwise every chunk would round
    the whole sum to 8 or 11 bits, and the result would depend on the number of chunks.
    """

    def __init__(self, logits: FactoredLogits, source: torch.Tensor, tokens: _Tokens, axis: Axis) -> None:
        self._weight, self._tokens, self._axis = logits.weight, tokens, axis
        self._start_sum = start_all_reduce if source is logits.hidden else start_summing
        self._pending: PendingTokens | None = None
        self._of_hidden = torch.empty_like(tokens.hidden) if source.requires_grad else None
        self._of_weight: torch.Tensor | None = None

    def add(self, chunk: slice, gradient: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        """Adds the two products of a chunk. Shapes: gradient `[n, v/t]`, hidden `[n, h]`, weight `[v/t, h]`."""
        if self._of_hidden is not None:
            add_product_(self._of_hidden[chunk], gradient, weight, replaces=True)
            if chunk.stop == len(self._of_hidden):
                self._of_hidden = self._tokens.scattered(self._of_hidden)
                if self._axis.size > 1:
                    self._pending = self._start_sum(self._of_hidden, self._axis)  # during the weight's last product
                    if not self._axis.overlaps:
                        self._pending.wait()
        if not self._weight.requires_grad:
            return
        if self._of_weight is None:
            is_only = hidden.shape[0] == self._tokens.hidden.shape[0]
            self._of_weight = (
                matrix_product(gradient.t(), hidden) if is_only else product_in_float32(gradient.t(), hidden)
            )
        else:
            add_product_(self._of_weight, gradient.t(), hidden)

    def of_hidden(self) -> torch.Tensor | None:
        """Shapes: `[b, s or s/t, h]`."""
        return self._of_hidden if self._pending is None else self._pending.wait()

    def of_weight(self) -> torch.Tensor | None:
        """Shapes: `[v/t, h]`."""
        return None if self._of_weight is None else self._of_weight.to(self._weight.dtype)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _chunk_rows_on_gpu(columns: int) -> int:
    fewest, most = _CHUNK_ROWS_GPU
    rows = _CHUNK_VALUES_GPU // columns // _TILE_ROWS_GPU * _TILE_ROWS_GPU
    return max(fewest, min(most, rows))


def _chunks(count: int, most: int) -> list[slice]:
    """Chunks of equal size, except the last; in whole tiles of a matrix product if `most` is."""
    size = -(-count // -(-count // most))
    if most % _TILE_ROWS_GPU == 0:
        size = -(-size // _TILE_ROWS_GPU) * _TILE_ROWS_GPU
    return [slice(first, min(count, first + size)) for first in range(0, count, size)]
