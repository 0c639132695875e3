"""The merge command, alone and under torchrun."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from megatron.data.formats.indexed_writer import IndexedWriter
from tests.helpers.programs import forking_python
from tests.tools.corpus.in_process import run_tool
from tools import merge_preprocessed_data

MAIN = merge_preprocessed_data.main


def write(prefix: Path, first: int, stop: int) -> None:
    with IndexedWriter(prefix, np.uint16) as writer:
        for number in range(first, stop):
            writer.add_document([np.arange(number)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "a_text_document", 0, 20)
    write(tmp_path / "b_text_document", 20, 21)
    write(tmp_path / "c_text_document", 21, 40)
    write(tmp_path / "whole_text_document", 0, 40)
    return tmp_path


def test_three_chunks_are_the_whole_serially_and_under_torchrun(folder: Path) -> None:
    flags = ["--datasets", *(f"{name}_text_document" for name in "abc"), "--output-prefix"]
    done = run_tool(MAIN, folder, *flags, "one")
    assert done.returncode == 0 and "Merged 3 datasets into one (.bin, .idx): 40 documents" in done.stderr, done.stderr
    launcher = [forking_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*launcher, merge_preprocessed_data.__file__, *flags, "two", "--merge", "distributed"]
    words += ["--torch-backend", "gloo"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stderr.count("Merged 3 datasets") == 1, done.stderr
    for suffix in (".bin", ".idx"):
        whole = (folder / f"whole_text_document{suffix}").read_bytes()
        assert (folder / f"one{suffix}").read_bytes() == (folder / f"two{suffix}").read_bytes() == whole


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--output-prefix", "o"], 64, "--datasets is required"),
        (["--datasets", "a_text_document", "--output-prefix", "o", "--torch-backend", "tcp"], 64, "tcp is unknown"),
        (["--datasets", "a_text_document", "gone", "--output-prefix", "o"], 65, "gone.idx does not exist"),
        (["--datasets", "a_text_document.bin", "--output-prefix", "o"], 65, "without its suffix: use a_text_document"),
    ],
)
def test_wrong_commands_are_one_sentence_errors(folder: Path, words: list[str], code: int, text: str) -> None:
    done = run_tool(MAIN, folder, *words)
    assert done.returncode == code and text in done.stderr
