"""What each endpoint does, apart from HTTP: a body or a query in, a reply out."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trident.serve.answers import Answer, AnswerForm
from trident.serve.chat import ChatForm, read_chat
from trident.serve.completions import CompletionForm, read_completion
from trident.serve.execution.jobs import Jobs
from trident.serve.metrics import ServerMetrics
from trident.serve.requests.asks import Ask, check_model
from trident.serve.requests.json_fields import JsonFields, read_object
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.refusals import Refusal, starting, stopping
from trident.serve.requests.served import Served
from trident.serve.single_turn import HEADERS, SingleTurn, response_of

STARTING, READY, STOPPING = "starting", "ready", "stopping"

# Reading a longer body takes long enough to hold up the streams of others, so another thread does it.
_LONG_BODY_BYTES = 16 << 10


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
        form_of: type[AnswerForm],
        prefix: str,
        *,
        in_thread: bool,
    ) -> Reply:
        served = self.model

        def ask_of() -> Ask:
            fields = JsonFields(read_object(body, self.limits.json_depth))
            check_model(fields, served)
            return read(fields, served, self.limits)

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
