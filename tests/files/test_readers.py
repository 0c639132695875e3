"""The readers of files that are named inside of others, or found in folders: a pipe there is refused at once."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.data.datasets.examples.example_files import read_records
from megatron.data.formats.indexed import IndexedDataset, check_pair
from megatron.data.formats.parquet_windows import WindowFile
from megatron.errors import MegatronError
from megatron.files.settings import read_json
from megatron.observe.metrics_file import read_records as read_metrics
from megatron.tokenizers.tokenizer_files import check_tokenizer_file, read_tokenizer_file
from trident.convert.hugging_face.weight_files import read_json_file
from trident.evaluate.item_files import read_lines
from trident.evaluate.results import read_results
from trident.evaluate.training.sample_prompts import read_prompts
from trident.launch.hostfile import read_hostfile
from trident.serve.access import read_token

READERS: dict[str, Callable[[Path], Any]] = {
    "JSON": lambda path: read_json(str(path), f"--config {path}"),
    "tokenizer": lambda path: read_tokenizer_file(path, "--vocab-file"),
    "beginning of a tokenizer": lambda path: check_tokenizer_file(path, "--merge-file"),
    "host file": read_hostfile,
    "index of tokens": lambda path: IndexedDataset(path.with_suffix("")),
    "pair of token files": lambda path: check_pair(str(path.with_suffix(""))),
    "windows": WindowFile,
    "examples": lambda path: list(read_records(str(path))),
    "metrics": read_metrics,
    "results": read_results,
    "lines of a task": lambda path: list(read_lines(path)),
    "prompts": read_prompts,
    "token": lambda path: read_token(str(path), None),
    "model of transformers": lambda path: read_json_file(path, "its configuration"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_is_called_one(tmp_path: Path, reader: str) -> None:
    path = tmp_path / "data.idx"
    os.mkfifo(path)
    path.with_suffix(".bin").touch()
    with pytest.raises(MegatronError, match=r"data\.idx.*it is a pipe, not a regular file") as failure:
        READERS[reader](path)
    assert "does not exist" not in str(failure.value)
