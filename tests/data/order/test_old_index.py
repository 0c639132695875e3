"""bigscience's index files: read when they fit the data, the split and the seed, and only then."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config import DataConfig
from megatron.data.build import build_split_datasets
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.order.index_map import build_indices
from megatron.data.order.old_index import read_old_index, shuffled_end
from megatron.data.sources import source_kinds
from megatron.data.sources.source import DataRequest
from tests.data.corpora import write_corpus

LENGTHS = [11, 5, 17, 0, 8] * 30  # 1230 tokens, 153 samples an epoch
SAMPLES, SEQUENCE_LENGTH, SEED = 400, 8, 1234
NAMES = ("doc", "sample", "shuffle")


def old_path(prefix: str, array: str, name: str = "train", samples: int = SAMPLES) -> Path:
    return Path(f"{prefix}_{name}_indexmap_{samples}ns_{SEQUENCE_LENGTH}sl_{SEED}s_{array}_idx.npy")


def write_old(prefix: str, first: int = 0, last: int = len(LENGTHS), seed: int = SEED) -> None:
    """What upstream would have left next to the corpus."""
    lengths = IndexedDataset(prefix).lengths
    built = build_indices(lengths, np.arange(first, last), SEQUENCE_LENGTH, SAMPLES, seed)
    for name, array in zip(NAMES, built, strict=True):
        np.save(old_path(prefix, name), array)


def rows_of(prefix: str, split: str = "1,0,0") -> list[list[int]]:
    data = DataConfig(seq_length=SEQUENCE_LENGTH, data_path=(prefix,), split=split)
    train = build_split_datasets(DataRequest(data, SEQUENCE_LENGTH, SEED, (SAMPLES, 0, 0)))[0].train
    assert train is not None
    return [train[sample].tolist() for sample in range(len(train))]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "corpus", LENGTHS)


@pytest.fixture
def expected(tmp_path: Path) -> list[list[int]]:
    (tmp_path / "elsewhere").mkdir()
    return rows_of(write_corpus(tmp_path / "elsewhere/corpus", LENGTHS))


@given(st.integers(1, 3000), st.integers(1, 500), st.integers(0, 2**32 - 1), st.integers(1, 2000))
def test_the_end_of_a_shuffle_is_known_from_its_first_draws(size, period, seed, count):
    whole = np.arange(size) % period
    np.random.RandomState(seed).shuffle(whole)
    end = shuffled_end(size, period, seed, count)
    assert len(end) == min(count, size - 1)
    assert np.array_equal(whole[size - len(end) :], end)


@pytest.mark.parametrize("wide", [False, True])
def test_files_that_fit_are_read(prefix, expected, wide, monkeypatch, capsys):
    """Those of deepspeedai's branch have 64-bit rows."""
    write_old(prefix)
    if wide:
        np.save(old_path(prefix, "sample"), np.load(old_path(prefix, "sample")).astype(np.int64))
    before = sorted(os.listdir(Path(prefix).parent))
    monkeypatch.setattr(source_kinds, "build_indices", lambda *arguments: pytest.fail("an index is built"))
    assert rows_of(prefix) == expected
    assert f"is read from {old_path(prefix, 'doc')} and the two files next to it" in capsys.readouterr().err
    assert sorted({*os.listdir(Path(prefix).parent)} - {"index-cache"}) == before
    for name in NAMES:
        old_path(prefix, name).unlink()
    assert rows_of(prefix) == expected  # our own copy holds it now


def test_they_are_looked_for_under_the_name_of_a_weighted_group(prefix, capsys):
    write_old(prefix)
    for name in NAMES:
        old_path(prefix, name).rename(old_path(prefix, name, "MAIN"))
    data = DataConfig(seq_length=SEQUENCE_LENGTH, train_weighted_split_paths=(f"MAIN: 1 0:1 {prefix}",))
    build_split_datasets(DataRequest(data, SEQUENCE_LENGTH, SEED, (SAMPLES, 0, 0)))
    assert "MAIN_indexmap" in capsys.readouterr().err


def test_without_such_files_nothing_is_logged(prefix, capsys):
    rows_of(prefix)
    assert "indexmap" not in capsys.readouterr().err


def other_split(prefix: str) -> None:
    write_old(prefix, 10, len(LENGTHS))


def other_seed(prefix: str) -> None:
    write_old(prefix, seed=4321)


def other_lengths(prefix: str) -> None:
    """A known pitfall of upstream: the corpus was regenerated with as many documents and tokens as before."""
    write_old(write_corpus(Path(prefix + "-before"), sorted(LENGTHS)))
    for name in NAMES:
        old_path(prefix + "-before", name).rename(old_path(prefix, name))


def changed(array: str, change: Callable[[np.ndarray], np.ndarray | None]) -> Callable[[str], None]:
    def damage(prefix: str) -> None:
        write_old(prefix)
        values = np.load(old_path(prefix, array))
        result = change(values)
        np.save(old_path(prefix, array), values if result is None else result)

    return damage


def put(place: object, value: object) -> Callable[[np.ndarray], None]:
    return lambda values: values.__setitem__(place, value)


def one_token_late(values: np.ndarray) -> None:
    values[-1, 1] += 1


def cut(prefix: str) -> None:
    write_old(prefix)
    os.truncate(old_path(prefix, "sample"), 200)


