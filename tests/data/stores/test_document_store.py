"""Documents are fetched by number from one index space, the same from every database."""

import multiprocessing

import pytest

from megatron.data.stores.document_store import DocumentStore, open_store
from megatron.errors import DataError
from tests.data.databases import NEWS, WEB, Database, numbered, write_web_and_news


@pytest.mark.parametrize("counted", [None, {"web": 40, "news": 3}])
def test_collections_share_one_index_space(database: Database, counted: dict[str, int] | None) -> None:
    write_web_and_news(database, counted=counted)
    store = open_store(database.address("web", "news"))
    assert [(one.name, one.first, one.last, len(one)) for one in store.collections] == [
        ("web", 0, 40, 40),
        ("news", 40, 43, 3),
    ]
    assert len(store) == 43 and store[len(WEB)] == NEWS[0]
    assert [store.fetch(number) for number in (0, 39, 40, 42)] == [WEB[0], WEB[39], NEWS[0], NEWS[2]]
    assert list(store) == WEB + NEWS
    assert store.fetch_many(range(38, 42)) == WEB[38:] + NEWS[:2]
    assert store.fetch_many(range(5, 5)) == []
    assert store.collection_of(40).name == "news"
    assert list(open_store(database.address("news", "web"))) == NEWS + WEB


def test_without_names_all_collections_are_taken_in_the_order_of_meta_info(database: Database) -> None:
    write_web_and_news(database, counted={"news": 3, "web": 40})
    assert [one.name for one in open_store(database.base).collections] == ["news", "web"]


def test_another_column_and_the_plain_one(database: Database) -> None:
    database.write({"web": numbered(["a", "b"])}, column="text")
    assert list(open_store(database.address("web"))) == ["a", "b"]
    assert list(open_store(database.address("web", column="text"))) == ["a", "b"]
    with pytest.raises(DataError, match=r"'web' has no column 'body'; it has .*'text'.*column="):
        open_store(database.address("web", column="body"))


@pytest.mark.parametrize("number", [-44, 43, 10**20])
def test_an_out_of_range_number_is_named(database: Database, number: int) -> None:
    write_web_and_news(database)
    store = open_store(database.base)
    with pytest.raises(DataError, match=rf"no document {number};"):
        store[number]
    with pytest.raises(DataError, match="no document 43; it holds 0 to 42"):
        store.fetch_many(range(40, 44))
    with pytest.raises(DataError, match="no document -1;"):
        store.fetch_many(range(-1, 4))


def test_a_gap_and_a_duplicate_are_named(database: Database) -> None:
    rows = [row for row in numbered(WEB[:20]) if row[0] != 7] + [(11, "again")]
    database.write({"first": numbered(["x"] * 5), "web": rows}, index="plain")
    store = open_store(database.address("first", "web"))
    assert store.fetch(5 + 6) == WEB[6]
    with pytest.raises(DataError, match=r"idx 7 of collection 'web' \(document 12 of the store\) is missing"):
        store.fetch(12)
    with pytest.raises(DataError, match=r"idx 11 of collection 'web' .*exists 2 times"):
        store.fetch(16)
    with pytest.raises(DataError, match=r"idx 7 of"):
        store.fetch_many(range(0, 25))
    with pytest.raises(DataError, match=r"idx 11 of"):
        store.fetch_many(range(14, 20))


def test_meta_info_is_compared_with_the_collections(database: Database, capsys: pytest.CaptureFixture[str]) -> None:
    write_web_and_news(database, counted={"web": 30, "news": 4})
    store = open_store(database.address("web"))
    assert len(store) == 30
    assert "'web' holds documents up to idx 39, but meta_info counts 30" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"meta_info counts 4 documents in collection 'news', but its last idx is 2"):
        open_store(database.address("news"))


def test_documents_that_begin_with_another_number(database: Database) -> None:
    database.write({"web": numbered(["a", "b"], 1)})
    with pytest.raises(DataError, match=r"idx of collection 'web' begins with 1, so document 0 is missing"):
        open_store(database.address("web"))


def test_a_collection_without_an_index_is_refused(database: Database) -> None:
    write_web_and_news(database, index=None)
    with pytest.raises(DataError, match=r"collection 'web' has no index on idx.*CREATE UNIQUE INDEX"):
        open_store(database.address("web"))


def test_missing_collections_name_those_there_are(database: Database) -> None:
    with pytest.raises(DataError, match="no such SQLite file|it has no collections"):
        open_store(database.base)
    write_web_and_news(database)
    with pytest.raises(DataError, match=r"no collection 'wbe'; it has ('web', 'news'|'news', 'web')\."):
        open_store(database.address("wbe"))


def test_an_empty_collection_has_no_documents(database: Database) -> None:
    database.write({"none": [], "news": numbered(NEWS)}, counted={"none": 0, "news": 3})
    store = open_store(database.address("none", "news"))
    assert [len(one) for one in store.collections] == [0, 3] and list(store) == NEWS
    with pytest.raises(DataError, match="no document 0; it is empty"):
        open_store(database.address("none")).fetch(0)


def test_a_document_without_text_is_named(database: Database) -> None:
    database.write({"web": numbered(["a", None, 5])})
    store = open_store(database.address("web"))
    with pytest.raises(DataError, match="web: idx 1: filt_text is null or missing"):
        store.fetch(1)
    with pytest.raises(DataError, match="web: idx 2: filt_text holds a value of type int, not text"):
        store.fetch(2)


def test_a_forked_process_uses_its_own_connection(sqlite_database: Database) -> None:
    write_web_and_news(sqlite_database)
    store = open_store(sqlite_database.address("web"))
    assert store[3] == WEB[3]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put([store[5], len(store._backend._threads.__dict__)]))  # type: ignore[attr-defined]
    child.start()
    assert queue.get() == [WEB[5], 2]
    child.join()
    assert store[4] == WEB[4]


def test_a_store_can_be_sent_to_another_process(database: Database) -> None:
    write_web_and_news(database)
    store = open_store(database.address("web"))
    rebuild, kind, state = store._backend.__reduce_ex__(2)[:3]  # what a spawned process is sent
    copy = rebuild(*kind)
    copy.__setstate__(state)
    assert copy.texts("web", "filt_text", 2, 3)[0][0] == 2
    assert DocumentStore(copy, ["web"])[2] == WEB[2]
