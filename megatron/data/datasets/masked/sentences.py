"""Sentence pairs for BERT: consecutive sentences of a document in two parts, possibly swapped, with masked words.

Source: bigscience Megatron-DeepSpeed `megatron/data/bert_dataset.py` (`build_training_sample`) and
`megatron/data/dataset_utils.py` (`get_a_and_b_segments`, `truncate_segments`, `create_tokens_and_tokentypes`). Given
the same data, flags and seed, the samples equal upstream's token for token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.data.datasets.masked.masked_options import MaskedOptions
from megatron.data.datasets.masked.masking import mask_spans
from megatron.data.datasets.masked.vocabulary import MaskedVocabulary
from megatron.data.datasets.sample import DocumentSpan, Sample, SegmentedSamples
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.order.index_cache import IndexCache
from megatron.data.order.plan import Segment
from megatron.data.order.sentence_map import build_sentence_map
from megatron.errors import DataError


class SentenceFile:
    """A token file whose sequences are sentences; its length is its number of documents.

    Args:
        sequence_length: tokens of a sample.
        cache: stores the sentence maps.

    Raises:
        ConfigError: samples are too short for a masked token.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequence_length: int,
        options: MaskedOptions,
        vocabulary: MaskedVocabulary,
        cache: IndexCache,
    ) -> None:
        self.indexed = indexed
        self.sequence_length = sequence_length
        self.options = options
        self.vocabulary = vocabulary
        self._rules = options.sentence_rules(sequence_length)
        self._cache = cache
        self._tables: dict[tuple[int, ...], np.ndarray] = {}

    @property
    def prefix(self) -> str:
        return self.indexed.prefix

    @property
    def fingerprint(self) -> str:
        return self.indexed.fingerprint

    def __len__(self) -> int:
        return len(self.indexed.documents) - 1

    def table(self, first: int, last: int, samples: int, seed: int) -> np.ndarray:
        """Returns the sentence map of the documents [first, last), see `build_sentence_map`.

        Raises:
            DataError: the documents yield no sample.
        """
        key = (first, last, samples, seed)
        if key not in self._tables:
            rules = self._rules
            description = {
                "idx_sha256": self.fingerprint,
                "first": first,
                "last": last,
                "samples": samples,
                "seed": seed,
                "most_tokens": rules.most_tokens,
                "short_ratio": rules.short_ratio,
                "least_sentences": rules.least_sentences,
            }
            documents = self.indexed.documents[first : last + 1]

            def make() -> dict[str, np.ndarray]:
                try:
                    return {"map": build_sentence_map(self.indexed.lengths, documents, rules, samples, seed)}
                except DataError as failure:
                    raise DataError(f"{self.prefix}: {failure}") from None

            self._tables[key] = self._cache.arrays("sentences", description, make)["map"]
        return self._tables[key]

    def sample(self, row: np.ndarray, random: np.random.RandomState) -> Sample:
        """Builds the sample of one row of a table.

        Raises:
            DataError: a token is outside the vocabulary.
        """
        first, last, most_tokens = row.tolist()
        ends = np.cumsum(self.indexed.lengths[first:last], dtype=np.int64)
        ids = self.indexed.tokens_at(int(self.indexed.pointers[first]), int(ends[-1])).astype(np.int64)
        self.vocabulary.check_ids(ids, lambda index: f"{self.indexed.bin_path}: token {index} from sequence {first} on")
        text, types, is_swapped = self._arranged(ids, ends, most_tokens, random)
        inputs, masked = mask_spans(text, most_tokens, self.options.masking, self.vocabulary, random)
        length = self.sequence_length
        tokens, labels = (np.full(length, self.vocabulary.pad_id, np.int64) for _ in range(2))
        tokens[: len(inputs)], labels[: len(text)] = inputs, text
        token_types, loss_mask = np.zeros(length, np.int64), np.zeros(length, np.bool_)
        token_types[: len(types)], loss_mask[masked] = types, True
        segments = (np.arange(length) >= len(text)).astype(np.int64)
        return Sample(
            tokens,
            loss_mask,
            segments,
            labels=labels,
            token_types=token_types,
            is_swapped=is_swapped if self.options.pairs else None,
        )

    def _arranged(
        self, ids: np.ndarray, ends: np.ndarray, most_tokens: int, random: np.random.RandomState
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """Returns the text of a sample with separators, the index of each token's part, and True if parts are swapped.

        Shapes:
            ids: int64 [n], of all sentences; ends: int64 [sentences], end of each in `ids`.
        """
        end, is_swapped = len(ids), False
        if self.options.pairs:
            end = int(ends[random.randint(1, len(ends)) - 1 if len(ends) > 2 else 0])
            is_swapped = bool(random.random_sample() < 0.5)
        parts = [ids[:end], ids[end:]]
        first, second = _truncated(parts[::-1] if is_swapped else parts, most_tokens, random)
        end_of_part = [self.vocabulary.sep_id]
        rest = [second, end_of_part] if len(second) else []
        text = np.concatenate([[self.vocabulary.cls_id], first, end_of_part, *rest]).astype(np.int64)
        return text, (np.arange(len(text)) >= len(first) + 2).astype(np.int64), is_swapped


class SentenceDataset(SegmentedSamples):
    """The samples of the documents [first, last) in planned order.

    Args:
        segments: as planned; each is one map of whole passes.

    Raises:
        DataError: the number of samples in a map differs from the plan.
    """

    def __init__(self, file: SentenceFile, first: int, last: int, segments: Sequence[Segment]) -> None:
        self.file = file
        self._segments = tuple(segments)
        self._tables = [file.table(first, last, segment.samples, segment.seed) for segment in segments]
        for segment, table in zip(segments, self._tables, strict=True):
            if len(table) != segment.rows:
                raise DataError(
                    f"The order of samples was planned with {segment.rows} samples of {file.prefix}, but its documents "
                    f"{first} to {last} yield {len(table)} with the current flags. Use the same data and flags, or "
                    "start a new order with --finetune."
                )
        super().__init__(file.prefix, map(len, self._tables))

    def read(self, sample: int) -> Sample:
        segment, number = self._segment_of(sample)
        random = np.random.RandomState((self._segments[segment].seed + number) % 2**32)
        return self.file.sample(self._tables[segment][number], random)

    def locate(self, sample: int, position: int) -> str:
        spans = self.spans(sample)
        return (
            f"{self.file.indexed.bin_path}: sequences {spans[0].sequence} to {spans[-1].sequence}, at token {position} "
            "of the sample made of them"
        )

    def spans(self, sample: int) -> list[DocumentSpan]:
        """Returns the sentences of a sample, regardless of truncation and swapping."""
        segment, number = self._segment_of(sample)
        first, last, _ = (int(value) for value in self._tables[segment][number])
        return [DocumentSpan(sentence, 0, int(self.file.indexed.lengths[sentence])) for sentence in range(first, last)]


def _truncated(parts: Sequence[np.ndarray], most: int, random: np.random.RandomState) -> list[np.ndarray]:
    """Removes tokens from the front or back of the longer part, until the parts have at most `most` in total."""
    edges = [[0, len(part)] for part in parts]
    for draw in random.random_sample(max(0, sum(map(len, parts)) - most)).tolist():
        longer = 0 if edges[0][1] - edges[0][0] > edges[1][1] - edges[1][0] else 1
        if draw < 0.5:
            edges[longer][0] += 1
        else:
            edges[longer][1] -= 1
    return [part[first:last] for part, (first, last) in zip(parts, edges, strict=True)]
