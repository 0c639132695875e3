"""Parquet windows among the sources of a run: split, blend, plan, and what the checkpoint keeps of them."""

import json
from pathlib import Path
from typing import ClassVar

import pytest

from megatron.config import DataConfig
from megatron.data.build import build_split_datasets, check_sources, describe, epoch_samples
from megatron.data.datasets.sample import SampleDataset
from megatron.data.formats.parquet_windows import WindowFile
from megatron.data.formats.window_names import shard_name
from megatron.data.loader import BatchOptions
from megatron.data.order.plan import DataPlan
from megatron.data.sources.source import DataRequest, SourceUse
from megatron.errors import ConfigError, DataError
from megatron.tokenizers.record import TokenizerRecord
from tests.data.corpora import write_corpus
from tests.data.samples import micro_batches
from tests.data.windows_files import counting_windows, padded_windows, write_windows

pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")

LENGTH = 8


def build(data: DataConfig, samples: tuple[int, int, int], plan: DataPlan | None = None, length: int = LENGTH):
    stored = DataPlan.from_json(json.loads(json.dumps(plan.to_json()))) if plan else None
    return build_split_datasets(DataRequest(data, length, 1234, samples, stored))


def first_tokens(dataset: SampleDataset, count: int) -> list[int]:
    return [int(dataset[sample][0]) for sample in range(count)]


@pytest.fixture
def windows(tmp_path: Path) -> str:
    for number in range(4):
        rows = counting_windows(25, LENGTH, first=200 * number)
        write_windows(tmp_path / shard_name("wikitext.train", number, 4), rows)
    return str(tmp_path / "wikitext.train*")