def lost(prefix: str) -> None:
    write_old(prefix)
    old_path(prefix, "shuffle").unlink()


def zipped(prefix: str) -> None:
    write_old(prefix)
    old_path(prefix, "doc").write_bytes(b"PK\x03\x04 of another program")


def pickled(prefix: str) -> None:
    write_old(prefix)
    np.save(old_path(prefix, "doc"), np.array([{}], dtype=object), allow_pickle=True)


STRANGERS: dict[str, tuple[Callable[[str], None], str]] = {
    "split": (other_split, r"document index is int32 \[420\]; this data needs \[450\]"),
    "seed": (other_seed, "its order does not match seed 1234"),
    "lengths": (other_lengths, r"its sample \d+ does not hold 8 tokens of these documents|its 461 samples end after"),
    "width": (changed("doc", lambda values: values.astype(np.int64)), r"document index is int64"),
    "outside": (changed("doc", put(0, 150)), r"it names sequences outside \[0, 150\)"),
    "repeated": (changed("doc", lambda values: put(0, values[1])(values)), r"times instead of"),
    "beginning": (changed("sample", put(0, [0, 1])), r"its first sample begins at \[0, 1\]"),
    "place": (changed("sample", put((5, 0), 450)), "it names places outside the 450 entries"),
    "negative": (changed("sample", put((5, 1), -1)), "it names places outside"),
    "end": (
        changed("sample", lambda values: put((-1, 1), values[-1, 1] + 1)(values)),
        "its 461 samples end after 3689",
    ),
    "row": (changed("sample", lambda values: put(7, values[8])(values)), "its sample 6 does not hold 8 tokens"),
    "shuffle twice": (changed("shuffle", lambda values: put(0, values[1])(values)), "it leaves out sample"),
    "shuffle outside": (changed("shuffle", put(0, 461)), r"it puts a sample outside \[0, "),
    "cut": (cut, r"sample_idx.npy has 200 bytes; its header announces \[462, 2\] int32"),
    "zip": (zipped, r"doc_idx.npy begins with b'PK.* and is not an array of integers"),
    "column": (changed("shuffle", lambda values: np.stack([values, values], 1)), r"is uint32 \[461, 2\]; .* \[461\]"),
    "lost": (lost, "No such file"),
    "pickle": (pickled, "doc_idx.npy begins with .* and is not an array of integers"),
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_mismatching_files_are_not_used_and_the_reason_is_logged(prefix, expected, kind, capsys):
    damage, reason = STRANGERS[kind]
    damage(prefix)
    assert rows_of(prefix) == expected
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "indexmap" in text]
    assert "a file next to it is not used" in line

    assert re.search(reason, line), line


def test_files_of_the_other_epoch_rule_are_not_used(tmp_path, capsys):
    prefix = write_corpus(tmp_path / "corpus", LENGTHS)
    lengths = IndexedDataset(prefix).lengths
    samples = 153 + 130  # 85 % of the second epoch
    for name, array in zip(NAMES, build_indices(lengths, np.arange(150), 8, samples, SEED, "nvidia"), strict=True):
        np.save(old_path(prefix, name, samples=samples), array)
    data = DataConfig(seq_length=SEQUENCE_LENGTH, data_path=(prefix,), split="1,0,0")
    build_split_datasets(DataRequest(data, SEQUENCE_LENGTH, SEED, (samples, 0, 0)))
    assert "not used (it names sequence" in capsys.readouterr().err
    build_split_datasets(
        DataRequest(
            DataConfig(seq_length=SEQUENCE_LENGTH, data_path=(prefix,), split="1,0,0", index_epoch_rule="nvidia"),
            8,
            SEED,
            (samples, 0, 0),
        )
    )
    assert "indexmap" not in capsys.readouterr().err


def mutated(data: bytes, drawn: random.Random) -> bytes:
    """Bytes changed, mostly in the header; the end cut; or other words in the header."""
    kind = drawn.randrange(4)
    if kind == 0:
        return data[: drawn.randrange(len(data))]
    if kind == 1:
        words = (b"(450,)", b"(462, 2)", b"(461,)", b"<i4", b"<u4", b"False")
        others = (b"(-1,)", b"(9999999999999999999,)", b"(450, 1)", b"()", b"<i8", b"|O", b">i4", b"True", b"\0")
        return data[:128].replace(drawn.choice(words), drawn.choice(others)) + data[128:]
    changed = bytearray(data)
    for _ in range(drawn.randint(1, 3)):
        changed[drawn.randrange(128 if kind == 2 else len(data))] = drawn.randrange(256)
    return bytes(changed)


def test_damage_is_refused_or_harmless(prefix):
    write_old(prefix)
    lengths = IndexedDataset(prefix).lengths
    true = [np.load(old_path(prefix, name)) for name in NAMES]
    drawn = random.Random(5)
    accepted = 0
    for _ in range(150):
        path = old_path(prefix, drawn.choice(NAMES))
        whole = path.read_bytes()
        path.write_bytes(mutated(whole, drawn))
        found = read_old_index(f"{prefix}_train", lengths, 0, len(LENGTHS), SEQUENCE_LENGTH, SAMPLES, SEED)
        assert found is None or all(map(np.array_equal, found, true))
        accepted += found is not None
        path.write_bytes(whole)
    assert accepted < 50
