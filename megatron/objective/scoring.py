"""Log-probabilities of target tokens instead of their sum: evaluation of single queries with the training engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from megatron.objective.base import ObjectiveResult
from megatron.objective.metric import MetricSpec
from megatron.parallel.mesh import Axis
from megatron.parallel.tensor.cross_entropy import vocab_parallel_argmax, vocab_parallel_losses
from megatron.parallel.tensor.head_loss import FactoredLogits

LOGPROBS, PREDICTED = "logprobs", "predicted"


class TargetScores(NamedTuple):
    """The scores of targets. Shapes: `[n]`, float32 nats and int64."""

    logprobs: torch.Tensor
    predicted: torch.Tensor


@torch.no_grad()
def score_targets(logits: torch.Tensor, labels: torch.Tensor, axis: Axis, vocab_size: int) -> TargetScores:
    """The log-probability of each target and the most probable token at its position; equal on all ranks of the axis.

    Shapes: logits `[n, v/t]`, labels `[n]`.

    Args:
        vocab_size: vocabulary size without padding; padded logits are ignored.
    """
    losses = vocab_parallel_losses(logits, labels, axis, vocab_size).cross_entropy  # [n]
    return TargetScores(-losses, vocab_parallel_argmax(logits, axis, vocab_size))


class ScoredBatch(Protocol):
    """The part of a micro-batch that this objective reads.

    Shapes: tokens `[b, s]`; rows, labels and indices `[n]`; all int64.
    """

    @property
    def tokens(self) -> np.ndarray:
        """The inputs."""

    @property
    def rows(self) -> np.ndarray:
        """The positions that predict the targets, as indices into `[b * s]`."""

    @property
    def labels(self) -> np.ndarray:
        """The targets."""

    @property
    def indices(self) -> np.ndarray:
        """The index of each target in the statistics."""


@dataclass(frozen=True)
class ScoringObjective:
    """The scores of the targets of a global batch, as two statistics with an element for each target.

    A micro-batch sets the elements of its own targets and leaves 0 elsewhere, so that the engine's sums over
    micro-batches, ranks and stages are the values themselves.

    Args:
        axis: the tensor-parallel axis that splits the logits.
        vocab_size: vocabulary size without padding.
        target_count: number of targets of the global batch, over all ranks.
    """

    axis: Axis
    vocab_size: int
    target_count: int

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """Empty: scores are not metrics of a step."""
        return {}

    @property
    def statistics(self) -> Mapping[str, int]:
        """The log-probability in nats and the most probable token for every target."""
        return {LOGPROBS: self.target_count, PREDICTED: self.target_count}

    def inputs(self, batch: ScoredBatch) -> tuple[np.ndarray, ...]:
        """The tokens. Shapes: `[b, s]` int64."""
        return (batch.tokens,)

    def targets(self, batch: ScoredBatch) -> Mapping[str, np.ndarray]:
        """Rows, labels and indices of the targets. Shapes: `[n]` int64."""
        return {"rows": batch.rows, "labels": batch.labels, "indices": batch.indices}

    def token_count(self, batch: ScoredBatch) -> float:
        return float(len(batch.labels))

    def __call__(
        self,
        outputs: torch.Tensor | FactoredLogits,
        targets: Mapping[str, torch.Tensor],
        factor: torch.Tensor | None = None,
    ) -> ObjectiveResult:
        """Scores the targets of a micro-batch.

        Shapes: outputs (logits) `[b, s, v/t]`; rows, labels and places `[n]`.
        """
        rows = targets["rows"]
        chosen = outputs.at(rows) if isinstance(outputs, FactoredLogits) else outputs.flatten(0, 1)[rows]  # [n, v/t]
        scores = score_targets(chosen, targets["labels"], self.axis, self.vocab_size)
        metrics = {}
        for name, values in ((LOGPROBS, scores.logprobs), (PREDICTED, scores.predicted)):
            elements = torch.zeros(self.target_count, dtype=torch.float64, device=values.device)
            metrics[name] = elements.index_copy_(0, targets["indices"], values.double())
        count = torch.tensor(float(len(scores.logprobs)), device=rows.device)
        return ObjectiveResult(-scores.logprobs.sum(), count, metrics)
