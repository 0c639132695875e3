"""Token files of the tools, opened by `megatron-core` from PyPI: the same sequences, documents and tokens.

It owns the import name `megatron` too, so it gets a folder and an interpreter of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.tokenizers.tokenizer import build_tokenizer
from tests.helpers.projects.megatron_core import python_with_core
from tests.helpers.vocabulary import hard_documents, write_vocabulary

ROOT = Path(__file__).resolve().parents[3]
READ = """
import json, sys
from megatron.core.datasets.indexed_dataset import IndexedDataset
for prefix in sys.argv[1:]:
    data = IndexedDataset(prefix, mmap=True)
    rows = [data[number] for number in range(len(data))]
    kind = str(data.index.dtype().dtype)
    print(json.dumps([kind, [row.tolist() for row in rows], data.document_indices.tolist()]))
"""


@pytest.fixture(scope="module")
def _python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return python_with_core(tmp_path_factory.mktemp("megatron-core"))


@pytest.mark.full
@pytest.mark.slow
def test_megatron_core_reads_the_same_tokens(_python: str, tmp_path: Path) -> None:
    choice = write_vocabulary(tmp_path)
    texts = hard_documents(60)
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tool = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(source), "--append-eod"]
    tool += ["--vocab-file", str(choice.vocab_file), "--merge-file", str(choice.merge_file)]
    tool += ["--tokenizer-type", "GPT2BPETokenizer"]
    subprocess.run([*tool, "--output-prefix", str(tmp_path / "whole")], check=True)
    subprocess.run([*tool, "--output-prefix", str(tmp_path / "split"), "--split-sentences"], check=True)
    prefixes = [str(tmp_path / "whole_text_document"), str(tmp_path / "split_text_sentence")]
    read = subprocess.run([_python, "-c", READ, *prefixes], check=True, capture_output=True, text=True, cwd=tmp_path)
    whole, split = (json.loads(line) for line in read.stdout.splitlines())

    tokenizer = build_tokenizer(choice)
    rows = [tokenizer.encode(text) for text in texts]
    expected = [[*row, tokenizer.eod_id] for row in rows if row]
    assert whole == ["uint16", expected, list(range(len(expected) + 1))]
    kind, sequences, ends = split
    assert kind == "uint16" and len(sequences) == ends[-1] > len(ends) - 1
    last = [sequences[end - 1][-1] for end in np.diff(ends).cumsum()]
    assert last == [tokenizer.eod_id] * (len(ends) - 1)
    assert sum(row.count(tokenizer.eod_id) for row in sequences) == len(ends) - 1
