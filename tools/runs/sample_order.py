"""Reconstructs the training samples of a run in the order of training.

The order is determined by the data plan of a checkpoint or, without one, by flags. Only data files and their indices
are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.checkpoint.record import Progress
from megatron.config import DataConfig, EvaluationConfig, OptimConfig, OptimRequest
from megatron.config.resolve import resolve_optim
from megatron.config.schedule import StepRange, planned_samples, samples_after, samples_before_step
from megatron.data.build import build_split_datasets
from megatron.data.datasets.masked.masked_options import MaskedOptions
from megatron.data.datasets.sample import DocumentSpan, SampleDataset
from megatron.data.order.plan import DataPlan
from megatron.data.sources.source import DataRequest
from megatron.errors import ConfigError, DataError
from megatron.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class SampleOrder:
    """Settings that determine the order of a run's training samples.

    Args:
        planned_samples: number of planned samples; the order depends on it.
        plan: the plan stored in a checkpoint; None builds it from the other values.
        masked: options of masked samples; None for other objectives.
    """

    data: DataConfig
    sequence_length: int
    seed: int
    planned_samples: int
    plan: DataPlan | None = None
    masked: MaskedOptions | None = None

    @staticmethod
    def of_plan(plan: DataPlan, data: DataConfig, masked: MaskedOptions | None = None) -> SampleOrder:
        """The order of a stored plan; file paths come from the flags, as files may have moved."""
        samples = plan.train.samples if plan.train else 0
        return SampleOrder(data, plan.sequence_length, plan.seed, samples, plan, masked)

    @staticmethod
    def of_flags(
        data: DataConfig,
        sequence_length: int,
        seed: int,
        optim: OptimRequest,
        ranges: Sequence[StepRange],
        masked: MaskedOptions | None = None,
    ) -> SampleOrder:
        """The order of a new run with these flags.

        Args:
            ranges: steps to skip, whose data is consumed.

        Raises:
            ConfigError: the flags do not determine the number of planned samples.
        """
        if optim.train_iters is None and not optim.is_counted_in_samples:
            raise ConfigError(
                "The order of samples depends on the number of planned samples. Give --train-samples (or --train-iters "
                "and --global-batch-size) as in training, or a checkpoint with --load."
            )
        if optim.train_samples is None:
            counted = "--train-iters" if optim.train_tokens is None else "--train-tokens"
            known = with_known_batch(optim, counted, sequence_length)
            samples = planned_samples(known, EvaluationConfig(), ranges=ranges)[0]
        else:
            samples = optim.train_samples
        return SampleOrder(data, sequence_length, seed, samples, masked=masked)


@dataclass(frozen=True)
class TrainedSample:
    """A sample as read in training.

    Args:
        number: index in the order of the run, from 0; equal to the samples consumed before it.
        source: data prefix that it comes from.
        tokens: the inputs and, shifted by one, the labels; for a masked sample only the masked inputs.
        hidden: position and original token of each masked token.

    Shapes:
        tokens: int64 [s + 1]; for a masked sample [s].
    """

    number: int
    source: str
    spans: tuple[DocumentSpan, ...]
    tokens: np.ndarray
    hidden: tuple[tuple[int, int], ...] = ()


def with_known_batch(optim: OptimRequest, flag: str, sequence_length: int) -> OptimConfig:
    """The optimizer section with a known global batch size, so that steps can be converted to samples.

    Args:
        flag: the flag that counts in steps, for the error.
        sequence_length: tokens per sample; only used for runs measured in tokens.

    Raises:
        ConfigError: the size depends on the number of processes.
    """
    if optim.global_batch_size is None:
        raise ConfigError(
            f"{flag} counts steps, whose number of samples depends on the number of processes. Give "
            "--global-batch-size as in training."
        )
    return resolve_optim(optim, optim.global_batch_size, sequence_length)


def read_samples(order: SampleOrder, start: int, end: int, tokenizer: Tokenizer | None) -> Iterator[TrainedSample]:
    """Reads the training samples [start, end).

    Args:
        tokenizer: the run's tokenizer; checked against the data if possible.

    Raises:
        DataError: the range is not within the planned samples, or the data is missing, damaged or different from the
            plan.
    """
    if not 0 <= start < end <= order.planned_samples:
        raise DataError(
            f"Samples {start} to {end} are not within the {order.planned_samples} planned training samples. Give a "
            f"start below the end, and an end of at most {order.planned_samples}."
        )
    # Evaluation data is not read and may be missing.
    data = dataclasses.replace(
        order.data,
        valid_weighted_split_paths=(),
        test_weighted_split_paths=(),
        valid_data_path=(),
        test_data_path=(),
        change_data_blend=False,
    )
    samples = (order.planned_samples, 0, 0)
    datasets, plan = build_split_datasets(
        DataRequest(
            data, order.sequence_length, order.seed, samples, order.plan, tokenizer=tokenizer, masked=order.masked
        )
    )
    if datasets.train is None or plan.train is None:
        raise DataError("The stored data plan has no training data, so there are no samples to show.")
    prefixes = [source.prefix for source in plan.train.sources]
    return _samples(datasets.train, prefixes, start, end)


def _samples(dataset: SampleDataset, prefixes: Sequence[str], start: int, end: int) -> Iterator[TrainedSample]:
    for number in range(start, end):
        source = prefixes[dataset.source_of(number)]
        sample = dataset.read(number)
        hidden: list[tuple[int, int]] = []
        if sample.labels is not None and sample.loss_mask is not None:
            hidden = [(int(index), int(sample.labels[index])) for index in np.flatnonzero(sample.loss_mask)]
        yield TrainedSample(number, source, tuple(dataset.spans(number)), sample.tokens, tuple(hidden))


def samples_of_steps(
    first: int, last: int, optim: OptimRequest, skipped: Sequence[StepRange], end: Progress | None = None
) -> tuple[int, int]:
    """The samples [start, end) of steps `first` to `last`, inclusive, counted from 1.

    Args:
        optim: the optimizer section, with its global batch size.
        skipped: the ranges of `--skip-train-iteration-range`.
        end: known progress of a run with these settings.

    Raises:
        ConfigError: the batch size is unknown, or the settings do not lead to `end`.
    """
    known = with_known_batch(optim, "--start-step", sequence_length=1)  # batch sizes do not depend on it
    if end is not None and end.step > 0:
        before = samples_before_step(known, skipped, end.step)
        consumed = samples_after(known, 1, before)
        if consumed != end.consumed_samples:
            raise ConfigError(
                f"The checkpoint had consumed {end.consumed_samples} samples at step {end.step}, but its batch sizes "
                f"give {consumed}: they changed during the run. Give the run folder (--run-dir), which has the count "
                "of every step, or --start-sample and --end-sample."
            )
    start, last_start = (samples_before_step(known, skipped, step) for step in (first, last))
    return start, samples_after(known, 1, last_start)


def samples_of_logged_steps(first: int, last: int, steps: Mapping[int, Mapping[str, Any]]) -> tuple[int, int]:
    """The samples [start, end) of steps `first` to `last`, inclusive, as logged by a run.

    Args:
        steps: the result of `read_steps`.

    Raises:
        DataError: one of the two was not logged.
    """
    missing = [step for step in (first, last) if step not in steps]
    if missing:
        logged = f"steps {min(steps)} to {max(steps)}" if steps else "no step"
        raise DataError(
            f"The run logged {logged}, but not step {missing[0]}. Choose --start-step and --end-step there."
        )
    start = int(steps[first]["consumed_samples"]) - int(steps[first]["global_batch_size"])
    return start, int(steps[last]["consumed_samples"])
