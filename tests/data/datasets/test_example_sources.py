"""Examples as sources of a run: splits, blends, epochs, resumes, caches, and flags that need them."""

import json
from pathlib import Path

import pytest

from megatron.config import DataConfig
from megatron.data.build import build_split_datasets, check_sources, epoch_samples
from megatron.data.datasets.examples.example_options import ExampleOptions
from megatron.data.loader import BatchOptions
from megatron.data.order.plan import DataPlan
from megatron.data.sources.source import DataRequest, SourceUse
from megatron.errors import ConfigError, DataError
from tests.data.corpora import write_corpus
from tests.data.databases import new_database, numbered
from tests.data.samples import batches_of_ranks

LENGTH = 31
DEFAULT = ExampleOptions()
PACKED = ExampleOptions(pack=True, on_targets_only=True, needed_by="--pack-examples")


def write(path: Path, count: int, word: str = "to") -> str:
    records = [{"prompt": f"{word} {number}", "answer": "a" + " b" * (number % 5)} for number in range(count)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def build(tokenizer, *paths: str, samples=(40, 0, 0), plan=None, options=DEFAULT, consumed=0, **flags):
    data = DataConfig(**{"seq_length": LENGTH, "data_path": paths, "split": "1,0,0", **flags})
    return build_split_datasets(
        DataRequest(data, LENGTH, 1234, samples, plan, consumed=consumed, tokenizer=tokenizer, examples=options)
    )


def prompts(dataset, numbers, tokenizer) -> list[str]:
    return [tokenizer.decode(dataset[number]).partition("\n")[0] for number in numbers]


def test_splits_hold_out_examples_packed_or_not(tmp_path: Path, tokenizer) -> None:
    path = write(tmp_path / "chat.jsonl", 40)
    for options in (DEFAULT, PACKED):
        datasets, plan = build(tokenizer, path, samples=(100, 20, 0), split="8,2,0", options=options)
        assert plan.train is not None
        found = {}
        for name, dataset, group in (
            ("train", datasets.train, plan.train),
            ("valid", datasets.valid["valid"], plan.valid[0]),
        ):
            rows = group.sources[0].last
            texts = "".join(tokenizer.decode(dataset[number]) for number in range(rows))
            found[name] = {int(part.partition("\n")[0]) for part in texts.split("to ")[1:]}
        assert found == {"train": set(range(32)), "valid": set(range(32, 40))}


def test_batches_carry_segments_and_masks_whatever_the_ranks(tmp_path: Path, tokenizer) -> None:
    datasets, _ = build(tokenizer, write(tmp_path / "chat.jsonl", 40), samples=(8, 0, 0), options=PACKED)
    options = BatchOptions(eod_id=tokenizer.eod_id, segments=True)

    def read(dp_size: int) -> dict[int, tuple[list[int], list[float], list[int]]]:
        found = {}
        for batch in batches_of_ranks(datasets.train, dp_size, 8, 2, options=options):
            fields = (batch.tokens, batch.loss_mask, batch.segment_ids)
            for index, number in enumerate(batch.sample_ids.tolist()):
                found[number] = tuple(field[index].tolist() for field in fields)
        return found

    assert read(1) == read(2) == read(4)
    tokens, mask, segments = read(1)[0]
    assert segments[0] == 0 and max(segments) > 1 and 0 < sum(mask) < len(mask)
    assert all(not counts for token, counts, one in zip(tokens, mask, segments, strict=True) if one == max(segments))


def test_a_resume_continues_the_order_and_notices_a_changed_file(tmp_path: Path, tokenizer) -> None:
    path = write(tmp_path / "chat.jsonl", 20)
    whole, _ = build(tokenizer, path, samples=(60, 0, 0), options=PACKED)
    _, plan = build(tokenizer, path, samples=(10, 0, 0), options=PACKED)
    stored = DataPlan.from_json(json.loads(json.dumps(plan.to_json())))
    (tmp_path / "moved").mkdir()
    moved = str((tmp_path / "chat.jsonl").rename(tmp_path / "moved" / "chat.jsonl"))
    resumed, _ = build(tokenizer, moved, samples=(10, 0, 0), plan=stored, options=PACKED, consumed=5)
    for number in range(10):
        assert resumed.train[number].tolist() == whole.train[number].tolist()
    with pytest.raises(DataError, match="The training data differs from the run to resume"):
        build(tokenizer, moved, plan=stored, consumed=5)  # in rows of their own now
    write(tmp_path / "moved" / "chat.jsonl", 20, "of")
    with pytest.raises(DataError, match="The training data differs from the run to resume"):
        build(tokenizer, moved, plan=stored, options=PACKED, consumed=5)


def test_blends_of_files_and_stores(tmp_path: Path, tokenizer) -> None:
    pairs = [(f"of {number}", "a") for number in range(10)]
    with new_database("sqlite", tmp_path) as database:
        database.write_pairs({"chat": numbered(pairs)})
        path, store = write(tmp_path / "chat.jsonl", 30), database.address("chat")
        datasets, plan = build(tokenizer, "3", path, "1", store, samples=(40, 0, 0))
    assert plan.train is not None and len(plan.train.sources) == 2
    found = prompts(datasets.train, range(40), tokenizer)
    assert sum(text.startswith("of") for text in found) == 10
    assert (tmp_path / "index-cache").is_dir()


def test_samples_of_an_epoch_are_the_rows_of_the_training_split(tmp_path: Path, tokenizer) -> None:
    path = write(tmp_path / "chat.jsonl", 40)

    def count(*paths: str, options=DEFAULT, **flags) -> int:
        data = DataConfig(**{"seq_length": LENGTH, "data_path": paths, "split": "1,0,0", **flags})
        return epoch_samples(DataRequest(data, LENGTH, 1234, tokenizer=tokenizer, examples=options))

    assert count(path) == 40
    assert count(path, split="3,1,0") == 30
    _, plan = build(tokenizer, path, options=PACKED)
    assert plan.train is not None
    assert count(path, options=PACKED) == plan.train.sources[0].last < 20
    corpus = write_corpus(tmp_path / "corpus", [50, 14])
    assert count(corpus) == 63 // LENGTH
    with pytest.raises(DataError, match="No tokens are left for training"):
        count(path, split="0,1,0")


def test_flags_for_examples_are_refused_with_other_data(tmp_path: Path, tokenizer) -> None:
    corpus = write_corpus(tmp_path / "corpus", [50, 14])
    data = DataConfig(seq_length=LENGTH, data_path=(corpus,))
    with pytest.raises(ConfigError, match=f"--pack-examples requires examples with answers .*{corpus} does not hold"):
        check_sources(data, SourceUse(LENGTH, needed_by="--pack-examples"))
    with pytest.raises(ConfigError, match="--pack-examples requires examples"):
        build(tokenizer, corpus, options=PACKED)
    with new_database("sqlite", tmp_path) as database:
        database.write({"web": numbered(["a text"])})
        database.write_pairs({"chat": numbered([("q", "a")])})
        web, chat = (DataConfig(seq_length=LENGTH, data_path=(database.address(name),)) for name in ("web", "chat"))
        with pytest.raises(ConfigError, match="--loss-on-targets-only requires examples"):
            check_sources(web, SourceUse(LENGTH, needed_by="--loss-on-targets-only"))
        check_sources(chat, SourceUse(LENGTH, needed_by="--loss-on-targets-only"))


def test_what_examples_cannot_be(tmp_path: Path, tokenizer) -> None:
    path = write(tmp_path / "chat.jsonl", 3)
    data = DataConfig(seq_length=LENGTH, data_path=(path,))
    check_sources(data, SourceUse(LENGTH))
    with pytest.raises(ConfigError, match="holds examples with answers, which --objective prefix does not support"):
        check_sources(data, SourceUse(LENGTH, "prefix"))
    with pytest.raises(DataError, match="--objective multitask requires pairs"):
        check_sources(data, SourceUse(LENGTH, "multitask"))
    with pytest.raises(DataError, match=r"none\.jsonl: no such file"):
        check_sources(DataConfig(seq_length=LENGTH, data_path=(f"{tmp_path}/none.jsonl",)), SourceUse(LENGTH))
    cut = "chat.jsonl holds examples with answers, and --curriculum-learning cuts off the ends of samples"
    with pytest.raises(ConfigError, match=cut):
        check_sources(data, SourceUse(LENGTH, excluded_by="--curriculum-learning"))
    with pytest.raises(ConfigError, match=cut):
        build(tokenizer, path, options=ExampleOptions(excluded_by="--curriculum-learning"))
    Path(path).write_text('{"text": "a document"}\n')
    with pytest.raises(DataError, match=r"chat\.jsonl:1: it has the keys \['text'\]"):
        check_sources(data, SourceUse(LENGTH))
    Path(path).write_text('[{"text": "lists are only parsed as a whole"}]')
    check_sources(data, SourceUse(LENGTH))
    write(Path(path), 3)
    with pytest.raises(ConfigError, match="Examples are encoded at the start, which requires a tokenizer"):
        build(None, path)
