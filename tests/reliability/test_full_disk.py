"""Each disk operation fails in turn: existing files stay intact, no partial file appears, and the error says why."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.data.order.index_cache import IndexCache
from megatron.errors import StorageError
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.data.formats.test_sidecar import SIDECAR
from tests.helpers.machines.faulty_disk import FaultyDisk, faulty_disk
from tests.helpers.vocabulary import hard_documents, write_vocabulary
from tools.corpus.examination import examine
from trident.corpus.cleaning.clean_corpus import CleanOutputs, clean_corpus
from trident.corpus.cleaning.documents.clean_options import CleanOptions
from trident.corpus.featurize.featurize_corpus import WindowOptions, featurize_tokens
from trident.corpus.preprocess import encode as encode_module
from trident.corpus.preprocess.encode import EncodeOptions
from trident.corpus.preprocess.merge import merge
from trident.corpus.preprocess.preprocess_corpus import preprocess
from trident.corpus.vocabulary.learning import save_vocabulary
from trident.corpus.workers import pool as pool_module
from trident.corpus.workers.progress_line import ProgressLine
from trident.corpus.workers.ranks import JobRanks

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="descriptors are followed through /proc"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
Contents = Mapping[str, bytes]


@dataclass(frozen=True)
class Job:
    """Something that writes into `out`.

    Args:
        run: takes the folder of the inputs, the folder of the outputs and a seed that decides what is written.
        is_one_step: its files appear together or not at all; else each by itself.
        says_need: a full disk is answered with the bytes that are needed, at least at some of its operations.
        stride: every how many operations one is tried; more than 1 where each attempt starts processes.
    """

    run: Callable[[Path, Path, int], None]
    is_one_step: bool = True
    says_need: bool = True
    stride: int = 1


def _quiet() -> ProgressLine:
    return ProgressLine(None, 1, lambda text: None)


def _choice(inputs: Path) -> TokenizerChoice:
    return TokenizerChoice("GPT2BPETokenizer", f"{inputs}/demo-vocab.json", f"{inputs}/demo-merges.txt")


def _preprocess(workers: int, keys: tuple[str, ...]) -> Callable[[Path, Path, int], None]:
    def run(inputs: Path, out: Path, seed: int) -> None:
        options = EncodeOptions(_choice(inputs), keys)
        preprocess((str(inputs / f"{seed}.jsonl"),), str(out / "data"), options, workers, _quiet(), 500)

    return run


def _merge(inputs: Path, out: Path, seed: int) -> None:
    merge([str(inputs / f"pair{seed}"), str(inputs / "pair0")], str(out / "merged"))


def _merge_together(inputs: Path, out: Path, seed: int) -> None:
    """Two ranks, the second one a child process; a failure of the first is raised on both."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_merge_as, args=(1, theirs, inputs, out, seed))
    child.start()
    try:
        _merge_as(0, ours, inputs, out, seed)
    finally:
        child.join()


def _merge_as(rank: int, pipe: Any, inputs: Path, out: Path, seed: int) -> None:
    def gather(value: Any) -> list[Any]:
        pipe.send_bytes(json.dumps(value).encode())
        other = json.loads(pipe.recv_bytes())
        return [value, other] if rank == 0 else [other, json.loads(json.dumps(value))]

    try:
        merge([str(inputs / f"pair{seed}"), str(inputs / "pair0")], str(out / "merged"), JobRanks(rank, 2, gather))
    except StorageError:
        if rank == 0:
            raise


def _index_cache(inputs: Path, out: Path, seed: int) -> None:
    arrays = {name: np.full(5000, seed, np.int64) for name in ("document", "sample")}
    found = IndexCache(out / "cache", required=True).arrays("gpt", {"samples": seed}, lambda: arrays)
    assert found["sample"].tolist() == [seed] * 5000


def _vocabulary(inputs: Path, out: Path, seed: int) -> None:
    save_vocabulary(str(out / "demo"), {"-vocab.json": bytes([seed] * 20_000), "-merges.txt": bytes([seed] * 9)})


def _clean(inputs: Path, out: Path, seed: int) -> None:
    outputs = CleanOutputs(str(out / "kept.jsonl.gz"), str(out / "dropped.jsonl"), str(out / "report.json"))
    clean_corpus(
        (str(inputs / f"{seed}.jsonl"),), outputs, CleanOptions(exact_duplicates=True, keep_originals=True), 1, _quiet()
    )


def _windows(inputs: Path, out: Path, seed: int) -> None:
    options = WindowOptions(2, 8, stride=4, bos_id=1, eos_id=2, pad_id=2, num_shards=seed)
    featurize_tokens(str(inputs / "pair2"), str(out / "windows"), None, options, 1)


