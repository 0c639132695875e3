"""What each endpoint does, apart from HTTP: a body or a query in, a reply out."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.inference.generation import GeneratedToken
from megatron.inference.serve.chat import ChatForm, read_chat
from megatron.inference.serve.completions import CompletionForm, read_completion
from megatron.inference.serve.metrics import ServerMetrics
from megatron.inference.serve.requests.asks import Ask
from megatron.inference.serve.requests.fields import JsonFields, read_object
from megatron.inference.serve.requests.limits import ServerLimits
from megatron.inference.serve.requests.refusals import Refusal, starting, stopping
from megatron.inference.serve.requests.served import Served
from megatron.inference.serve.running.jobs import GenerationJob, Jobs
from megatron.inference.serve.running.texts import AnswerPiece, AnswerText
from megatron.inference.serve.single_turn import HEADERS, SingleTurn, response_of

STARTING, READY, STOPPING = "starting", "ready", "stopping"

# Reading a longer body takes long enough to hold up the streams of others, so another thread does it.
_LONG_BODY_BYTES = 16 << 10
END_OF_EVENTS = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Reply:
    """An answer for HTTP to send.

    Args:
        content: an object that becomes JSON.
        first_event: of a stream.
        events: the others, which are generated while they are sent.
    """

    content: Any = None
    first_event: bytes = b""
    events: AsyncGenerator[bytes, None] | None = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Service:
    """The endpoints of one server; they belong to the event loop's thread.

    Args:
        served: the model, once it is loaded.
        single_turn: how `/generate` answers.
    """

    limits: ServerLimits
    jobs: Jobs
    metrics: ServerMetrics
    single_turn: SingleTurn
    served: Served | None = None
    state: str = STARTING

    def open(self, served: Served) -> None:
        """Takes requests from now on."""
        if self.state == STARTING:
            self.served, self.state = served, READY

    def drain(self) -> None:
        """Takes no more requests, and completes the ones it has."""
        self.state = STOPPING
        self.jobs.refuse_new(stopping())

    def end(self, refusal: Refusal) -> None:
        """Takes no more requests, and ends the ones it has with a refusal."""
        self.state = STOPPING
        self.jobs.end_all(refusal)

    async def completions(self, body: bytes) -> Reply:
        """`POST /v1/completions`."""
        is_long = len(body) >= _LONG_BODY_BYTES
        return await self._generate(body, read_completion, CompletionForm, "cmpl-", in_thread=is_long)

    async def chat(self, body: bytes) -> Reply:
        """`POST /v1/chat/completions`."""
        # A chat template is rendered by another process, which may use up its time.
        return await self._generate(body, read_chat, ChatForm, "chatcmpl-", in_thread=True)

    async def generate(self, query: Mapping[str, str]) -> Reply:
        """`GET /generate`."""
        ask = await asyncio.to_thread(self.single_turn.ask, query, self.model, self.limits)
        pieces, _ = await self._answer(ask, "gen-").whole()
        return Reply(response_of(query["sentence"], pieces[0].text), headers=HEADERS)

    def models(self) -> Reply:
        """`GET /v1/models`."""
        return Reply({"object": "list", "data": [self._model()]})

    def one_model(self, name: str) -> Reply:
        """`GET /v1/models/NAME`.

        Raises:
            Refusal: it is not the model that is served.
        """
        if name != self.model.name:
            raise Refusal(404, f"The model {name[:200]!r} is not served here.", "model", "model_not_found")
        return Reply(self._model())

    def health(self) -> Reply:
        """`GET /health`: 200 only while requests are taken."""
        shown = {"status": self.state, "model": None if self.served is None else self.served.name}
        return Reply(shown, status=200 if self.state == READY else 503, headers={"Cache-Control": "no-store"})

    @property
    def model(self) -> Served:
        """The model.

        Raises:
            Refusal: it is not there yet, or not any more.
        """
        if self.state == STOPPING:
            raise stopping()
        if self.served is None:
            raise starting()
        return self.served

    def _model(self) -> dict[str, Any]:
        served = self.model
        return {
            "id": served.name,
            "object": "model",
            "created": served.created_at,
            "owned_by": "megatron",
            "max_model_len": served.positions,
        }

    async def _generate(
        self,
        body: bytes,
        read: Callable[[JsonFields, Served, ServerLimits], Ask],
        form_of: Callable[[Ask, Served, str, int], AnswerForm],
        prefix: str,
        *,
        in_thread: bool,
    ) -> Reply:
        served = self.model

        def ask_of() -> Ask:
            return read(JsonFields(read_object(body, self.limits.json_depth)), served, self.limits)

        ask = await asyncio.to_thread(ask_of) if in_thread else ask_of()
        answer = self._answer(ask, prefix)
        form = form_of(ask, served, answer.name, int(time.time()))
        if ask.streams:
            events = answer.events(form)
            return Reply(first_event=await anext(events), events=events)  # until then a refusal can become the status
        pieces, usage = await answer.whole()
        return Reply(form.whole(pieces, usage))

    def _answer(self, ask: Ask, prefix: str) -> Answer:
        return Answer(ask, self.model, self.jobs, self.metrics, prefix + secrets.token_hex(12))


class AnswerForm(Protocol):
    """Writes the objects of an answer as one of the endpoints does."""

    def whole(self, pieces: Sequence[AnswerPiece], usage: dict[str, int]) -> dict[str, Any]: ...
    def opening(self) -> list[dict[str, Any]]: ...
    def chunk(self, place: int, piece: AnswerPiece) -> dict[str, Any]: ...
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
