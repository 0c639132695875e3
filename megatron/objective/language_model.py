"""Next-token prediction, also after a random prefix; optionally with label smoothing, z-loss, means over samples and
losses per data source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from megatron.data.loader import Batch
from megatron.kernels.choice import Implementation
from megatron.objective.base import ObjectiveResult
from megatron.objective.metric import MetricSpec, Reduction
from megatron.parallel.mesh import Axis
from megatron.parallel.tensor.cross_entropy import TokenLosses, vocab_parallel_losses
from megatron.parallel.tensor.head_loss import FactoredLogits, HeadGradients, LossTerms, head_losses

SOURCE_LOSSES, Z_LOSS, SAMPLE_LOSS = "source_losses", "z_loss", "sample_loss"


class SampleMeans(NamedTuple):
    """The weights of labels for a mean over samples of the means over their labels.

    Shapes: weights float32 `[b, s]`.

    Attributes:
        weights: factor of a label's masked loss: 1 / (sum of the loss mask over its sample); 0 if no label of the
            sample counts.
        samples: number of samples with a counted label.
    """

    weights: np.ndarray
    samples: int


def sample_means(loss_mask: np.ndarray, segment_ids: np.ndarray | None = None) -> SampleMeans:
    """Computes the weights of a micro-batch.

    Shapes: loss_mask float32 `[b, s]`; segment_ids int64 `[b, s]`, from 0.

    Args:
        segment_ids: the sample of each label, if rows hold several packed samples; None if every row is a sample.

    Source: jisngprk/dsGPT2 `ds_trainer.py` (`_backward_step`), which takes the mean of a sequence first because sums
    over a batch overflow float16.
    """
    rows, length = loss_mask.shape
    numbers = np.zeros(loss_mask.shape, np.int64) if segment_ids is None else segment_ids
    numbers = numbers + np.arange(rows)[:, None] * (length + 1)  # one for each sample of the micro-batch
    totals = np.bincount(numbers.ravel(), loss_mask.ravel(), minlength=rows * (length + 1))
    shares = np.divide(1.0, totals, out=np.zeros_like(totals), where=totals > 0)
    return SampleMeans(shares[numbers].astype(np.float32), int((totals > 0).sum()))


@dataclass(frozen=True)
class LanguageModelObjective:
    """Cross-entropy of the next token.

    Label smoothing, z-loss and means over samples change the minimized sum. The reported loss, in total and per source,
    stays the plain cross-entropy per token, so that it is comparable between runs; the z-loss and the mean over samples
    are separate metrics.

    Args:
        axis: the tensor-parallel axis that splits the logits.
        vocab_size: vocabulary size without padding; padded logits are ignored.
        sources: names of the data sources whose losses are also reported separately; does not affect training.
        label_smoothing: share e of the target probability that is spread evenly over the vocabulary: the loss of a
            token is (1 - e) times its cross-entropy plus e times the mean cross-entropy of all tokens of the
            vocabulary, as in `torch.nn.functional.cross_entropy`.
        z_loss_coeff: coefficient c of the z-loss c * (log Z)^2 per token, with the softmax denominator Z over the
            unpadded vocabulary.
        statistics: name and length of the values recorded by layers, such as routers.
        averages_samples: minimize the mean over samples of the mean over the tokens of a sample, instead of the mean
            over all tokens.
        packs_samples: each segment of a row is a sample; otherwise each row.
        implementation: implementation of the cross-entropy.

    Source: Szegedy et al., "Rethinking the Inception architecture", 2016, section 7 (label smoothing); Chowdhery et
    al., "PaLM", 2022, section 5 (z-loss).
    """

    axis: Axis
    vocab_size: int
    sources: tuple[str, ...] = ()
    label_smoothing: float = 0.0
    z_loss_coeff: float = 0.0
    statistics: Mapping[str, int] = field(default_factory=dict)
    averages_samples: bool = False
    packs_samples: bool = False
    implementation: Implementation = Implementation.TORCH

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """Per token, the losses of sources and the z-loss; the mean over samples of mean losses; all if requested."""
        specs = {SOURCE_LOSSES: MetricSpec(self.sources, Reduction.WEIGHTED_MEAN)} if self.sources else {}
        if self.z_loss_coeff:
            specs[Z_LOSS] = MetricSpec()
        if self.averages_samples:
            specs[SAMPLE_LOSS] = MetricSpec()
        return specs

    def inputs(self, batch: Batch) -> tuple[np.ndarray, ...]:
        """The tokens. Shapes: `[b, s]` int64."""
        return (batch.tokens,)

    def targets(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """Labels and loss mask `[b, s]`; if requested, weights `[b, s]` and the source of each sample `[b]`."""
        targets = {"labels": batch.labels, "loss_mask": batch.loss_mask}
        if self.averages_samples:
            targets["sample_weights"] = self._sample_means(batch).weights
        if self.sources and batch.source_ids is not None:
            targets["source_ids"] = batch.source_ids
        return targets

    def token_count(self, batch: Batch) -> float:
        """Number of tokens that the loss mask keeps, or of samples if the loss is a mean over samples."""
        if self.averages_samples:
            return float(self._sample_means(batch).samples)
        return batch.counted_labels

    def __call__(
        self,
        outputs: torch.Tensor | FactoredLogits,
        targets: Mapping[str, torch.Tensor],
        factor: torch.Tensor | None = None,
    ) -> ObjectiveResult:
        """Sums the token losses.

        Shapes: outputs (logits) `[b, s, v/t]`; labels, loss_mask and sample_weights `[b, s]`; source_ids `[b]`.
        """
        mask, weights = targets["loss_mask"], self.token_weights(targets)
        of_tokens, gradients = self._token_losses(outputs, targets["labels"], mask, weights, factor)
        losses = of_tokens.cross_entropy * mask  # [b, s]
        metrics = self._metrics(of_tokens, losses, targets)
        if not (self.label_smoothing or self.z_loss_coeff) and weights is None:
            loss_sum = losses.sum() if gradients is None else gradients.attached_to(losses.sum())
            return ObjectiveResult(loss_sum, mask.sum(), metrics)
        minimized_sum = self._minimized(of_tokens, mask, weights).sum()
        if gradients is not None:
            minimized_sum = gradients.attached_to(minimized_sum)
        return ObjectiveResult(losses.sum(), mask.sum(), metrics, minimized_sum)

    def _metrics(
        self, of_tokens: TokenLosses, losses: torch.Tensor, targets: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The metrics besides the loss. Shapes: losses, after the loss mask, `[b, s]`."""
        mask, metrics = targets["loss_mask"], dict[str, torch.Tensor]()
        if self.sources and "source_ids" in targets:
            of_samples = torch.stack([losses.detach(), mask]).sum(dim=2, dtype=torch.float64)  # [2, b]
            totals = of_samples.new_zeros(2, len(self.sources))
            metrics[SOURCE_LOSSES] = totals.index_add_(1, targets["source_ids"], of_samples)
        if self.z_loss_coeff:
            z_losses = self.z_loss_coeff * of_tokens.log_normalizer.detach().square() * mask  # [b, s]
            metrics[Z_LOSS] = torch.stack([z_losses, mask]).sum(dim=(1, 2), dtype=torch.float64)
        if self.averages_samples:  # the weights of a sample, masked, sum to 1
            pair = torch.stack([losses.detach(), mask]) * targets["sample_weights"]  # [2, b, s]
            metrics[SAMPLE_LOSS] = pair.sum(dim=(1, 2), dtype=torch.float64)
        return metrics

    def _minimized(self, of_tokens: TokenLosses, mask: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """The minimized value of every token. Shapes: `[b, s]`."""
        minimized = of_tokens.cross_entropy
        if of_tokens.uniform is not None:
            minimized = torch.lerp(minimized, of_tokens.uniform, self.label_smoothing)
        if self.z_loss_coeff:
            minimized = minimized + self.z_loss_coeff * of_tokens.log_normalizer.square()
        minimized = minimized * mask
        return minimized if weights is None else minimized * weights

    def _token_losses(
        self,
        outputs: torch.Tensor | FactoredLogits,
        labels: torch.Tensor,
        mask: torch.Tensor,
        weights: torch.Tensor | None,
        factor: torch.Tensor | None,
    ) -> tuple[TokenLosses, HeadGradients | None]:
        """The losses of the tokens, and the gradients of the minimized sum unless autograd computes them."""
        axis, vocab_size, implementation = self.axis, self.vocab_size, self.implementation
        if isinstance(outputs, FactoredLogits):
            terms = LossTerms(self.label_smoothing, self.z_loss_coeff)
            weights = mask if weights is None else mask * weights
            return head_losses(
                outputs, labels, weights, axis, vocab_size, terms, factor=factor, implementation=implementation
            )
        is_smoothed = self.label_smoothing > 0
        losses = vocab_parallel_losses(
            outputs, labels, axis, vocab_size, with_uniform=is_smoothed, implementation=implementation
        )
        return losses, None

    def token_weights(self, targets: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The weight of each token in the minimized sum, besides the loss mask; None if all weights are equal.

        Shapes: result `[b, s]`.
        """
        return targets.get("sample_weights")

    def _sample_means(self, batch: Batch) -> SampleMeans:
        return sample_means(batch.loss_mask, batch.segment_ids if self.packs_samples else None)


@dataclass(frozen=True)
class PrefixObjective(LanguageModelObjective):
    """Cross-entropy of the next token, divided by the expected number of tokens outside prefixes.

    Every target then has the same weight, whether its micro-batch has long or short prefixes. The logged and evaluated
    loss stays the plain mean over the tokens of the loss mask.

    Args:
        on_targets_only: the loss mask excludes prefixes; a sample of s tokens keeps (s + 1) / 2 labels on average,
            since a prefix ends at each of its positions with the same probability.
        by_document: each document of a sample has a prefix; then s is the length of a document, and prefixes exclude
            its end-of-document token. The last document of a sample is assumed to continue after it.
        reweights_positions: weight the label of position t, counted from 0, by 2 (s - t) / (s + 1), because late
            positions are targets more often than early ones. The weights of s tokens sum to s; the weights of targets
            sum to (s + 2) / 3 on average, if all positions are ends of prefixes.

    Source: bigscience Megatron-DeepSpeed `megatron/model/gpt_model.py` (`get_cross_entropy`) and `megatron/utils.py`
    (`reweight_loss_mask_`).
    """

    on_targets_only: bool = False
    by_document: bool = False
    reweights_positions: bool = False

    def token_count(self, batch: Batch) -> float:
        """A micro-batch's part of the divisor of the minimized sum."""
        if not self.on_targets_only:
            return float(batch.loss_mask.size)
        offsets, sizes, longest = self._offsets(batch)
        weights = 2 * (sizes - offsets) / (sizes + 1) if self.reweights_positions else 1.0
        return float((np.minimum((offsets + 1) / longest, 1.0) * weights).sum())

    def targets(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """The language model's targets, and if requested the weight of each position `[b, s]`."""
        targets = super().targets(batch)
        if not self.reweights_positions:
            return targets
        offsets, sizes, _ = self._offsets(batch)
        return {**targets, "position_weights": (2 * (sizes - offsets) / (sizes + 1)).astype(np.float32)}

    def _offsets(self, batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The offset of each token in its sample or document, the length of that, and of its longest prefix.

        Shapes: each `[b, s]`.
        """
        shape = batch.loss_mask.shape
        segments = batch.segment_ids if self.by_document and batch.segment_ids is not None else np.zeros(shape, int)
        offsets, sizes = np.empty(shape), np.empty(shape)
        for row, ids in enumerate(segments):
            _, firsts, numbers, counts = np.unique(ids, return_index=True, return_inverse=True, return_counts=True)
            offsets[row], sizes[row] = np.arange(shape[1]) - firsts[numbers], counts[numbers]
        return offsets, sizes, np.maximum(sizes - (segments < segments[:, -1:]), 1)

    def token_weights(self, targets: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The weights of the means over samples, or of the positions. Shapes: result `[b, s]`."""
        weights = super().token_weights(targets)
        return targets.get("position_weights") if weights is None else weights
