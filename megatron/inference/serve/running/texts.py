"""From the tokens of one answer to pieces of text, each with the tokens that it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.inference.generation import GeneratedToken
from megatron.inference.sampling.incremental_decoder import IncrementalDecoder
from megatron.inference.sampling.text_stream import TextStream
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
        prompt: tokens before the answer; whether the answer begins with a space may depend on them.
        stop_texts: end the answer and are not part of it.
        stop_ids: tokens that end the answer and have no text in it.
        keeps_tokens: whether pieces say which tokens they came from.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop_texts: Sequence[str],
        stop_ids: frozenset[int],
        keeps_tokens: bool = False,
    ) -> None:
        self._stream = TextStream(tokenizer, stop_texts, prompt)
        self._stop_ids = stop_ids
        self._unstopped = IncrementalDecoder(tokenizer, prompt) if keeps_tokens else None
        self._unstopped_letters = 0
        self._held: list[TokenRecord] = []
        self._letters = 0
        self.generated_tokens = 0
        self.finish: str | None = None

    def push(self, token: GeneratedToken) -> Piece:
        """Adds a token; a piece with `finish` is the last one."""
        self.generated_tokens += 1
        text = ""
        if token.token is not None and not (token.finish == "stop" and token.token in self._stop_ids):
            text = self._stream.push(token.token)
            self._hold(token, token.token)
        if self._stream.is_stopped:
            self.finish = "stop"
        elif token.finish is not None:
            text += self._stream.finish()
            self.finish = "stop" if self._stream.is_stopped else token.finish
        self._letters += len(text)
        return Piece(text, self._released(), self.finish)

    def _hold(self, token: GeneratedToken, number: int) -> None:
        if self._unstopped is None:
            return
        top = tuple((other, max(logprob, _LOWEST_LOGPROB)) for other, logprob in token.top)
        logprob = max(token.logprob, _LOWEST_LOGPROB)
        self._held.append(TokenRecord(number, logprob, top, self._unstopped_letters))
        self._unstopped_letters += len(self._unstopped.push(number))

    def _released(self) -> tuple[TokenRecord, ...]:
        """The tokens whose text has begun to come out; at the end all, but none of a stop text."""
        is_whole = self.finish is not None and not self._stream.is_stopped
        count = sum(is_whole or record.offset < self._letters for record in self._held)
        released, self._held = self._held[:count], self._held[count:]
        return tuple(released)
