"""Stores of prompts and answers: found by their columns, read in order, refused with what is missing."""

import pytest

from megatron.data.stores.address import StoreAddress
from megatron.data.stores.record_store import PairStore, holds_pairs
from megatron.errors import DataError
from tests.data.databases import new_database, numbered

PAIRS = [(f"q{number}", f"ğ{number}") for number in range(5)]


@pytest.fixture(params=["sqlite", "mongomock"])
def database(request, tmp_path):
    with new_database(request.param, tmp_path) as database:
        yield database


def test_pairs_of_collections_in_order(database):
    database.write_pairs({"one": numbered(PAIRS[:3]), "two": numbered(PAIRS[3:])}, counted={"one": 3, "two": 2})
    address = StoreAddress.of(database.address())
    store = PairStore(address)
    assert holds_pairs(address)
    assert len(store) == 5
    assert [(record["q"], record["a"]) for record in store.records()] == PAIRS
    assert [record["q"] for record in PairStore(StoreAddress.of(database.address("two"))).records()] == ["q3", "q4"]


def test_fingerprint_is_of_the_pairs(database):
    database.write_pairs({"one": numbered(PAIRS), "two": numbered([*PAIRS[:4], ("q4", "other")])})
    one, two = (PairStore(StoreAddress.of(database.address(name))).fingerprint() for name in ("one", "two"))
    assert one == PairStore(StoreAddress.of(database.address("one"))).fingerprint() != two


def test_other_columns_are_named(database):
    database.write_pairs({"one": numbered(PAIRS)}, columns=("question", "answer"))
    assert not holds_pairs(StoreAddress.of(database.address("one")))
    named = StoreAddress.of(database.address("one", column="question,answer"))
    assert holds_pairs(named)
    assert [(record["q"], record["a"]) for record in PairStore(named).records()] == PAIRS
    with pytest.raises(DataError, match="collection 'one' has no column 'q'"):
        PairStore(StoreAddress.of(database.address("one")))


def test_texts_are_no_pairs(database):
    database.write({"web": numbered(["text"])})
    assert not holds_pairs(StoreAddress.of(database.address("web")))
    assert not holds_pairs(StoreAddress.of(database.address("web", column="filt_text")))


def test_holes_and_duplicates_are_refused(database):
    database.write_pairs(
        {"hole": [(0, PAIRS[0]), (2, PAIRS[1])], "twice": [(0, PAIRS[0]), (0, PAIRS[1])]}, index="plain"
    )
    with pytest.raises(DataError, match="idx 1 of collection 'hole' is missing"):
        list(PairStore(StoreAddress.of(database.address("hole"))).records())
    database.write_pairs({"meta": numbered(PAIRS)}, counted={"meta": 5, "twice": 2})
    with pytest.raises(DataError, match="collection 'twice'"):
        list(PairStore(StoreAddress.of(database.address("twice"))).records())