JOBS = {
    "windows": Job(_windows, says_need=False),
    "preprocess": Job(_preprocess(1, ("text", "more"))),
    "preprocess in workers": Job(_preprocess(2, ("text",)), stride=3),
    "merge": Job(_merge),
    "merge on two ranks": Job(_merge_together, stride=2),
    "index cache": Job(_index_cache, is_one_step=False),
    "vocabulary": Job(_vocabulary),
    "cleaning": Job(_clean, is_one_step=False, says_need=False),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_vocabulary(folder)
    for seed in (1, 2):
        texts = [text for text in hard_documents(12, seed=seed) if len(text) < 100]
        rows = [json.dumps({"text": text, "more": text[::-1]}) + "\n" for text in texts]
        (folder / f"{seed}.jsonl").write_text("".join(rows))
    for seed in (0, 1, 2):
        with IndexedWriter(folder / f"pair{seed}", np.uint16) as writer:
            for number in range(seed + 3):
                writer.add_document([np.arange(number, number + 10)])
            writer.describe(SIDECAR.tokenizer, {}, (), append_eod=True, empty=0)
    return folder


@pytest.fixture(autouse=True)
def one_tokenizer(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded once, and workers however few cores there are."""
    tokenizer = build_tokenizer(_choice(inputs))
    monkeypatch.setattr(encode_module, "build_tokenizer", lambda flags, known_library=None: tokenizer)
    monkeypatch.setattr(pool_module, "usable_cores", lambda: 2)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_locks(found: Contents) -> dict[str, bytes]:
    return {name: data for name, data in found.items() if not name.endswith(".lock")}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("is_there", [True, False], ids=["over older files", "new"])
def test_a_failure_of_each_operation(tmp_path: Path, inputs: Path, name: str, is_there: bool) -> None:
    job, out = JOBS[name], tmp_path / "out"
    (tmp_path / "whole").mkdir()
    job.run(inputs, tmp_path / "whole", 2)
    whole = without_locks(contents(tmp_path / "whole"))
    out.mkdir()
    if is_there:
        job.run(inputs, out, 1)
    older = without_locks(contents(out))
    counted = FaultyDisk(tmp_path / "count")
    shutil.copytree(out, tmp_path / "count")
    with faulty_disk(counted):
        job.run(inputs, tmp_path / "count", 2)
    assert counted.operations >= 4
    told = set()
    again = [(errno.EIO, False, 1), (errno.EDQUOT, False, 5)] if is_there else []
    for number, is_full, step in [(errno.ENOSPC, True, 1), *again]:
        for place in range(0, counted.operations, max(step, job.stride)):
            failure = _attempt(job, inputs, out, FaultyDisk(out, place, number, is_full))
            found = without_locks(contents(out))
            where = f"{name}, operation {place}, {errno.errorcode[number]}: {failure}"
            if job.is_one_step:
                assert found == (whole if failure is None else older), where
            else:
                assert all(data in (older.get(path), whole.get(path)) for path, data in found.items()), where
                assert older.keys() <= found.keys(), where
            assert not [path for path in found if path.endswith(".tmp")], where
            if failure is None:
                assert found == whole or name == "index cache", where
            else:
                told |= _check_sentence(failure, out, number)
            shutil.rmtree(out)
            out.mkdir()
            for path, data in older.items():
                (out / path).parent.mkdir(parents=True, exist_ok=True)
                (out / path).write_bytes(data)
    assert ("need" in told) == job.says_need


def _attempt(job: Job, inputs: Path, out: Path, disk: FaultyDisk) -> StorageError | None:
    try:
        with faulty_disk(disk):
            job.run(inputs, out, 2)
    except StorageError as failure:
        return failure
    return None


def _check_sentence(failure: StorageError, out: Path, number: int) -> set[str]:
    text = str(failure)
    assert str(out) in text and os.strerror(number) in text and failure.exit_code == 74
    if number != errno.EIO:
        assert "bytes are free" in text and "Free some space" in text
    return {"need"} if "needs at least" in text else set()


@pytest.mark.parametrize("name", JOBS)
def test_short_writes_are_finished(tmp_path: Path, inputs: Path, name: str) -> None:
    for folder, is_short in (("one", False), ("two", True)):
        (tmp_path / folder).mkdir()
        with faulty_disk(FaultyDisk(tmp_path / folder, is_short=is_short)):
            JOBS[name].run(inputs, tmp_path / folder, 1)
    assert without_locks(contents(tmp_path / "one")) == without_locks(contents(tmp_path / "two"))


def test_inspecting_a_pair_does_not_modify_it(tmp_path: Path, inputs: Path) -> None:
    disk = FaultyDisk(inputs)
    with faulty_disk(disk):
        examine(str(inputs / "pair1"))
    assert disk.operations == 0


def test_an_optional_index_cache_is_skipped_on_failure(tmp_path: Path, inputs: Path) -> None:
    def make() -> dict[str, np.ndarray]:
        return {"sample": np.arange(1000)}

    for place in range(12):
        folder = tmp_path / str(place)
        with faulty_disk(FaultyDisk(folder, place, is_full=True)):
            found = IndexCache(folder).arrays("gpt", {"samples": 5}, make)
        assert found["sample"].tolist() == list(range(1000))
        assert not [path for path in folder.glob("*.tmp")] and not list(folder.glob(".*.tmp"))
