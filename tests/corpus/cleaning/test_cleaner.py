"""One block through the cleaner: what is dropped, changed and kept, and in which bytes."""

from __future__ import annotations

from megatron.corpus.cleaning.cleaner import Cleaner
from megatron.corpus.cleaning.documents.clean_options import CleanOptions, LengthLimits
from megatron.corpus.inputs.block import InputBlock

LINES = b'{"text": "a  b", "n": 1}\n{"text": " "}\nno json\n{"text": "long enough text"}\n'


def clean(options: CleanOptions) -> tuple[list[str], list[tuple[int, str]]]:
    """The kept lines, and number and reason of the dropped documents."""
    cleaned = Cleaner(options).clean(InputBlock("in.jsonl", 0, len(LINES), LINES, 0))
    assert cleaned.documents == 4 and len(cleaned.passed) == len(cleaned.sizes)
    return cleaned.output.decode().splitlines(), [(entry.number, entry.reason) for entry in cleaned.dropped]


def test_lines_that_do_not_change_keep_their_bytes() -> None:
    kept, dropped = clean(CleanOptions(skip_bad_lines=True))
    assert kept == ['{"text": "a  b", "n": 1}', '{"text": "long enough text"}']
    assert sorted(dropped) == [(1, "empty"), (2, "bad line")]


def test_filters_reject_and_say_why() -> None:
    kept, dropped = clean(CleanOptions(skip_bad_lines=True, lengths=LengthLimits(minimum_words=3)))
    assert kept == ['{"text": "long enough text"}'] and (0, "too few words") in dropped


def test_originals_are_kept_if_wanted() -> None:
    cleaned = Cleaner(CleanOptions(skip_bad_lines=True, keep_originals=True)).clean(
        InputBlock("in.jsonl", 0, len(LINES), LINES, 0)
    )
    assert len(cleaned.original_sizes) == 4 and b"no json" in cleaned.originals
