"""Masked language modeling: prediction of masked tokens, and of the order of a sample's segments."""

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
from megatron.objective.metric import MetricSpec

ORDER_LOSS = "order_loss"
_NO_ORDER = -1  # for samples that only fill up a micro-batch, and for all tokens but the first


@dataclass(frozen=True)
class MaskedLanguageModelObjective(LanguageModelObjective):
    """Cross-entropy of the masked tokens, over all masked tokens of the global batch, plus the sentence-order loss.

    The sentence-order loss is a mean over samples. It is a separate metric and not part of the logged and evaluated
    loss.

    Args:
        has_sentence_order: the network predicts for each sample if its two segments were swapped.

    Source: Devlin et al., "BERT", 2019, appendix A.2, "the training loss is the sum of the mean masked LM likelihood
    and the mean next sentence prediction likelihood"; bigscience Megatron-DeepSpeed `pretrain_bert.py`, whose means are
    over each micro-batch.
    """

    has_sentence_order: bool = False

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """The metrics of the language model, and the sentence-order loss per sample."""
        return {**super().metrics, **({ORDER_LOSS: MetricSpec()} if self.has_sentence_order else {})}

    def targets(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """Labels, loss mask and weights at the predicted positions `[b, m]`, and the order of the segments `[b, s]`.

        The order is a label of the first token and predicted from it; one of the ranks sharing a sample has it.
        """
        targets = dict(super().targets(batch))
        if batch.predicted is not None:
            for name in targets.keys() & {"labels", "loss_mask", "sample_weights"}:
                targets[name] = np.take_along_axis(targets[name], batch.predicted, axis=1)
        if self.has_sentence_order and batch.swapped is not None:
            targets["orders"] = np.pad(batch.swapped[:, None] + 1, ((0, 0), (0, batch.tokens.shape[1] - 1)))
        return targets

    def __call__(  # type: ignore[override]
        self, outputs: Outputs, targets: Mapping[str, torch.Tensor], factor: torch.Tensor | None = None
    ) -> ObjectiveResult:
        """Sums the losses.

        Shapes: outputs `[b, m, v/t]`, with a sentence order also `[b, 2]`; labels and loss_mask `[b, m]`, orders
        `[b, s]`: 1 for segments in order, 2 for swapped ones, 0 for none. Without predicted positions m = s.
        """
        if not self.has_sentence_order:
            return super().__call__(outputs, targets, factor)  # type: ignore[arg-type]
        logits, order_logits = outputs
        result, swapped = super().__call__(logits, targets, factor), targets["orders"][:, 0] - 1
        order_sum = F.cross_entropy(order_logits.float(), swapped, ignore_index=_NO_ORDER, reduction="sum")
        figures = torch.stack([order_sum.detach(), (swapped != _NO_ORDER).sum()])
        return dataclasses.replace(result, metrics={**result.metrics, ORDER_LOSS: figures}, sample_sum=order_sum)
