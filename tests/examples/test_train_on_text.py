"""train_on_text.py: one line from text to a checkpoint, and the same line again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megatron.data.formats.indexed import IndexedDataset
from megatron.observe.metrics_file import read_steps
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.programs import forking_python

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --seq-length 32 --micro-batch-size 1 --global-batch-size 2"
)
SHORT = "--eval-iters 1 --log-interval 1"


def run(folder: Path, *words: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [forking_python(), *launcher, str(ROOT / "train_on_text.py"), *words, *SMALL.split(), *SHORT.split()]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


def test_flags_are_checked_before_the_text_is_read(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("word " * 100)
    for words, said in (
        (("--lr-decay", "3"), "unknown flag --lr-decay."),
        (("--tensor-model-parallel-size", "2"), "train_on_text.py my.txt --tensor-model-parallel-size 2 --num-layers"),
        (("--hidden-size", "65536", "--num-layers", "500"), "parameters of --num-layers 500 --hidden-size 65536 need"),
    ):
        small = [] if "--hidden-size" in words else SMALL.split()
        done = subprocess.run(
            [forking_python(), str(ROOT / "train_on_text.py"), "my.txt", *words, *small],
            **{"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 60},
            env={"PATH": os.environ["PATH"], "DS_ACCELERATOR": "cpu"},
        )
        assert done.returncode == 64 and said in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["my.txt"]


@pytest.mark.slow
def test_one_line_trains_and_the_same_line_goes_on(tmp_path: Path) -> None:
    text = "".join(f"Line {number} says {number * 7919 % 1000}.\n" + "\n" * (number % 5 == 0) for number in range(4000))
    (tmp_path / "my.text.txt").write_text(text)
    first = run(tmp_path, "my.text.txt", "--train-iters", "2", "--vocab-size", "600", ranks=2)
    assert first.returncode == 0, first.stdout + first.stderr
    folder = tmp_path / "my-training"
    made = (folder / "train_text_document.bin").stat().st_mtime_ns
    tokenizer = build_tokenizer(TokenizerChoice("HFTokenizer", None, None, str(folder / "tokenizer.json")))
    assert tokenizer.vocab_size == 600
    documents = IndexedDataset(str(folder / "train_text_document"))
    ids = [documents[number].tolist() for number in range(len(documents))]
    assert len(ids) > 4 and all(one[-1] == tokenizer.eod_id for one in ids)
    assert "".join(tokenizer.decode(one[:-1]) for one in ids) == text

    again = run(tmp_path, "my.text.txt", "--train-iters", "3", "--vocab-size", "600")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "iter_0000002" in again.stderr, "one process continues what two began"
    assert sorted(read_steps(folder / "run")) == [1, 2, 3]
    assert (folder / "train_text_document.bin").stat().st_mtime_ns == made, "the tokens are used again"
    assert f"--load {folder.name}/checkpoints" in again.stderr + again.stdout

    (tmp_path / "my.text.txt").write_text(text[: len(text) // 2])
    changed = run(tmp_path, "my.text.txt", "--train-iters", "4", "--vocab-size", "600")
    assert changed.returncode == 64
    assert "--text my.text.txt changed since it was prepared in my-training" in changed.stderr
