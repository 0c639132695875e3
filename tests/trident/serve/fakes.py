"""An engine with given answers, and a service around it without a network or a socket."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

from megatron.errors import ConfigError
from megatron.inference.generation import GeneratedToken, Request
from megatron.inference.sampling import Sampling, TokenChoice
from megatron.tokenizers.chat import load_chat_template
from megatron.tokenizers.tokenizer import Tokenizer, build_tokenizer
from tests.helpers.vocabulary import write_vocabulary
from trident.serve.access import Access
from trident.serve.execution.engine_loop import Arrival, Command, EngineLoop, Load, Stop
from trident.serve.execution.jobs import Jobs
from trident.serve.metrics import ServerMetrics
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.served_model import ServedModel
from trident.serve.service import Service
from trident.serve.single_turn import SingleTurn
from trident.serve.web import build_app

POSITIONS = 128
WRONG_TOKEN = 598  # the engine refuses a prompt that begins with it
FAILING_TOKEN = 597  # the engine fails at a prompt that begins with it, after two tokens


def counting(request: Request) -> list[int]:
    """An answer that depends on the prompt and on the sample: whoever gets another one's tokens shows it.

    The tokens are those of the visible ASCII letters, one each.
    """
    first = sum(request.prompt) * 7 + request.sample * 13
    return [(first + place * place) % 94 for place in range(request.max_new_tokens)]


@dataclass
class FakeEngine:
    """Says one token of every running answer in each step, as a real engine does.

    Args:
        answer: the tokens of a request; cut at its `max_new_tokens`.
        step_seconds: how long a step takes.
        max_running: others wait inside.
    """

    answer: Callable[[Request], Sequence[int]] = counting
    step_seconds: float = 0.0
    max_running: int = 8
    requests: list[Request] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    steps: int = 0
    fails: Exception | None = None

    def __post_init__(self) -> None:
        self._running: dict[str, tuple[Request, deque[int]]] = {}

    def add(self, request: Request) -> None:
        if request.prompt[0] == WRONG_TOKEN:
            raise ConfigError(f"The prompt of request {request.id} has token {WRONG_TOKEN}, which is wrong here.")
        self.requests.append(request)
        self._running[request.id] = request, deque(self.answer(request)[: request.max_new_tokens])

    def cancel(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is not None:
            self.cancelled.append(request_id)

    def step(self) -> list[GeneratedToken]:
        if self.fails is not None:
            raise self.fails
        time.sleep(self.step_seconds)
        self.steps += 1
        found = []
        for identity, (request, left) in list(self._running.items())[: self.max_running]:
            if request.prompt[0] == FAILING_TOKEN and len(left) == request.max_new_tokens - 2:
                found.append(GeneratedToken(identity, None, finish="failed", failure="Traceback of this sequence"))
                del self._running[identity]
                continue
            prompt: tuple[TokenChoice, ...] = ()
            top = tuple((number, -float(number)) for number in range(request.top_logprobs))
            if request.scores_prompt and len(left) == request.max_new_tokens:
                prompt = tuple(TokenChoice(number, -0.5, top) for number in request.prompt[1:])
            if not left:
                found.append(GeneratedToken(identity, None, finish="length", prompt=prompt))
                del self._running[identity]
                continue
            token = left.popleft()
            finish = "stop" if token in request.stop_ids else None if left else "length"
            found.append(GeneratedToken(identity, token, -0.25, top, finish, prompt=prompt))
            if finish is not None:
                del self._running[identity]
        return found

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._running)


def saying(tokenizer: Tokenizer, text: str) -> Callable[[Request], list[int]]:
    """An answer that is always this text and the end of the document."""
    return lambda request: [*tokenizer.encode(text), tokenizer.eod_id]


def served_by(folder: Path, **changes: Any) -> ServedModel:
    """A model with the tests' small vocabulary."""
    tokenizer = build_tokenizer(write_vocabulary(folder))
    values: dict[str, Any] = {
        "name": "tiny",
        "tokenizer": tokenizer,
        "template": load_chat_template(None, None),
        "is_chat": False,
        "positions": POSITIONS,
        "vocab_size": tokenizer.vocab_size,
        "eod_id": tokenizer.eod_id,
        "created_at": 1_700_000_000,
        "fingerprint": "fp_test",
    }
    return ServedModel(**{**values, **changes})


@dataclass
class Running:
    """A service whose engine runs in a thread, and clients that call it in this process."""

    service: Service
    engine: FakeEngine
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI

    async def settle(self) -> None:
        """Waits until nothing is computed."""
        for _ in range(500):
            if not self.engine.running and not len(self.service.jobs):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{self.engine.running} sequences are still running")


@asynccontextmanager
async def running(
    served: ServedModel,
    engine: FakeEngine | None = None,
    limits: ServerLimits | None = None,
    access: Access | None = None,
) -> AsyncIterator[Running]:
    """Runs a service for as long as the context is open."""
    engine, limits = engine or FakeEngine(), limits or ServerLimits()
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    jobs, load = Jobs(commands, limits), Load()
    single_turn = SingleTurn(Sampling(seed=7), 60, has_seed=True)
    service = Service(limits, jobs, ServerMetrics(load, lambda: jobs.sequences), single_turn)
    loop = asyncio.get_running_loop()

    def deliver(arrivals: Sequence[Arrival]) -> None:
        loop.call_soon_threadsafe(jobs.arrive, arrivals)

    computing = EngineLoop(commands, deliver, engine.max_running, load=load)
    thread = threading.Thread(target=computing.run, args=(engine,), daemon=True)
    thread.start()
    service.open(served)
    transport = httpx.ASGITransport(app=build_app(service, access or Access()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        client = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0, timeout=60
        )
        try:
            yield Running(service, engine, http, client)
        finally:
            commands.put(Stop())
            await asyncio.to_thread(thread.join, 10)
