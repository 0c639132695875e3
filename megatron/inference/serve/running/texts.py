"""From the tokens of one answer to pieces of text, each with the tokens that it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.inference.generation import GeneratedToken
from megatron.inference.sampling import TextStream
from megatron.tokenizers.tokenizer import Tokenizer

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(frozen=True)
class TokenRecord:
    """A token of an answer.

    Args:
        offset: letters of the answer before the token's own.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True)
class Piece:
    """What has become certain of an answer: more text, the tokens behind it, and why it ended, if it did."""

    text: str
    tokens: tuple[TokenRecord, ...] = ()
    finish: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell the client."""
        return not self.text and not self.tokens and self.finish is None


class AnswerText:
    """Turns the tokens of one answer into text; nothing of a stop text or of a character in two parts leaves it.

    Args:
        stop_texts: end the answer and are not part of it.
        stop_ids: tokens that end the answer and have no text in it.
    """

    def __init__(self, tokenizer: Tokenizer, stop_texts: Sequence[str], stop_ids: frozenset[int]) -> None:
        self._stream = TextStream(tokenizer, stop_texts)
        self._stop_ids = stop_ids
        self._held: list[TokenRecord] = []
        self.generated_tokens = 0
        self.letters = 0
        self.finish: str | None = None

    def push(self, token: GeneratedToken) -> Piece:
        """Adds a token; a piece with `finish` is the last one."""
        self.generated_tokens += 1
        is_end = token.finish == "stop" and token.token in self._stop_ids
        text = "" if is_end else self._stream.push(token.token)
        if not is_end:
            top = tuple((other, max(logprob, _LOWEST_LOGPROB)) for other, logprob in token.top)
            self._held.append(TokenRecord(token.token, max(token.logprob, _LOWEST_LOGPROB), top, self.letters))
        if self._stream.stopped:
            self.finish = "stop"
        elif token.finish is not None:
            text += self._stream.finish()
            self.finish = "stop" if self._stream.stopped else token.finish
        self.letters += len(text)
        return Piece(text, self._released(bool(text)), self.finish)

    def _released(self, has_text: bool) -> tuple[TokenRecord, ...]:
        """The held tokens once their text is out; of those behind a stop text, none."""
        if not has_text and self.finish is None:
            return ()
        released = [record for record in self._held if record.offset < self.letters or not self._stream.stopped]
        self._held.clear()
        return tuple(released)
