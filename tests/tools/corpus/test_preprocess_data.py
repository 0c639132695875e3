"""The preprocessing command as users type it: from a clone, in a process of its own."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron import process_exit
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.errors import ConfigError
from megatron.tokenizers.encoders.fast_encoder import resident_bytes
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.vocabulary import GPT2_FOLDER, hard_documents, write_vocabulary
from tests.tools.corpus.in_process import run_tool
from tools import preprocess_data

ROOT = Path(__file__).resolve().parents[3]
TOOL = str(ROOT / "tools" / "preprocess_data.py")


@pytest.fixture(scope="module")
def choice(tmp_path_factory: pytest.TempPathFactory) -> TokenizerChoice:
    return write_vocabulary(tmp_path_factory.mktemp("vocabulary"))


def arguments(choice: TokenizerChoice, *more: str) -> list[str]:
    tokenizer = ["--vocab", str(choice.vocab_file), "--merge-file", str(choice.merge_file)]
    return [*tokenizer, "--tokenizer-type", "GPT2BPETokenizer", "--dataset-impl", "mmap", *more]


def command(choice: TokenizerChoice, *more: str) -> list[str]:
    return [sys.executable, TOOL, *arguments(choice, *more)]


def run(words: list[str], folder: Path, given: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(words, cwd=folder, input=given, capture_output=True, timeout=120, check=False)


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_upstreams_command_with_files_pipes_and_workers(tmp_path: Path, choice: TokenizerChoice) -> None:
    texts = hard_documents(500)
    data = write_jsonl(tmp_path / "in.jsonl", texts).read_bytes()
    (tmp_path / "in.gz").write_bytes(gzip.compress(data))
    (tmp_path / "in.xz").write_bytes(lzma.compress(data))
    (tmp_path / "in.bz2").write_bytes(bz2.compress(data))
    pairs = []
    runs = (("in.jsonl", "1"), ("in.jsonl", "2"), ("in.gz", "2"), ("in.xz", "1"), ("in.bz2", "1"), ("-", "2"))
    for number, (source, workers) in enumerate(runs):
        prefix = f"out/{number}"
        words = command(choice, "--input", source, "--output-prefix", prefix, "--append-eod", "--workers", workers)
        done = run(words, tmp_path, data if source == "-" else None)
        assert done.returncode == 0, done.stderr.decode()
        pairs.append([(tmp_path / f"{prefix}_text_document.{suffix}").read_bytes() for suffix in ("bin", "idx")])
    assert all(pair == pairs[0] for pair in pairs)
    assert b"Opening -" in done.stderr and b"Processed 507 documents (" in done.stderr
    tokenizer = build_tokenizer(choice)
    kept = [text for text in texts if text]
    written = IndexedDataset(tmp_path / "out" / "0_text_document")
    assert len(written) == len(kept)
    for index, text in enumerate(kept):
        assert written[index][-1] == tokenizer.eod_id
        assert tokenizer.decode(written[index][:-1]) == text


def test_flags_of_other_forks_are_accepted_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\none\ntwo\n")
    write_jsonl(tmp_path / "in.jsonl", ["one two"])
    words = "--input in.jsonl --output-prefix out --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt"
    words += " --seq-length 2048 --vocab-size 786 --trust-remote-code --keep-newlines --partitions 1 --lang english"
    done = run_tool(preprocess_data.main, tmp_path, *words.split())
    assert done.returncode == 0, done.stderr
    for name in ("--seq-length", "--vocab-size", "--trust-remote-code", "--keep-newlines"):
        assert f"warning: {name} has no effect and is ignored." in done.stderr
    assert "BertWordPieceLowerCase without --split-sentences: BERT trains on sentences" in done.stderr
    assert IndexedDataset(tmp_path / "out_text_document")[0].tolist() == [5, 6]


def test_a_partitioned_run_continues_where_it_stopped(tmp_path: Path, choice: TokenizerChoice) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", hard_documents(300))
    with source.open("ab") as stream:
        stream.write(b"no JSON\n")
    words = arguments(choice, "--input", "in.jsonl", "--output-prefix", "out", "--partitions", "4", "--workers", "2")
    done = run_tool(preprocess_data.main, tmp_path, *words)
    assert done.returncode == 65
    assert "3 of 4 parts are finished and kept in .out_text_document.parts; the same command continues" in done.stderr
    done = run_tool(preprocess_data.main, tmp_path, *words, "--append-eod")
    assert done.returncode == 64 and "with other --append-eod: false then, true now" in done.stderr
    done = run_tool(preprocess_data.main, tmp_path, *words, "--on-bad-line", "skip")
    assert done.returncode == 0, done.stderr
    assert "3 of 4 parts were finished by an earlier run (.out_text_document.parts) and are skipped" in done.stderr
    assert re.search(
        r"Wrote out_text_document .*: 300 documents, \d+ tokens; skipped \d+ empty .* and 1 bad lines\.", done.stderr
    )
    words = arguments(choice, "--input", "in.jsonl", "--output-prefix", "one", "--on-bad-line", "skip")
    done = run_tool(preprocess_data.main, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    for suffix in ("bin", "idx"):
        assert len({(tmp_path / f"{name}_text_document.{suffix}").read_bytes() for name in ("out", "one")}) == 1
    assert not list(tmp_path.glob(".*"))


def test_a_corpus_without_tokens_warns_once(tmp_path: Path, choice: TokenizerChoice) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"")
    words = arguments(choice, "--input", "empty.jsonl", "--output-prefix", "out")
    done = run_tool(preprocess_data.main, tmp_path, *words)
    assert done.returncode == 0
    assert done.stderr.count("warning: out_text_document (.bin, .idx): 0 tokens were written") == 1
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": 1, "a": "b"}\n{"a": "b"}\n')
    words = arguments(choice, "--input", "bad.jsonl", "--output-prefix", "bad", "--on-bad-line", "skip")
    done = run_tool(preprocess_data.main, tmp_path, *words)
    assert done.returncode == 0
    assert "0 tokens were written (0 empty documents and 2 bad lines skipped)" in done.stderr
    (tmp_path / "half.jsonl").write_bytes(b'{"text": "", "other": "b"}\n')
    words = arguments(choice, "--input", "half.jsonl", "--output-prefix", "h", "--json-keys", "text", "other")
    done = run_tool(preprocess_data.main, tmp_path, *words)
    assert done.returncode == 0
    assert "warning: h_text_document (.bin, .idx): 0 tokens" in done.stderr


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--input none.jsonl", "--input none.jsonl cannot be read"),
        ("--input in.jsonl --workers 0", "--workers 0 is out of range"),
        ("--input in.jsonl --dataset-impl best", "--dataset-impl best is unknown"),
        ("--input in.jsonl --tokenizer-type Parrot", "--tokenizer-type Parrot is unknown"),
        ("--input in.jsonl --split-sentences --lang x", "--lang x is not a language"),
        ("--input in.jsonl --json-keys a a", "contains a key twice"),
        ("--input in.jsonl --json-keys a b --document-separator x", "plain text without keys"),
        ("--input in.jsonl --shard 3/2", "--shard 3/2 is not a share"),
        ("--input *.json", "--input *.json matches no file"),
        ("--input - --partitions 2", "--shard and --partitions divide files; --input - (standard input)"),
        ("--input gone.jsonl in.jsonl --shard 1/2", "--input gone.jsonl cannot be read"),
        ("--input in.jsonl --vocab none.json", "--vocab-file none.json is not a file"),
        ("", "--input is required"),
    ],
)
def test_wrong_flags_are_one_sentence_errors(
    tmp_path: Path, choice: TokenizerChoice, monkeypatch: pytest.MonkeyPatch, more: str, message: str
) -> None:
    write_jsonl(tmp_path / "in.jsonl", ["a"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process_exit, "interrupt_on_sigterm", lambda: None)
    with pytest.raises(ConfigError, match=re.escape(message)):
        preprocess_data.main(arguments(choice, "--output-prefix", "out", *more.split()))


def test_the_tool_needs_no_torch_and_starts_quickly(tmp_path: Path, choice: TokenizerChoice) -> None:
    write_jsonl(tmp_path / "in.jsonl", ["a"])
    program = (
        "import sys, runpy\nsys.modules['torch'] = sys.modules['transformers'] = None\n"
        f"sys.argv = {command(choice, '--input', 'in.jsonl', '--output-prefix', 'out')[1:]!r}\n"
        f"runpy.run_path({TOOL!r}, run_name='__main__')"
    )
    done = run([sys.executable, "-c", program], tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / "out_text_document.idx").is_file()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_publishes_nothing(tmp_path: Path, choice: TokenizerChoice, number: signal.Signals) -> None:
    reading, writing = os.pipe()
    words = command(choice, "--input", "-", "--output-prefix", "out", "--workers", "2")
    minds_interrupts = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a suite in the background does not
    with subprocess.Popen(
        words, cwd=tmp_path, stdin=reading, stderr=subprocess.PIPE, preexec_fn=minds_interrupts
    ) as process:
        os.close(reading)
        stop = threading.Event()
        feeder = threading.Thread(target=feed, args=(writing, stop))
        feeder.start()
        try:
            wait_until(lambda: any(path.stat().st_size > 100_000 for path in tmp_path.glob(".*.tmp")), 120)
            workers = children_of(process.pid)
            assert len(workers) >= 2
            process.send_signal(number)
            process.wait(timeout=120)
        finally:
            process.kill()
            stop.set()
            feeder.join()
    assert process.returncode not in (0, 64)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    if number != signal.SIGKILL:
        assert not list(tmp_path.iterdir())
    else:
        with IndexedWriter(tmp_path / "out_text_document", np.uint16):
            assert len(list(tmp_path.glob(".*.tmp"))) == 1  # the killed run's is gone
    wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() and is_alive(pid) for pid in workers), 120)


def feed(descriptor: int, stop: threading.Event) -> None:
    """Writes lines into a pipe until the reader goes."""
    line = (json.dumps({"text": "some text " * 100}) + "\n").encode() * 50
    try:
        while not stop.is_set():
            os.write(descriptor, line)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def wait_until(holds, seconds: float) -> None:  # type: ignore[no-untyped-def]
    end_at = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end_at, "it did not happen in time"
        time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(status.parent.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.mark.skipif(resident_bytes() is None, reason="memory of another process can only be measured where /proc is")
def test_memory_does_not_grow_with_the_input(tmp_path: Path, choice: TokenizerChoice) -> None:
    drawn = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    line = lambda: json.dumps({"text": " ".join("".join(drawn.choices(letters, k=7)) for _ in range(150))}) + "\n"  # noqa: E731
    lines = "".join(line() for _ in range(800))
    peaks = []
    for copies in (20, 120):  # 20 MB and 120 MB
        with (tmp_path / "in.jsonl").open("w") as stream:
            for _ in range(copies):
                stream.write(lines)
        words = command(choice, "--input", "in.jsonl", "--output-prefix", "out", "--workers", "1")
        measured = f"import resource, subprocess, sys\nsubprocess.run({words!r}, check=True)\n"
        measured += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        done = run([sys.executable, "-c", measured], tmp_path)
        assert done.returncode == 0, done.stderr.decode()
        peaks.append(int(done.stdout) / 1024)
    assert peaks[1] < peaks[0] + 60, f"peak memory grew from {peaks[0]:.0f} to {peaks[1]:.0f} MB"


@pytest.mark.skipif(
    not (GPT2_FOLDER / "megatron_fixture").is_dir(), reason=f"upstream's fixture is not in {GPT2_FOLDER}"
)
def test_upstreams_files_are_reproduced_byte_for_byte(tmp_path: Path) -> None:
    """The fixture was written by bigscience's tool; its text, read back out of it, must give the same two files."""
    folder = GPT2_FOLDER / "megatron_fixture"
    files = [str(folder / f"gpt2-tiny-{name}") for name in ("vocab.json", "merges.txt")]
    choice = TokenizerChoice("GPT2BPETokenizer", *files)
    tokenizer = build_tokenizer(choice)
    fixture = IndexedDataset(folder / "meg-gpt2-openwebtext_text_document")
    assert all(ids[-1] == tokenizer.eod_id for ids in fixture[:])
    write_jsonl(tmp_path / "in.jsonl", [tokenizer.decode(ids[:-1]) for ids in fixture[:]])
    words = command(choice, "--input", "in.jsonl", "--output-prefix", "out", "--append-eod", "--workers", "2")
    done = run(words, tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    for suffix in ("bin", "idx"):
        written = (tmp_path / f"out_text_document.{suffix}").read_bytes()
        assert written == (folder / f"meg-gpt2-openwebtext_text_document.{suffix}").read_bytes()
