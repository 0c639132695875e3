"""Examples as rows: one per row, or several that do not attend to each other.

An example longer than a row loses the beginning of its prompt, so that the last answer stays complete. Only an answer
that is itself too long is cut off at its end; a quarter of the row is reserved for the preceding text. Both cases are
counted and reported.
"""

from __future__ import annotations

import numpy as np

from megatron import log
from megatron.data.datasets.examples.tokenized_examples import TokenizedExamples
from megatron.data.order.index_cache import IndexCache, description_sha256
from megatron.data.order.packing import best_fit
from megatron.data.order.row_order import RowSource

_PROMPT_SHARE = 4  # a quarter of the row is reserved for the prompt of an answer that is too long


class ExampleRows(RowSource):
    """Rows filled with the examples [first, last); each epoch has the same rows in another order.

    Args:
        sequence_length: inputs of a sample.
        pack: put several examples in a row.
        on_targets_only: compute the loss on answers only, not on all tokens of an example.
        cache: stores the packing.
    """

    def __init__(
        self,
        examples: TokenizedExamples,
        first: int,
        last: int,
        sequence_length: int,
        *,
        pack: bool,
        on_targets_only: bool,
        cache: IndexCache,
    ) -> None:
        self.prefix = examples.prefix
        self._examples = examples
        self._first = first
        self._last = last
        self._length = sequence_length + 1
        self._on_targets_only = on_targets_only
        description = {
            "examples": examples.fingerprint,
            "first": first,
            "last": last,
            "sequence_length": sequence_length,
            "packed": pack,
        }
        self.fingerprint = description_sha256(description)
        self._kept = windows(examples.lengths[first:last], examples.last_answers[first:last], self._length)  # [n, 2]
        self._order, self._starts = np.arange(last - first), np.arange(last - first + 1)
        if pack:
            lengths = self._kept[:, 1] - self._kept[:, 0]
            key = {**description, "examples": description_sha256(examples.key)}
            packed = cache.arrays("rows", key, lambda: best_fit(lengths, self._length)._asdict())
            self._order, self._starts = packed["order"], packed["starts"]

    def __len__(self) -> int:
        return len(self._starts) - 1

    def of(self, examples: TokenizedExamples, cache: IndexCache) -> ExampleRows:
        """Returns rows, one per example, of other examples with the same indices."""
        return ExampleRows(
            examples,
            self._first,
            self._last,
            self._length - 1,
            pack=False,
            on_targets_only=self._on_targets_only,
            cache=cache,
        )

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens = np.full((len(rows), self._length), self._examples.padding_id, np.int64)
        segments = np.zeros(tokens.shape, np.int64)
        counts = np.zeros(tokens.shape, np.bool_)
        for index, row in enumerate(rows.tolist()):
            end = 0
            numbers = self._order[self._starts[row] : self._starts[row + 1]].tolist()
            for segment, number in enumerate(numbers):
                first, last = self._kept[number].tolist()
                target = slice(end, end + last - first)
                example = self._first + number
                tokens[index, target] = self._examples.ids(example)[first:last]
                counts[index, target] = self._examples.is_answer(example)[first:last] if self._on_targets_only else True
                segments[index, target] = segment
                end = target.stop
            segments[index, end:] = len(numbers)
        loss_mask = counts[:, 1:] & (segments[:, 1:] == segments[:, :-1])
        return tokens, loss_mask, segments[:, :-1]

    def locate(self, row: int, position: int) -> str:
        end = 0
        for number in self._order[self._starts[row] : self._starts[row + 1]].tolist():
            first, last = self._kept[number].tolist()
            start, end = end, end + last - first
            if position < end:
                token = first + position - start
                return f"{self._examples.locate(self._first + number)}: token {token} of the example"
        return f"{self.prefix}: padding at {position} of row {row}"

    def report(self, name: str) -> None:
        """Logs the fill ratio of the rows and the examples that did not fit, for the split `name`."""
        kept = int((self._kept[:, 1] - self._kept[:, 0]).sum())
        log.info(
            f"{name}: {len(self._kept):,} examples of {self.prefix} in {len(self):,} rows of {self._length} tokens, "
            f"{kept / (len(self) * self._length):.1%} filled"
        )
        first, last = self._first, self._first + len(self._kept)
        lengths = self._examples.lengths[first:last]
        answer_lost = self._kept[:, 0] > self._examples.first_answers[first:last, 0]
        cut_short = self._kept[:, 1] < self._examples.last_answers[first:last, 1]
        longer = lengths > self._length
        for affected, loss in (
            (longer & ~answer_lost & ~cut_short, "lose the beginning of their prompts"),
            (answer_lost & ~cut_short, "lose their first answers with the beginning of the conversation"),
            (cut_short, "lose the end of their answers, which are longer than a row"),
        ):
            if affected.any():
                worst = int(np.argmax(np.where(affected, lengths, -1)))
                log.shared_warning(
                    f"{name}: {int(affected.sum()):,} of {len(lengths):,} examples {loss}: the longest "
                    f"({self._examples.locate(first + worst)}) has {int(lengths[worst]):,} tokens, a row "
                    f"{self._length:,}. Increase --seq-length to keep them complete."
                )


def windows(lengths: np.ndarray, last_answers: np.ndarray, capacity: int) -> np.ndarray:
    """Returns the range of tokens that a row keeps of each example: all, or a window ending with the last answer.

    Shapes:
        lengths: int64 [n]; last_answers: int64 [n, 2], token range of each example's last answer; result: int64 [n, 2].

    Args:
        capacity: tokens of a row.
    """
    answer_firsts, answer_lasts = last_answers[:, 0], last_answers[:, 1]
    fits = lengths <= capacity
    firsts = np.maximum(answer_lasts - capacity, 0)
    no_prompt = (firsts >= answer_firsts) & (answer_firsts > 0)  # nothing would predict the answer's first token
    firsts = np.where(no_prompt, np.maximum(answer_firsts - capacity // _PROMPT_SHARE, 0), firsts)
    lasts = np.minimum(firsts + capacity, answer_lasts)
    return np.stack([np.where(fits, 0, firsts), np.where(fits, lengths, lasts)], axis=1).astype(np.int64)
