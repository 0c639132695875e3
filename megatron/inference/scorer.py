"""Scores queries with a loaded checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron import device
from megatron.evaluation.batches import Answers, QueryBatch, plan_batches
from megatron.evaluation.scoring import Progress, Query, Score, check_queries
from megatron.inference.forward import Forward
from megatron.inference.loading import LoadedModel
from megatron.model.interface.step_context import StepSettings
from megatron.objective.scoring import score_targets
from megatron.parallel.messages import all_reduce_sum


class LoadedScorer:
    """A `Scorer` of a loaded checkpoint, over all its ranks.

    Queries of similar length share a forward pass, data-parallel ranks run different ones, pipeline stages run batch
    after batch, and all ranks get all results. Logits are computed where a target is predicted and nowhere else.
    A network that was trained with prefixes attends to a context in both directions.

    Args:
        loaded: the checkpoint, opened on this rank's mesh.
        batch_size: queries of full length that a forward pass may have; of shorter ones it has more.
    """

    def __init__(self, loaded: LoadedModel, batch_size: int = 8) -> None:
        self.loaded = loaded
        self.batch_size = batch_size
        self._forward = Forward(loaded)
        self._settings = StepSettings(has_prefixes=loaded.config.loss.has_prefixes)

    @property
    def max_length(self) -> int:
        """The most tokens of a query: one more than the network has positions."""
        return self.loaded.positions + 1

    @torch.inference_mode()
    def score(self, queries: Sequence[Query], on_progress: Progress | None = None) -> list[Score]:
        """The scores of queries, in their order; collective over all ranks.

        Raises:
            DataError: a query is too long, or has a token that the network does not know.
        """
        mesh = self.loaded.mesh
        check_queries(queries, self.max_length, self.loaded.config.model.vocab_size)
        answers = Answers(queries)
        batches = plan_batches(
            queries,
            self.batch_size * self.loaded.positions,
            padded_up_to=self.loaded.config.model.rotations_fixed_up_to,
        )
        done = 0
        for first in range(0, len(batches), mesh.batch.size):
            side_by_side = batches[first : first + mesh.batch.size]
            if mesh.batch.rank < len(side_by_side):
                self._score(answers, answers.batch(side_by_side[mesh.batch.rank]))
            done += sum(map(len, side_by_side))
            if on_progress is not None:
                on_progress(done, len(queries))
        for values in (answers.logprobs, answers.predicted):
            all_reduce_sum(torch.from_numpy(values), mesh.control)
        return answers.scores()

    def _score(self, answers: Answers, batch: QueryBatch) -> None:
        """Runs one batch and writes its results to their places."""
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
        targets = score_targets(logits, labels, mesh.tp, self.loaded.config.model.vocab_size)
        if mesh.tp.rank == 0:  # all ranks of the axis have found the same, and one of them reports it
            answers.logprobs[batch.places] = targets.logprobs.double().cpu().numpy()
            answers.predicted[batch.places] = targets.predicted.cpu().numpy()
