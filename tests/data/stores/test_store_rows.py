"""Documents of a store as rows of training: encoded when they are read, the same from any database."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from megatron.config import DataConfig
from megatron.data.build import build_split_datasets, check_sources, data_fingerprint, describe
from megatron.data.order.plan import DataPlan
from megatron.data.sources.source import DataRequest, SourceUse
from megatron.data.stores.store_rows import DocumentEncoder, StoreRows
from megatron.errors import ConfigError, DataError
from megatron.tokenizers.library import Tokenizer
from megatron.tokenizers.tokenizer import build_tokenizer
from tests.data.databases import Database, new_database, numbered
from tests.helpers.vocabulary import hard_documents, write_vocabulary

LENGTH = 16
TEXTS = [f"{number}{' to' * (number % 4)}" for number in range(40)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return build_tokenizer(write_vocabulary(tmp_path_factory.mktemp("vocabulary"), 400))


@pytest.fixture
def database(tmp_path: Path):
    with new_database("sqlite", tmp_path) as database:
        yield database


def build(address: str, tokenizer: Tokenizer | None, samples=(40, 0, 0), plan: DataPlan | None = None, **flags):
    data = DataConfig(**{"seq_length": LENGTH, "data_path": (address,), "split": "1,0,0", **flags})
    return build_split_datasets(DataRequest(data, LENGTH, 1234, samples, plan, tokenizer=tokenizer))


def test_a_row_is_what_preprocessing_gives_a_document(database: Database, tokenizer: Tokenizer) -> None:
    texts = ["", *hard_documents(20)]
    database.write({"web": numbered(texts)})
    rows = StoreRows(database.base, DocumentEncoder(tokenizer, LENGTH))
    tokens, mask = rows.read(np.arange(len(texts)))
    for place, text in enumerate(texts):
        ids = [*tokenizer.encode(text), tokenizer.eod_id][: LENGTH + 1]
        filled = ids + [tokenizer.eod_id] * (LENGTH + 1 - len(ids))
        assert tokens[place].tolist() == filled
        assert mask[place].tolist() == [True] * (len(ids) - 1) + [False] * (LENGTH + 1 - len(ids))
    assert rows.locate(3, 5) == f"{database.base}: token 5 of document 3"


def test_collections_are_one_source_whose_split_holds_out_documents(database: Database, tokenizer: Tokenizer) -> None:
    database.write({"web": numbered(TEXTS[:25]), "news": numbered(TEXTS[25:])})
    datasets, plan = build(database.address("web", "news"), tokenizer, (90, 5, 3), split="80,12,8")
    parts = [datasets.train, datasets.valid["valid"], datasets.test["test"]]
    encoded = {tuple(DocumentEncoder(tokenizer, LENGTH).encode(text)[0].tolist()): text for text in TEXTS}
    read = [[encoded[tuple(part[sample].tolist())] for sample in range(len(part))] for part in parts]
    assert [sorted(texts, key=TEXTS.index) for texts in read] == [
        [text for text in TEXTS[:32] for _ in range(3)],
        TEXTS[32:37],
        TEXTS[37:],
    ]
    assert plan.train.sources[0].is_rows
    assert "90 samples (100.00%, target 100.00%), 2.81 epochs of 32 rows" in describe(datasets, plan)[0]


def test_any_database_with_the_same_documents_continues_the_order(
    database: Database, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    database.write({"web": numbered(TEXTS)})
    short, plan = build(database.base, tokenizer)
    with new_database("mongomock", tmp_path) as other:
        other.write({"korean": numbered(TEXTS)}, {"korean": 40})
        config = tmp_path / "db.json"
        server, _, name = other.base.rpartition("/")
        content = {"MONGO_CONNECTION_STRING": server, "MONGO_CONNECTION_DB": name, "COLLECTIONS": ["korean"]}
        config.write_text(json.dumps(content))
        longer, extended = build(str(config), tokenizer, (50, 0, 0), plan)
        assert [longer.train[sample].tolist() for sample in range(40)] == [
            short.train[sample].tolist() for sample in range(40)
        ]
    assert [segment.rows for segment in extended.train.sources[0].segments] == [40, 40]
    assert extended.train.sources[0].prefix == str(config)


def test_truncated_documents_are_reported_once(
    database: Database, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["short"] * 200
    texts[57] = "long " * 100
    database.write({"some": numbered(texts), "many": numbered(["long " * 100, "short"])})
    rows = StoreRows(database.address("some"), DocumentEncoder(tokenizer, LENGTH))
    assert "warning" not in capsys.readouterr().err
    rows.read(np.arange(200))
    rows.read(np.arange(200))
    said = capsys.readouterr().err
    assert said.count("warning") == 1 and "document 57 of" in said and "first 17 tokens of each document" in said
    StoreRows(database.address("many"), DocumentEncoder(tokenizer, LENGTH)).read(np.arange(2))
    said = capsys.readouterr().err
    assert said.count("warning") == 1 and "1 of 2 sampled documents are longer than 17 tokens" in said


def test_training_and_evaluation_may_read_at_the_same_time(database: Database, tokenizer: Tokenizer) -> None:
    database.write({"web": numbered(TEXTS)})
    rows = StoreRows(database.base, DocumentEncoder(tokenizer, LENGTH))
    expected = rows.read(np.arange(40))[0].tolist()
    results: list[list[list[int]]] = []
    threads = [
        threading.Thread(target=lambda: results.extend(rows.read(np.arange(40))[0].tolist() for _ in range(10)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 30


def test_stores_that_are_unusable_for_training(database: Database, tokenizer: Tokenizer, tmp_path: Path) -> None:
    holes = [row for row in numbered(TEXTS * 5) if row[0] != 57]
    database.write({"web": numbered(TEXTS), "empty": [], "holes": holes})
    with pytest.raises(ConfigError, match=r"requires a tokenizer \(--tokenizer-type\)"):
        build(database.address("web"), None)
    with pytest.raises(DataError, match="store.db holds no documents"):
        build(database.address("empty"), tokenizer)
    with pytest.raises(DataError, match=r"1 of the 200 documents of collection 'holes' are missing \(gaps in idx\)"):
        build(database.address("holes"), tokenizer)
    with pytest.raises(DataError, match="no collection 'wbe'; it has"):
        build(database.address("wbe"), tokenizer)
    with pytest.raises(DataError, match="nothing.db"):
        check_sources(DataConfig(seq_length=LENGTH, data_path=(f"sqlite:///{tmp_path}/nothing.db",)), SourceUse(LENGTH))
    check_sources(DataConfig(seq_length=LENGTH, data_path=(database.base,)), SourceUse(LENGTH))
    check_sources(DataConfig(seq_length=LENGTH, data_path=("mongodb://nowhere/corpus",)), SourceUse(LENGTH))
    with pytest.raises(ConfigError, match="mongodb://nowhere names no database"):
        check_sources(DataConfig(seq_length=LENGTH, data_path=("mongodb://nowhere",)), SourceUse(LENGTH))


def test_no_password_gets_into_plans_and_manifests(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with new_database("mongomock", tmp_path) as database:
        database.write({"web": numbered(TEXTS)})
        address = database.base.replace("//localhost", "//me:secret@localhost")
        datasets, plan = build(address, tokenizer, (4, 0, 0))
        facts = data_fingerprint(DataConfig(seq_length=LENGTH, data_path=(address,)))
    kept = json.dumps([plan.to_json(), facts]) + "".join(describe(datasets, plan))
    assert "secret" not in kept and "me:***@localhost" in kept
    assert list(facts.values()) == [{"documents": 40, "sha256": plan.train.sources[0].fingerprint}]
