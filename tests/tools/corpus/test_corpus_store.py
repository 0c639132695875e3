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

from megatron.data.stores.address import StoreAddress
from megatron.data.stores.record_store import PairStore, holds_pairs
from megatron.errors import ConfigError, DataError
from tests.helpers.vocabulary import write_vocabulary
from tools.corpus import corpus_store

TOOL = str(Path(__file__).resolve().parents[3] / "tools" / "corpus" / "corpus_store.py")


class Tool:
    """Runs the program in this process, in a folder."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.complaints = ""

    def __call__(self, *words: str) -> tuple[int, str]:
        """The exit code and what was printed."""
        code = corpus_store.main(words)
        shown, self.complaints = self._capsys.readouterr()
        return code, shown


@pytest.fixture
def tool(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Tool]:
    monkeypatch.chdir(folder)
    before = signal.getsignal(signal.SIGTERM)
    yield Tool(capsys)
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
    assert (code, shown) == (0, "corpus/a.jsonl: already imported; nothing added\n")
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
    with pytest.raises(ConfigError, match=r"--num-process 2 cannot be combined with --output-prefix -, standard out"):
        tool("fetch", "--config", "db.json", "--nsample", "8", "--output-prefix", "-", "--num-process", "2")
    with sqlite3.connect(folder / "store.db") as connection:
        connection.execute("DELETE FROM web WHERE idx = 2")
    code, shown = tool("stat", "--config", "db.json")
    assert code == 65 and "  1 missing: idx 2\n" in shown


def test_pairs_are_stored_as_dsgpt2_stores_them_and_read_as_examples(tool: Tool, folder: Path) -> None:
    lines = [json.dumps({"question": f"q{number}", "answer": f"a{number}"}) + "\n" for number in range(3)]
    (folder / "chat.jsonl").write_text("".join(lines))
    words = ["--config", "sqlite:///chat.db", "--collection", "chat", "--pair-keys", "question", "answer"]
    assert tool("import", "chat.jsonl", *words) == (0, "chat.jsonl: 3 documents into chat (idx 0 to 2); 0 skipped\n")
    assert tool("import", "chat.jsonl", *words)[1] == "chat.jsonl: already imported; nothing added\n"
    address = StoreAddress.of("sqlite:///chat.db")
    assert holds_pairs(address)
    assert list(PairStore(address).records()) == [{"q": f"q{number}", "a": f"a{number}"} for number in range(3)]
    with pytest.raises(DataError, match="'chat' is not a collection of a document store: it lacks 'form', 'filt_text'"):
        tool("import", "corpus/a.jsonl", "--config", "sqlite:///chat.db", "--collection", "chat")
    with pytest.raises(ConfigError, match=r"--pair-keys q: expected two keys"):
        tool("import", "chat.jsonl", *words[:4], "--pair-keys", "q")


def test_the_lengths_of_documents(tool: Tool, folder: Path) -> None:
    tool("import", "corpus/*.jsonl", "--config", "sqlite:///store.db", "--collection", "web")
    choice = write_vocabulary(folder, 300)
    files = ["--vocab-file", str(choice.vocab_file), "--merge-file", str(choice.merge_file)]
    code, shown = tool("lengths", "--config", "sqlite:///store.db", *files, "--width", "2", "--most", "4")
    assert code == 0 and shown.splitlines() == [
        "      0 to 1 tokens:          0 documents ( 0.00%)",
        "      2 to 3 tokens:          5 documents (100.00%)",
        "  4 and more tokens:          0 documents ( 0.00%)",
        "5 documents, 10 tokens, 2.0 in the mean, 2 in the longest",
    ]


def test_unknown_commands_are_reported(tool: Tool, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown command 'imprt'\. Use one of: import, stat"):
        tool("imprt")
    with pytest.raises(ConfigError, match=r"nothing\.json is not a document store"):
        tool("import", "corpus/a.jsonl", "--config", "nothing.json", "--collection", "web")
    assert tool("import", "corpus/a.jsonl", "--config", "db.json", "--collection", "books")[0] == 0
    assert "--collection books is not listed in db.json?collection=web,news" in tool.complaints
    assert "Commands: import, stat, bench, fetch, lengths" in tool("--help")[1]
    done = subprocess.run(
        [sys.executable, TOOL, "stat", "--config", "sqlite:///absent.db"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 65 and "absent.db: no such SQLite file" in done.stderr
