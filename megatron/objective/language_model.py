"""Next-token prediction, with optional losses per data source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from megatron.data.loader import Batch
from megatron.objective.base import ObjectiveResult
from megatron.parallel.mesh import Axis
from megatron.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy

SOURCE_LOSS, SOURCE_TOKENS = "source_loss", "source_tokens"


@dataclass(frozen=True)
class LanguageModelObjective:
    """Cross-entropy of the next token.

    Args:
        axis: the tensor-parallel axis that splits the logits.
        vocab_size: vocabulary size without padding; padded logits are ignored.
        source_count: number of data sources whose losses are summed separately; 0 for none. The token losses are
            computed anyway, so this does not affect training.
    """

    axis: Axis
    vocab_size: int
    source_count: int = 0

    @property
    def metric_sizes(self) -> Mapping[str, int]:
        """Loss sum and counted tokens of each source, if requested."""
        return {SOURCE_LOSS: self.source_count, SOURCE_TOKENS: self.source_count} if self.source_count else {}

    def inputs(self, batch: Batch) -> tuple[np.ndarray, ...]:
        """The tokens. Shapes: `[b, s]` int64."""
        return (batch.tokens,)

    def targets(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """Labels and loss mask `[b, s]`, and the source of each sample `[b]` if requested."""
        targets = {"labels": batch.labels, "loss_mask": batch.loss_mask}
        if self.source_count and batch.source_ids is not None:
            targets["source_ids"] = batch.source_ids
        return targets

    def token_count(self, batch: Batch) -> float:
        """Number of tokens that the loss mask keeps."""
        return float(batch.loss_mask.sum(dtype=np.float64))

    def __call__(self, outputs: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> ObjectiveResult:
        """Sums the token losses.

        Shapes: outputs (logits) `[b, s, v/t]`; labels and loss_mask `[b, s]`; source_ids `[b]`.
        """
        mask = targets["loss_mask"]
        losses = vocab_parallel_cross_entropy(outputs, targets["labels"], self.axis, self.vocab_size) * mask  # [b, s]
        metrics = {}
        if self.source_count and "source_ids" in targets:
            for name, values in ((SOURCE_LOSS, losses.detach()), (SOURCE_TOKENS, mask)):
                totals = torch.zeros(self.source_count, dtype=torch.float64, device=values.device)
                metrics[name] = totals.index_add_(0, targets["source_ids"], values.sum(dim=1, dtype=torch.float64))
        return ObjectiveResult(losses.sum(), mask.sum(), metrics)
