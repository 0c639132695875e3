"""Shares of several ranks merged are the whole, however they were chosen and merged."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.errors import ConfigError, DataError, StorageError
from megatron.tokenizers.tokenizer import TokenizerChoice
from tests.helpers.vocabulary import hard_documents
from tests.trident.corpus.preprocess_runs import quiet, write_lines
from trident.corpus.preprocess import distributed
from trident.corpus.preprocess.distributed import DocumentDraw, preprocess_on_ranks, share_of_rank
from trident.corpus.preprocess.encode import EncodeOptions
from trident.corpus.preprocess.preprocess_corpus import PreprocessResult, preprocess
from trident.corpus.preprocess.sentences import SentenceSplitter
from trident.corpus.workers.ranks import JobRanks

TEXTS = hard_documents(300)
EVERYTHING = DocumentDraw()


def on_ranks(size: int, work: Callable[[JobRanks], Any]) -> list[Any]:
    """Runs `work` on `size` threads, each as one rank of the job."""
    values: list[Any] = [None] * size
    meet = threading.Barrier(size)

    def gather(rank: int) -> Callable[[Any], list[Any]]:
        def gathered(value: Any) -> list[Any]:
            values[rank] = json.loads(json.dumps(value))
            meet.wait(120)
            found = list(values)
            meet.wait(120)
            return found

        return gathered

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(JobRanks(rank, size, gather(rank))), range(size)))


def both(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}_text_document.{suffix}").read_bytes() for suffix in ("bin", "idx")]


def run(
    folder: Path, options: EncodeOptions, draw: DocumentDraw = EVERYTHING, merging: str = "parallel", ranks: int = 2
) -> PreprocessResult:
    def work(ranks: JobRanks) -> PreprocessResult:
        encode = share_of_rank([f"{folder}/in.jsonl"], draw, options, ranks, quiet())
        return preprocess_on_ranks(encode, f"{folder}/out/o", options, merging, None, ranks)

    results = on_ranks(ranks, work)
    assert all(result == results[0] for result in results)
    return results[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("merging", "ranks"), [("parallel", 3), ("serial", 2), ("both", 2)])
def test_every_merge_method_gives_the_whole(
    tmp_path: Path, choice: TokenizerChoice, merging: str, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    source, options = write_lines(tmp_path / "in.jsonl", TEXTS), EncodeOptions(choice, append_eod=True)
    if merging == "serial":
        options = replace(options, sentences=SentenceSplitter(), is_cached=True)
    result = run(tmp_path, options, merging=merging, ranks=ranks)
    level = "sentence" if merging == "serial" else "document"
    found = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert sorted(found) == [f"o_text_{level}.{suffix}" for suffix in ("bin", "idx", "json")]
    assert result == preprocess((source,), f"{tmp_path}/out/o", options, 1, quiet())
    for name in found:
        assert name.endswith(".json") or (tmp_path / "out" / name).read_bytes() == found[name]
    assert ("parallel and serial merge are equal" in capsys.readouterr().err) == (merging == "both")


def test_two_merge_methods_that_differ_are_an_error(
    tmp_path: Path, choice: TokenizerChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "in.jsonl", TEXTS)
    monkeypatch.setattr(distributed, "_COMPARED_BYTES", 64)
    merge = distributed.merge

    def forgetful(parts: Any, whole: str, *more: Any, **words: Any) -> Any:
        plan = merge(parts, whole, *more, **words)
        if "_serial_" in whole:
            with open(f"{whole}.bin", "r+b") as stream:
                stream.seek(100)
                stream.write(b"\xff\xff")
        return plan

    monkeypatch.setattr(distributed, "merge", forgetful)
    with pytest.raises(StorageError, match=r"o_text_document\.bin: .* differs at byte offset 100 from the serial one"):
        run(tmp_path, EncodeOptions(choice), merging="both", ranks=1)
    assert not list((tmp_path / "out").iterdir())


def test_the_first_of_the_shuffled_documents(tmp_path: Path, choice: TokenizerChoice) -> None:
    pytest.importorskip("datasets", reason="the datasets package is not installed")
    options = EncodeOptions(choice, append_eod=True)
    write_lines(tmp_path / "in.jsonl", TEXTS)
    order = np.arange(len(TEXTS))
    np.random.default_rng(7).shuffle(order)
    write_lines(tmp_path / "drawn.jsonl", [TEXTS[number] for number in order[:100]])
    preprocess((f"{tmp_path}/drawn.jsonl",), f"{tmp_path}/drawn", options, 1, quiet())
    result = run(tmp_path, options, DocumentDraw(count=100, is_shuffled=True, seed=7))
    assert both(tmp_path / "out" / "o") == both(tmp_path / "drawn")
    assert result.documents + result.empty == 100


def test_a_seed_that_was_drawn_gives_the_same_order_again(
    tmp_path: Path, choice: TokenizerChoice, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("datasets", reason="the datasets package is not installed")
    write_lines(tmp_path / "in.jsonl", TEXTS)
    run(tmp_path, EncodeOptions(choice), DocumentDraw(is_shuffled=True))
    found = both(tmp_path / "out" / "o")
    seed = int(capsys.readouterr().err.partition("without --seed: --seed ")[2].split()[0])
    run(tmp_path, EncodeOptions(choice), DocumentDraw(is_shuffled=True, seed=seed), ranks=1)
    assert both(tmp_path / "out" / "o") == found


def test_databases_are_not_drawn_from(choice: TokenizerChoice) -> None:
    with pytest.raises(
        ConfigError, match=r"--split, --count and --shuffle require files.*--input sqlite:///a\.db is a database"
    ):
        share_of_rank(["sqlite:///a.db"], DocumentDraw(count=5), EncodeOptions(choice), JobRanks.single(), quiet())


def test_a_failure_of_one_rank_is_raised_on_all_and_leaves_nothing(tmp_path: Path, choice: TokenizerChoice) -> None:
    path = tmp_path / "in.jsonl"
    write_lines(path, TEXTS)
    path.write_bytes(path.read_bytes() + b"no JSON\n")
    with pytest.raises(DataError, match=rf"rank 1: .*in\.jsonl:{len(TEXTS) + 1}: byte offset"):
        run(tmp_path, EncodeOptions(choice))
    assert not list((tmp_path / "out").iterdir())
    path.unlink()
    with pytest.raises(ConfigError, match=r"in\.jsonl cannot be read: No such file"):
        run(tmp_path, EncodeOptions(choice))
