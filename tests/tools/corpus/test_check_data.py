"""The data check: statistics, samples, exit codes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from megatron.data.formats.indexed_writer import IndexedWriter
from tests.helpers.vocabulary import write_vocabulary
from tests.tools.corpus.in_process import run_tool
from tools.corpus import check_data
from trident.corpus.preprocess.encode import EncodeOptions
from trident.corpus.preprocess.preprocess_corpus import preprocess
from trident.corpus.workers.progress_line import ProgressLine

TOKENIZER = [
    "--vocab-file",
    "demo-vocab.json",
    "--merge-file",
    "demo-merges.txt",
    "--tokenizer-type",
    "GPT2BPETokenizer",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    choice = write_vocabulary(folder)
    texts = ["the first document", "a second one", "the first document", ""]
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = EncodeOptions(choice, append_eod=True)
    preprocess((f"{folder}/in.jsonl",), f"{folder}/good", options, 1, ProgressLine(None, 1, lambda text: None))
    with IndexedWriter(folder / "wrong", np.uint16) as writer:
        writer.add_document([[1, 700]])
    (folder / "cut.idx").write_bytes((folder / "wrong.idx").read_bytes()[:-1])
    (folder / "cut.bin").write_bytes((folder / "wrong.bin").read_bytes())
    (folder / "other").mkdir()
    write_vocabulary(folder / "other", 520)
    return folder


def check(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_tool(check_data.main, folder, *words)


def test_good_data_with_its_texts(folder: Path) -> None:
    done = check(folder, "good_text_document", "--show", "2", *TOKENIZER)
    assert done.returncode == 0, done.stderr
    assert "3 documents, 3 sequences" in done.stdout and "duplicates: 1 documents: 2 (as 0)" in done.stdout
    assert "'the first document<|endoftext|>'" in done.stdout and "'a second one<|endoftext|>'" in done.stdout
    assert "ids: all in 0 to 599" in done.stdout


def test_every_prefix_is_checked_and_one_bad_prefix_fails_the_check(folder: Path) -> None:
    done = check(folder, "cut", "good_text_document", "none")
    assert done.returncode == 65 and "3 documents" in done.stdout
    assert "cut.idx: the header" in done.stderr and "none.idx does not exist" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["wrong", *TOKENIZER], 65, "wrong contains 1 ids outside the vocabulary"),
        (
            ["good_text_document", *(word.replace("demo", "other/demo") for word in TOKENIZER)],
            65,
            "good_text_document was made with another tokenizer",
        ),
        (["good_text_document", "--show", "1"], 64, "--show 1 requires --tokenizer-type"),
        ([], 64, "--prefixes is required"),
    ],
)
def test_exit_codes_and_sentences(folder: Path, words: list[str], code: int, text: str) -> None:
    done = check(folder, *words)
    assert done.returncode == code and text in done.stderr
