"""Which texts take part in the next step, and with how many of their tokens. Runs no network.

A text enters when the memory of its whole length is free, so that nothing has to be evicted later. In every step each
running text that waits for one token takes part; prompts are computed in chunks whose bounds depend on the prompt
alone, as many per step as the budget allows, so that a long prompt does not hold up the others and the numbers of a
text do not depend on the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.inference.generation.request import Request
from megatron.inference.sampling import Chooser, Chosen
from megatron.model.interface.key_value_cache import TextCache
from megatron.model.interface.step_context import TextPart


@dataclass
class Text:
    """A request and its progress.

    Attributes:
        tokens: the prompt and what was generated.
        last_length: tokens at which the text ends.
        cache: keys and values of the tokens that were computed.
        context_number: which rotations the cached keys have; see `EngineLimits.contexts`.
        scored: tokens of the prompt from the second on that are scored, for a request that asks for it.
        draft: guesses of the tokens after the last one.
    """

    request: Request
    tokens: list[int]
    last_length: int
    cache: TextCache
    chooser: Chooser
    context_number: int = 0
    scored: list[Chosen] = field(default_factory=list)
    draft: Sequence[int] = ()

    @property
    def pending(self) -> int:
        """Tokens that are not in the cache."""
        return len(self.tokens) - self.cache.length


@dataclass(frozen=True)
class EngineLimits:
    """What the engine holds at once.

    Args:
        sequences: running texts.
        tokens: tokens of all running texts at their full lengths, counted in whole blocks.
        chunk_tokens: tokens of a prompt that are computed in one step.
        block_tokens: tokens of a block of the cache.
        whole_prompts: whether a prompt is computed in one step, however long it is, because its tokens attend to each
            other in both directions.
        short_context: length beyond which all tokens of a text are rotated differently, so that its cache is rebuilt;
            None if there is none.
    """

    sequences: int
    tokens: int
    chunk_tokens: int = 128
    block_tokens: int = 32
    whole_prompts: bool = False
    short_context: int | None = None

    def reserved(self, length: int) -> int:
        """Tokens of whole blocks for a text of this length."""
        return -(-length // self.block_tokens) * self.block_tokens


@dataclass(frozen=True)
class TextChunk:
    """The tokens of a text that are computed in a step.

    Attributes:
        count: how many of the text.
        draft: guesses that follow them.
    """

    text: Text
    count: int
    draft: Sequence[int] = ()

    @property
    def width(self) -> int:
        """How many tokens are computed."""
        return self.count + len(self.draft)

    @property
    def is_last(self) -> bool:
        """Whether the next token of the text can be chosen afterwards."""
        return self.count == self.text.pending

    @property
    def tokens(self) -> list[int]:
        """The token ids."""
        first = self.text.cache.length
        return [*self.text.tokens[first : first + self.count], *self.draft]

    @property
    def targets(self) -> list[tuple[int, int]]:
        """Tokens of the prompt that are to be scored, each with the place in the part of the one before it."""
        text, first = self.text, self.text.cache.length
        if not text.request.scores_prompt:
            return []
        begin, end = max(first, len(text.scored)), min(first + self.count, len(text.request.prompt) - 1)
        return [(place - first, text.tokens[place + 1]) for place in range(begin, end)]

    @property
    def place(self) -> TextPart:
        return TextPart(self.width, self.text.cache.length, len(self.text.tokens))


@dataclass
class TextSchedule:
    """The texts that run and those that wait, in the order in which they came."""

    limits: EngineLimits
    waiting: deque[Text] = field(default_factory=deque)
    running: list[Text] = field(default_factory=list)
    reserved_tokens: int = 0

    def __contains__(self, request_id: object) -> bool:
        return any(text.request.id == request_id for text in (*self.waiting, *self.running))

    def next_parts(self) -> list[TextChunk]:
        """Admits the texts that now fit, and says what is computed next."""
        self._admit()
        parts, left = [], self.limits.chunk_tokens
        for text in self.running:
            self._renew(text)
            if text.pending == 1:
                parts.append(TextChunk(text, 1, text.draft))
                continue
            count = text.pending if self.limits.whole_prompts else min(text.pending, self.limits.chunk_tokens)
            if count <= left or left == self.limits.chunk_tokens:
                parts.append(TextChunk(text, count))
                left -= count
        return parts

    def remove(self, text: Text) -> None:
        if text in self.running:
            self.running.remove(text)
            self.reserved_tokens -= self.limits.reserved(text.last_length)
            text.cache.clear()
        else:
            self.waiting.remove(text)

    def find(self, request_id: str) -> Text | None:
        """The text of a request; None if it is not here (any more)."""
        return next((text for text in (*self.waiting, *self.running) if text.request.id == request_id), None)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.limits.sequences:
            needed = self.limits.reserved(self.waiting[0].last_length)
            if self.reserved_tokens + needed > self.limits.tokens:
                return
            self.reserved_tokens += needed
            self.running.append(self.waiting.popleft())

    def _renew(self, text: Text) -> None:
        """Empties the cache of a text whose tokens are all rotated differently from now on."""
        number = int(self.limits.short_context is not None and len(text.tokens) > self.limits.short_context)
        if number != text.context_number:
            text.cache.clear()
            text.context_number = number
