"""Evaluation: validation and test losses.

Every evaluation uses the same first samples, weights losses by tokens, and leaves the training state unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron import log
from megatron.data.datasets.sample import SampleDataset
from megatron.errors import DataError
from megatron.train.callback import Callback, Evaluation
from megatron.train.callbacks.step_reports import EMPTY_ADVICE, StepReports
from megatron.train.run import Run
from megatron.train.steps import TrainedStep


class Evaluator(Callback):
    """Evaluates a run when due, and stores the result of the last evaluation.

    Args:
        followers: callbacks called after each evaluation.
        reports: flushed before an evaluation.
    """

    def __init__(self, followers: Callback, reports: StepReports) -> None:
        self._followers = followers
        self._reports = reports
        self._validated_step: int | None = None
        self._validation_loss = math.nan
        self._empty: set[tuple[str, str]] = set()

    def after_step(self, run: Run, step: TrainedStep) -> None:
        evaluation = run.config.evaluation
        if run.is_due(evaluation.eval_interval) or (step.ends_epoch and evaluation.eval_each_epoch):
            self._reports.flush(run)
            self.evaluate(run, f"iteration {run.progress.step}")

    def finished(self, run: Run) -> None:
        """Evaluates both splits; skips validation if the last epoch ended with one.

        Raises:
            DataError: the run only evaluates, and no evaluation has a loss.
        """
        step, evaluation = run.progress.step, run.config.evaluation
        if not evaluation.eval_only:
            if not (self.has_validated(step) and evaluation.eval_each_epoch):
                self.evaluate(run, "the end of training for val data")
            self.evaluate(run, "the end of training for test data", split="test")
            return
        losses = [*self.evaluate(run, f"iteration {step}").values()]
        losses += self.evaluate(run, f"iteration {step}", split="test").values()
        if losses and all(loss is None for loss in losses):
            raise DataError(f"nothing was evaluated: no token of the samples counts in the loss. {EMPTY_ADVICE}")

    def evaluate(self, run: Run, prefix: str, *, split: str = "valid") -> Mapping[str, float | None]:
        """Evaluates every named group of a split, with averaged weights if there are any, and reports the losses.

        Args:
            run: its progress and data position do not change.
            prefix, split: see `Evaluation`.

        Returns:
            the losses of the `Evaluation`.
        """
        with run.engine.using_averages():
            return self._evaluate(run, prefix, split)

    def _evaluate(self, run: Run, prefix: str, split: str) -> Mapping[str, float | None]:
        losses: dict[str, float | None] = {}
        for name, dataset in run.data.evaluation_datasets(split).items():
            count = run.data.evaluation_samples(split, name)
            if count == 0:  # --eval-iters 0 with the data plan of a resumed run
                continue
            run.watch.enter("evaluation", run.progress.step)
            log.set_activity(f"evaluating the {name} data after step {run.progress.step}")
            losses[name] = mean_loss(run, dataset, count)
            run.report.evaluation(run.progress, name, prefix, losses[name])
            if losses[name] is None:
                self._warn_of_empty(run, split, name, count)
        self._followers.at_evaluation(run, Evaluation(split, prefix, losses))
        counted = [loss for loss in losses.values() if loss is not None]
        if counted and split == "valid":
            self._validated_step, self._validation_loss = run.progress.step, math.fsum(counted) / len(counted)
        return losses

    def has_validated(self, step: int) -> bool:
        """True if the last validation with a loss was after this step."""
        return self._validated_step == step

    def validation_loss(self, step: int) -> float | None:
        """The mean loss over the groups after a step; None if not evaluated at this step, or not finite."""
        return self._validation_loss if self.has_validated(step) and math.isfinite(self._validation_loss) else None

    def _warn_of_empty(self, run: Run, split: str, name: str, count: int) -> None:
        """Warns once per group that an evaluation has no loss."""
        if (split, name) in self._empty:
            return
        self._empty.add((split, name))
        if run.mesh.world.rank == 0:
            log.warning(
                f"the evaluation on {name} has no loss: none of the tokens of its {count} samples counts. "
                f"{EMPTY_ADVICE}"
            )


def mean_loss(run: Run, dataset: SampleDataset, count: int) -> float | None:
    """Mean loss per counted token over the first `count` samples; None if no token counts."""
    loss_sum, token_count = 0.0, 0.0
    batch_size = run.config.optim.global_batch_size
    with run.data.loader(dataset) as loader:
        for first in range(0, count, batch_size):
            run.watch.enter("evaluation", run.progress.step)
            batch_sum, batch_tokens = run.engine.evaluate(loader.micro_batches(first, batch_size, count))
            loss_sum += batch_sum
            token_count += batch_tokens
    return loss_sum / token_count if token_count else None
