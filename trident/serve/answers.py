"""The answer to one request: generated in deltas, and written as OpenAI's clients expect it."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron.inference.generation import GeneratedToken
from trident.serve.execution.answer_text import AnswerDelta, AnswerText
from trident.serve.execution.jobs import GenerationJob, Jobs
from trident.serve.metrics import ServerMetrics
from trident.serve.requests.parsing import GenerationRequest
from trident.serve.requests.refusals import Refusal
from trident.serve.requests.served_model import ServedModel

END_OF_EVENTS = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class AnswerForm(ABC):
    """Writes the JSON objects of an answer; each endpoint's subclass writes the choices in them.

    Args:
        name: id of the answer.
        created_at: seconds since 1970.
    """

    request: GenerationRequest
    served: ServedModel
    name: str
    created_at: int
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    @abstractmethod
    def opening_choices(self) -> list[dict[str, Any]]:
        """The choices at the start of a stream, before any token; each is sent in its own chunk."""

    @abstractmethod
    def choice(self, index: int, delta: AnswerDelta, *, is_whole: bool = False) -> dict[str, Any]:
        """A choice, or a part of one."""

    def whole(self, deltas: Sequence[AnswerDelta], usage: dict[str, int]) -> dict[str, Any]:
        """The answer as one object, from one delta per choice."""
        choices = [self.choice(index, delta, is_whole=True) for index, delta in enumerate(deltas)]
        return {**self._object(self.whole_kind, choices), "usage": usage}

    def opening(self) -> list[dict[str, Any]]:
        return [self._object(self.chunk_kind, [choice]) for choice in self.opening_choices()]

    def chunk(self, index: int, delta: AnswerDelta) -> dict[str, Any]:
        return self._object(self.chunk_kind, [self.choice(index, delta)])

    def closing(self, usage: dict[str, int]) -> dict[str, Any]:
        """The last chunk of a stream with usage."""
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
    """Generates the answer to one request.

    Args:
        name: unique id of the answer.
    """

    request: GenerationRequest
    served: ServedModel
    jobs: Jobs
    metrics: ServerMetrics
    name: str
    _texts: list[AnswerText] = field(default_factory=list)

    async def deltas(self) -> AsyncGenerator[tuple[int, AnswerDelta], None]:
        """Yields the deltas of all choices as they become final, each with the index of its choice.

        Raises:
            Refusal: the server cannot accept or complete the request.
        """
        self._texts = [self._text(index) for index in range(self.request.sequences)]
        started_at = time.perf_counter()
        latest: dict[int, float] = {}
        with self.jobs.open(self.name, self.request.requests(self.name)) as job:
            self.metrics.prompt_tokens.inc(self.request.prompt_tokens)
            async for index, token in job.tokens():
                self._time(index, started_at, latest)
                delta = self._push(job, index, token)
                if not delta.is_empty:
                    yield index, delta
        self.metrics.request_seconds.observe(time.perf_counter() - started_at)

    async def whole(self) -> tuple[list[AnswerDelta], dict[str, int]]:
        """Returns one delta per choice, and the usage.

        Raises:
            Refusal: see `deltas`.
        """
        by_choice: list[list[AnswerDelta]] = [[] for _ in range(self.request.sequences)]
        async with aclosing(self.deltas()) as deltas:
            async for index, delta in deltas:
                by_choice[index].append(delta)
        return [_joined(deltas) for deltas in by_choice], self.usage

    async def events(self, form: AnswerForm) -> AsyncGenerator[bytes, None]:
        """Server-sent events; a refusal after the first is an event too, because the status has been sent.

        Raises:
            Refusal: see `deltas`; only before the first event.
        """
        is_open = False
        try:
            async with aclosing(self.deltas()) as deltas:
                async for index, delta in deltas:
                    for chunk in [] if is_open else form.opening():
                        yield event(chunk)
                    is_open = True
                    yield event(form.chunk(index, delta))
        except Refusal as refusal:
            if not is_open:
                raise
            yield event(refusal.to_json())
            return
        if self.request.with_usage:
            yield event(form.closing(self.usage))
        yield END_OF_EVENTS

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of tokens of the prompts and of the answers so far, stop tokens included."""
        answers = sum(text.generated_tokens for text in self._texts)
        prompts = self.request.prompt_tokens
        return {"prompt_tokens": prompts, "completion_tokens": answers, "total_tokens": prompts + answers}

    def _text(self, index: int) -> AnswerText:
        request = self.request
        return AnswerText(
            self.served.tokenizer,
            request.prompts[index // request.choices],
            request.stop_texts,
            request.stop_ids,
            keeps_tokens=request.top_logprobs is not None,
            keeps_prompt=request.scores_prompts,
        )

    def _push(self, job: GenerationJob, index: int, token: GeneratedToken) -> AnswerDelta:
        delta = self._texts[index].push(token)
        if delta.finish is not None and token.finish is None:
            job.end(index)
        if token.token is not None:
            self.metrics.generated_tokens.inc()
        return delta

    def _time(self, index: int, started_at: float, latest: dict[int, float]) -> None:
        now = time.perf_counter()
        if index in latest:
            self.metrics.token_seconds.observe(now - latest[index])
        else:
            self.metrics.first_token_seconds.observe(now - started_at)
        latest[index] = now


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _joined(deltas: Sequence[AnswerDelta]) -> AnswerDelta:
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    return AnswerDelta("".join(delta.text for delta in deltas), tokens, deltas[-1].finish if deltas else None)
