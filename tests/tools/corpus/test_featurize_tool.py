"""The featurize tools."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.config.flags.command_line import parse_flags
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.parquet_windows import WindowFile
from megatron.errors import ConfigError
from tests.helpers.projects.jax_lm import PREPROCESS_FLAGS
from tests.helpers.vocabulary import hard_documents, write_vocabulary
from tests.tools.corpus.in_process import run_tool
from tools import preprocess_data
from tools.corpus import featurize, windows_to_tokens
from tools.corpus.featurize import FeaturizeFlags, divide, make_in_worker

pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
TOKENIZER = "--vocab-file demo-vocab.json --merge-file demo-merges.txt"
WINDOWS = f"{TOKENIZER} --max_sequence_length=32 --min-sequence-length 8 --stride 16 --rows-per-shard 300"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("featurize")
    write_vocabulary(folder)
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in hard_documents(200)))
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> str:
    """The log of the tool, which writes windows to out/wt.train."""
    words = f"--input in.jsonl --output-path out/wt.train --num-workers 2 {WINDOWS}"
    done = run_tool(featurize.main, folder, *shlex.split(words))
    assert done.returncode == 0, done.stderr
    return done.stderr


def flags_of(words: str) -> FeaturizeFlags:
    return parse_flags(FeaturizeFlags, divide(shlex.split(words))[0])


def test_the_command_of_jax_lm_training_is_read() -> None:
    ours, beam = divide(shlex.split(PREPROCESS_FLAGS.replace("\\\n", "")))
    assert beam == ["--direct_running_mode", "multi_processing", "--direct_num_workers", "0"]
    flags = parse_flags(FeaturizeFlags, ours)
    assert (flags.tokenizer_type, flags.tokenizer_name_or_path, flags.ignore_label) == (
        "PretrainedFromHF",
        "gpt2",
        -100,
    )
    assert (flags.min_sequence_length, flags.max_sequence_length, flags.stride) == (128, 256, 128)
    assert flags.texts == ("hf://wikitext:wikitext-103-v1:train",)
    underscored = [word.replace("-", "_").replace("__", "--") if word.startswith("--") else word for word in ours]
    assert any("_" in word for word in underscored) and divide(underscored) == (ours, [])


def test_texts_to_windows_to_tokens(folder: Path, report: str) -> None:
    shards = sorted((folder / "out").glob("wt*"))
    assert shards[0].name == f"wt.train-00000-of-{len(shards):05d}" and len(shards) > 1
    table = pyarrow.concat_tables([parquet.read_table(path) for path in shards])
    assert str(table.schema).count("list<element: int64>") == 2 and "list<element: float>" in str(table.schema)
    assert f"Wrote {table.num_rows} windows of 32 positions" in report and "Dropped 0 tokens" in report
    words = "--windows out/wt.train --output-prefix back --append-eod"
    back = run_tool(windows_to_tokens.main, folder, *words.split())
    assert back.returncode == 0 and f"from {table.num_rows} windows joined" in back.stderr, back.stderr
    words = f"--input in.jsonl {TOKENIZER} --tokenizer-type GPT2BPETokenizer --output-prefix whole --append-eod"
    done = run_tool(preprocess_data.main, folder, *words.split())
    assert done.returncode == 0
    for suffix in ("bin", "idx"):
        assert (folder / f"back.{suffix}").read_bytes() == (folder / f"whole_text_document.{suffix}").read_bytes()
    words = "--data-prefix whole_text_document --output-path out/again --no-overlap --max-sequence-length 32"
    done = run_tool(featurize.main, folder, *words.split(), "--min-sequence-length", "8")
    assert done.returncode == 0 and " 0 of them a second time (overlap)" in done.stderr, done.stderr
    rows = next(WindowFile(folder / "out" / "again-00000-of-00001").batches(1000, group=0))
    whole = IndexedDataset(folder / "whole_text_document")
    assert np.count_nonzero(rows.attention_mask) == whole.tokens - len(whole) + 2 * len(rows.input_ids)


def test_a_dataset_of_the_library(folder: Path, report: str, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="--dataset-name needs the datasets package")
    (folder / "set").mkdir()
    (folder / "set" / "train.jsonl").write_bytes((folder / "in.jsonl").read_bytes())
    monkeypatch.setenv("HF_HOME", str(folder / "cache"))
    words = f"--dataset-name ./set --output-path set.train {WINDOWS}"
    command = [sys.executable, featurize.__file__, *words.split()]  # the library reads HF_HOME when it is imported
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for one, two in zip(sorted(folder.glob("set.train*")), sorted(folder.glob("out/wt*")), strict=True):
        assert one.read_bytes() == two.read_bytes()
    rows = datasets.Dataset.from_parquet(str(folder / "set.train*"), cache_dir=str(folder / "cache"))
    assert rows.column_names == ["input_ids", "attention_mask", "labels"] and len(rows[0]["labels"]) == 32


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--input a --data-prefix b --output-path o", "got --input and --data-prefix"),
        ("--output-path o --tokenizer-model t", "got none"),
        ("--input a --output-path o", "--tokenizer-model (or --vocab-file and --merge-file) is required"),
        ("--data-prefix a --output-path o --runner beam", "--data-prefix a cannot be combined with --runner beam"),
        ("--data-prefix a --output-path o --no-overlap --stride 128", "--no-overlap requires --stride 254"),
        ("--data-prefix a --output-path o --overlap --stride 254", "below the 254 tokens of a window, not 254"),
        ("--data-prefix a --output-path o --num-special-token-reserved 3", "--num-special-token-reserved 3 is unknown"),
        ("--input a --output-path o --tokenizer-model t --num-shards 100000", "--num-shards 100000 is out of range"),
    ],
)
def test_wrong_flags_are_one_sentence_errors(words: str, text: str) -> None:
    with pytest.raises(ConfigError) as failure:
        flags_of(words)
    assert text in str(failure.value)


def test_the_stride_follows_from_the_window() -> None:
    assert flags_of("--data-prefix a --output-path o").stride == 128
    assert flags_of("--data-prefix a --output-path o --max-sequence-length 64").stride == 62
    assert flags_of("--data-prefix a --output-path o --no-overlap").stride is None
    assert flags_of("--data-prefix a --output-path o --no-overlap --stride 254").stride == 254


def test_damaged_inputs_end_with_their_exit_code(folder: Path) -> None:
    (folder / "bad.parquet").write_bytes(b"PAR1")
    done = run_tool(windows_to_tokens.main, folder, "--windows", "bad.parquet", "--output-prefix", "none")
    assert done.returncode == 65 and "bad.parquet is not a readable Parquet file" in done.stderr


def test_a_worker_finds_the_package_by_its_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(folder)])
    with pytest.raises(json.JSONDecodeError):
        make_in_worker("no json", str(folder), "{}")
    assert sys.path[0] == str(folder)
