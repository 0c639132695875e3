"""SIGKILL of a run at its requests to an object store: `python -m campaigns.run store-kills --cases 40`.

A run copies each checkpoint to a local S3 server (--save-secondary) and keeps the newest two. The server kills it
before or after it carries out one of the requests that change something. What then counts as a checkpoint in the store
is whole, and none that was complete is lost. The next run, every other time without the first one's disk, continues
from the newest checkpoint that is left, and the store ends with the objects of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing.process
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.request import Request, urlopen

from campaigns.campaign import Plan, Result
from megatron.checkpoint import find, verify
from megatron.checkpoint.storage import DISK
from tests.helpers.ranks import fork_server_context
from tests.helpers.tiny_run import TinyCorpus, losses, train_here, write_tiny_corpus

STEPS = 5
_LIMIT_SECONDS = 120
_MANIFEST = re.compile(r"/iter_([0-9]+)/manifest\.json$")


class KillingServer:
    """A local S3 server that kills its client at one of the requests that change something.

    Attributes:
        changes: how many such requests came.
        place: number of the request at which the client dies; -1 for none.
        after: whether the request is carried out first.
        complete: steps whose manifest is stored.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._lock = threading.Lock()
        self.client: multiprocessing.process.BaseProcess | None = None
        self.expect(-1)

    def expect(self, place: int, *, after: bool = False) -> None:
        """Prepares for the next client."""
        self.changes, self.place, self.after = 0, place, after
        self.complete: set[int] = set()

    def __call__(self, environ: Mapping[str, Any], start_response: Any) -> Iterable[bytes]:
        """Handles a WSGI request."""
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return self._app(environ, start_response)  # type: ignore[no-any-return]
        with self._lock:
            number, self.changes = self.changes, self.changes + 1
        if number == self.place and not self.after:
            return self._end(start_response)
        content = list(self._app(environ, start_response))
        manifest = _MANIFEST.search(environ["PATH_INFO"])
        if manifest is not None and environ["REQUEST_METHOD"] == "PUT":
            self.complete.add(int(manifest.group(1)))
        return self._end(None) if number == self.place else content

    def _end(self, start_response: Any) -> list[bytes]:
        assert self.client is not None and self.client.pid is not None
        os.kill(self.client.pid, signal.SIGKILL)
        if start_response is not None:
            start_response("503 Service Unavailable", [])
        return [b""]


@contextlib.contextmanager
def killing_server() -> Iterator[KillingServer]:
    """The server, with a bucket `kills`, and the environment by which this process reaches it."""
    from moto.server import ThreadedMotoServer

    clients = importlib.import_module("s3fs").S3FileSystem
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    threaded = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    threaded.start()
    host, port = threaded.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    # Clients of another test's server are kept for the length of a process.
    with patch.dict(os.environ, environment), patch.dict(vars(DISK)["_objects"]._stores, clear=True):
        clients.clear_instance_cache()
        urlopen(Request(f"http://{host}:{port}/kills", method="PUT")).close()
        server = KillingServer(threaded._server.app)  # type: ignore[union-attr]
        threaded._server.app = server  # type: ignore[union-attr]
        try:
            yield server
        finally:
            clients.clear_instance_cache()
            threaded.stop()


def run_cases(plan: Plan) -> Iterator[Result]:
    """Kills runs, each at another request; every other run loses its disk as well."""
    with killing_server() as server:
        cases = _Cases(plan.folder, server)
        for number in plan.numbers:
            drawn = plan.random(number)
            request, after, loses_disk = drawn.randrange(cases.requests), drawn.random() < 0.5, number % 2 == 0
            kind = f"{'after' if after else 'before'} the request"
            problem = cases.problem(number, request, after=after, loses_disk=loses_disk)
            problem = problem and f"request {request} of {cases.requests}: {problem}"
            yield Result(number, kind, "resumed from the store" if loses_disk else "resumed from the disk", problem)


class _Cases:
    def __init__(self, folder: Path, server: KillingServer) -> None:
        self._folder, self._server = folder, server
        self._corpus: TinyCorpus = write_tiny_corpus(folder)
        code = self._train(folder / "alone", "s3://kills/alone", STEPS)
        self.requests = server.changes
        code = code or self._train(folder / "alone", "s3://kills/alone", STEPS + 1)
        if code:
            raise RuntimeError(f"an undisturbed run ends with {code}")
        self._after = _objects("s3://kills/alone")

    def problem(self, number: int, place: int, *, after: bool, loses_disk: bool) -> str:
        """The problem after a kill; empty if none."""
        folder, address = self._folder / f"run{number}", f"s3://kills/run{number}"
        self._server.expect(place, after=after)
        code = self._train(folder, address, STEPS)
        if code != -signal.SIGKILL:
            return f"the run was not killed but ended with {code}"
        steps = [verify(candidate.path).step for candidate in find(Path(address))]
        newest, complete = max(steps, default=0), max(self._server.complete, default=0)
        if newest != complete:
            return f"the store holds step {newest}, but {complete} was complete"
        if loses_disk:
            shutil.rmtree(folder)
        else:
            newest = max((candidate.step for candidate in find(folder / "checkpoints")), default=0)
            shutil.rmtree(folder / "run", ignore_errors=True)
        self._server.expect(-1)
        code = self._train(folder, address, STEPS + 1)
        first = min(losses(folder)) if code == 0 else 0
        if code or first != newest + 1:
            return f"the next run ends with {code} and begins at step {first} after a checkpoint of step {newest}"
        wrong = sorted(_objects(address) ^ self._after)
        shutil.rmtree(folder)
        return f"in the end these objects are missing or too many: {wrong[:5]}" if wrong else ""

    def _train(self, folder: Path, address: str, steps: int) -> int:
        changes = {"train_iters": steps, "save_interval": 1, "keep_last": 2, "save_secondary": address}
        words = self._corpus.flags(folder=folder, **changes)
        environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        self._server.client = fork_server_context().Process(target=_run_child, args=(words, environment))
        self._server.client.start()
        self._server.client.join(_LIMIT_SECONDS)
        if self._server.client.is_alive():
            self._server.client.kill()
            self._server.client.join()
            return 1
        return self._server.client.exitcode or 0


def _run_child(words: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment, DS_ACCELERATOR="cpu")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    code, text = train_here(0, words)
    sys.stderr.write(text)
    os._exit(code)


def _objects(address: str) -> frozenset[str]:
    folder = Path(address)
    names = {name: DISK.names(folder / name) for name in DISK.names(folder)}
    return frozenset(f"{name}/{file}" for name, files in names.items() for file in files or [""])
