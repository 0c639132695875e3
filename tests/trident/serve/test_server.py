"""A whole server: starting, ready, stopping; many clients at once."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import openai
import pytest

from megatron.errors import NumericsError
from megatron.inference.generation import Request
from megatron.inference.sampling import Sampling
from megatron.tokenizers.chat import ChatTemplate, sandbox
from tests.trident.serve.fakes import FAILING_TOKEN, FakeEngine, counting
from tests.trident.serve.listening import get, listening, post, read_all
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.served_model import ServedModel
from trident.serve.server import _shutdown_message

ASK = {"prompt": "a", "max_tokens": 5, "seed": 1}


def body_of(answer: bytes) -> str:
    """The body of a response."""
    return answer.partition(b"\r\n\r\n")[2].decode()


def test_health_reports_the_state(served: ServedModel) -> None:
    may_load = threading.Event()
    engine = FakeEngine(step_seconds=0.02)
    with listening(served, engine, before=lambda: may_load.wait(120) and None, waits=False) as running:
        health = running.send(get("/health"))
        assert b" 503 " in health.splitlines()[0] and json.loads(body_of(health)) == {
            "status": "starting",
            "model": None,
        }
        refused = running.send(post(ASK))
        assert b" 503 " in refused.splitlines()[0] and b"Retry-After" in refused.replace(b"retry-after", b"Retry-After")
        assert "The checkpoint is being loaded" in body_of(refused)
        may_load.set()
        while json.loads(body_of(running.send(get("/health"))))["status"] != "ready":
            time.sleep(0.01)
        with running.connect() as connection:
            connection.sendall(post({**ASK, "max_tokens": 60}))
            while not engine.requests:
                time.sleep(0.005)
            engine.step_seconds = 0.5  # the answer is not complete before the server has been asked
            running.server.stop()
            ends_at = time.monotonic() + 120
            while "stopping" not in body_of(running.send(get("/health"))):
                assert time.monotonic() < ends_at
            assert '"code":"stopping"' in body_of(running.send(post(ASK)))
            engine.step_seconds = 0.0
            answer = json.loads(body_of(read_all(connection)))  # what runs is completed
            assert answer["usage"]["completion_tokens"] == 60
        running.join()
        assert running.failures == []


@pytest.mark.parametrize("streams", [False, True])
def test_what_does_not_end_within_the_grace_period_is_ended(served: ServedModel, streams: bool) -> None:
    engine = FakeEngine(step_seconds=0.05)
    with listening(served, engine, grace_seconds=0.2) as running, running.connect() as connection:
        connection.sendall(post({**ASK, "max_tokens": 120, "stream": streams}))
        while engine.steps < 2:
            time.sleep(0.005)
        running.server.stop()
        answer = read_all(connection)
        running.join()
        assert (b" 200 " if streams else b" 503 ") in answer.splitlines()[0]
        assert b"The server is stopping" in answer and b"[DONE]" not in answer
        assert len(engine.cancelled) == 1 and engine.steps < 100


def test_a_second_signal_ends_what_runs_at_once(served: ServedModel) -> None:
    engine = FakeEngine(step_seconds=0.05)
    with listening(served, engine, grace_seconds=3600) as running, running.connect() as connection:
        connection.sendall(post({**ASK, "max_tokens": 120}))
        while engine.steps < 2:
            time.sleep(0.005)
        running.server.stop()
        running.server.stop()
        assert b"The server is stopping" in read_all(connection)
        running.join()


def test_a_failure_of_the_engine_ends_the_server_and_its_requests(served: ServedModel) -> None:
    engine = FakeEngine(step_seconds=0.02)
    with listening(served, engine) as running, running.connect() as connection:
        connection.sendall(post({**ASK, "max_tokens": 120, "stream": True}))
        while engine.steps < 2:
            time.sleep(0.005)
        engine.fails = NumericsError("the scores have NaN")
        answer = read_all(connection)
        running.join()
        assert b"internal_error" in answer and b"NaN" not in answer
        assert [str(failure) for failure in running.failures] == ["the scores have NaN"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_failure_at_one_request_ends_it_alone(
    served: ServedModel, streams: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(step_seconds=0.005)
    with listening(served, engine) as running, running.connect() as other:
        other.sendall(post({**ASK, "max_tokens": 100}))
        while engine.steps < 2:
            time.sleep(0.002)
        failed = running.send(post({**ASK, "prompt": [FAILING_TOKEN], "max_tokens": 9, "n": 2, "stream": streams}))
        assert (b" 200 " if streams else b" 500 ") in failed.splitlines()[0]
        assert b"internal_error" in failed and b"Traceback" not in failed and b"[DONE]" not in failed
        answer = read_all(other)
        assert b" 200 " in answer.splitlines()[0] and b'"completion_tokens":100' in answer
        assert b" 200 " in running.send(get("/health")).splitlines()[0]
        assert running.thread.is_alive() and engine.running == 0
    assert "could not be chosen:\nTraceback of this sequence" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "says"),
    [(0, "no requests in progress"), (1, "1 request in progress, at most 3 s"), (2, "2 requests in progress")],
)
def test_requests_are_counted_in_english(count: int, says: str) -> None:
    assert says in _shutdown_message(count, 3.0)


def test_a_failure_to_load_ends_the_server(served: ServedModel) -> None:
    def fail() -> None:
        raise NumericsError("no checkpoint")

    with listening(served, before=fail) as running:
        running.join()
        assert [str(failure) for failure in running.failures] == ["no checkpoint"]


def test_two_hundred_requests_at_once_get_their_own_tokens_in_order(served: ServedModel) -> None:
    """Streams and whole answers, with OpenAI's client; none is lost, and each is what it would be alone."""
    engine = FakeEngine(max_running=16)

    def expected(number: int) -> str:
        request = Request("x", (number + 1,), 20, Sampling())
        return served.tokenizer.decode(counting(request))

    with listening(served, engine, ServerLimits(queued_sequences=200)) as running:
        client = openai.OpenAI(base_url=f"{running.server.address}/v1", api_key="none", max_retries=0, timeout=120)

        def request(number: int) -> str:
            settings = {"model": "tiny", "prompt": [number + 1], "max_tokens": 20}
            if number % 2:
                return client.completions.create(**settings).choices[0].text
            chunks = client.completions.create(**settings, stream=True)
            return "".join(choice.text for chunk in chunks for choice in chunk.choices)

        with ThreadPoolExecutor(200) as pool:
            answers = list(pool.map(request, range(200)))
        assert answers == [expected(number) for number in range(200)]
        metrics = body_of(running.send(get("/metrics")))
    assert 'megatron_requests_total{endpoint="completions",status="200"} 200.0' in metrics
    assert "megatron_generated_tokens_total 4000.0" in metrics and "megatron_sequences_outstanding 0.0" in metrics


