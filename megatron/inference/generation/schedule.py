"""The scheduler: the texts of the next step, and their numbers of tokens. Runs no network.

A text is admitted once the memory of its full length is free, so that nothing has to be evicted later. Every step
includes each running text with one pending token. Prompts are computed in chunks, as many per step as the budget
allows, so that a long prompt does not hold up the others; the bounds of the chunks depend only on the prompt, so that a
text's results do not depend on other texts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.inference.generation.request import Request
from megatron.inference.sampling import Chooser, TokenChoice
from megatron.model.interface.key_value_cache import TextCache
from megatron.model.interface.step_context import TextPart


@dataclass
class Text:
    """A request and its progress.

    Attributes:
        tokens: the prompt and the generated tokens.
        last_length: maximum length of the text, in tokens.
        cache: keys and values of the computed tokens.
        context_number: 1 if the cached keys have the rotations of long texts; see `EngineLimits.short_context`.
        scored: the scored tokens of the prompt, from the second on, for a request with `scores_prompt`.
        draft: drafted tokens after the last one.
    """

    request: Request
    tokens: list[int]
    last_length: int
    cache: TextCache
    chooser: Chooser
    context_number: int = 0
    scored: list[TokenChoice] = field(default_factory=list)
    draft: Sequence[int] = ()

    @property
    def pending(self) -> int:
        """Number of tokens that are not in the cache."""
        return len(self.tokens) - self.cache.length


@dataclass(frozen=True)
class EngineLimits:
    """The limits of the engine.

    Args:
        sequences: most running texts.
        tokens: most tokens of all running texts at their full lengths, in whole blocks.
        chunk_tokens: most tokens of a prompt per step.
        block_tokens: tokens of a block of the cache.
        whole_prompts: compute each prompt in one step, because its tokens attend to each other in both directions.
        short_context: length beyond which all tokens of a text are rotated differently, so that its cache is rebuilt;
            None for none.
    """

    sequences: int
    tokens: int
    chunk_tokens: int = 128
    block_tokens: int = 32
    whole_prompts: bool = False
    short_context: int | None = None

    def reserved(self, length: int) -> int:
        """Tokens reserved for a text of this length, in whole blocks."""
        return -(-length // self.block_tokens) * self.block_tokens


@dataclass(frozen=True)
class TextChunk:
    """The tokens of a text in a step.

    Attributes:
        count: number of the text's tokens.
        draft: drafted tokens after them.
    """

    text: Text
    count: int
    draft: Sequence[int] = ()

    @property
    def width(self) -> int:
        """Number of computed tokens."""
        return self.count + len(self.draft)

    @property
    def is_last(self) -> bool:
        """True if the text's next token can be chosen afterwards."""
        return self.count == self.text.pending

    @property
    def tokens(self) -> list[int]:
        first = self.text.cache.length
        return [*self.text.tokens[first : first + self.count], *self.draft]

    @property
    def targets(self) -> list[tuple[int, int]]:
        """The prompt tokens to score, each after the index in the chunk of the token before it."""
        text, first = self.text, self.text.cache.length
        if not text.request.scores_prompt:
            return []
        start, end = max(first, len(text.scored)), min(first + self.count, len(text.request.prompt) - 1)
        return [(index - first, text.tokens[index + 1]) for index in range(start, end)]

    @property
    def text_part(self) -> TextPart:
        return TextPart(self.width, self.text.cache.length, len(self.text.tokens))


@dataclass
class TextSchedule:
    """The running and the waiting texts, in order of arrival."""

    limits: EngineLimits
    waiting: deque[Text] = field(default_factory=deque)
    running: list[Text] = field(default_factory=list)
    reserved_tokens: int = 0

    def __contains__(self, request_id: object) -> bool:
        return any(text.request.id == request_id for text in (*self.waiting, *self.running))

    def next_chunks(self) -> list[TextChunk]:
        """Admits the texts that fit now, and returns the chunks of the next step."""
        self._admit()
        chunks, left = [], self.limits.chunk_tokens
        for text in self.running:
            self._renew(text)
            if text.pending == 1:
                chunks.append(TextChunk(text, 1, text.draft))
                continue
            count = text.pending if self.limits.whole_prompts else min(text.pending, self.limits.chunk_tokens)
            if count <= left or left == self.limits.chunk_tokens:
                chunks.append(TextChunk(text, count))
                left -= count
        return chunks

    def remove(self, text: Text) -> None:
        if text in self.running:
            self.running.remove(text)
            self.reserved_tokens -= self.limits.reserved(text.last_length)
            text.cache.clear()
        else:
            self.waiting.remove(text)

    def find(self, request_id: str) -> Text | None:
        """The text of a request; None if it is neither running nor waiting."""
        return next((text for text in (*self.waiting, *self.running) if text.request.id == request_id), None)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.limits.sequences:
            needed = self.limits.reserved(self.waiting[0].last_length)
            if self.reserved_tokens + needed > self.limits.tokens:
                return
            self.reserved_tokens += needed
            self.running.append(self.waiting.popleft())

    def _renew(self, text: Text) -> None:
        """Clears the cache of a text that has grown beyond the short context."""
        number = int(self.limits.short_context is not None and len(text.tokens) > self.limits.short_context)
        if number != text.context_number:
            text.cache.clear()
            text.context_number = number
