"""A `.txt` file is plain text, one document per line, in every tool that reads a corpus, without a flag."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.data.formats.indexed import IndexedDataset
from tests.helpers.vocabulary import write_vocabulary
from tests.trident.corpus.preprocess_runs import quiet
from tools import preprocess_data, preprocess_data_many_cores, train_tokenizer
from tools.corpus import check_tokenizer, clean_corpus, corpus_store, featurize
from trident.corpus.preprocess.distributed import DocumentDraw, preprocess_on_ranks, share_of_rank
from trident.corpus.preprocess.encode import EncodeOptions
from trident.corpus.workers.ranks import JobRanks

TOOLS = Path(corpus_store.__file__).parents[1]
LINES = [f"line {number} of a plain text" for number in range(20)]
Start = Callable[..., None]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Runs the main function of a tool in a folder with `in.txt`, and `vocabulary` in place of a tokenizer's flags."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_bytes("\r\n".join(LINES).encode())
    choice = write_vocabulary(tmp_path, 300)
    files = f"--vocab-file {choice.vocab_file} --merge-file {choice.merge_file} --tokenizer-type GPT2BPETokenizer"

    def run(main: Callable[[list[str]], int], words: str) -> None:
        assert main(words.replace("vocabulary", files).split()) == 0

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.syspath_prepend(str(TOOLS))
    yield run
    signal.signal(signal.SIGTERM, before)


def test_every_tool_takes_a_txt_file_without_flags(start: Start, tmp_path: Path) -> None:
    for name, tool in (("one", preprocess_data), ("two", preprocess_data_many_cores)):
        start(tool.main, f"--input in.txt --output-prefix {name} vocabulary")
        assert len(IndexedDataset(tmp_path / f"{name}_text_document")) == len(LINES)
    start(train_tokenizer.main, "--input in.txt --output-prefix learned --vocab-size 300")
    start(check_tokenizer.main, "--input in.txt vocabulary --require-exact")
    start(clean_corpus.main, "--input in.txt --output clean.jsonl")
    cleaned = [json.loads(line) for line in (tmp_path / "clean.jsonl").read_text().splitlines()]
    assert cleaned == [{"text": line} for line in LINES]
    start(featurize.main, "--input in.txt --output-path windows vocabulary")
    start(corpus_store.main, "import in.txt --config sqlite:///store.db --collection web")
    start(corpus_store.main, "fetch --config sqlite:///store.db --nsample 20 --output-prefix drawn")
    assert sorted((tmp_path / "drawn0.txt").read_text().splitlines()) == sorted(LINES)
    start(train_tokenizer.main, "--input drawn*.txt --output-prefix again --vocab-size 300")
    assert (tmp_path / "again-vocab.json").read_bytes() == (tmp_path / "learned-vocab.json").read_bytes()


def test_ranks_read_a_txt_file_without_flags(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes("\r\n".join(LINES).encode())
    ranks, options = JobRanks(0, 1, lambda value: [value]), EncodeOptions(write_vocabulary(tmp_path, 300))
    encode = share_of_rank([str(path)], DocumentDraw(), options, ranks, quiet())
    assert preprocess_on_ranks(encode, f"{tmp_path}/ranks", options, "parallel", None, ranks).documents == len(LINES)


def test_what_fetch_writes_is_an_input_over_a_pipe(start: Start, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": f"{line}\nand more"}) + "\n" for line in LINES))
    start(corpus_store.main, "import in.jsonl --config sqlite:///store.db --collection web")
    script = (
        f"python {TOOLS}/corpus/corpus_store.py fetch --config sqlite:///store.db --nsample 20 --output-prefix - |"
        f" python {TOOLS}/train_tokenizer.py --input - --output-prefix piped --vocab-size 300"
    )
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f'python() {{ "{sys.executable}" "$@"; }}; {script}'],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    start(train_tokenizer.main, "--input in.jsonl --output-prefix whole --vocab-size 300")
    assert (tmp_path / "piped-vocab.json").read_bytes() == (tmp_path / "whole-vocab.json").read_bytes()
