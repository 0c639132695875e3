"""Batches from samples: distributes a global batch over the ranks and reads the next one ahead.

The samples of a global batch are fixed by its first sample and its size alone; data-parallel size and micro-batch size
only distribute them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import TracebackType

import numpy as np

from megatron.data.datasets.sample import Sample, SampleDataset
from megatron.data.read_ahead import PendingRead, ReadAhead
from megatron.errors import ConfigError, DataError

_BatchRange = tuple[int, int, "int | None"]  # first sample, global batch size, and the sample where the data ends

# Read ahead at a time: up to this many global batches, of about this many tokens in all. Reading one small batch takes
# less time than waking the thread and warming its caches.
_MOST_AHEAD_BATCHES = 8
_AHEAD_TOKENS = 1 << 16


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank.

    Shapes:
        tokens, labels: int64 [b, s]; loss_mask: float32 [b, s], weight of each label.
        sample_ids: int64 [b], index of each sample in the order of the whole run.
        segment_ids: int64 [b, s], 0 for the first document of a sample, or None if documents are not separated.
        source_ids: int64 [b], index of each sample's source in the blend; None unless `BatchOptions.sources`.
        prefix_mask: bool [b, s], inputs that all tokens of their segment may attend to; None unless
            `BatchOptions.prefixes`.
        token_types: int64 [b, s], index of the part that each token belongs to, or None if samples have no parts.
        predicted: int64 [b, m], positions with a loss in ascending order, padded to the fixed
            m (`BatchOptions.predictions`) with position 0, which never has a loss; None unless requested.
        swapped: int64 [b], 1 where the two parts of a sample are in the wrong order, 0 where they are not, -1 for
            padding; None if samples have no such parts.
    """

    tokens: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray
    sample_ids: np.ndarray
    segment_ids: np.ndarray | None
    source_ids: np.ndarray | None = None
    prefix_mask: np.ndarray | None = None
    token_types: np.ndarray | None = None
    predicted: np.ndarray | None = None
    swapped: np.ndarray | None = None

    @cached_property
    def counted_labels(self) -> float:
        return float(self.loss_mask.sum(dtype=np.float64))


@dataclass(frozen=True)
class BatchOptions:
    """The contents of a batch besides its tokens.

    Args:
        eod_id: the end-of-document token; required by `eod_mask_loss` and `segments`.
        vocab_size: ids must be below it; None leaves them unchecked.
        eod_mask_loss: no loss where the input token is end-of-document.
        segments: add segment ids (`--reset-position-ids`, `--reset-attention-mask`, packed examples).
        prefixes: add prefix masks.
        sources: add source ids (`--log-per-source-loss`).
        predictions: add the positions that have a loss, at most this many per sample.
    """

    eod_id: int | None = None
    vocab_size: int | None = None
    eod_mask_loss: bool = False
    segments: bool = False
    prefixes: bool = False
    sources: bool = False
    predictions: int | None = None

    def __post_init__(self) -> None:
        if self.eod_id is None and (self.eod_mask_loss or self.segments):
            raise ConfigError(
                "--eod-mask-loss, --reset-position-ids and --reset-attention-mask require an end-of-document token, "
                "which the tokenizer does not have. Remove them or use a tokenizer that defines one."
            )


