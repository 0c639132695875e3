"""The tokens of one answer as deltas of text, each with the tokens that it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.inference.generation import GeneratedToken
from megatron.inference.sampling.text_stream import IncrementalDecoder, TextStream
from megatron.tokenizers.tokenizer import Tokenizer

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(frozen=True)
class TokenRecord:
    """A token of an answer, or of its prompt.

    Args:
        logprob: None for the first token of a prompt.
        offset: characters of the answer before this token's text; negative in the prompt, which ends at 0.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True)
class AnswerDelta:
    """A new final part of an answer: text, the tokens behind it, and the finish reason in the last one."""

    text: str
    tokens: tuple[TokenRecord, ...] = ()
    finish: str | None = None

    @property
    def is_empty(self) -> bool:
        return not self.text and not self.tokens and self.finish is None


class AnswerText:
    """Decodes the tokens of one answer; incomplete characters and possible beginnings of stop texts are held back.

    Args:
        prompt: tokens before the answer; a leading space of the answer may depend on them.
        stop_texts: end the answer and are not part of it.
        stop_ids: tokens that end the answer and have no text in it.
        keeps_tokens: add the tokens to the deltas.
        keeps_prompt: with `keeps_tokens`, add the prompt's tokens to the first delta and the stop token to the last.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop_texts: Sequence[str],
        stop_ids: frozenset[int],
        keeps_tokens: bool = False,
        keeps_prompt: bool = False,
    ) -> None:
        self._stream = TextStream(tokenizer, stop_texts, prompt)
        self._tokenizer = tokenizer
        self._prompt = tuple(prompt)
        self._keeps_prompt = keeps_tokens and keeps_prompt
        self._stop_ids = stop_ids
        self._unstopped = IncrementalDecoder(tokenizer, prompt) if keeps_tokens else None
        self._unstopped_letters = 0
        self._held: list[TokenRecord] = []
        self._letters = 0
        self.generated_tokens = 0
        self.finish: str | None = None

    def push(self, token: GeneratedToken) -> AnswerDelta:
        """Adds a token; returns the next delta, which has `finish` set if it is the last."""
        self.generated_tokens += token.token is not None
        text = ""
        if self._keeps_prompt and self._prompt:
            self._held += self._of_prompt(token)
            self._prompt = ()
        if token.token is not None and not (token.finish == "stop" and token.token in self._stop_ids):
            text = self._stream.push(token.token)
            self._hold(token, token.token)
        elif token.token is not None and self._keeps_prompt:
            self._hold(token, token.token)
        if self._stream.is_stopped:
            self.finish = "stop"
        elif token.finish is not None:
            text += self._stream.finish()
            self.finish = "stop" if self._stream.is_stopped else token.finish
        self._letters += len(text)
        return AnswerDelta(text, self._released(), self.finish)

    def _hold(self, token: GeneratedToken, number: int) -> None:
        if self._unstopped is None:
            return
        self._held.append(_record(number, token.logprob, token.top, self._unstopped_letters))
        self._unstopped_letters += len(self._unstopped.push(number))

    def _of_prompt(self, token: GeneratedToken) -> list[TokenRecord]:
        """The records of the prompt's tokens."""
        decoder, letters, offsets = IncrementalDecoder(self._tokenizer), 0, []
        for number in self._prompt:
            offsets.append(letters)
            letters += len(decoder.push(number))
        records = [TokenRecord(self._prompt[0], None, (), min(-letters, -1))]
        for one, offset in zip(token.prompt, offsets[1:], strict=True):
            records.append(_record(one.token, one.logprob, one.top, min(offset - letters, -1)))
        return records

    def _released(self) -> tuple[TokenRecord, ...]:
        """Takes the held tokens whose text has begun to be released; at the end all, except in a stop text."""
        is_whole = self.finish is not None and not self._stream.is_stopped
        count = sum(is_whole or record.offset < self._letters for record in self._held)
        released, self._held = self._held[:count], self._held[count:]
        return tuple(released)


def _record(number: int, logprob: float, top: Sequence[tuple[int, float]], offset: int) -> TokenRecord:
    limited = tuple((other, max(value, _LOWEST_LOGPROB)) for other, value in top)
    return TokenRecord(number, max(logprob, _LOWEST_LOGPROB), limited, offset)
