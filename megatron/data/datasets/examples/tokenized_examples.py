"""The ids of all examples of a source, encoded once, cached next to the data and mapped by every process.

Encoding everything at the start finds bad records before training, and yields the lengths that packing and the number
of rows depend on. A token takes two bytes, or four with a vocabulary of more than 65,536 tokens.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np

from megatron import log
from megatron.data.datasets.examples.example_files import example_files, files_fingerprint, read_records
from megatron.data.datasets.examples.records import Example, example_of, with_copied_prompts
from megatron.data.order.index_cache import IndexCache, description_sha256
from megatron.errors import ConfigError, DataError
from megatron.secret_text import masked
from megatron.tokenizers.chat import ChatTemplate
from megatron.tokenizers.tokenizer import Tokenizer

_FORMAT = 2  # of the cached arrays and of the encoding of records
_REPORTED_EXAMPLES = 100_000
_BATCH_EXAMPLES, _BATCH_LETTERS = 32, 1 << 18  # rendered by a template at once


class RecordLocation(NamedTuple):
    """The location of a record: index of its file (0 for a database), and its number there."""

    file: int
    number: int


@dataclass(frozen=True)
class RecordSource:
    """Records with their locations.

    Args:
        names: of the files or the store, as shown in messages.
        fingerprint: computes the hash of the content.
        records: yields all records in order.
    """

    names: Sequence[str]
    fingerprint: Callable[[], str]
    records: Callable[[], Iterator[tuple[RecordLocation, Any]]]

    @staticmethod
    def of_files(prefix: str) -> RecordSource:
        """Returns the records of files, file by file, each with its line number.

        Raises:
            DataError: no file matches the name or pattern.
        """
        names = example_files(prefix)

        def records() -> Iterator[tuple[RecordLocation, Any]]:
            for file, path in enumerate(names):
                for number, record in read_records(path):
                    yield RecordLocation(file, number), record

        return RecordSource(names, lambda: files_fingerprint(prefix), records)


def check_first_records(prefix: str) -> None:
    """Checks the first record of each file, to detect files with other content early.

    Lists are skipped, because they are parsed as a whole.

    Raises:
        DataError: the file does not exist, or a record is bad.
    """
    for path in example_files(prefix):
        for number, record in islice(read_records(path, with_lists=False), 1):
            _example(record, f"{path}:{number}")


class TokenizedExamples:
    """Examples by index, as ids.

    Args:
        prefix: the source as named by the user.
        cache: stores the ids.
        copies_prompts: replace each answer by the prompt before it.

    Attributes:
        key: everything that determines the ids, as the cache's key.

    Raises:
        ConfigError: the chat template cannot be used, or needs tokens that the vocabulary lacks.
        DataError: a record is bad, or the source is empty.
    """

    def __init__(
        self,
        prefix: str,
        source: RecordSource,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        cache: IndexCache,
        *,
        copies_prompts: bool = False,
    ) -> None:
        self.prefix = masked(prefix)
        self.padding_id = tokenizer.eod_id
        self.names = source.names
        template.check_tokenizer(tokenizer)
        self._description: dict[str, object] = {
            "format": 1,
            "records_sha256": source.fingerprint(),
            "tokenizer": tokenizer.fingerprint,
            "template": template.fingerprint,
            **({"copies_prompts": True} if copies_prompts else {}),
        }
        self.key: dict[str, object] = {**self._description, "format": _FORMAT, **_encoding_settings(tokenizer)}
        arrays = cache.arrays("examples", self.key, lambda: _tokenized(source, template, tokenizer, copies_prompts))
        self._ids, self._starts = arrays["ids"], arrays["starts"]
        self._spans, self._span_starts = arrays["spans"].reshape(-1, 2), arrays["span_starts"]
        self._numbers, self._file_starts = arrays["numbers"], arrays["file_starts"]

    def __len__(self) -> int:
        return len(self._starts) - 1

    @cached_property
    def fingerprint(self) -> str:
        """Hash over the records and their encoding, which identifies them in a resumed run."""
        # It covers less than `key`: the tokenizer is compared with the checkpoint's.
        return description_sha256(self._description)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example. Shapes: int64 [n]."""
        return np.diff(self._starts)

    @property
    def last_answers(self) -> np.ndarray:
        """Token range of the last answer of each example. Shapes: int64 [n, 2]."""
        return self._spans[self._span_starts[1:] - 1].astype(np.int64)

    @property
    def first_answers(self) -> np.ndarray:
        """Token range of the first answer of each example. Shapes: int64 [n, 2]."""
        return self._spans[self._span_starts[:-1]].astype(np.int64)

    def ids(self, example: int) -> np.ndarray:
        """Returns the ids of an example. Shapes: int64 [length]."""
        return self._ids[self._starts[example] : self._starts[example + 1]].astype(np.int64)

    def is_answer(self, example: int) -> np.ndarray:
        """Returns a mask of the answers in an example. Shapes: bool [length]."""
        is_answer = np.zeros(int(self._starts[example + 1] - self._starts[example]), np.bool_)
        for first, last in self._spans[self._span_starts[example] : self._span_starts[example + 1]].tolist():
            is_answer[first:last] = True
        return is_answer

    def locate(self, example: int) -> str:
        """Describes the location of an example's record."""
        file = bisect_right(self._file_starts.tolist(), example) - 1
        return f"{self.names[file]}:{int(self._numbers[example])}"