def first_samples(
    first_sample: int, global_batch_size: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> range:
    """Returns the first sample of each micro-batch of a rank, see `MicroBatches`."""
    first = first_sample + dp_rank * micro_batch_size
    return range(first, first_sample + global_batch_size, micro_batch_size * dp_size)


class MicroBatches:
    """This rank's micro-batches of one global batch: samples [first_sample, first_sample + global_batch_size).

    In micro step m, rank r owns the `micro_batch_size` samples from `first_sample + (m * dp_size + r) *
    micro_batch_size`. Samples from `stop_sample` on do not exist: they are replaced by padding without loss (the last
    batch of an evaluation).

    Raises:
        ConfigError: the global batch cannot be divided evenly.
        DataError: on iteration, if a sample is beyond the plan or has a token id outside the vocabulary.
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
        self._firsts = first_samples(first_sample, global_batch_size, micro_batch_size, dp_rank, dp_size)

    def __len__(self) -> int:
        return len(self._firsts)

    def __iter__(self) -> Iterator[Batch]:
        return map(self._batch, self._firsts)

    def _batch(self, first: int) -> Batch:
        numbers = range(first, first + self._micro_batch_size)
        exists = [self.stop_sample is None or number < self.stop_sample for number in numbers]
        rows = [self._sample(number) for number, real in zip(numbers, exists, strict=True) if real]
        sources = [self.dataset.source_of(number) for number in numbers[: len(rows)]] if self.options.sources else []
        missing = len(numbers) - len(rows)
        if missing:
            row = rows[0] if rows else self._sample(self.first_sample)
            rows += [_padding_like(row, self.options.eod_id or 0)] * missing
        tokens, labels = self._tokens(rows, first)
        mask = np.ones(tokens.shape, np.float32)
        for index, row in enumerate(rows):
            if row.loss_mask is not None:
                mask[index] = row.loss_mask
        if self.options.eod_mask_loss:
            mask[tokens == self.options.eod_id] = 0.0
        mask[len(numbers) - missing :] = 0.0
        batch = Batch(
            tokens=tokens,
            labels=labels,
            loss_mask=mask,
            sample_ids=np.arange(first, first + self._micro_batch_size, dtype=np.int64),
            segment_ids=self._segment_ids(rows, tokens) if self.options.segments else None,
            source_ids=np.array(sources + [0] * missing, np.int64) if self.options.sources else None,
            prefix_mask=_stacked_prefixes(rows) if self.options.prefixes else None,
            token_types=_stacked([row.token_types for row in rows]),
            predicted=None if self.options.predictions is None else predicted_positions(mask, self.options.predictions),
            swapped=_stacked_orders(rows, missing),
        )
        _ = batch.counted_labels  # cached here, in the thread that reads ahead
        return batch

    def _tokens(self, rows: Sequence[Sample], first: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and labels. Shapes: both int64 [b, s]."""
        text = np.stack([row.tokens for row in rows])  # [b, s + 1], or [b, s] for samples with labels
        labels = _stacked([row.labels for row in rows])
        self._check_ids(text, first)
        if labels is None:
            return np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])
        self._check_ids(labels, first)
        return text, labels

    def _segment_ids(self, rows: Sequence[Sample], tokens: np.ndarray) -> np.ndarray:
        # Samples without segment ids get one segment per document.
        return np.stack(
            [
                segment_ids(ids[None], self.options.eod_id)[0] if row.segment_ids is None else row.segment_ids
                for row, ids in zip(rows, tokens, strict=True)
            ]
        )

    def _sample(self, number: int) -> Sample:
        if number >= len(self.dataset):
            raise DataError(
                f"Sample {number} was requested, but {len(self.dataset)} samples are planned. "
                "Plan more (--train-iters or --train-samples) before training continues."
            )
        return self.dataset.read(number)

    def _check_ids(self, text: np.ndarray, first: int) -> None:
        limit = self.options.vocab_size
        if limit is None or int(text.view(np.uint64).max()) < limit:  # negative ids are large ones
            return
        row, position = (int(value) for value in np.argwhere((text >= limit) | (text < 0))[0])
        raise DataError(
            f"{self.dataset.locate(first + row, position)} has id {int(text[row, position])}, but the vocabulary has "
            f"{limit} entries. The data was tokenized by another tokenizer, or it is damaged."
        )


def _padding_like(row: Sample, token: int) -> Sample:
    """Returns a sample without loss that has the fields of another one."""
    tokens = np.full_like(row.tokens, token)
    # One segment: were each end-of-document token a document, attention would be computed one token per call.
    if row.labels is None:
        return Sample(tokens, segment_ids=np.zeros_like(tokens[:-1]))
    types = None if row.token_types is None else np.zeros_like(row.token_types)
    segments = np.zeros_like(tokens)
    return Sample(tokens, segment_ids=segments, labels=tokens, token_types=types, is_swapped=row.is_swapped)


