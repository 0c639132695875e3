"""The tools take SentencePiece and WordPiece tokenizers as they take GPT-2's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.sidecar import read_sidecar
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.helpers.sentencepiece_models import write_model

TOOLS = Path(__file__).resolve().parents[3] / "tools"
TEXTS = ["Merhaba dünya, nasılsın?", "the quick brown fox", "", "안녕 세상아 👍🏽"]


def run(tool: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOLS / tool), *words], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("kind", ["Llama2Tokenizer", "SentencePieceTokenizer", "BertWordPieceLowerCase"])
def test_preprocess_and_check(tmp_path: Path, kind: str) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    options = {} if kind == "Llama2Tokenizer" else {"model_type": "unigram", "vocab_size": 500}
    flag, path = "--tokenizer-model", tmp_path / "small.model"
    if kind.startswith("Bert"):
        flag, path = "--vocab-file", tmp_path / "vocab.txt"
        path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "quick", "fox", ","]) + "\n")
    else:
        write_model(tmp_path, **options)
    choice = ["--tokenizer-type", kind, flag, str(path)]
    prefix = tmp_path / "out"
    words = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(prefix), "--append-eod", "--workers", "2"]
    done = run("preprocess_data.py", *words, *choice)
    assert done.returncode == 0, done.stderr
    assert ("encoding with the" in done.stderr) == (kind != "Llama2Tokenizer")
    is_bert = kind.startswith("Bert")
    files = {"vocab_file": str(path)} if is_bert else {"tokenizer_name_or_path": str(path)}
    tokenizer = build_tokenizer(TokenizerChoice(kind, **files))
    kept = [ids for ids in map(tokenizer.encode, TEXTS) if ids]
    assert [ids.tolist() for ids in IndexedDataset(f"{prefix}_text_document")[:]] == [
        [*ids, tokenizer.eod_id] for ids in kept
    ]
    sidecar = read_sidecar(f"{prefix}_text_document")
    assert sidecar is not None and sidecar.tokenizer.fingerprint == tokenizer.fingerprint
    done = run("corpus/check_data.py", f"{prefix}_text_document", "--show", "4", *choice)
    assert done.returncode == 0 and "fox" in done.stdout + done.stderr
    other = [
        "--tokenizer-type",
        "GPTSentencePieceTokenizer",
        "--tokenizer-model",
        str(write_model(tmp_path, "other.model")),
    ]
    done = run("corpus/check_data.py", f"{prefix}_text_document", *other)
    assert done.returncode == 65 and "was made with another tokenizer" in done.stderr