def test_the_split_applies_to_rows(windows: str) -> None:
    data = DataConfig(seq_length=LENGTH, data_path=(windows,), split="80,10,10")
    datasets, plan = build(data, (80, 10, 10))
    parts = [datasets.train, datasets.valid["valid"], datasets.test["test"]]
    rows = [sorted(first // LENGTH for first in first_tokens(part, len(part))) for part in parts]
    assert rows == [list(range(80)), list(range(80, 90)), list(range(90, 100))]
    line = f"train: {windows} [0, 80): 80 samples (100.00%, target 100.00%), 1.00 epochs of 80 rows"
    assert describe(datasets, plan)[0].startswith(line)


def test_an_extended_run_continues_with_whole_epochs(windows: str) -> None:
    data = DataConfig(seq_length=LENGTH, data_path=(windows,), split="1,0,0")
    short, plan = build(data, (130, 0, 0))
    assert len(short.train) == 200
    longer, extended = build(data, (420, 0, 0), plan)
    assert first_tokens(longer.train, 200) == first_tokens(short.train, 200)
    assert [segment.rows for segment in extended.train.sources[0].segments] == [200, 300]
    for start in range(0, 500, 100):
        assert len({int(longer.train[sample][0]) for sample in range(start, start + 100)}) == 100


def test_a_resume_with_other_rows_or_another_length_is_rejected(windows: str, tmp_path: Path) -> None:
    data = DataConfig(seq_length=LENGTH, data_path=(windows,), split="1,0,0")
    _, plan = build(data, (10, 0, 0))
    with pytest.raises(ConfigError, match=rf"--seq-length 16 does not match .* of {LENGTH} tokens"):
        build(data, (10, 0, 0), plan, length=16)
    (tmp_path / "moved").mkdir()
    for path in tmp_path.glob("wikitext*"):
        path.rename(tmp_path / "moved" / path.name)
    moved = DataConfig(seq_length=LENGTH, data_path=(f"{tmp_path}/moved/wikitext.train",), split="1,0,0")
    assert build(moved, (10, 0, 0), plan)[1].train.sources[0].prefix == f"{tmp_path}/moved/wikitext.train"
    write_windows(tmp_path / "moved" / shard_name("wikitext.train", 2, 4), counting_windows(25, LENGTH))
    with pytest.raises(DataError, match="The training data differs from the run to resume"):
        build(moved, (10, 0, 0), plan)


def test_a_changed_blend_continues_the_windows_at_their_position(windows: str, tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus", [40] * 50, first_id=10_000)
    first, plan = build(DataConfig(seq_length=LENGTH, data_path=(windows,), split="1,0,0"), (30, 0, 0))
    data = DataConfig(seq_length=LENGTH, data_path=("1", windows, "1", prefix), split="1,0,0", change_data_blend=True)
    stored = DataPlan.from_json(json.loads(json.dumps(plan.to_json())))
    second, changed = build_split_datasets(DataRequest(data, LENGTH, 1234, (90, 0, 0), stored, consumed=30))
    before = first_tokens(first.train, 30)
    after = [token for token in (int(second.train[sample][0]) for sample in range(30, 90)) if token < 10_000]
    whole, _ = build(DataConfig(seq_length=LENGTH, data_path=(windows,), split="1,0,0"), (60, 0, 0))
    assert before + after == first_tokens(whole.train, 60)
    assert [source.is_rows for source in changed.train.sources] == [True, False]


def test_windows_and_token_files_in_one_blend(tmp_path: Path) -> None:
    rows = padded_windows([[1000 + row] * (3 + row % 6) for row in range(20)], LENGTH)
    path = write_windows(tmp_path / "a.parquet", rows)
    prefix = write_corpus(tmp_path / "corpus", [40] * 10)
    datasets, plan = build(DataConfig(seq_length=LENGTH, data_path=("1", path, "3", prefix), split="9,1,0"), (40, 4, 0))
    kinds = [first >= 1000 for first in first_tokens(datasets.train, 40)]
    assert sum(kinds) == 10 and [source.is_rows for source in plan.train.sources] == [True, False]
    options = BatchOptions(eod_id=0, vocab_size=2000)
    for batch in micro_batches(datasets.train, 40, 8, options=options):
        for tokens, mask in zip(batch.tokens, batch.loss_mask, strict=True):
            real = int((tokens >= 1000).sum())
            assert mask.tolist() == ([1.0] * (real - 1) + [0.0] * (LENGTH - real + 1) if real else [1.0] * LENGTH)
    assert (tmp_path / "index-cache").is_dir()


def test_ids_beyond_the_vocabulary_name_the_row(windows: str) -> None:
    datasets, _ = build(DataConfig(seq_length=LENGTH, data_path=(windows,), split="1,0,0"), (100, 0, 0))
    with pytest.raises(DataError, match=r"train-00003-of-00004: position 7 of row 24 has id 799, but the vocabulary"):
        list(micro_batches(datasets.train, 100, 100, options=BatchOptions(vocab_size=799)))


def test_errors_detected_before_anything_is_built(windows: str, tmp_path: Path) -> None:
    check_sources(DataConfig(seq_length=LENGTH, data_path=(windows,)), SourceUse(LENGTH))
    with pytest.raises(ConfigError, match=r"--seq-length 16 does not match .*train\* of 8.* Use --seq-length 8"):
        check_sources(DataConfig(seq_length=LENGTH, data_path=(windows,)), SourceUse(16))
    (tmp_path / shard_name("wikitext.train", 1, 4)).unlink()
    with pytest.raises(DataError, match="wikitext.train-00001-of-00004 is missing: 3 of 4 shards exist"):
        check_sources(DataConfig(seq_length=LENGTH, data_path=(windows,)), SourceUse(LENGTH))
    with pytest.raises(DataError, match=r"nothing.train\* matches no Parquet file"):
        check_sources(DataConfig(seq_length=LENGTH, data_path=(f"{tmp_path}/nothing.train*",)), SourceUse(LENGTH))


def test_windows_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    class Given:
        name, fingerprint, vocab_size, eod_id = "mine", "b" * 64, 600, 7
        behaviour: ClassVar[dict[str, str]] = {}
        parts: ClassVar[dict[str, str]] = {}

    path = write_windows(
        tmp_path / "a.parquet", counting_windows(4, LENGTH), tokenizer=TokenizerRecord("theirs", "a" * 64, 600, 7)
    )
    data = DataConfig(seq_length=LENGTH, data_path=(path,), split="1,0,0")
    match = (
        r"a.parquet was created with another tokenizer \(theirs, fingerprint aaaaaaaaaaaa, 600 tokens\) than this run's"
    )
    with pytest.raises(DataError, match=match):
        build_split_datasets(DataRequest(data, LENGTH, 1, (4, 0, 0), tokenizer=Given()))


def test_a_pattern_that_the_shell_expanded() -> None:
    for paths in (("a.parquet", "b.parquet"), ("a-00000-of-00003", "a-00001-of-00003", "index-cache")):
        with pytest.raises(ConfigError, match="a pattern of Parquet files must be quoted"):
            DataConfig(seq_length=LENGTH, data_path=paths)
    with pytest.raises(ConfigError, match=r"followed by its prefix\."):
        DataConfig(seq_length=LENGTH, data_path=("a", "1"))


def test_a_group_of_rows_is_decoded_once_for_a_chunk(windows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    real = WindowFile.batches

    def batches(self: WindowFile, rows: int, vocab_size: int | None = None, group: int | None = None):
        asked.append((self.path, group))
        return real(self, rows, vocab_size, group)

    monkeypatch.setattr(WindowFile, "batches", batches)
    datasets, _ = build(DataConfig(seq_length=LENGTH, data_path=(windows,), split="1,0,0"), (100, 0, 0))
    assert len(set(first_tokens(datasets.train, 100))) == 100
    assert len(asked) == len(set(asked)) == 4 * 7


def test_an_epoch_is_every_row_of_the_training_split(windows: str) -> None:
    data = DataConfig(seq_length=LENGTH, data_path=(windows,), split="80,10,10")
    assert epoch_samples(DataRequest(data, LENGTH, 1234)) == 80
    datasets, _ = build(data, (160, 0, 0))
    seen = [first // LENGTH for first in first_tokens(datasets.train, 160)]
    assert sorted(seen[:80]) == sorted(seen[80:]) == list(range(80)) and seen[:80] != seen[80:]


def test_epochs_of_a_blend_are_refused_with_its_size(windows: str, tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "corpus", [10] * 9)
    data = DataConfig(seq_length=LENGTH, data_path=("1", windows, "3", other), split="1,0,0")
    with pytest.raises(ConfigError, match=r"2 are blended.* They have 100 \+ 11 samples; use --train-samples 111"):
        epoch_samples(DataRequest(data, LENGTH, 1234))
