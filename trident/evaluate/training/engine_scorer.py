"""Scores queries with the network in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron.config import ModelConfig
from megatron.engine.engine import Engine
from megatron.objective.scoring import LOGPROBS, PREDICTED, ScoringObjective
from megatron.train.run import Run
from trident.evaluate.batches import Answers, NetworkScorer, QueryBatch, plan_rounds
from trident.evaluate.scoring import Query

_MICRO_BATCHES_PER_STAGE = 4  # per call, to keep the pipeline busy


@dataclass(frozen=True)
class ScoringBatch:
    """A micro-batch of queries, padded to the common shape of a call.

    Shapes: tokens and segment_ids `[b, s]`, sample_ids `[b]`, rows, labels and indices `[n]`, all int64; prefix_mask
    `[b, s]` bool.
    """

    tokens: np.ndarray
    prefix_mask: np.ndarray
    rows: np.ndarray
    labels: np.ndarray
    indices: np.ndarray

    @property
    def sample_ids(self) -> np.ndarray:
        """Zeros, since only dropout depends on sample ids."""
        return np.zeros(len(self.tokens), np.int64)

    @property
    def segment_ids(self) -> np.ndarray:
        return np.zeros_like(self.tokens)

    @classmethod
    def of(cls, batch: QueryBatch | None, shape: tuple[int, int], indices: Sequence[int]) -> ScoringBatch:
        """Pads a batch of queries; None gives an empty one.

        Args:
            indices: indices of the batch's targets in the statistics.
        """
        nothing = np.zeros(0, np.int64)
        tokens, prefix, rows, labels = np.zeros(shape, np.int64), np.zeros(shape, np.bool_), nothing, nothing
        if batch is not None:
            count, length = batch.inputs.shape
            tokens[:count, :length], prefix[:count, :length] = batch.inputs, batch.prefix
            rows = batch.rows // length * shape[1] + batch.rows % length
            labels = batch.labels
        return cls(tokens, prefix, rows, labels, np.array(indices, np.int64))


class EngineScorer(NetworkScorer):
    """A `Scorer` of the network in a training engine, for every layout and ZeRO stage, without effect on training.

    Args:
        engine: the engine, between two steps.
        model: the architecture.
        batch_tokens: tokens of a micro-batch in training, the limit of a batch of queries.
        beat: called while scores are computed, so that the run is not considered hung.
    """

    def __init__(
        self, engine: Engine, model: ModelConfig, batch_tokens: int, beat: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(model)
        self.engine = engine
        self.batch_tokens = batch_tokens
        self._beat = beat

    @classmethod
    def of(cls, run: Run) -> EngineScorer:
        config = run.config
        batch_tokens = config.optim.micro_batch_size * config.data.seq_length
        return cls(run.engine, config.model, batch_tokens, lambda: run.watch.enter("evaluation", run.progress.step))

    def rounds(self, queries: Sequence[Query]) -> list[list[list[int]]]:
        """Batches of one shape, enough per round to fill the pipeline."""
        mesh = self.engine.mesh
        side_by_side = mesh.loss.size * (1 if mesh.pp.size == 1 else _MICRO_BATCHES_PER_STAGE * mesh.pp.size)
        return plan_rounds(queries, self.batch_tokens, side_by_side, padded_up_to=self.model.rotations_fixed_up_to)

    def answer(self, answers: Answers, batches: Sequence[Sequence[int]]) -> None:
        """Runs a round; the engine returns its scores on all ranks."""
        self._measure(answers, [answers.batch(numbers) for numbers in batches])
        self._beat()

    def _measure(self, answers: Answers, batches: Sequence[QueryBatch]) -> None:
        """Scores a round of batches, divided among all copies of the model, and writes the results into `answers`."""
        axis = self.engine.mesh.loss
        counts = [len(batch.labels) for batch in batches]
        starts = np.concatenate([[0], np.cumsum(counts)])
        shape = (max(len(batch.inputs) for batch in batches), max(batch.inputs.shape[1] for batch in batches))
        local = []
        for first in range(0, len(batches), axis.size):
            number = first + axis.rank
            batch = batches[number] if number < len(batches) else None
            indices = range(starts[number], starts[number + 1]) if batch is not None else ()
            local.append(ScoringBatch.of(batch, shape, indices))
        objective = ScoringObjective(self.engine.mesh.tp, self.model.vocab_size, int(starts[-1]))
        scores = self.engine.measure(local, objective)
        indices_of_all = np.concatenate([batch.indices for batch in batches])
        answers.logprobs[indices_of_all] = scores[LOGPROBS].numpy()
        answers.predicted[indices_of_all] = scores[PREDICTED].to(torch.int64).numpy()
