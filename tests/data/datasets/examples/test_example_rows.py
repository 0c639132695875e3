"""Rows of examples: padded or packed, what counts as a label, what is cut, and every example in exactly one row."""

import numpy as np
import pytest

from megatron.data.datasets.examples.example_rows import ExampleRows, windows
from megatron.data.datasets.examples.tokenized_examples import RecordSource, TokenizedExamples
from megatron.data.order.index_cache import IndexCache
from megatron.tokenizers.chat import load_chat_template

PAIRS = [{"prompt": f"what is {number}?", "answer": "a" + " b" * (number % 11)} for number in range(40)]
LENGTH = 63


@pytest.fixture
def examples(write, tokenizer, tmp_path):
    path = write(PAIRS)
    cache = IndexCache(tmp_path / "cache")
    return TokenizedExamples(path, RecordSource.of_files(path), load_chat_template("plain", None), tokenizer, cache)


def rows_of(examples, tmp_path, first=0, last=40, length=LENGTH, **options):
    chosen = {"pack": False, "on_targets_only": True, **options}
    return ExampleRows(examples, first, last, length, cache=IndexCache(tmp_path / "cache"), **chosen)


def test_a_row_is_one_example_and_padding(examples, tmp_path, tokenizer):
    rows = rows_of(examples, tmp_path, 5, 40)
    assert len(rows) == 35
    tokens, mask, segments = rows.read(np.array([0, 34]))
    for place, number in enumerate((5, 39)):
        ids, is_answer = examples.ids(number), examples.is_answer(number)
        assert tokens[place, : len(ids)].tolist() == ids.tolist()
        assert (tokens[place, len(ids) :] == tokenizer.eod_id).all()
        assert mask[place].tolist() == [*is_answer[1:].tolist(), *[False] * (LENGTH + 1 - len(ids))]
        assert segments[place].tolist() == [0] * len(ids) + [1] * (LENGTH - len(ids))
    everything = rows_of(examples, tmp_path, 5, 40, on_targets_only=False).read(np.array([0]))[1]
    assert int(everything.sum()) == len(examples.ids(5)) - 1


@pytest.mark.parametrize("on_targets_only", [True, False])
def test_packed_rows_hold_every_example_once_as_it_is_alone(examples, tmp_path, on_targets_only):
    alone = rows_of(examples, tmp_path, on_targets_only=on_targets_only)
    packed = rows_of(examples, tmp_path, on_targets_only=on_targets_only, pack=True)
    assert len(packed) < len(alone) / 2
    assert alone.fingerprint != packed.fingerprint
    tokens, mask, segments = packed.read(np.arange(len(packed)))
    assert int(mask.sum()) == int(alone.read(np.arange(40))[1].sum())
    labels = sorted(tokens[row, 1:][mask[row]].tolist() for row in range(len(packed)))
    assert sum(map(len, labels)) == int(mask.sum())
    starts = packed._starts
    assert sorted(packed._order.tolist()) == list(range(40))
    for row in range(len(packed)):
        end = 0
        for segment, number in enumerate(packed._order[starts[row] : starts[row + 1]].tolist()):
            ids, is_answer = examples.ids(number), examples.is_answer(number)
            assert tokens[row, end : end + len(ids)].tolist() == ids.tolist()
            inputs = segments[row, end : end + len(ids)]
            assert (inputs == segment).all()
            counted = mask[row, end : end + len(ids) - 1].tolist()
            assert counted == (is_answer[1:].tolist() if on_targets_only else [True] * (len(ids) - 1))
            if end:
                assert not mask[row, end - 1]  # the first token of an example is nobody's label
            end += len(ids)


def test_packing_is_kept_and_depends_on_the_range_only(examples, tmp_path):
    first = rows_of(examples, tmp_path, pack=True)
    again = rows_of(examples, tmp_path, pack=True)
    assert first.fingerprint == again.fingerprint
    assert first._order.tolist() == again._order.tolist()
    assert rows_of(examples, tmp_path, 0, 39, pack=True).fingerprint != first.fingerprint
    assert rows_of(examples, tmp_path, length=LENGTH + 1, pack=True).fingerprint != first.fingerprint


def test_tokens_are_located_by_file_and_line(examples, tmp_path):
    rows = rows_of(examples, tmp_path, 5, 40)
    assert rows.locate(2, 3).endswith("chat.jsonl:8: token 3 of the example")
    assert rows.locate(2, LENGTH).endswith(f"padding at {LENGTH} of row 2")


@pytest.mark.parametrize(
    ("length", "answer", "kept"),
    [
        (8, (4, 8), (0, 8)),
        (9, (5, 9), (1, 9)),
        (20, (15, 18), (10, 18)),  # what follows the answer goes first
        (20, (12, 20), (10, 18)),  # the answer alone fills the row: a quarter is kept for the prompt
        (20, (6, 20), (4, 12)),
        (20, (1, 20), (0, 8)),
        (20, (0, 20), (12, 20)),  # without a prompt the end is kept
        (9, (1, 9), (0, 8)),
    ],
)
def test_windows_keep_the_last_answer(length, answer, kept):
    assert windows(np.array([length]), np.array([answer]), 8)[0].tolist() == list(kept)


def test_what_is_cut_is_counted_and_named(write, tokenizer, tmp_path, capsys):
    long = "words " * 30
    turns = [
        {"role": role, "content": text}
        for role, text in (("user", "x"), ("assistant", long), ("user", "y"), ("assistant", "z"))
    ]
    records = [*PAIRS, {"prompt": long, "answer": "short"}, {"prompt": "short", "answer": long}, {"messages": turns}]
    path = write(records)
    cache = IndexCache(tmp_path / "cache")
    examples = TokenizedExamples(path, RecordSource.of_files(path), load_chat_template("plain", None), tokenizer, cache)
    rows = rows_of(examples, tmp_path, 0, 43, pack=True)
    rows.report("train")
    text = capsys.readouterr().err
    assert "43 examples" in text and f"rows of {LENGTH + 1} tokens" in text and "% filled" in text
    assert "1 of 43 examples lose the beginning of their prompts: the longest" in text and "chat.jsonl:41)" in text
    assert "1 of 43 examples lose their first answers" in text and "chat.jsonl:43)" in text
    assert "1 of 43 examples lose the end of their answers" in text and "chat.jsonl:42)" in text
    tokens, mask, _ = rows_of(examples, tmp_path, 40, 41).read(np.array([0]))
    kept = examples.ids(40)[-(LENGTH + 1) :]
    assert tokens[0].tolist() == kept.tolist()
    assert mask[0].sum() == examples.is_answer(40).sum()
