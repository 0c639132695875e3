"""Blocks to token ids: end-of-document ids, empty documents, sentences, and bad lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.errors import ConfigError, DataError, StorageError
from megatron.tokenizers.tokenizer import TokenizerChoice
from tests.helpers.vocabulary import write_vocabulary
from tests.trident.corpus.preprocess_runs import START_METHODS, endless, run, write_numbered_lines
from trident.corpus.inputs.block import InputBlock
from trident.corpus.preprocess.encode import BlockEncoder, EncodeOptions, EncodeWork
from trident.corpus.workers.pool import WorkerPool

LINES = b'{"text": "some text"}\n{"text": ""}\n{"text": "more"}\n'


def block(data: bytes) -> InputBlock:
    return InputBlock("in.jsonl", 0, len(data), data, len(data))


@pytest.mark.parametrize("append_eod", [True, False])
def test_ids_are_the_tokenizers_and_empty_documents_are_skipped(choice: TokenizerChoice, append_eod: bool) -> None:
    encoder = BlockEncoder(EncodeOptions(choice, append_eod=append_eod))
    end = [encoder.tokenizer.eod_id] if append_eod else []
    expected = [encoder.tokenizer.encode(text) + end for text in ("some text", "more")]
    encoded = encoder.encode(block(LINES))
    ids = encoded.keys[0].ids
    assert ids is not None and ids.dtype == encoder.dtype
    assert ids.tolist() == [*expected[0], *expected[1]] and encoded.keys[0].lengths.tolist() == list(map(len, expected))
    assert (encoded.lines, encoded.documents, encoded.keys[0].documents) == (3, 3, 2)


def test_a_bad_line_stops_the_block_unless_it_is_skipped(choice: TokenizerChoice) -> None:
    data = LINES + b"no json\n"
    stopped = BlockEncoder(EncodeOptions(choice)).encode(block(data))
    assert stopped.keys == () and [bad.line for bad in stopped.bad] == [3]
    skipped = BlockEncoder(EncodeOptions(choice, skip_bad_lines=True)).encode(block(data))
    assert skipped.keys[0].documents == 2 and skipped.bad_count == 1


def test_each_key_and_level_names_a_pair(choice: TokenizerChoice) -> None:
    assert EncodeOptions(choice, ("text", "title")).prefixes("out") == ("out_text_document", "out_title_document")


def test_the_cached_layout_takes_wide_ids(choice: TokenizerChoice) -> None:
    assert BlockEncoder(EncodeOptions(choice, is_cached=True)).dtype == np.int32


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
                assert result.keys[0].ids is None and result.send_offsets is not None
                result.send_offsets([(str(target), number * ids.nbytes)])
            assert len(pool.process_ids) == 2
            assert target.read_bytes() == ids.tobytes() * 2


def test_ids_that_cannot_be_written_are_a_storage_error(tmp_path: Path, choice: TokenizerChoice) -> None:
    data = b'{"text": "some text"}\n'
    with (
        WorkerPool(EncodeWork(BlockEncoder(EncodeOptions(choice))), 1) as pool,
        pytest.raises(StorageError, match=r"Cannot write .*/gone/out\.bin: No such file"),
    ):
        for _, result in pool.run([InputBlock("<test>", 1, len(data), data, 0)]):
            assert result.send_offsets is not None
            result.send_offsets([(str(tmp_path / "gone" / "out.bin"), 0)])


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
