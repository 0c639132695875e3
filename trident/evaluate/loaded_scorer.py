"""Scores queries with a loaded checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron import device
from megatron.inference.forward import Forward
from megatron.inference.loaded_model import LoadedModel
from megatron.model.interface.step_context import StepSettings
from megatron.objective.scoring import score_targets
from megatron.parallel.messages import all_reduce_sum
from trident.evaluate.batches import Answers, NetworkScorer, QueryBatch, plan_batches
from trident.evaluate.scoring import Progress, Query, Score


class LoadedScorer(NetworkScorer):
    """A `Scorer` of a loaded checkpoint.

    Data-parallel ranks run different batches, and pipeline stages run batch after batch. Logits are computed only at
    positions that predict a target. A network that was trained with prefixes attends to a context in both directions.

    Args:
        loaded: the checkpoint, opened on this rank's mesh.
        batch_size: queries of full length per forward pass; more if they are shorter.
    """

    def __init__(self, loaded: LoadedModel, batch_size: int = 8) -> None:
        super().__init__(loaded.config.model)
        self.loaded = loaded
        self.batch_size = batch_size
        self._forward = Forward(loaded)
        self._settings = StepSettings(has_prefixes=loaded.config.loss.has_prefixes)

    @torch.inference_mode()
    def score(self, queries: Sequence[Query], on_progress: Progress | None = None) -> list[Score]:
        """As `NetworkScorer.score`, without gradients."""
        return super().score(queries, on_progress)

    def rounds(self, queries: Sequence[Query]) -> list[list[list[int]]]:
        """Batches that depend only on the queries, one per data-parallel rank in a round."""
        limit, size = self.model.rotations_fixed_up_to, self.loaded.mesh.batch.size
        batches = plan_batches(queries, self.batch_size * self.loaded.positions, padded_up_to=limit)
        return [batches[first : first + size] for first in range(0, len(batches), size)]

    def answer(self, answers: Answers, batches: Sequence[Sequence[int]]) -> None:
        """Runs the batch of this rank's replica, if the round has one."""
        rank = self.loaded.mesh.batch.rank
        if rank < len(batches):
            self._score(answers, answers.batch(batches[rank]))

    def gathered(self, answers: Answers) -> Answers:
        """Sums the answers of all ranks."""
        for values in (answers.logprobs, answers.predicted):
            all_reduce_sum(torch.from_numpy(values), self.loaded.mesh.control)
        return answers

    def _score(self, answers: Answers, batch: QueryBatch) -> None:
        """Runs one batch and writes its results into `answers`."""
        mesh = self.loaded.mesh
        inputs, prefix, rows, labels = (
            device.copy_to_device(array, mesh.device)
            for array in (batch.inputs, batch.prefix, batch.rows, batch.labels)
        )
        sample_ids = torch.zeros(len(inputs), dtype=torch.int64, device=mesh.device)
        mask = prefix if self._settings.has_prefixes else None
        logits = self._forward(inputs, self._settings.context(sample_ids, None, mask, first_sample=0), rows)
        if logits is None:  # a stage before the last
            return
        targets = score_targets(logits, labels, mesh.tp, self.model.vocab_size)
        if mesh.tp.rank == 0:  # all ranks of the axis have the same scores
            answers.logprobs[batch.indices] = targets.logprobs.double().cpu().numpy()
            answers.predicted[batch.indices] = targets.predicted.cpu().numpy()
