"""The document store's program as users type it."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tools import corpus_store

TOOL = str(Path(__file__).resolve().parents[2] / "tools" / "corpus_store.py")


class Tool:
    """Runs the program in this process, in a folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self.complaints = ""

    def __call__(self, *words: str) -> tuple[int, str]:
        """The exit code and what was printed."""
        self._monkeypatch.setattr(sys, "argv", [TOOL, *words])
        code = corpus_store.main()
        shown, self.complaints = self._capsys.readouterr()
        return code, shown


@pytest.fixture
def tool(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Tool]:
    monkeypatch.chdir(folder)
    before = signal.getsignal(signal.SIGTERM)
    yield Tool(monkeypatch, capsys)
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "corpus").mkdir()
    for name, count in (("a", 3), ("b", 2)):
        lines = [json.dumps({"text": f"{name}{number}"}) + "\n" for number in range(count)]
        (tmp_path / "corpus" / f"{name}.jsonl").write_text("".join(lines))
    (tmp_path / "db.json").write_text(
        json.dumps(
            {
                "MONGO_CONNECTION_STRING": "sqlite:///store.db",
                "MONGO_CONNECTION_DB": "unused",
                "COLLECTIONS": ["web", "news"],
            }
        )
    )
    return tmp_path


def test_import_stat_bench_and_fetch(tool: Tool, folder: Path) -> None:
    code, shown = tool("import", "corpus/*.jsonl", "--config", "db.json", "--collection", "web")
    assert code == 0 and shown.splitlines() == [
        "corpus/a.jsonl: 3 documents into web (idx 0 to 2); 0 skipped",
        "corpus/b.jsonl: 2 documents into web (idx 3 to 4); 0 skipped",
    ]
    assert tool("import", "--input", "corpus/a.jsonl", "--config", "sqlite:///store.db", "--collection", "news")[0] == 0
    code, shown = tool("import", "corpus/a.jsonl", "--config", "db.json", "--collection", "web")
    assert (code, shown) == (0, "corpus/a.jsonl: already imported; nothing was added\n")
    code, shown = tool("stat", "--config", "db.json")
    assert code == 0 and shown.splitlines() == [
        "web: 5 documents (numbers 0 to 4 of the store)",
        "news: 3 documents (numbers 5 to 7 of the store)",
        "total: 8 documents",
    ]
    figures = json.loads(tool("bench", "--config", "db.json", "--n", "50")[1])
    assert figures["documents"] == 8 and figures["fetches"] == 50 and figures["p50_ms"] > 0
    assert tool("fetch", "--config", "db.json", "--nsample", "8", "--output-prefix", "part") == (
        0,
        "part0.txt: 8 documents\n",
    )
    assert (folder / "part0.txt").read_text().split() == ["a0", "a1", "a2", "b0", "b1", "a0", "a1", "a2"]
    with sqlite3.connect(folder / "store.db") as connection:
        connection.execute("DELETE FROM web WHERE idx = 2")
    code, shown = tool("stat", "--config", "db.json")
    assert code == 65 and "  1 missing: idx 2\n" in shown


def test_unknown_commands_are_reported(tool: Tool, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"the command 'imprt' is not known\. Use one of: import, stat"):
        tool("imprt")
    with pytest.raises(ConfigError, match=r"nothing\.json is not a document store"):
        tool("import", "corpus/a.jsonl", "--config", "nothing.json", "--collection", "web")
    assert tool("import", "corpus/a.jsonl", "--config", "db.json", "--collection", "books")[0] == 0
    assert "--collection books is not among the collections listed in db.json?collection=web,news" in tool.complaints
    assert "Commands: import, stat, bench, fetch" in tool("--help")[1]
    done = subprocess.run(
        [sys.executable, TOOL, "stat", "--config", "sqlite:///absent.db"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 65 and "absent.db: there is no such SQLite file" in done.stderr
