"""The ids of all examples of a source, made once, kept next to the data and mapped by every process.

Making them all at the start finds every bad record before training, and gives the lengths that packing and the number
of rows depend on. A token takes two bytes, or four with more than 65,536 of them in the vocabulary.
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

_FORMAT = 2  # of the cached arrays and of how records become ids
_REPORTED_EXAMPLES = 100_000
_BATCH_EXAMPLES, _BATCH_LETTERS = 32, 1 << 18  # that a template is asked for together


class RecordPlace(NamedTuple):
    """Where a record is: its file, or a database, and its number there."""

    file: int
    number: int


@dataclass(frozen=True)
class RecordSource:
    """Records with their places.

    Args:
        names: of the files or the store, as messages show them.
        fingerprint: makes the hash of the content.
        records: gives all records in order.
    """

    names: Sequence[str]
    fingerprint: Callable[[], str]
    records: Callable[[], Iterator[tuple[RecordPlace, Any]]]

    @staticmethod
    def of_files(prefix: str) -> RecordSource:
        """The records of files, file after file, each with the number of its line.

        Raises:
            DataError: there is no file of that name or pattern.
        """
        names = example_files(prefix)

        def records() -> Iterator[tuple[RecordPlace, Any]]:
            for place, path in enumerate(names):
                for number, record in read_records(path):
                    yield RecordPlace(place, number), record

        return RecordSource(names, lambda: files_fingerprint(prefix), records)


def check_first_records(prefix: str) -> None:
    """Checks the first record of each file, which shows at once that a file holds something else.

    Lists are left out, because they are parsed as a whole.

    Raises:
        DataError: there is no such file, or a record is bad.
    """
    for path in example_files(prefix):
        for number, record in islice(read_records(path, with_lists=False), 1):
            _example(record, f"{path}:{number}")


class TokenizedExamples:
    """Examples by number, as ids.

    Args:
        prefix: the source as the user named it.
        cache: where the ids are kept.
        copies_prompts: whether each answer is replaced by the prompt before it.

    Attributes:
        key: everything that decides the ids; the cache finds them by it.

    Raises:
        ConfigError: the chat template cannot be used, or needs tokens that the vocabulary lacks.
        DataError: a record is bad, or there are none.
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
        self.key: dict[str, object] = {**self._description, "format": _FORMAT, **_decides_ids(tokenizer)}
        made = cache.arrays("examples", self.key, lambda: _tokenized(source, template, tokenizer, copies_prompts))
        self._ids, self._starts = made["ids"], made["starts"]
        self._spans, self._span_starts = made["spans"].reshape(-1, 2), made["span_starts"]
        self._numbers, self._file_starts = made["numbers"], made["file_starts"]

    def __len__(self) -> int:
        return len(self._starts) - 1

    @cached_property
    def fingerprint(self) -> str:
        """Hash over the records and what they are encoded with, by which a resumed run finds them again.

        It covers less than `key`: the tokenizer is compared with the checkpoint's.
        """
        return description_sha256(self._description)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example. Shapes: int64 [n]."""
        return np.diff(self._starts)

    @property
    def last_answers(self) -> np.ndarray:
        """Where the last answer of each example begins and ends. Shapes: int64 [n, 2]."""
        return self._spans[self._span_starts[1:] - 1].astype(np.int64)

    @property
    def first_answers(self) -> np.ndarray:
        """Where the first answer of each example begins and ends. Shapes: int64 [n, 2]."""
        return self._spans[self._span_starts[:-1]].astype(np.int64)

    def ids(self, example: int) -> np.ndarray:
        """The ids of an example. Shapes: int64 [length]."""
        return self._ids[self._starts[example] : self._starts[example + 1]].astype(np.int64)

    def is_answer(self, example: int) -> np.ndarray:
        """Which ids of an example are answers. Shapes: bool [length]."""
        is_answer = np.zeros(int(self._starts[example + 1] - self._starts[example]), np.bool_)
        for first, last in self._spans[self._span_starts[example] : self._span_starts[example + 1]].tolist():
            is_answer[first:last] = True
        return is_answer

    def place(self, example: int) -> str:
        """Where the record of an example is."""
        file = bisect_right(self._file_starts.tolist(), example) - 1
        return f"{self.names[file]}:{int(self._numbers[example])}"


def _tokenized(
    source: RecordSource, template: ChatTemplate, tokenizer: Tokenizer, copies_prompts: bool
) -> dict[str, np.ndarray]:
    """The arrays that are kept.

    Shapes:
        ids: [tokens]; starts: int64 [n + 1]; spans: int32 [2 answers], first and one past the last token of each
        answer; span_starts: int64 [n + 1]; numbers: int64 [n], of each record in its file; file_starts: int64 [files].
    """
    ids = array("H" if tokenizer.vocab_size <= 1 << 16 else "i")
    spans, starts, span_starts, numbers = array("i"), array("q", [0]), array("q", [0]), array("q")
    file_starts = [0] * len(source.names)
    cut_messages = cut_examples = 0
    for place, example, (example_ids, is_answer) in _encoded(source, template, tokenizer, copies_prompts):
        cut_messages += example.cut_messages
        cut_examples += example.cut_messages > 0
        ids.extend(example_ids)
        spans.extend(_spans(is_answer))
        starts.append(len(ids))
        span_starts.append(len(spans) // 2)
        numbers.append(place.number)
        for file in range(place.file + 1, len(file_starts)):
            file_starts[file] = len(numbers)
        if len(numbers) % _REPORTED_EXAMPLES == 0:
            log.info(f"{len(numbers):,} examples of {masked(source.names[0])} encoded")
    if not len(numbers):
        raise DataError(f"{source.names[0]} holds no examples. Write at least one record.")
    if cut_messages and not copies_prompts:  # said of the examples themselves
        log.shared_warning(
            f"{cut_examples} of {len(numbers)} conversations in {source.names[0]} end without an answer; "
            f"their last {cut_messages} messages are left out."
        )
    made = {"ids": ids, "starts": starts, "spans": spans, "span_starts": span_starts, "numbers": numbers}
    return {name: np.asarray(values) for name, values in made.items()} | {
        "file_starts": np.array(file_starts, np.int64)
    }


def _encoded(
    source: RecordSource, template: ChatTemplate, tokenizer: Tokenizer, copies_prompts: bool
) -> Iterator[tuple[RecordPlace, Example, tuple[list[int], list[bool]]]]:
    """All examples with their ids, made in batches."""
    for batch in _batches(source):
        conversations = [
            with_copied_prompts(example.messages) if copies_prompts else example.messages for _, example in batch
        ]
        made = template.examples(conversations, tokenizer)
        for place, example in batch:
            shown = f"{source.names[place.file]}:{place.number}"
            try:
                encoded = next(made)
            except (DataError, ConfigError) as failure:
                raise type(failure)(f"{shown}: {failure}") from None
            if not any(encoded[1]):
                raise DataError(
                    f"{shown}: the chat template {template.name} writes no token of its answer, so nothing would be "
                    "learned from it. Correct the record, or leave it out; or use another --chat-template."
                )
            yield place, example, encoded


def _batches(source: RecordSource) -> Iterator[list[tuple[RecordPlace, Example]]]:
    batch: list[tuple[RecordPlace, Example]] = []
    letters = 0
    for place, record in source.records():
        example = _example(record, f"{source.names[place.file]}:{place.number}")
        batch.append((place, example))
        letters += sum(len(text) for message in example.messages for text in message.values())
        if len(batch) == _BATCH_EXAMPLES or letters > _BATCH_LETTERS:
            yield batch
            batch, letters = [], 0
    if batch:
        yield batch


def _decides_ids(tokenizer: Tokenizer) -> dict[str, object]:
    """What besides its files decides the ids that a tokenizer gives."""
    return {
        "end_of_document": tokenizer.eod_id,
        "special_ids": dict(tokenizer.special_ids),
        "behaviour": dict(tokenizer.behaviour),
    }


def _example(record: Any, place: str) -> Example:
    try:
        return example_of(record)
    except ValueError as failure:
        raise DataError(f"{place}: {failure}. Correct the record, or leave it out.") from None


def _spans(is_answer: Sequence[bool]) -> list[int]:
    """First and one past the last position of each stretch of answers."""
    return [place for place, (before, after) in enumerate(pairwise([False, *is_answer, False])) if before != after]
