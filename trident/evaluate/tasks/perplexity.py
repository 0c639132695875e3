"""Perplexity of text: the loss per token, and per word and per byte, which do not depend on the tokenizer.

A text longer than the window is scored in overlapping windows. Items are parts of a document of about a window's
tokens; adjacent items count as independent in the standard errors.

The first window scores all of its tokens. Each later one starts `stride` tokens after the one before and scores only
its last `stride` tokens, so that every token is scored exactly once and, with a small stride, after a long context.

Detokenizers undo the spacing of datasets that were published as words between blanks, so that the tokenizer sees plain
text. Their rules run in order; white space inside of quotes and brackets is removed.

Source of the rules: bigscience Megatron-DeepSpeed `tasks/zeroshot_gpt/detokenizer.py`, except a rule for `/' 5/`, which
there replaces the digit by the text of a pattern.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from megatron.config import flag
from megatron.errors import ConfigError
from megatron.tokenizers.prompts import encode_document, special_bytes, start_ids
from megatron.tokenizers.tokenizer import Tokenizer
from trident.evaluate.item_files import ScoredDocument, read_documents
from trident.evaluate.scoring import Query, Score
from trident.evaluate.statistics import Estimate, exponential, ratio, scaled
from trident.evaluate.tasks.task import SHOWN_MISTAKES, Mistake, Prepared, ScoredTask, TaskMeasurement, shown_end

_SHOWN_TOKENS = 48

Rule = Callable[[str], str]


def _replace(*pairs: tuple[str, str]) -> tuple[Rule, ...]:
    return tuple(lambda text, pair=pair: text.replace(*pair) for pair in pairs)  # type: ignore[misc]


def _trim_inside(opening: str, closing: str) -> Rule:
    pattern = re.compile(f"{re.escape(opening)}([^{re.escape(closing)}]*){re.escape(closing)}")
    return lambda text: pattern.sub(lambda inside: opening + inside.group(1).strip() + closing, text)


def _words_between_white_space(text: str) -> int:
    return len(text.split())


def _words_between_blanks(text: str) -> int:
    """A line end between blanks counts as a word, as in the published perplexities of these datasets."""
    return len(text.strip().split(" "))


@dataclass(frozen=True)
class Detokenizer:
    """The conversion of a dataset's spacing to plain text.

    Attributes:
        rules: replacements that restore plain text.
        count_words: counts the words of the text as published, for the adjusted perplexity.
    """

    rules: tuple[Rule, ...]
    count_words: Callable[[str], int]

    def __call__(self, text: str) -> str:
        for rule in self.rules:
            text = rule(text)
        return text


_WIKITEXT = (
    *_replace(("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")),
    *_replace(*((f" {mark} ", f"{mark} ") for mark in ":;.!?,")),
    _trim_inside("(", ")"),
    _trim_inside("[", "]"),
    _trim_inside("{", "}"),
    _trim_inside('"', '"'),
    _trim_inside("'", "'"),
    *_replace(("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}")),
    *_replace((" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")),
)
_PENN_TREEBANK = _replace(
    (" '", "'"), (" \n", "\n"), ("\n ", "\n"), (" n't", "n't"), (" N ", "1 "), ("$ 1", "$1"), ("# 1", "#1")
)

DETOKENIZERS = {
    "none": Detokenizer((), _words_between_white_space),
    "wikitext": Detokenizer(_WIKITEXT, _words_between_blanks),
    "ptb": Detokenizer(_PENN_TREEBANK, _words_between_blanks),
}


@dataclass(frozen=True)
class Perplexity(ScoredTask):
    """Perplexity of a text, the texts of a jsonl file, or a token file."""

    kind: ClassVar[str] = "perplexity"

    key: str = flag("text", "key of the text in a jsonl file")
    window: int | None = flag(None, "most tokens scored by a query; by default the network's positions", at_least=1)
    stride: int | None = flag(
        None, "tokens between the starts of overlapping windows; by default half a window", at_least=1
    )
    detokenizer: str = flag("none", "spacing of the dataset to undo", choices=tuple(DETOKENIZERS))
    start: str = flag(
        "eod",
        "token before a document: the tokenizer's start token or else the end-of-document token; or none, which skips "
        "the document's first token",
        choices=("eod", "nothing"),
    )  # fmt: skip

    def prepare(self, tokenizer: Tokenizer, max_length: int, limit: int | None) -> Prepared:
        window = max_length - 1 if self.window is None else self.window
        if window >= max_length:
            raise ConfigError(
                f"--window {window} of the task {self.title} exceeds the {max_length - 1} positions of the "
                "network. Use a smaller window."
            )
        stride = max(1, window // 2) if self.stride is None else self.stride
        parts: list[Part] = []
        queries: list[Query] = []
        for document in read_documents(self.path, self.key, tokenizer):
            if limit is not None and len(parts) >= limit:
                break
            for part, part_queries in self._parts(document, tokenizer, window, stride):
                parts.append(part)
                queries += part_queries
        kept = parts[:limit]
        notes = (f"windows of {window} tokens, {stride} apart",)
        return PreparedText(tuple(kept), queries[: sum(one.queries for one in kept)], tokenizer, notes=notes)

    def _parts(
        self, document: ScoredDocument, tokenizer: Tokenizer, window: int, stride: int
    ) -> Iterator[tuple[Part, list[Query]]]:
        detokenizer = DETOKENIZERS[self.detokenizer]
        if document.tokens is not None:
            tokens = document.ids(tokenizer)
            raw = text = tokenizer.decode(tokens)
        else:
            raw = document.text or ""
            text = detokenizer(raw)
            tokens = encode_document(tokenizer, text)
        words = detokenizer.count_words(raw)
        text_bytes = len(text.encode(errors="replace")) - special_bytes(tokenizer, tokens)
        start = start_ids(tokenizer)[-1:] if self.start == "eod" else []
        if not start and tokens:
            words, text_bytes = words - 1, text_bytes - len(tokenizer.decode(tokens[:1]).encode())
            start, tokens = tokens[:1], tokens[1:]
        tokens, scored = [*start, *tokens], len(tokens)
        group: list[Query] = []
        before = count = 0
        for query in overlapping_windows(tokens, window, stride):
            group.append(query)
            count += len(query.targets)
            if count >= window or before + count == scored:
                share = Fraction(count, scored)
                source = f"{document.source}, token {before}"
                yield Part(source, len(group), count, max(words, 0) * share, max(text_bytes, 0) * share), group
                group, before, count = [], before + count, 0


@dataclass(frozen=True)
class Part:
    """A part of a document, of about a window's tokens.

    Attributes:
        queries: number of its queries.
        tokens: number of scored tokens.
        words: its share of the document's words, by tokens.
        text_bytes: its share of the document's bytes in UTF-8, by tokens.
    """

    source: str
    queries: int
    tokens: int
    words: Fraction
    text_bytes: Fraction


@dataclass(frozen=True)
class PreparedText(Prepared):
    """Parts of text with their queries, in order."""

    items: Sequence[Part]
    tokenizer: Tokenizer

    def measure(self, scores: Sequence[Score], *, is_uniform: bool = False) -> TaskMeasurement:
        """Loss, perplexity, bits per byte, and the share of predicted tokens."""
        nats, right, per_item = [], [], []
        first = 0
        for part in self.items:
            indices = range(first, first + part.queries)
            first += part.queries
            nats.append(-math.fsum(scores[number].logprob for number in indices))
            hits = sum(
                predicted == token
                for number in indices
                for predicted, token in zip(scores[number].predicted, self.queries[number].targets, strict=True)
            )
            right.append(math.exp(-nats[-1] / part.tokens) * part.tokens if is_uniform else float(hits))
            per_item.append({"item": part.source, "nats": nats[-1], "tokens": part.tokens})
        tokens = [part.tokens for part in self.items]
        loss = ratio(nats, tokens)
        estimates = {"loss": loss, "ppl": exponential(loss), **self._per_unit(nats), "acc": ratio(right, tokens)}
        return TaskMeasurement(estimates, tuple(per_item), () if is_uniform else tuple(self._mistakes(scores)))

    def _per_unit(self, nats: Sequence[float]) -> dict[str, Estimate]:
        figures = {}
        words, text_bytes = ([getattr(one, name) for one in self.items] for name in ("words", "text_bytes"))
        if sum(words):
            figures["adjusted_ppl"] = exponential(ratio(nats, [float(count) for count in words]))
            figures["token_ratio"] = Estimate(float(sum(one.tokens for one in self.items) / sum(words)), None)
        if sum(text_bytes):
            figures["bits_per_byte"] = scaled(ratio(nats, [float(count) for count in text_bytes]), 1 / math.log(2))
        return figures

    def _mistakes(self, scores: Sequence[Score]) -> Iterator[Mistake]:
        """The first mispredicted token in the first query of each of the first few items that have one."""
        first = shown = 0
        for part in self.items:
            query, score = self.queries[first], scores[first]
            first += part.queries
            pairs = zip(score.predicted, query.targets, strict=True)
            wrong = [index for index, (predicted, meant) in enumerate(pairs) if predicted != meant]
            if wrong and shown < SHOWN_MISTAKES:
                shown += 1
                position = query.first_target + wrong[0]
                context = self.tokenizer.decode(query.tokens[max(0, position - _SHOWN_TOKENS) : position])
                expected, predicted = (
                    self.tokenizer.decode([token]) for token in (query.tokens[position], score.predicted[wrong[0]])
                )
                yield Mistake(part.source, shown_end(context), expected, predicted)


def overlapping_windows(tokens: Sequence[int], window: int, stride: int) -> Iterator[Query]:
    """The queries that score every token but the first exactly once.

    Args:
        window: most tokens that a query scores, and one less than it may hold.
        stride: tokens scored by each query after the first; limited to the window.

    Source: bigscience Megatron-DeepSpeed `tasks/zeroshot_gpt/datasets.py` (`--overlapping-eval`).
    """
    stride = max(1, min(stride, window))
    stop = min(window + 1, len(tokens))
    done = 1
    while done < len(tokens):
        start = max(0, done - 1 - (window - stride))
        yield Query(tuple(tokens[start:stop]), done - start)
        done, stop = stop, min(stop + stride, len(tokens))
