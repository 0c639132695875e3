"""The endpoints, independent of HTTP: a body or a query in, a reply out."""

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
from trident.serve.requests.json_fields import JsonFields, read_object
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.parsing import GenerationRequest, check_model
from trident.serve.requests.refusals import Refusal, starting, stopping
from trident.serve.requests.served_model import ServedModel
from trident.serve.single_turn import HEADERS, SingleTurn, response_of

STARTING, READY, STOPPING = "starting", "ready", "stopping"

# Parsing a longer body would hold up other streams, so it is done in another thread.
_LONG_BODY_BYTES = 16 << 10


@dataclass(frozen=True)
class Reply:
    """The content of an HTTP response.

    Args:
        content: an object that is sent as JSON, unless `events` is given.
        first_event: the first event of a stream.
        events: the remaining events, generated while they are sent.
    """

    content: Any = None
    first_event: bytes = b""
    events: AsyncGenerator[bytes, None] | None = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Service:
    """The endpoints of one server, used on the event loop's thread only.

    Args:
        served: the model; None until it is loaded.
        single_turn: settings of `/generate`.
    """

    limits: ServerLimits
    jobs: Jobs
    metrics: ServerMetrics
    single_turn: SingleTurn
    served: ServedModel | None = None
    state: str = STARTING

    def open(self, served: ServedModel) -> None:
        if self.state == STARTING:
            self.served, self.state = served, READY

    def drain(self) -> None:
        """Takes no more requests, and completes those in progress."""
        self.state = STOPPING
        self.jobs.refuse_new(stopping())

    def end(self, refusal: Refusal) -> None:
        """Takes no more requests, and ends those in progress with a refusal."""
        self.state = STOPPING
        self.jobs.end_all(refusal)

    async def completions(self, body: bytes) -> Reply:
        """`POST /v1/completions`."""
        is_long = len(body) >= _LONG_BODY_BYTES
        return await self._generate(body, read_completion, CompletionForm, "cmpl-", in_thread=is_long)

    async def chat(self, body: bytes) -> Reply:
        """`POST /v1/chat/completions`."""
        # A chat template is rendered in another process, which may take until its time limit.
        return await self._generate(body, read_chat, ChatForm, "chatcmpl-", in_thread=True)

    async def generate(self, query: Mapping[str, str]) -> Reply:
        """`GET /generate`."""
        request = await asyncio.to_thread(self.single_turn.read, query, self.model, self.limits)
        deltas, _ = await self._answer(request, "gen-").whole()
        return Reply(response_of(query["sentence"], deltas[0].text), headers=HEADERS)

    def models(self) -> Reply:
        """`GET /v1/models`."""
        return Reply({"object": "list", "data": [self._model()]})

    def one_model(self, name: str) -> Reply:
        """`GET /v1/models/NAME`.

        Raises:
            Refusal: not the served model.
        """
        if name != self.model.name:
            raise Refusal(404, f"The model {name[:200]!r} is not served here.", "model", "model_not_found")
        return Reply(self._model())

    def health(self) -> Reply:
        """`GET /health`: 200 only while requests are accepted."""
        shown = {"status": self.state, "model": None if self.served is None else self.served.name}
        return Reply(shown, status=200 if self.state == READY else 503, headers={"Cache-Control": "no-store"})

    @property
    def model(self) -> ServedModel:
        """The served model.

        Raises:
            Refusal: the server is starting or stopping.
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
        read: Callable[[JsonFields, ServedModel, ServerLimits], GenerationRequest],
        form_of: type[AnswerForm],
        prefix: str,
        *,
        in_thread: bool,
    ) -> Reply:
        served = self.model

        def read_request() -> GenerationRequest:
            fields = JsonFields(read_object(body, self.limits.json_depth))
            check_model(fields, served)
            return read(fields, served, self.limits)

        request = await asyncio.to_thread(read_request) if in_thread else read_request()
        answer = self._answer(request, prefix)
        form = form_of(request, served, answer.name, int(time.time()))
        if request.streams:
            events = answer.events(form)
            return Reply(first_event=await anext(events), events=events)  # a refusal before it can still set the status
        deltas, usage = await answer.whole()
        return Reply(form.whole(deltas, usage))

    def _answer(self, request: GenerationRequest, prefix: str) -> Answer:
        return Answer(request, self.model, self.jobs, self.metrics, prefix + secrets.token_hex(12))
