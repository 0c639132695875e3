"""From a request that was read to its answer: at once, or as a stream of events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.inference.generation import GeneratedToken
from megatron.inference.serve.metrics import Metrics
from megatron.inference.serve.requests.asks import Ask
from megatron.inference.serve.requests.refusals import Refusal
from megatron.inference.serve.requests.served import Served
from megatron.inference.serve.running.jobs import Job, Jobs
from megatron.inference.serve.running.texts import AnswerText, Piece

END_OF_EVENTS = b"data: [DONE]\n\n"


class Form(Protocol):
    """Writes the objects of an answer as one of the endpoints does."""

    def whole(self, pieces: Sequence[Piece], usage: dict[str, int]) -> dict[str, Any]: ...
    def opening(self) -> list[dict[str, Any]]: ...
    def chunk(self, place: int, piece: Piece) -> dict[str, Any]: ...
    def closing(self, usage: dict[str, int]) -> dict[str, Any]: ...


@dataclass
class Answer:
    """Generates what one request asks for.

    Args:
        name: of the answer, unique.
    """

    ask: Ask
    served: Served
    jobs: Jobs
    metrics: Metrics
    name: str
    _texts: list[AnswerText] = field(default_factory=list)

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
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

    async def whole(self) -> tuple[list[Piece], dict[str, int]]:
        """Every choice as one piece, and the usage.

        Raises:
            Refusal: see `pieces`.
        """
        found: list[list[Piece]] = [[] for _ in range(self.ask.sequences)]
        async with aclosing(self.pieces()) as pieces:
            async for place, piece in pieces:
                found[place].append(piece)
        return [_joined(pieces) for pieces in found], self.usage

    async def events(self, form: Form) -> AsyncGenerator[bytes, None]:
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
        """Tokens of the prompts and of the answers so far, those included that ended an answer."""
        answers = sum(text.generated_tokens for text in self._texts)
        prompts = self.ask.prompt_tokens
        return {"prompt_tokens": prompts, "completion_tokens": answers, "total_tokens": prompts + answers}

    def _text(self, place: int) -> AnswerText:
        ask = self.ask
        prompt = ask.prompts[place // ask.choices]
        keeps_tokens = ask.top_logprobs is not None
        return AnswerText(self.served.tokenizer, prompt, ask.stop_texts, ask.stop_ids, keeps_tokens)

    def _push(self, job: Job, place: int, token: GeneratedToken) -> Piece:
        piece = self._texts[place].push(token)
        if piece.finish is not None and token.finish is None:
            job.end(place)
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


def _joined(pieces: Sequence[Piece]) -> Piece:
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    return Piece("".join(piece.text for piece in pieces), tokens, pieces[-1].finish if pieces else None)
