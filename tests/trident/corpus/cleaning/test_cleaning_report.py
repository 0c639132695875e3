"""The report of a cleaning run: counts, a few examples, a table and JSON."""

from __future__ import annotations

import json

from trident.corpus.cleaning.cleaning_report import CleaningReport


def filled() -> CleaningReport:
    report = CleaningReport(maximum_examples=1, read=10, kept=7, written=8, changed_documents=1)
    for line in range(2):
        report.drop("empty", f"a.jsonl:{line}", "", "")
    report.drop("too few words", "a.jsonl:5", "one", "1")
    report.change("text repaired", "a.jsonl:6", "cafÃ©", "café")
    return report


def test_all_are_counted_and_the_first_is_shown() -> None:
    report = filled()
    assert report.dropped_documents == 3 and len(report.dropped["empty"].examples) == 1
    assert not report.wants_example("empty") and report.wants_example("language")
    assert not CleaningReport(maximum_examples=0).wants_example("empty")


def test_the_json_holds_what_was_counted() -> None:
    content = json.loads(filled().as_json())
    assert (content["read"], content["kept"], content["dropped"], content["written"]) == (10, 7, 3, 8)
    assert content["dropped_for"]["empty"]["documents"] == 2
    assert content["changed_by"]["text repaired"]["examples"][0]["detail"] == "café"


def test_the_table_has_shares_and_examples() -> None:
    lines = list(filled().table())
    assert [line.split()[:3] for line in lines[:2]] == [["read", "10", "100.00%"], ["kept", "7", "70.00%"]]
    assert any(line.startswith("    a.jsonl:5: 'one' ('1')") for line in lines)
    assert lines[-1].split() == ["lines", "written", "8", "80.00%"]
    assert next(iter(CleaningReport().table())).split() == ["read", "0", "–"]
