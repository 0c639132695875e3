"""From text to a vocabulary to token files to training, by the commands."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from tests.helpers.tiny_run import TinyCorpus, losses, train
from tests.helpers.vocabulary import hard_documents, write_vocabulary
from tests.tools.corpus.in_process import run_tool
from tools import preprocess_data, train_tokenizer
from tools.corpus import check_data, check_tokenizer


def learn(*words: object) -> subprocess.CompletedProcess[str]:
    """Trains a tokenizer."""
    return run_tool(train_tokenizer.main, Path(), *words)


def learn_piped(texts: bytes, *words: object) -> subprocess.CompletedProcess[bytes]:
    """Trains a tokenizer on texts from standard input."""
    command = [sys.executable, train_tokenizer.__file__, "--input", "-", *map(str, words)]
    return subprocess.run(command, input=texts, capture_output=True, timeout=120, check=False)


def check(*words: object) -> subprocess.CompletedProcess[str]:
    """Checks a tokenizer."""
    return run_tool(check_tokenizer.main, Path(), *words)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "in.jsonl.gz"
    source = Path(random.__file__).read_text(encoding="utf-8").split("\n\n")
    lines = (json.dumps({"text": text}) + "\n" for text in [*source, *hard_documents(60)])
    path.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
    return path


def test_a_unigram_vocabulary_end_to_end(tmp_path: Path, corpus: Path) -> None:
    words = ["--model-type", "unigram", "--vocab-size", "800", "--special-tokens", "dsgpt2"]
    done = learn("--input", corpus, *words, "--output-prefix", tmp_path / "one")
    assert done.returncode == 0, done.stderr
    assert "one-tokenizer.json: 800 entries, 107 special" in done.stderr and (tmp_path / "one.model").is_file()
    choice = ["--tokenizer-type", "HFTokenizer", "--tokenizer-name-or-path", tmp_path / "one-tokenizer.json"]
    done = check(*choice, "--input", corpus, "--text", "çok güzel 안녕 👍🏽", "--require-exact")
    assert done.returncode == 0, done.stderr
    assert "-> 'çok güzel 안녕 👍🏽'" in done.stdout and "tokens per word" in done.stdout
    prefix = tmp_path / "data"
    files = ["--input", corpus, "--output-prefix", prefix]
    done = run_tool(preprocess_data.main, tmp_path, *files, *choice, "--append-eod")
    assert done.returncode == 0, done.stderr
    done = run_tool(check_data.main, tmp_path, f"{prefix}_text_document", *choice, "--show", "1")
    assert done.returncode == 0 and "Random variable generators" in done.stdout
    tiny = TinyCorpus(tmp_path, f"{prefix}_text_document", "", "")
    flags = tiny.flags(
        train_iters=2, vocab_file=None, merge_file=None, tokenizer_type="HFTokenizer",
        tokenizer_name_or_path=tmp_path / "one-tokenizer.json", run_dir=tmp_path / "run",
    )  # fmt: skip
    assert train(flags) == (0, "")
    assert sorted(losses(tmp_path)) == [1, 2]


def test_a_sample_of_standard_input_and_of_plain_text(tmp_path: Path) -> None:
    texts = "\n\n".join(hard for hard in hard_documents(200) if "\n\n" not in hard).encode()
    words = ["--vocab-size", "400", "--document-separator", r"\n\n", "--max-documents", "50"]
    for prefix, seed in (("one", "1"), ("again", "1"), ("other", "2")):
        more = ["--output-prefix", tmp_path / prefix, "--seed", seed]
        done = learn_piped(texts, *words, *more)
        assert done.returncode == 0, done.stderr.decode()
    one, again, other = ((tmp_path / f"{name}-merges.txt").read_bytes() for name in ("one", "again", "other"))
    assert one == again != other
    more = ["--output-prefix", tmp_path / "wp", "--model-type", "wordpiece"]
    done = learn_piped(texts, *words, *more, "--lower-case")
    assert done.returncode == 0 and (tmp_path / "wp-vocab.txt").read_bytes().startswith(b"[PAD]\n[UNK]\n")
    refused = learn("--input", "-", *more)
    assert refused.returncode == 64 and "reads the input twice" in refused.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lower-case"], "--lower-case has no effect with --model-type bpe"),
        (["--megabytes", "3", "--sample", "0.5"], "--megabytes 3 cannot be combined with --sample 0.5"),
        (["--special-tokens", "word"], "--special-tokens 'word' could be learned"),
        (["--sample", "0"], "--sample 0"),
    ],
)
def test_wrong_flags_of_training(tmp_path: Path, corpus: Path, words: list[str], message: str) -> None:
    done = learn("--input", corpus, "--output-prefix", tmp_path / "x", *words)
    assert done.returncode == 64 and message in done.stderr and not list(tmp_path.iterdir())


def test_a_byte_level_tokenizer_that_loses_bytes_is_an_error(tmp_path: Path) -> None:
    choice = write_vocabulary(tmp_path)
    vocabulary = {letter: number for number, letter in enumerate("abc")}
    reference = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={**vocabulary, "</s>": 3}, merges=[]))
    reference.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.decoder = tokenizers.decoders.ByteLevel()
    reference.save(str(tmp_path / "few.json"))
    few = ["--tokenizer-type", "HFTokenizer", "--tokenizer-name-or-path", tmp_path / "few.json"]
    done = check(*few, "--text", "abc", "abd")
    assert done.returncode == 65 and "1 texts do not round-trip byte for byte" in done.stderr
    assert "document 1, character 2: 'd' became ''" in done.stdout
    good = [
        "--tokenizer-type",
        "GPT2BPETokenizer",
        "--vocab-file",
        choice.vocab_file,
        "--merge-file",
        choice.merge_file,
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in hard_documents(20)))
    done = check(*map(str, good), "--input", tmp_path / "in.jsonl", "--max-documents", "5")
    assert done.returncode == 0 and "round trip: 5 of 5 documents" in done.stdout
    done = check(*map(str, good))
    assert done.returncode == 64 and "--text or --input is required" in done.stderr
