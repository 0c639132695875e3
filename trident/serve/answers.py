"""The answer to one request: generated piece by piece, and written as OpenAI's clients expect it."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron.inference.generation import GeneratedToken
from trident.serve.execution.answer_text import AnswerPiece, AnswerText
from trident.serve.execution.jobs import GenerationJob, Jobs
from trident.serve.metrics import ServerMetrics
from trident.serve.requests.asks import Ask
from trident.serve.requests.refusals import Refusal
from trident.serve.requests.served import Served

END_OF_EVENTS = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class AnswerForm(ABC):
    """Writes the objects of an answer; an endpoint's own form says what a choice looks like in them.

    Args:
        name: of this answer.
        created_at: seconds since 1970.
    """

    ask: Ask
    served: Served
    name: str
    created_at: int
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    @abstractmethod
    def opening_choices(self) -> list[dict[str, Any]]:
        """What a stream begins with, before any token: one chunk for each."""

    @abstractmethod
    def choice(self, place: int, piece: AnswerPiece, *, is_whole: bool = False) -> dict[str, Any]:
        """A choice, or a part of one."""

    def whole(self, pieces: Sequence[AnswerPiece], usage: dict[str, int]) -> dict[str, Any]:
        """The answer as one object; one piece for each choice."""
        choices = [self.choice(place, piece, is_whole=True) for place, piece in enumerate(pieces)]
        return {**self._object(self.whole_kind, choices), "usage": usage}

    def opening(self) -> list[dict[str, Any]]:
        return [self._object(self.chunk_kind, [choice]) for choice in self.opening_choices()]

    def chunk(self, place: int, piece: AnswerPiece) -> dict[str, Any]:
        return self._object(self.chunk_kind, [self.choice(place, piece)])

    def closing(self, usage: dict[str, int]) -> dict[str, Any]:
        """The end of a stream that was asked for its usage."""
        return {**self._object(self.chunk_kind, []), "usage": usage}

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": kind,
            "created": self.created_at,
            "model": self.served.name,
            "system_fingerprint": self.served.fingerprint,
            "choices": choices,
        }


@dataclass
class Answer:
    """Generates what one request asks for.

    Args:
        name: of the answer, unique.
    """

    ask: Ask
    served: Served
    jobs: Jobs
    metrics: ServerMetrics
    name: str
    _texts: list[AnswerText] = field(default_factory=list)

    async def pieces(self) -> AsyncGenerator[tuple[int, AnswerPiece], None]:
        """The pieces of all choices, each with the place of its choice, as they become certain.

        Raises:
            Refusal: the server cannot take the request, or not complete it.
        """
        self._texts = [self._text(place) for place in range(self.ask.sequences)]
        started_at = time.perf_counter()
        latest: dict[int, float] = {}
        with self.jobs.opened(self.name, self.ask.requests(self.name)) as job:
            self.metrics.prompt_tokens.inc(self.ask.prompt_tokens)
            async for place, token in job.tokens():
                self._time(place, started_at, latest)
                piece = self._push(job, place, token)
                if not piece.is_empty:
                    yield place, piece
        self.metrics.request_seconds.observe(time.perf_counter() - started_at)

    async def whole(self) -> tuple[list[AnswerPiece], dict[str, int]]:
        """Every choice as one piece, and the usage.

        Raises:
            Refusal: see `pieces`.
        """
        by_choice: list[list[AnswerPiece]] = [[] for _ in range(self.ask.sequences)]
        async with aclosing(self.pieces()) as pieces:
            async for place, piece in pieces:
                by_choice[place].append(piece)
        return [_joined(pieces) for pieces in by_choice], self.usage

    async def events(self, form: AnswerForm) -> AsyncGenerator[bytes, None]:
        """Server-sent events; a refusal after the first of them is an event too, because the status has been sent.

        Raises:
            Refusal: see `pieces`; before the first event.
        """
        is_open = False
        try:
            async with aclosing(self.pieces()) as pieces:
                async for place, piece in pieces:
                    for chunk in [] if is_open else form.opening():
                        yield event(chunk)
                    is_open = True
                    yield event(form.chunk(place, piece))
        except Refusal as refusal:
            if not is_open:
                raise
            yield event(refusal.to_json())
            return
        if self.ask.with_usage:
            yield event(form.closing(self.usage))
        yield END_OF_EVENTS

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of the prompts and of the answers so far, including the ones that ended an answer."""
        answers = sum(text.generated_tokens for text in self._texts)
        prompts = self.ask.prompt_tokens
        return {"prompt_tokens": prompts, "completion_tokens": answers, "total_tokens": prompts + answers}

    def _text(self, place: int) -> AnswerText:
        ask = self.ask
        prompt = ask.prompts[place // ask.choices]
        keeps_tokens = ask.top_logprobs is not None
        return AnswerText(self.served.tokenizer, prompt, ask.stop_texts, ask.stop_ids, keeps_tokens, ask.scores_prompts)

    def _push(self, job: GenerationJob, place: int, token: GeneratedToken) -> AnswerPiece:
        piece = self._texts[place].push(token)
        if piece.finish is not None and token.finish is None:
            job.end(place)
        if token.token is not None:
            self.metrics.generated_tokens.inc()
        return piece

    def _time(self, place: int, started_at: float, latest: dict[int, float]) -> None:
        now = time.perf_counter()
        if place in latest:
            self.metrics.token_seconds.observe(now - latest[place])
        else:
            self.metrics.first_token_seconds.observe(now - started_at)
        latest[place] = now


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _joined(pieces: Sequence[AnswerPiece]) -> AnswerPiece:
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    return AnswerPiece("".join(piece.text for piece in pieces), tokens, pieces[-1].finish if pieces else None)
