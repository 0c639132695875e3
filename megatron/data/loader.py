"""Samples to batches: which rank gets which samples of a global batch, and reading the next one ahead.

The samples of a global batch are fixed by its first sample and its size alone; data-parallel size and micro-batch size
only distribute them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from megatron.data.datasets.sample import Sample, SampleDataset
from megatron.errors import ConfigError, DataError


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank.

    Shapes:
        tokens, labels: int64 [b, s]; loss_mask: float32 [b, s], 0 where no loss is wanted.
        sample_ids: int64 [b], number of each sample in the order of the whole run.
        segment_ids: int64 [b, s], 0 for the first document of a sample, or None if documents are not separated.
        source_ids: int64 [b], which source of the blend each sample comes from, or None unless they were asked for.
    """

    tokens: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray
    sample_ids: np.ndarray
    segment_ids: np.ndarray | None
    source_ids: np.ndarray | None = None


@dataclass(frozen=True)
class BatchOptions:
    """What a batch consists of besides its tokens.

    Args:
        eod_id: the end-of-document token; needed for the two options below.
        vocab_size: ids must be below it; None leaves them unchecked.
        eod_mask_loss: no loss where the input token is end-of-document.
        segments: whether batches carry segment ids (`--reset-position-ids`, `--reset-attention-mask`).
        sources: whether batches carry source ids (`--log-per-source-loss`).
    """

    eod_id: int | None = None
    vocab_size: int | None = None
    eod_mask_loss: bool = False
    segments: bool = False
    sources: bool = False

    def __post_init__(self) -> None:
        if self.eod_id is None and (self.eod_mask_loss or self.segments):
            raise ConfigError(
                "--eod-mask-loss, --reset-position-ids and --reset-attention-mask need an end-of-document token, "
                "which the tokenizer does not have. Leave them off or use a tokenizer that defines one."
            )


