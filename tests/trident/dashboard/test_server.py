"""The dashboard over HTTP: who may ask, what is answered, and that no request reaches another file."""

from __future__ import annotations

import http.client
import json
import math
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.errors import ConfigError
from tests.trident.dashboard.listening import listening
from tests.trident.dashboard.run_folders import step, write_lines, write_run
from trident.dashboard.board import Board
from trident.dashboard.server import DashboardServer, read_page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    secret = {"optim": {"lr": 0.5}, "data": {"train": "mongodb://me:hunter2@host/db"}}
    for name, sections in (("a", {}), ("b", secret)):
        write_run(folder / name, steps=3000 if name == "a" else 7, **sections)
    write_lines(folder / "b/metrics.jsonl", [step(8, lm_loss="NaN", gradient_norm="Infinity")])
    (folder.parent / "outside.txt").write_text("outside")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[DashboardServer]:
    with listening(folder) as server:
        yield server


def ask(server: DashboardServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=120)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    connection.close()
    return found


def asked(server: DashboardServer, path: str) -> Any:
    status, _, content = ask(server, path)
    assert status == 200, content
    return json.loads(content)


def read_curves(content: bytes) -> list[dict[str, Any]]:
    (length,) = struct.unpack("<I", content[:4])
    entries, offset = json.loads(content[4 : 4 + length]), 4 + length
    for entry in entries:
        count = entry["count"]
        assert offset % 8 == 0
        entry["x"] = np.frombuffer(content, "<f8", count, offset)
        entry["rows"] = np.frombuffer(content, "<f4", 3 * count, offset + 8 * count).reshape(3, count)
        offset += 20 * count + 4 * (count % 2)
    assert offset == len(content)
    return entries


def test_the_page_is_whole_and_needs_no_network() -> None:
    page = read_page()
    html = page["/"][1].decode()
    assert {"/", "/main.js", "/plot.js", "/style.css", "/icon.svg"} <= set(page) and "style=" not in html
    assert page["/main.js"][0] == "text/javascript; charset=utf-8" and html.count("<script") == 1
    for path, (_, content) in page.items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, path
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", " onclick="):
            assert way not in text, (path, way)


def test_runs_details_and_configurations(server: DashboardServer) -> None:
    found = asked(server, "/api/runs")
    assert [run["name"] for run in found["runs"]] == ["a", "b"] and len(found["folders"]) == 1
    assert found["runs"][1]["loss"] is None  # NaN is nothing that a browser could read
    assert [event["kind"] for event in asked(server, "/api/details?run=1")["events"]] == ["start"]
    assert asked(server, "/api/log?run=2") == {"text": "first line\nlast line\n", "size_bytes": 21}
    both = asked(server, "/api/configurations?runs=1,2")
    assert both["differences"][0] == "optim.lr" and [run["given"] for run in both["runs"]] == [["optim.lr"]] * 2
    assert "hunter2" not in json.dumps(both)
    assert asked(server, "/api/checkpoints?run=1") == {"folder": None, "checkpoints": []}


def test_curves_come_as_numbers(server: DashboardServer) -> None:
    _, headers, content = ask(server, "/api/curves?metric=lm_loss&runs=1,2,99&points=100&weight=0.9")
    curves = read_curves(content)
    assert headers["content-type"] == "application/octet-stream"
    assert [(curve["run"], curve["group"], curve["count"]) for curve in curves] == [
        (1, "", 100),
        (1, "valid", 30),
        (2, "", 8),
    ]
    low, high, line = curves[0]["rows"]
    assert (low <= high).all() and curves[0]["extent"] == [1, 3000] and np.isnan(curves[2]["rows"][0, -1])
    assert abs(line[-1] - 2.0) < 0.01
    part = read_curves(ask(server, "/api/curves?metric=lm_loss&runs=1&axis=tokens&from=1280&to=2560&scale=log")[2])[0]
    assert part["x"][0] == 1152 and part["x"][-1] == 2688 and part["extent"] == [128, 384_000]
    for query, says in (
        ("axis=miles", "axis must be one of"),
        ("from=x", "from must be a number"),
        ("points=nan", "points must"),
    ):
        status, _, content = ask(server, f"/api/curves?metric=lm_loss&runs=1&{query}")
        assert status == 400 and says in json.loads(content)["error"]
    assert ask(server, "/api/curves?metric=lm_loss&runs=7")[0] == 404 == ask(server, "/api/curves?metric=lm_loss")[0]


