"""Encoding in worker processes: ids are written by the workers themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.corpus.inputs.input_blocks import InputBlock
from megatron.corpus.preprocess.encode import BlockEncoder, EncodeOptions
from megatron.corpus.preprocess.encode_work import EncodeWork
from megatron.corpus.workers.pool import WorkerPool
from megatron.errors import ConfigError, DataError, StorageError
from megatron.tokenizers.tokenizer import TokenizerChoice
from tests.corpus.preprocess_runs import START_METHODS, endless, run, write_numbered_lines
from tests.helpers.vocabulary import write_vocabulary


def test_workers_start_as_blocks_arrive_and_write_ids_themselves(tmp_path: Path, choice: TokenizerChoice) -> None:
    data = b'{"text": "some text"}\n' * 1000
    encoder = BlockEncoder(EncodeOptions(choice))
    ids = encoder.encode(InputBlock("<test>", 1, len(data), data, 0)).keys[0].ids
    assert ids is not None
    for start_method in START_METHODS:
        target = tmp_path / start_method
        target.touch()
        with WorkerPool(EncodeWork(encoder), 8, start_method) as pool:
            for number, (_, result) in enumerate(
                pool.run(InputBlock("<test>", 1, len(data), data, 0) for _ in range(2))
            ):
                assert result.keys[0].ids is None and result.place is not None
                result.place([(str(target), number * ids.nbytes)])
            assert len(pool.process_ids) == 2
            assert target.read_bytes() == ids.tobytes() * 2


def test_ids_that_cannot_be_written_are_a_storage_error(tmp_path: Path, choice: TokenizerChoice) -> None:
    data = b'{"text": "some text"}\n'
    with (
        WorkerPool(EncodeWork(BlockEncoder(EncodeOptions(choice))), 1) as pool,
        pytest.raises(StorageError, match=r"Cannot write .*/gone/out\.bin: No such file"),
    ):
        for _, result in pool.run([InputBlock("<test>", 1, len(data), data, 0)]):
            assert result.place is not None
            result.place([(str(tmp_path / "gone" / "out.bin"), 0)])


def test_workers_report_what_is_wrong_with_the_tokenizer(tmp_path: Path) -> None:
    choice = write_vocabulary(tmp_path)
    path = write_numbered_lines(tmp_path / "in.jsonl", ["a"])
    missing = TokenizerChoice("GPT2BPETokenizer", "/nowhere/v.json", "/nowhere/m.txt")
    with pytest.raises(ConfigError, match=r"--vocab-file /nowhere/v\.json is not a file"):
        run([path], tmp_path / "out", EncodeOptions(missing), workers=2)
    encoder = BlockEncoder(EncodeOptions(choice))
    Path(str(choice.vocab_file)).unlink()
    with (
        WorkerPool(EncodeWork(encoder), 1, "spawn") as pool,
        pytest.raises(ConfigError, match="--vocab-file .* is not a file"),
    ):
        list(pool.run(endless()))


def test_a_file_that_vanishes_is_a_data_error_from_a_worker(tmp_path: Path, choice: TokenizerChoice) -> None:
    pool = WorkerPool(EncodeWork(BlockEncoder(EncodeOptions(choice))), 1)
    with pool, pytest.raises(DataError, match=r"gone\.jsonl: cannot be read"):
        list(pool.run([InputBlock(str(tmp_path / "gone.jsonl"), 0, 10, None, 10)]))
