"""Scenario 001.3: the page's commands for token files; every way gives the same bytes, in upstream's format."""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np
import pytest

from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.sidecar import read_sidecar
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.seeds.turkish_gpt2.guide import DOCUMENTS, Guide

pytestmark = [pytest.mark.xdist_group("turkish"), pytest.mark.slow]

TOKENIZER = "--vocab gpt2-vocab.json --merge-file gpt2-merges.txt --tokenizer-type GPT2BPETokenizer --append-eod"


def read_pair(index: bytes, tokens: bytes) -> list[list[int]]:
    """The documents of a pair, read by nothing but the format's description.

    Source: Megatron's `.idx`: `MMIDIDX\\0\\0`, uint64 version, uint8 element type, uint64 sequences, uint64 boundaries
    of documents, int32 lengths, int64 first bytes, int64 boundaries.
    """
    assert index[:9] == b"MMIDIDX\0\0"
    version, kind, sequences, boundaries = struct.unpack_from("<QBQQ", index, 9)
    assert (version, kind) == (1, 8), "uint16 where the vocabulary has fewer than 65,500 entries"
    place = 9 + struct.calcsize("<QBQQ")
    lengths = np.frombuffer(index, "<i4", sequences, place)
    starts = np.frombuffer(index, "<i8", sequences, place + 4 * sequences)
    edges = np.frombuffer(index, "<i8", boundaries, place + 12 * sequences)
    assert len(index) == place + 12 * sequences + 8 * boundaries
    assert len(tokens) == 2 * lengths.sum() and starts.tolist() == [0, *(2 * np.cumsum(lengths[:-1])).tolist()]
    assert edges[0] == 0 and edges[-1] == sequences
    parts = [np.frombuffer(tokens, "<u2", count, start) for count, start in zip(lengths, starts, strict=True)]
    return [np.concatenate(parts[first:last]).tolist() for first, last in pairwise(edges)]


def test_001_3_workers_programs_and_chunks_give_the_same_bytes(turkish: Guide) -> None:
    tool = "python tools/preprocess_data"
    turkish.run(
        f"{tool}.py --input my-corpus.json --output-prefix one {TOKENIZER} --workers 1\n"
        f"{tool}_dist.py --input my-corpus.json --output-prefix ranks {TOKENIZER}"
    )
    tokens, index = whole = turkish.pair("my-gpt2")
    for name in ("one", "ranks", "my-gpt2-cores", "meg-gpt2_oscar"):
        assert turkish.pair(name) == whole, name
    files = turkish.folder / "gpt2-vocab.json", turkish.folder / "gpt2-merges.txt"
    tokenizer = build_tokenizer(TokenizerChoice("GPT2BPETokenizer", *map(str, files)))
    found = read_pair(index, tokens)
    assert {ids[-1] for ids in found} == {tokenizer.eod_id}
    assert [tokenizer.decode(ids[:-1]) for ids in found] == turkish.texts()


def test_the_descriptions_of_merged_and_whole_files_agree(turkish: Guide) -> None:
    merged, whole = (read_sidecar(turkish.folder / f"{name}_text_document") for name in ("meg-gpt2_oscar", "my-gpt2"))
    assert merged is not None and whole is not None and merged.tokenizer == whole.tokenizer
    assert (merged.documents, merged.empty, merged.tokens) == (whole.documents, whole.empty, whole.tokens)
    assert whole.documents == DOCUMENTS
    assert not list(turkish.folder.glob("ranks_0*")), "parts of a finished run are removed"


def test_speeds_are_shown(turkish: Guide) -> None:
    assert f"Processed {DOCUMENTS} documents (" in turkish.output and " docs/s, " in turkish.output


def test_any_tokenizer_of_hugging_face(turkish: Guide) -> None:
    (ids,) = IndexedDataset(turkish.folder / "c4_en_train_text_document")[:]
    assert len(ids) == len("ılık iğde") + 1 and ids[-1] == 0
