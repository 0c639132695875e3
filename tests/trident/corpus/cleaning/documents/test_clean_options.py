"""Options of a cleaning run: what the counting pass takes over."""

from __future__ import annotations

from trident.corpus.cleaning.documents.clean_options import CleanOptions, ContaminationChoice, NearChoice


def test_the_counting_pass_reads_the_same_documents_and_does_nothing_else() -> None:
    contamination = ContaminationChoice(("task.jsonl",))
    options = CleanOptions("body", ("id",), "\n\n", fix_text=True, gopher_quality=True, contamination=contamination)
    counting = options.only_counting()
    assert counting == CleanOptions("body", ("id",), "\n\n", contamination=contamination, skip_bad_lines=True)


def test_duplicates_that_will_be_dropped_are_not_counted() -> None:
    assert CleanOptions(near=NearChoice()).only_counting().exact_duplicates
    assert CleanOptions(exact_duplicates=True).only_counting().exact_duplicates
    assert not CleanOptions().only_counting().exact_duplicates
