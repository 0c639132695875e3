"""Masked language modelling: the masked tokens are predicted, and whether the segments of a sample were swapped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from megatron.data.loader import Batch
from megatron.objective.base import ObjectiveResult, Outputs
from megatron.objective.language_model import LanguageModelObjective

ORDER_LOSS = "order_loss"
_IS_PADDING = -1  # in place of the order of a sample that only fills up a micro-batch


@dataclass(frozen=True)
class MaskedLanguageModelObjective(LanguageModelObjective):
    """Cross-entropy of the masked tokens, over all masked tokens of the global batch, plus the sentence-order loss.

    The sentence-order loss is a mean over samples. It is a metric of its own and no part of the loss that is logged and
    evaluated.

    Args:
        has_sentence_order: whether the network tells for each sample if its two segments were swapped.

    Source: Devlin et al., "BERT", 2019, appendix A.2, "the training loss is the sum of the mean masked LM likelihood
    and the mean next sentence prediction likelihood"; bigscience Megatron-DeepSpeed `pretrain_bert.py`, whose means are
    over each micro-batch.
    """

    has_sentence_order: bool = False

    @property
    def metric_sizes(self) -> Mapping[str, int]:
        """The metrics of the language model; sum and number of the sentence-order losses."""
        return {**super().metric_sizes, **({ORDER_LOSS: 2} if self.has_sentence_order else {})}

    def targets(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """Labels, loss mask and weights at the predicted positions `[b, m]`, and the order of the segments `[b]`."""
        targets = dict(super().targets(batch))
        if batch.predicted is not None:
            for name in targets.keys() & {"labels", "loss_mask", "sample_weights"}:
                targets[name] = np.take_along_axis(targets[name], batch.predicted, axis=1)
        if self.has_sentence_order and batch.swapped is not None:
            targets["swapped"] = batch.swapped
        return targets

    def __call__(  # type: ignore[override]
        self, outputs: Outputs, targets: Mapping[str, torch.Tensor], factor: torch.Tensor | None = None
    ) -> ObjectiveResult:
        """Sums the losses.

        Shapes: outputs `[b, m, v/t]`, with a sentence order that and `[b, 2]`; labels and loss_mask `[b, m]`, swapped
        `[b]`. Without predicted positions m = s.
        """
        if not self.has_sentence_order:
            return super().__call__(outputs, targets, factor)  # type: ignore[arg-type]
        logits, order_logits = outputs
        result, swapped = super().__call__(logits, targets, factor), targets["swapped"]
        order_sum = F.cross_entropy(order_logits.float(), swapped, ignore_index=_IS_PADDING, reduction="sum")
        figures = torch.stack([order_sum.detach(), (swapped != _IS_PADDING).sum()])
        return dataclasses.replace(result, metrics={**result.metrics, ORDER_LOSS: figures}, sample_sum=order_sum)