def _stacked(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Stacks a field of all samples; None if they do not have it. Shapes: each [s]; result [b, s]."""
    present = [array for array in arrays if array is not None]
    return np.stack(present) if len(present) == len(arrays) else None


def _stacked_orders(rows: Sequence[Sample], padding: int) -> np.ndarray | None:
    """Returns 1 for each sample with swapped parts, 0 for the others, -1 for the `padding` samples at the end."""
    orders = [row.is_swapped for row in rows if row.is_swapped is not None]
    if not orders:
        return None
    return np.array(orders[: len(rows) - padding] + [-1] * padding, np.int64)


def _stacked_prefixes(rows: Sequence[Sample]) -> np.ndarray:
    """Stacks the prefix masks; a sample without one has no prefix. Shapes: result bool [b, s]."""
    prefixes = np.zeros((len(rows), len(rows[0].tokens) - 1), np.bool_)
    for index, row in enumerate(rows):
        if row.prefix_mask is not None:
            prefixes[index] = row.prefix_mask
    return prefixes


def predicted_positions(loss_mask: np.ndarray, most: int) -> np.ndarray:
    """Returns the positions of each sample that have a loss, padded with position 0.

    Shapes:
        loss_mask: [b, s]; result: int64 [b, most].

    Raises:
        DataError: a sample has more than `most` of them, or position 0, which stands for none, is one of them.
    """
    has_loss = loss_mask != 0
    counts = has_loss.sum(axis=1)
    if counts.max() > most or has_loss[:, 0].any():
        raise DataError(
            f"A sample has {counts.max()} tokens to predict, expected at most {most} and not the first token. This is "
            "a bug in the dataset class, not in the data; please report it."
        )
    positions = np.zeros((len(loss_mask), most), np.int64)
    rows, columns = np.nonzero(has_loss)
    positions[rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)] = columns
    return positions


def segment_ids(tokens: np.ndarray, eod_id: int | None) -> np.ndarray:
    """Numbers the documents inside each sample; an end-of-document token belongs to the document that it ends.

    Shapes:
        tokens: [b, s]; result: int64 [b, s].
    """
    ends = (tokens == eod_id).astype(np.int64)
    return np.cumsum(ends, axis=1) - ends


class BatchLoader:
    """Yields the micro-batches of one global batch after another and reads the likely next ones in a thread.

    The guess (same size, next sample) is wrong at a ramp-up step or a skipped range; such a batch is read on demand.
    An error during read-ahead is raised when its batch is requested, not before.

    Args:
        ahead: the thread that reads ahead, which several loaders may share; None reads every batch on demand.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        options: BatchOptions | None = None,
        ahead: ReadAhead | None = None,
    ) -> None:
        self.dataset = dataset
        self._share = partial(
            MicroBatches, micro_batch_size=micro_batch_size, dp_rank=dp_rank, dp_size=dp_size, options=options
        )
        self.ahead = ahead
        self._pending: deque[tuple[_BatchRange, PendingRead[Batch]]] = deque()

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def micro_batches(self, first_sample: int, global_batch_size: int, stop_sample: int | None = None) -> list[Batch]:
        """Returns this rank's micro-batches of the samples [first_sample, first_sample + global_batch_size).

        Raises:
            ConfigError, DataError: see `MicroBatches`.
            StorageError: the read-ahead thread exited.
        """
        requested = (first_sample, global_batch_size, stop_sample)
        if self._pending and self._pending[0][0] == requested:
            batches = self._pending.popleft()[1].result()
        else:
            self._cancel()
            batches = list(self._micro_batches(requested))
        if self.ahead is not None and not self._pending:
            self._read_ahead(self.ahead, requested, sum(batch.tokens.size for batch in batches))
        return batches

    def read_from(self, dataset: SampleDataset) -> None:
        """Switches to another dataset.

        Raises:
            StorageError: the read-ahead thread exited.
        """
        self._cancel()
        self.dataset = dataset

    def close(self) -> None:
        """Abandons all pending reads."""
        for _, read in self._pending:
            read.abandon()
        self._pending.clear()

    def _cancel(self) -> None:
        """Abandons all pending reads and waits until the thread no longer uses the dataset."""
        abandoned = [read for _, read in self._pending]
        self.close()
        for read in abandoned:
            read.cancel()

    def _read_ahead(self, ahead: ReadAhead, last: _BatchRange, tokens: int) -> None:
        """Submits the batches that are expected after `last`, a batch of `tokens` tokens, up to the end of the data."""
        first, size, stop = last
        for _ in range(max(1, min(_MOST_AHEAD_BATCHES, _AHEAD_TOKENS // max(1, tokens)))):
            first += size
            exists = first + size <= len(self.dataset) if stop is None else first < stop
            following = (first, size, stop)
            read = ahead.submit(self._micro_batches(following)) if exists else None
            if read is None:
                return
            self._pending.append((following, read))

    def _micro_batches(self, samples: _BatchRange) -> MicroBatches:
        first, size, stop = samples
        return self._share(self.dataset, first_sample=first, global_batch_size=size, stop_sample=stop)