def _tokenized(
    source: RecordSource, template: ChatTemplate, tokenizer: Tokenizer, copies_prompts: bool
) -> dict[str, np.ndarray]:
    """Encodes all examples into the cached arrays.

    Shapes:
        ids: [tokens]; starts: int64 [n + 1]; spans: int32 [2 answers], first and one past the last token of each
        answer; span_starts: int64 [n + 1]; numbers: int64 [n], of each record in its file; file_starts: int64 [files].
    """
    ids = array("H" if tokenizer.vocab_size <= 1 << 16 else "i")
    spans, starts, span_starts, numbers = array("i"), array("q", [0]), array("q", [0]), array("q")
    file_starts = [0] * len(source.names)
    cut_messages = cut_examples = 0
    for location, example, (example_ids, is_answer) in _encoded(source, template, tokenizer, copies_prompts):
        cut_messages += example.cut_messages
        cut_examples += example.cut_messages > 0
        ids.extend(example_ids)
        spans.extend(_spans(is_answer))
        starts.append(len(ids))
        span_starts.append(len(spans) // 2)
        numbers.append(location.number)
        for file in range(location.file + 1, len(file_starts)):
            file_starts[file] = len(numbers)
        if len(numbers) % _REPORTED_EXAMPLES == 0:
            log.info(f"{len(numbers):,} examples of {masked(source.names[0])} encoded")
    if not len(numbers):
        raise DataError(f"{source.names[0]} holds no examples. Write at least one record.")
    if cut_messages and not copies_prompts:  # the warning for copies would repeat it
        log.shared_warning(
            f"{cut_examples} of {len(numbers)} conversations in {source.names[0]} end without an answer; "
            f"their last {cut_messages} messages are skipped."
        )
    arrays = {"ids": ids, "starts": starts, "spans": spans, "span_starts": span_starts, "numbers": numbers}
    return {name: np.asarray(values) for name, values in arrays.items()} | {
        "file_starts": np.array(file_starts, np.int64)
    }


def _encoded(
    source: RecordSource, template: ChatTemplate, tokenizer: Tokenizer, copies_prompts: bool
) -> Iterator[tuple[RecordLocation, Example, tuple[list[int], list[bool]]]]:
    """Yields all examples with their ids, encoded in batches."""
    for batch in _batches(source):
        conversations = [
            with_copied_prompts(example.messages) if copies_prompts else example.messages for _, example in batch
        ]
        encodings = template.examples(conversations, tokenizer)
        for location, example in batch:
            path = f"{source.names[location.file]}:{location.number}"
            try:
                encoded = next(encodings)
            except (DataError, ConfigError) as failure:
                raise type(failure)(f"{path}: {failure}") from None
            if not any(encoded[1]):
                raise DataError(
                    f"{path}: the chat template {template.name} renders no token of the answer, so the model would "
                    "learn nothing from it. Correct or remove the record, or use another --chat-template."
                )
            yield location, example, encoded


def _batches(source: RecordSource) -> Iterator[list[tuple[RecordLocation, Example]]]:
    batch: list[tuple[RecordLocation, Example]] = []
    letters = 0
    for location, record in source.records():
        example = _example(record, f"{source.names[location.file]}:{location.number}")
        batch.append((location, example))
        letters += sum(len(text) for message in example.messages for text in message.values())
        if len(batch) == _BATCH_EXAMPLES or letters > _BATCH_LETTERS:
            yield batch
            batch, letters = [], 0
    if batch:
        yield batch


def _encoding_settings(tokenizer: Tokenizer) -> dict[str, object]:
    """Returns the settings of a tokenizer, besides its files, that determine the ids."""
    return {
        "end_of_document": tokenizer.eod_id,
        "special_ids": dict(tokenizer.special_ids),
        "behaviour": dict(tokenizer.behaviour),
    }


def _example(record: Any, location: str) -> Example:
    try:
        return example_of(record)
    except ValueError as failure:
        raise DataError(f"{location}: {failure}. Correct or remove the record.") from None


def _spans(is_answer: Sequence[bool]) -> list[int]:
    """Returns first and one past the last position of each run of answer tokens."""
    return [index for index, (before, after) in enumerate(pairwise([False, *is_answer, False])) if before != after]
