"""Multi-token prediction: a network also learns to predict tokens after the next one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from megatron.data.loader import Batch
from megatron.objective.base import ObjectiveResult
from megatron.objective.language_model import LanguageModelObjective
from megatron.objective.metric import MetricSpec
from megatron.parallel.tensor.cross_entropy import TokenLosses
from megatron.parallel.tensor.head_loss import FactoredLogits

MTP_LOSSES = "mtp_losses"


def later_labels(labels: np.ndarray, depth: int) -> np.ndarray:
    """The labels `depth` positions later, and 0 at the last positions. Shapes: `[b, s]` to the same."""
    later = np.zeros_like(labels)
    later[:, : labels.shape[1] - depth] = labels[:, depth:]
    return later


@dataclass(frozen=True)
class MultiTokenObjective(LanguageModelObjective):
    """The loss of the next token, plus a factor times the mean over depths of the losses of later tokens.

    All have the same terms and are divided by the number of tokens that count in the main loss. At depth k a position
    counts if the label k positions later does, in the same document if documents are separated: the last k positions of
    a sample, and of such a document, do not count. If only ends of documents are masked, a prediction does not cross a
    masked position either.

    Shapes: labels, loss_mask and sample_weights `[(1 + depths) b, s]`, the samples followed by those of each depth.

    Args:
        depths: number of further tokens.
        scale: the factor.
        stops_at_masked: a masked label is the end of a document (`--eod-mask-loss`).

    Source: DeepSeek-AI, "DeepSeek-V3", 2024, section 2.2, equations 24 and 25.
    """

    depths: int = 1
    scale: float = 0.1
    stops_at_masked: bool = False

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """The metrics of the main loss, and the loss of each depth per counted token."""
        return {**super().metrics, MTP_LOSSES: MetricSpec([f"mtp_{depth + 1}" for depth in range(self.depths)])}

    def targets(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """The targets of the main loss, with rows for every depth."""
        targets = dict(super().targets(batch))
        labels, mask, segments = batch.labels, batch.loss_mask, batch.segment_ids
        weights = targets.get("sample_weights", np.ones_like(mask))
        all_labels, all_masks, reached = [labels], [mask], mask
        for depth in range(1, self.depths + 1):
            later = later_labels(mask, depth)
            if segments is not None:
                later *= later_labels(segments, depth) == segments
            if self.stops_at_masked:
                reached = later = later * (reached > 0)
            all_labels.append(later_labels(labels, depth))
            all_masks.append(later)
        scaled = (self.scale / self.depths * weights).astype(np.float32)
        return targets | {
            "labels": np.concatenate(all_labels),
            "loss_mask": np.concatenate(all_masks),
            "sample_weights": np.concatenate([weights, *[scaled] * self.depths]),
        }

    def __call__(
        self,
        outputs: torch.Tensor | FactoredLogits,
        targets: Mapping[str, torch.Tensor],
        factor: torch.Tensor | None = None,
    ) -> ObjectiveResult:
        """Sums the token losses; only of the next token if there are no other outputs, as in evaluation.

        Shapes: outputs (logits) `[(1 + depths) b, s, v/t]`, or `[b, s, v/t]`.
        """
        mask = targets["loss_mask"]
        rows = len(mask) // (1 + self.depths)
        main = {name: values[:rows] for name, values in targets.items()}
        hidden = outputs.hidden if isinstance(outputs, FactoredLogits) else outputs
        if len(hidden) == rows:
            return super().__call__(outputs, main, factor)
        weights = self.token_weights(targets)
        of_tokens, gradients = self._token_losses(outputs, targets["labels"], mask, weights, factor)
        minimized = self._minimized(of_tokens, mask, weights).sum()
        plain, log_normalizer = (part[:rows].detach() for part in of_tokens[:2])
        of_main = TokenLosses(plain, log_normalizer, None)
        losses = plain * main["loss_mask"]
        of_depths = torch.stack([of_tokens.cross_entropy.detach() * mask, mask])[:, rows:]  # [2, depths b, s]
        sums = of_depths.unflatten(1, (self.depths, rows)).sum(dim=(2, 3), dtype=torch.float64)
        return ObjectiveResult(
            losses.sum(),
            main["loss_mask"].sum(),
            {**self._metrics(of_main, losses, main), MTP_LOSSES: sums},
            minimized if gradients is None else gradients.attached_to(minimized),
        )
