"""The other preprocessing tools give the bytes of `preprocess_data.py`; see also `test_seed_commands.py`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from megatron.data.formats.sidecar import read_sidecar
from tests.helpers.programs import forking_python
from tests.helpers.vocabulary import hard_documents, write_vocabulary
from tests.tools.corpus.in_process import run_tool
from tools import merge_preprocessed_data
from tools.corpus import check_data

TOOLS = Path(__file__).resolve().parents[3] / "tools"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary, a corpus, and what preprocess_data.py makes of it (`whole_text_document`)."""
    folder = tmp_path_factory.mktemp("family")
    write_vocabulary(folder)
    lines = [json.dumps({"text": text}) + "\n" for text in hard_documents(300)]
    (folder / "in.jsonl").write_text("".join(lines))
    for number in range(3):
        (folder / f"chunk{number}.jsonl").write_text("".join(lines[number * 110 : (number + 1) * 110]))
    done = tool(folder, "preprocess_data.py", "--input", "in.jsonl", "--output-prefix", "whole")
    assert done.returncode == 0, done.stderr
    return folder


def tool(folder: Path, name: str, *words: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    tokenizer = "--vocab-file demo-vocab.json --merge-file demo-merges.txt --tokenizer-type GPT2BPETokenizer"
    command = [forking_python(), *launcher, str(TOOLS / name), *tokenizer.split(), "--append-eod", *words]
    environment = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=150, check=False
    )


def pair(folder: Path, name: str, level: str = "document") -> list[bytes]:
    return [(folder / f"{name}_text_{level}.{suffix}").read_bytes() for suffix in ("bin", "idx")]


def test_two_ranks_give_the_same_bytes_and_one_description(folder: Path) -> None:
    before = {path.name for path in folder.iterdir()}
    words = ["--input", "in.json?", "--output-prefix", "dist", "--scratch", "scratch"]
    done = tool(folder, "preprocess_data_dist.py", *words, launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Opening in.json? on 2 ranks") == 1
    assert pair(folder, "dist") == pair(folder, "whole")
    made, whole = (read_sidecar(folder / f"{name}_text_document") for name in ("dist", "whole"))
    assert made is not None and whole is not None
    assert (made.documents, made.empty, made.tokens) == (whole.documents, whole.empty, whole.tokens)
    assert [(one.path, one.text_bytes) for one in made.sources] == [(one.path, one.text_bytes) for one in whole.sources]
    new = {path.name for path in folder.iterdir()} - before
    assert new == {"scratch", *(f"dist_text_document.{suffix}" for suffix in ("bin", "idx", "json"))}
    assert not list((folder / "scratch").iterdir())


@pytest.mark.full
def test_upstreams_flags_of_the_ranks_tool(folder: Path) -> None:
    """Every flag that upstream's tool has, on two ranks: the first 50 documents of a shuffled split."""
    pytest.importorskip("datasets", reason="the datasets package is not installed")
    words = "--input in.jsonl --split train[:200] --columns text --count 50 --shuffle --seed 3 --merge both --scratch s"
    words += " --torch-backend mpi --log-interval 1 --dataset-impl mmap --make-vocab-size-divisible-by 128"
    words += " --pad-vocab-size-to 640 --output-prefix drawn"
    done = tool(folder, "preprocess_data_dist.py", *words.split(), launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert "parallel and serial merge are equal" in done.stderr
    order = np.arange(200)
    np.random.default_rng(3).shuffle(order)
    lines = (folder / "in.jsonl").read_text().splitlines(keepends=True)
    (folder / "drawn.jsonl").write_text("".join(lines[number] for number in order[:50]))
    assert tool(folder, "preprocess_data.py", "--input", "drawn.jsonl", "--output-prefix", "lines").returncode == 0
    assert pair(folder, "drawn") == pair(folder, "lines")


def test_the_older_layout_is_written_merged_and_checked(folder: Path) -> None:
    for number in range(3):
        words = ["--input", f"chunk{number}.jsonl", "--output-prefix", f"old{number}", "--dataset-impl", "lazy"]
        assert tool(folder, "preprocess_data.py", *words).returncode == 0
    words = ["--input", "in.jsonl", "--output-prefix", "old", "--dataset-impl", "cached"]
    assert tool(folder, "preprocess_data_many_cores.py", *words).returncode == 0
    parts = [f"old{number}_text_document" for number in range(3)]
    words = ["--datasets", *parts, "--output-prefix", "both_text_document"]
    done = run_tool(merge_preprocessed_data.main, folder, *words)
    assert done.returncode == 0 and pair(folder, "both") == pair(folder, "old")
    assert pair(folder, "old")[1].startswith(b"TNTIDX")
    done = run_tool(check_data.main, folder, "both_text_document")
    assert done.returncode == 0 and "tokens of int32" in done.stdout and "ids: all in 0 to 599" in done.stdout


def test_sentences_are_the_same_with_both_tools(folder: Path) -> None:
    words = ["--input", "in.jsonl", "--split-sentences", "--keep-newlines", "--lang", "english", "--output-prefix"]
    for prefix, name in (("one", "preprocess_data.py"), ("cores", "preprocess_data_many_cores.py")):
        done = tool(folder, name, *words, prefix)
        assert done.returncode == 0, done.stderr
        assert pair(folder, prefix, "sentence") == pair(folder, "one", "sentence")
    assert pair(folder, "one", "sentence")[0] != pair(folder, "whole")[0]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--input", "in.jsonl", "--seed", "5"], "--seed 5 has no effect without --shuffle"),
        (["--input", "in.jsonl", "--torch-backend", "tcp"], "--torch-backend tcp is unknown"),
        (["--input", "in.jsonl", "--columns", "a", "a"], "contains a key twice"),
    ],
)
def test_wrong_flags_are_one_sentence_errors(folder: Path, words: list[str], text: str) -> None:
    done = tool(folder, "preprocess_data_dist.py", "--output-prefix", "wrong", *words)
    assert done.returncode == 64 and text in done.stderr and "Traceback" not in done.stderr