HOSTILE = (
    "{% if messages[0].content == 'hostile' %}{{ ('%(a)s' * 4000) % {'a': messages[0].content * 50000} }}"
    "{% elif messages[0].content == 'endless' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}{{ messages[0].content }}"
)


def test_a_hostile_template_delays_no_other_request(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests are refused one after the other, while /health stays ready."""
    monkeypatch.setattr(sandbox, "_SECONDS", 0.3)
    template = ChatTemplate("mine.jinja", HOSTILE)

    def talk(said: str) -> bytes:
        body = {"messages": [{"role": "user", "content": said}], "max_tokens": 3}
        return running.send(post(body, "/v1/chat/completions"))

    with listening(replace(served, template=template)) as running, ThreadPoolExecutor(4) as clients:
        assert b" 200 " in talk("good").splitlines()[0]
        endless = [clients.submit(talk, "endless") for _ in range(4)]  # for a third of a second each
        meanwhile = 0
        while not all(one.done() for one in endless):
            assert b" 200 " in running.send(get("/health")).splitlines()[0]
            meanwhile += not any(one.done() for one in endless)
            time.sleep(0.05)
        assert meanwhile, "no answer came before the first of them was refused"
        for one in endless:
            assert b" 400 " in one.result().splitlines()[0]
            assert "the chat template mine.jinja: it takes more than 0.3" in body_of(one.result())
        refused = clients.submit(talk, "hostile").result()
        # Which limit it meets first depends on the machine.
        limits = ("it needs more than 256 MB of memory", "renders more than", "it takes more than")
        assert any(limit in body_of(refused) for limit in limits)
        killed = clients.submit(talk, "endless")
        while not killed.done():
            seat = template._program._slot
            if seat.child is not None:
                os.kill(seat.child._process.pid, signal.SIGKILL)
            time.sleep(0.05)
        assert "exited with -9" in body_of(killed.result())
        assert b" 200 " in talk("good").splitlines()[0]