def test_changes_come_as_events(server: DashboardServer, folder: Path) -> None:
    with socket.create_connection(server.server_address[:2], timeout=120) as stream:
        host = f"localhost:{server.server_address[1]}"
        stream.sendall(f"GET /api/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        received = stream.makefile("rb")

        def event() -> Any:
            while not (line := received.readline()).startswith(b"data: "):
                assert line, "the stream has ended"
            return json.loads(line[6:])

        assert [run["id"] for run in event()] == [1, 2]
        write_lines(folder / "b/metrics.jsonl", [step(9)])
        changed = event()
        while changed[0]["iteration"] != 9:
            changed = event()
        assert [run["id"] for run in changed] == [2]


def test_only_the_page_itself_may_ask(server: DashboardServer) -> None:
    host = f"127.0.0.1:{server.server_address[1]}"
    assert server.server_address[0] == "127.0.0.1" and server.address == f"http://{host}"
    for path in ("/", "/api/runs"):
        assert ask(server, path, Host="evil.example")[0] == 421  # a name that was pointed at this machine
        assert ask(server, path, Origin="http://evil.example")[0] == 403
    assert ask(server, "/api/runs", Sec_Fetch_Site="cross-site")[0] == 403
    assert ask(server, "/api/runs", Origin=f"http://{host}")[0] == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, "/api/runs", method)[0] == 501
    status, headers, content = ask(server, "/", "HEAD")
    policy = headers["content-security-policy"]
    assert status == 200 and content == b"" and "unsafe" not in policy and "default-src 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"


def test_no_request_reaches_another_file(server: DashboardServer) -> None:
    for path in (
        "/../outside.txt", "/..%2foutside.txt", "/%2e%2e/outside.txt", "//outside.txt", "/page/main.js", "/server.py",
        "/api/log?run=../outside.txt", "/api/log?run=1/../../outside.txt", "/api/log?run=", "/api/log",
        "/api/log?run=0",
        "/api/details?run=-1", "/api/checkpoints?run=%2Fetc", "/api/configurations?runs=..", "/api/",
        "/api/log?run=%D9%A1",
    ):  # fmt: skip
        status, _, content = ask(server, path)
        assert status == 404 and b"outside" not in content.replace(b"outside.txt", b""), path


def test_addresses_that_cannot_be_read(server: DashboardServer) -> None:
    fields = "&".join(f"{name}=1" for name in range(40))
    for path, expected in (
        (f"/api/runs?{fields}", 400),
        ("ftp://[", 400),
        (f"/api/log?run={'1' * 5000}", 404),
        (f"/api/curves?metric=lm_loss&runs={'9' * 5000}", 404),
        (f"/api/curves?metric=lm_loss&runs=1&points={'9' * 5000}&to=inf", 200),
    ):
        status, _, content = ask(server, path)
        assert status == expected, path[:40]
        assert status != 400 or "at most 32 fields" in json.loads(content)["error"]


def test_a_question_for_the_headers_gets_nothing_else(server: DashboardServer) -> None:
    for path in ("/api/events", "/api/runs", "/api/curves?metric=lm_loss&runs=1"):
        with socket.create_connection(server.server_address[:2], timeout=120) as stream:
            host = f"localhost:{server.server_address[1]}"
            stream.sendall(f"HEAD {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            received = stream.makefile("rb")
            assert received.readline().startswith(b"HTTP/1.1 200")
            while received.readline() != b"\r\n":
                pass
            assert received.read(1) == b"", path


def test_values_without_a_place_on_the_axis_are_no_points(tmp_path: Path) -> None:
    tokens: list[Any] = ["Infinity", [1], None, "missing", -1, 1e308]
    lines = [step(at, consumed_tokens=value) for at, value in enumerate(tokens, 1)]
    del lines[3]["consumed_tokens"]
    evaluations = [
        {"kind": "evaluation", "iteration": at, "consumed_tokens": value, "group": "valid", "lm_loss": 1e308}
        for at, value in ((5, "Infinity"), (6, 1024), (7, math.inf), (2**64 - 1, 8))
    ]
    folder = write_run(tmp_path / "a", steps=0)
    times = [step(8, seconds_per_iteration=1e308), step(9, seconds_per_iteration="-Infinity"), step(10)]
    write_lines(folder / "metrics.jsonl", [*lines, step(7), *evaluations, *times])
    with listening(folder) as server:
        for axis, first, second in (("tokens", 4, 1), ("steps", 10, 2), ("hours", 10, 2)):
            status, _, content = ask(server, f"/api/curves?metric=lm_loss&runs=1&axis={axis}&points=50")
            curves = read_curves(content)
            assert status == 200 and [len(curve["x"]) for curve in curves] == [first, second], axis
            assert all(np.isfinite(curve["x"]).all() for curve in curves)
        (summary,) = asked(server, "/api/runs")["runs"]
        assert summary["eta_seconds"] == 990 * 0.5 and summary["iteration"] == 10
        json.dumps(server.board.summaries(), allow_nan=False)


def test_a_failure_and_a_taken_port(server: DashboardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(known: object = None) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(server.board, "summaries", fail)
    status, _, content = ask(server, "/api/runs")
    assert status == 500 and b"out of order" not in content
    with pytest.raises(ConfigError, match=rf"--port {server.server_address[1]} cannot be opened"):
        DashboardServer(Board([]), server.server_address[1], lambda path, headers: None, lambda folder: [])
