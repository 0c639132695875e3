"""`tools/serve.py`: its flags, its signals, and a network that is split over ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import CheckpointError, ConfigError
from tests.helpers.ranks import free_port, run_ranks
from tests.helpers.web.serving import start_server
from tests.inference.checkpoints import make_checkpoint
from tools import serve

ASK = {"prompt": "What is this?", "max_tokens": 10, "temperature": 0, "logprobs": 0}


def post(address: str, values: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request for completions."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(values).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return dict(json.load(response))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "--load is required"),
        (("--load", "x", "--port", "70000"), "--port 70000 is out of range"),
        (("--load", "x", "--cors-origin", "example.org"), "--cors-origin example.org is not an origin"),
        (("--load", "x", "--max-queue", "3"), "--max-choices 64 exceeds --max-queue 3"),
        (("--load", "x", "--logit-bias", "a"), "--logit-bias a is invalid. Expected a token id and a bias"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        serve.main(flags)


def test_a_port_that_is_taken_is_refused_before_the_checkpoint_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} cannot be opened: Address already in use"):
            serve.main(["--load", "nowhere", "--port", str(port)])


def test_a_checkpoint_that_is_not_there_ends_the_server(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"there is no checkpoint in {tmp_path}"):
        serve.main(["--load", str(tmp_path), "--port", "0"])


def test_other_machines_are_let_in_with_a_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = serve.ServeFlags(load="x", host="0.0.0.0")
    assert serve._access(flags).hosts is None
    assert "--host 0.0.0.0 allows other machines to connect without a token" in capsys.readouterr().err
    monkeypatch.setenv("MEGATRON_SERVE_TOKEN", "0123456789abcdef0123")
    access = serve._access(flags)
    assert access.token is not None and access.token.reveal() == "0123456789abcdef0123"
    assert capsys.readouterr().err == "" and "0123456789" not in repr(flags) + repr(access)


@pytest.mark.slow
def test_a_signal_ends_the_server_after_the_running_requests(tmp_path: Path) -> None:
    server = start_server(make_checkpoint(tmp_path), tmp_path / "log", "--served-model-name", "own")
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(post(server.address, {**ASK, "n": 8, "max_tokens": 40})))
    asking.start()
    with contextlib.suppress(OSError):
        while "sequences_outstanding 8" not in urllib.request.urlopen(f"{server.address}/metrics").read().decode():
            if answers:
                break
    assert server.stop(signal.SIGTERM) == 0
    asking.join(120)
    assert answers[0]["usage"]["completion_tokens"] > 8 and answers[0]["model"] == "own"
    assert "Traceback" not in server.log.read_text() and "stopping" in server.log.read_text()


def serve_on_ranks(rank: int, world_size: int, checkpoints: str, port: int, layout: tuple[int, int]) -> dict[str, Any]:
    """Serves on all ranks; the answer to one question, on rank 0, which then ends the server."""
    answers: list[dict[str, Any]] = []

    def ask() -> None:
        ends_at = time.monotonic() + 120
        while not answers and time.monotonic() < ends_at:
            try:
                answers.append(post(f"http://127.0.0.1:{port}", ASK))
            except OSError:
                time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    if rank == 0:
        threading.Thread(target=ask, daemon=True).start()
    flags = ["--load", checkpoints, "--port", str(port), "--tensor-model-parallel-size", str(layout[0])]
    assert serve.main([*flags, "--pipeline-model-parallel-size", str(layout[1])]) == 0
    return answers[0] if answers else {}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 1), (1, 2)], ids=["tp2", "pp2"])
def test_a_split_network_gives_the_same_answer(layout: tuple[int, int], tmp_path: Path) -> None:
    checkpoints = make_checkpoint(tmp_path)
    port = free_port()
    (alone,) = run_ranks(serve_on_ranks, 1, 1, str(checkpoints), port, (1, 1), timeout_seconds=120)
    split, follower = run_ranks(serve_on_ranks, 2, 2, str(checkpoints), port, layout, timeout_seconds=120)
    assert follower == {} and alone["usage"] == split["usage"]
    (one,), (other,) = alone["choices"], split["choices"]
    assert one["text"] == other["text"] and one["logprobs"]["tokens"] == other["logprobs"]["tokens"]
    assert one["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-4)
