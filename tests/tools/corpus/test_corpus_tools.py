"""The embedded corpus and the vocabulary trained on it."""

from __future__ import annotations

import json
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from megatron.errors import ConfigError, DataError, StorageError
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.vocabulary import hard_documents
from tests.tools.corpus.in_process import run_tool
from tools import train_tokenizer
from tools.corpus import build_demo_corpus
from trident.corpus.vocabulary.learning import save_byte_level_vocabulary, texts_of, train_byte_level


def build(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Builds the demo corpus."""
    return run_tool(build_demo_corpus.main, Path(), "--output", path, *words)


def learn(*words: object, prefix: Path) -> subprocess.CompletedProcess[str]:
    """Trains a tokenizer."""
    return run_tool(train_tokenizer.main, Path(), *words, "--output-prefix", prefix)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "demo.jsonl"
    done = build(path)
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.full
@pytest.mark.slow
def test_the_demo_corpus_is_large_and_reproducible(demo: Path, tmp_path: Path) -> None:
    assert demo.stat().st_size >= 10_000_000
    documents = [json.loads(line) for line in demo.read_bytes().splitlines()]
    assert len(documents) > 100 and all(set(entry) == {"text", "src"} and entry["text"].strip() for entry in documents)
    assert len({entry["src"] for entry in documents}) == len(documents)
    again = tmp_path / "folder" / "again.jsonl"
    assert build(again).returncode == 0
    assert again.read_bytes() == demo.read_bytes()


def test_the_demo_corpus_rejects_an_unwritable_path_and_a_small_size(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = build(tmp_path / "file" / "demo.jsonl")
    assert done.returncode == 74 and "Cannot write" in done.stderr
    done = build(tmp_path)
    assert done.returncode == 64 and f"--output {tmp_path} is a folder. Give the path" in done.stderr
    done = build(tmp_path / "demo.jsonl", "--megabytes", "3")
    assert done.returncode == 64 and "--megabytes 3" in done.stderr


def test_a_trained_tokenizer_round_trips_everything(demo: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "out" / "demo"
    words = ["--input", demo, "--vocab-size", "2000", "--megabytes", "3"]
    done = learn(*words, prefix=prefix)
    assert done.returncode == 0, done.stderr
    vocabulary = json.loads(Path(f"{prefix}-vocab.json").read_text(encoding="utf-8"))
    merges = Path(f"{prefix}-merges.txt").read_text(encoding="utf-8").splitlines()
    assert len(vocabulary) == 2000 and sorted(vocabulary.values()) == list(range(2000))
    assert vocabulary["<|endoftext|>"] == 1999 and merges[0] == "#version: 0.2" and len(merges) == 2000 - 257 + 1
    tokenizer = build_tokenizer(TokenizerChoice("GPT2BPETokenizer", f"{prefix}-vocab.json", f"{prefix}-merges.txt"))
    assert tokenizer.vocab_size == 2000 and tokenizer.eod_id == 1999
    first = json.loads(demo.read_bytes().splitlines()[5])["text"]
    for text in [*hard_documents(), first]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and tokenizer.eod_id not in ids
    assert len(tokenizer.encode(first)) < len(first.encode()) / 2
    assert learn(*words, prefix=tmp_path / "again").returncode == 0
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / f"again-{name}").read_bytes() == Path(f"{prefix}-{name}").read_bytes()


def test_train_tokenizer_reports_errors(tmp_path: Path) -> None:
    done = learn("--input", "/nowhere.jsonl", "--vocab-size", "300", prefix=tmp_path / "x")
    assert done.returncode == 64 and "/nowhere.jsonl cannot be read" in done.stderr
    done = learn("--input", "/nowhere.jsonl", "--vocab-size", "256", prefix=tmp_path / "x")
    assert done.returncode == 64 and "--vocab-size 256" in done.stderr
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": 1}\n')
    done = learn("--input", path, "--vocab-size", "300", prefix=tmp_path / "x")
    assert done.returncode == 65 and "in.jsonl:2: byte offset 14" in done.stderr
    assert not list(tmp_path.glob("x*"))


def test_train_tokenizer_checks_its_output_first(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("no JSON at all\n")
    (tmp_path / "x-merges.txt").mkdir()
    done = learn("--input", tmp_path / "in.jsonl", "--vocab-size", "300", prefix=tmp_path / "x")
    assert done.returncode == 74 and "x-merges.txt: Is a directory" in done.stderr
    assert not (tmp_path / "x-vocab.json").exists()


def test_vocabulary_functions_reject_invalid_inputs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--vocab-size 200 is too small"):
        train_byte_level(["abc"], 200)
    with pytest.raises(DataError, match="no pair of characters"):
        train_byte_level([], 300)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        save_byte_level_vocabulary(str(tmp_path / "file" / "x"), {"a": 0}, [])


def test_a_fraction_of_the_texts_is_spread_evenly(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(100)))
    taken = [int(text) for text in texts_of([str(path)], ["text"], 0.25, False)]
    assert len(taken) == 25 and max(b - a for a, b in pairwise(taken)) == 4
    assert len(list(texts_of([str(path)], ["text"], 1.0, False))) == 100