class MicroBatches:
    """This rank's micro-batches of one global batch: samples [first_sample, first_sample + global_batch_size).

    In micro step m, rank r owns the `micro_batch_size` samples from `first_sample + (m * dp_size + r) *
    micro_batch_size`. Samples from `stop_sample` on do not exist: they are filled with padding that has no loss (the
    last batch of an evaluation).

    Raises:
        ConfigError: the global batch cannot be divided evenly.
        DataError: on iteration, when a sample is beyond the plan or has a token id that the vocabulary does not.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        first_sample: int,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        stop_sample: int | None = None,
        options: BatchOptions | None = None,
    ) -> None:
        samples_per_step = micro_batch_size * dp_size
        if global_batch_size % samples_per_step:
            raise ConfigError(
                f"A global batch of {global_batch_size} samples cannot be divided among {dp_size} data-parallel ranks "
                f"with --micro-batch-size {micro_batch_size}: it must be a multiple of {samples_per_step}."
            )
        self.dataset = dataset
        self.first_sample = first_sample
        self.stop_sample = stop_sample
        self.options = options or BatchOptions()
        self._micro_batch_size = micro_batch_size
        self._own_first = first_sample + dp_rank * micro_batch_size
        self._samples_per_step = samples_per_step
        self._steps = global_batch_size // samples_per_step

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Batch]:
        return (self._batch(self._own_first + step * self._samples_per_step) for step in range(self._steps))

    def _batch(self, first: int) -> Batch:
        numbers = range(first, first + self._micro_batch_size)
        exists = [self.stop_sample is None or number < self.stop_sample for number in numbers]
        rows = [self._sample(number) for number, real in zip(numbers, exists, strict=True) if real]
        sources = [self.dataset.source_of(number) for number in numbers[: len(rows)]] if self.options.sources else []
        missing = len(numbers) - len(rows)
        if missing:
            row = rows[0] if rows else self._sample(self.first_sample)
            rows += [Sample(np.full_like(row.tokens, self.options.eod_id or 0))] * missing
        text = np.stack([row.tokens for row in rows])  # [b, s + 1]
        self._check_ids(text, first)
        tokens = np.ascontiguousarray(text[:, :-1])  # [b, s]
        mask = np.ones(tokens.shape, np.float32)
        for place, row in enumerate(rows):
            if row.loss_mask is not None:
                mask[place] = row.loss_mask
        if self.options.eod_mask_loss:
            mask[tokens == self.options.eod_id] = 0.0
        mask[len(numbers) - missing :] = 0.0
        return Batch(
            tokens=tokens,
            labels=np.ascontiguousarray(text[:, 1:]),
            loss_mask=mask,
            sample_ids=np.arange(first, first + self._micro_batch_size, dtype=np.int64),
            segment_ids=segment_ids(tokens, self.options.eod_id) if self.options.segments else None,
            source_ids=np.array(sources + [0] * missing, np.int64) if self.options.sources else None,
        )

    def _sample(self, number: int) -> Sample:
        if number >= len(self.dataset):
            raise DataError(
                f"Sample {number} was asked for, but {len(self.dataset)} samples are planned. "
                "Plan more (--train-iters or --train-samples) before training continues."
            )
        return self.dataset.read(number)

    def _check_ids(self, text: np.ndarray, first: int) -> None:
        limit = self.options.vocab_size
        if limit is None or (int(text.max()) < limit and int(text.min()) >= 0):
            return
        row, position = (int(value) for value in np.argwhere((text >= limit) | (text < 0))[0])
        raise DataError(
            f"{self.dataset.locate(first + row, position)} has id {int(text[row, position])}, but the vocabulary has "
            f"{limit} entries. The data was made with another tokenizer, or it is damaged."
        )


def segment_ids(tokens: np.ndarray, eod_id: int | None) -> np.ndarray:
    """Numbers the documents inside each sample; an end-of-document token belongs to the document that it ends.

    Shapes:
        tokens: [b, s]; result: int64 [b, s].
    """
    ends = (tokens == eod_id).astype(np.int64)
    return np.cumsum(ends, axis=1) - ends


class BatchLoader:
    """Yields the micro batches of one global batch after another, reading the likely next one in a thread meanwhile.

    The guess (same size, next sample) is wrong at a ramp-up step or a skipped range; that batch is then read on demand.
    An error met while reading ahead is raised when the batch is requested, not before.

    Args:
        read_ahead: whether to use the thread.
        reads: whether this rank uses its micro-batches. One that does not (a pipeline stage between the first and the
            last) gets None for each of them and reads no sample.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        options: BatchOptions | None = None,
        read_ahead: bool = True,
        reads: bool = True,
    ) -> None:
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.options = options or BatchOptions()
        self.read_ahead = read_ahead and reads
        self.reads = reads
        self._ahead: _Reading | None = None

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def micro_batches(
        self, first_sample: int, global_batch_size: int, stop_sample: int | None = None
    ) -> list[Batch] | list[None]:
        """This rank's micro-batches of the samples [first_sample, first_sample + global_batch_size).

        Raises:
            ConfigError, DataError: see `MicroBatches`.
        """
        wanted = (first_sample, global_batch_size, stop_sample)
        if not self.reads:
            return [None] * len(self._micro_batches(*wanted))
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.wanted == wanted:
            batches = ahead.result()
        else:
            if ahead is not None:
                ahead.stop()
            batches = list(self._micro_batches(*wanted))
        end = first_sample + global_batch_size
        limit = len(self.dataset) if stop_sample is None else stop_sample
        if self.read_ahead and (end + global_batch_size <= limit or (stop_sample is not None and end < limit)):
            self._ahead = _Reading(
                self._micro_batches(end, global_batch_size, stop_sample), (end, global_batch_size, stop_sample)
            )
        return batches

    def close(self) -> None:
        """Ends reading ahead and waits for the thread."""
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None

    def _micro_batches(self, first_sample: int, global_batch_size: int, stop_sample: int | None) -> MicroBatches:
        return MicroBatches(
            self.dataset,
            first_sample=first_sample,
            global_batch_size=global_batch_size,
            micro_batch_size=self.micro_batch_size,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
            stop_sample=stop_sample,
            options=self.options,
        )


class _Reading:
    """One global batch being read in a thread."""

    def __init__(self, source: MicroBatches, wanted: tuple[int, int, int | None]) -> None:
        self.wanted = wanted
        self._source = source
        self._batches: list[Batch] = []
        self._failure: BaseException | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, name=f"read-ahead-{wanted[0]}", daemon=True)
        self._thread.start()

    def result(self) -> list[Batch]:
        """Waits for the batch; an error of the thread is raised here."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._batches

    def stop(self) -> None:
        """Abandons the batch and waits for the thread."""
        self._stopped.set()
        self._thread.join()

    def _read(self) -> None:
        try:
            for batch in self._source:
                if self._stopped.is_set():
                    return
                self._batches.append(batch)
        except BaseException as failure:  # raised in the thread that asks for the batch
            self._failure = failure
