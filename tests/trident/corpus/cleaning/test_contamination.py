"""Evaluation texts are found anywhere in documents, which are split around them or dropped."""

from __future__ import annotations

import gzip
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.errors import ConfigError, DataError
from tests.trident.corpus.cleaning.runs import clean_texts, quiet, read_jsonl, write_jsonl
from tests.trident.corpus.cleaning.texts import random_text, vocabulary
from trident.corpus.cleaning.clean_corpus import CleanOutputs, clean_corpus
from trident.corpus.cleaning.contamination import EvaluationSets, Match, parts_around
from trident.corpus.cleaning.documents.clean_options import CleanOptions, ContaminationChoice, NearChoice
from trident.corpus.cleaning.documents.words import WordSplitter

WORDS = vocabulary(500, seed=3)
QUESTION = "Which of the rivers that cross the old town has the most bridges, and who built the first of them?"

PHRASE = "one two three four five six seven eight"


@pytest.fixture
def choice(tmp_path: Path) -> ContaminationChoice:
    folder = tmp_path / "evaluation"
    folder.mkdir()
    task = {
        "id": 7,
        "question": QUESTION,
        "choices": [{"label": "A", "text": "one two three four five six seven eight"}],
    }
    (folder / "task.jsonl").write_text(json.dumps(task) + "\n\n" + json.dumps({"text": "too short"}) + "\n")
    return ContaminationChoice((str(folder),))


def sentences(seed: int, count: int = 60) -> str:
    drawn = random.Random(seed)
    return " ".join(random_text(drawn, WORDS, 9).replace(".", "").capitalize() + "." for _ in range(count))


def test_the_middle_of_a_document_is_cut_out(tmp_path: Path, choice: ContaminationChoice) -> None:
    before, after = sentences(1), sentences(2)
    spelled = QUESTION.upper().replace(",", " --")
    texts = [f"{before} {spelled} {after}", sentences(3)]
    kept, report = clean_texts(tmp_path, texts, CleanOptions(contamination=choice))
    assert len(kept) == 3 and kept[2] == texts[1]
    assert before.startswith(kept[0]) and kept[0].endswith(".") and after.endswith(kept[1])
    for piece, side in ((kept[0], before), (kept[1], after)):
        assert 200 <= len(side) - len(piece) <= 200 + 120
    assert (report.read, report.kept, report.written) == (2, 2, 3)
    example = report.changed["contamination cut out"].examples[0]
    assert example["shown"].startswith("WHICH OF THE RIVERS") and example["detail"] == "2 pieces left"


def test_a_document_may_be_dropped_instead(tmp_path: Path, choice: ContaminationChoice) -> None:
    texts = [f"{sentences(1)} {QUESTION}", sentences(2)]
    kept, report = clean_texts(tmp_path, texts, CleanOptions(contamination=replace(choice, drops=True)))
    assert kept == texts[1:]
    assert report.dropped["contaminated"].examples[0]["detail"].startswith("Which of the rivers")


def test_short_pieces_and_too_many_pieces(tmp_path: Path, choice: ContaminationChoice) -> None:
    near_the_start = f"{sentences(1, 2)} {QUESTION} {sentences(2)}"
    nothing_left = f"{sentences(3, 5)} {QUESTION} {sentences(4, 5)}"
    shredded = " ".join(f"{sentences(number, 20)} {QUESTION}" for number in range(11))
    barely = " ".join(f"{sentences(number, 20)} {QUESTION}" for number in range(10))
    options = CleanOptions(contamination=replace(choice, maximum_occurrences=0))
    kept, report = clean_texts(tmp_path, [near_the_start, nothing_left, shredded, barely], options)
    assert len(kept) == 11 and near_the_start.endswith(kept[0])
    details = [example["detail"] for example in report.dropped["contaminated"].examples]
    assert [detail.split(":")[0] for detail in details] == ["0 pieces left", "11 pieces left"]


@pytest.mark.full
def test_common_phrases_stay(tmp_path: Path, choice: ContaminationChoice) -> None:
    texts = [f"{sentences(number, 30)} {PHRASE} {sentences(100 + number, 30)}" for number in range(11)]
    texts.append(f"{sentences(50)} {QUESTION}")
    for workers, block_bytes in ((1, 1 << 20), (2, 4000)):
        kept, report = clean_texts(tmp_path, texts, CleanOptions(contamination=choice), workers, block_bytes)
        assert kept[:11] == texts[:11] and len(kept[11]) < len(texts[11])
        assert report.changed_documents == 1
    kept, report = clean_texts(tmp_path, texts[1:], CleanOptions(contamination=choice))
    assert report.changed_documents == 11
    copies = [texts[0]] * 11
    kept, report = clean_texts(tmp_path, copies, CleanOptions(contamination=choice))
    assert kept == copies
    kept, report = clean_texts(tmp_path, copies, CleanOptions(contamination=choice, exact_duplicates=True), 2, 4000)
    assert report.changed_documents == 1 and PHRASE not in " ".join(kept)


def test_no_run_is_left(tmp_path: Path) -> None:
    drawn = random.Random(9)
    evaluation = [random_text(drawn, WORDS, drawn.randint(5, 40)) for _ in range(40)]
    task = tmp_path / "task.txt.gz"
    task.write_bytes(gzip.compress("\n".join(evaluation).encode()))
    runs = set()
    for words in map(_plain, evaluation):
        size = min(13, len(words))
        runs |= {tuple(words[at : at + size]) for at in range(len(words) - size + 1) if size >= 8}
    documents = []
    for number in range(40):
        parts = [sentences(1000 + number, drawn.randint(1, 40))]
        for _ in range(drawn.randint(0, 3)):
            words = drawn.choice(evaluation).split()
            start = drawn.randrange(len(words))
            parts += [" ".join(words[start : start + 20]), sentences(drawn.randrange(10**6), drawn.randint(1, 40))]
        documents.append(" ".join(parts))
    choice = ContaminationChoice((str(task),), maximum_occurrences=0)
    kept, report = clean_texts(tmp_path, documents, CleanOptions(contamination=choice))
    assert not any(_holds_one(text, runs) for text in kept)
    clean = [text for text in documents if not _holds_one(text, runs)]
    assert 5 < len(clean) < 35 and [text for text in documents if text in set(kept)] == clean
    assert report.changed_documents > 10


def _holds_one(text: str, runs: set[tuple[str, ...]]) -> bool:
    words = _plain(text)
    return any(tuple(words[at : at + size]) in runs for size in range(8, 14) for at in range(len(words) - size + 1))


def _plain(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.booleans(), max_size=80), st.data())
def test_pieces_are_what_is_outside_of_the_margins(ends: list[bool], data: st.DataObject) -> None:
    text = "".join("." if is_end else chr(0x4E00 + place) for place, is_end in enumerate(ends))
    starts = sorted(data.draw(st.lists(st.integers(0, max(0, len(text) - 5)), max_size=4)))
    matches = [Match(start, start + 5, 0) for start in starts if start + 5 <= len(text)]
    choice = ContaminationChoice((), margin=data.draw(st.integers(0, 9)), shortest_piece=data.draw(st.integers(1, 9)))
    pieces = parts_around(text, matches, choice)
    assert all(len(piece) >= choice.shortest_piece and piece in text for piece in pieces)
    left = set("".join(pieces)) - {"."}
    near = {at for match in matches for at in range(match.start - choice.margin, match.stop + choice.margin)}
    assert not left & {text[at] for at in near if 0 <= at < len(text)}
    assert "".join(pieces) == text or matches or len(text) < choice.shortest_piece


def test_a_match_that_ends_with_the_piece_before_still_takes_its_margin() -> None:
    choice = ContaminationChoice((), margin=1, shortest_piece=1)
    assert parts_around("aaaaabbbb.cd. e", [Match(0, 5, 0), Match(5, 10, 0)], choice) == ["e"]


def test_other_keys_stay_with_every_piece(tmp_path: Path, choice: ContaminationChoice) -> None:
    source = write_jsonl(
        tmp_path / "in.jsonl", [{"id": 5, "text": f"{sentences(1)} {QUESTION} {sentences(2)}", "n": 1}]
    )
    kept, dropped = tmp_path / "kept.jsonl", tmp_path / "dropped.jsonl"
    options = CleanOptions(contamination=choice, near=NearChoice(), exact_duplicates=True, keep_originals=True)
    clean_corpus([str(source), str(source)], CleanOutputs(str(kept), str(dropped)), options, 1, quiet())
    assert [(document["id"], document["n"]) for document in read_jsonl(kept)] == [(5, 1), (5, 1)]
    assert [entry["reason"] for entry in read_jsonl(dropped)] == ["exact duplicate"]


def test_the_texts_of_evaluation_files(tmp_path: Path, choice: ContaminationChoice) -> None:
    sets = EvaluationSets(choice)
    count = len(QUESTION.split())
    assert [(one.length, len(one.hashes)) for one in sets.sets] == [(8, 1), (13, count - 12)]
    assert len(sets) == count - 11
    words = WordSplitter().split([f"a {QUESTION}", "ONE two three four, five six seven eight nine", "nothing"])
    found = sets.matches(words)
    assert [len(matches) for matches in found] == [count - 12, 1, 0]
    assert found[0][0].start == 2 and found[1][0][:2] == (0, 40)
    assert sets.ignore(np.full(len(sets), 10)) == 0 and sets.matches(words) == found
    assert sets.ignore(np.full(len(sets), 11)) == len(sets) and sets.matches(words) == [[], [], []]


def test_invalid_evaluation_files(tmp_path: Path, choice: ContaminationChoice) -> None:
    def read(name: str, data: bytes = b"") -> None:
        (tmp_path / name).write_bytes(data)
        EvaluationSets(replace(choice, files=(str(tmp_path / name),)))

    with pytest.raises(ConfigError, match=r"--decontaminate .*gone\.jsonl cannot be read"):
        EvaluationSets(replace(choice, files=(str(tmp_path / "gone.jsonl"),)))
    with pytest.raises(ConfigError, match=r"--decontaminate .*a\.txt: no text has 8 words.*--min-ngram"):
        read("a.txt", b"one two three\n")
    with pytest.raises(DataError, match=r"b\.jsonl: byte offset 3: the line cannot be read.*\.txt"):
        read("b.jsonl", b"{}\n{\n")
    with pytest.raises(DataError, match=r"c\.txt: byte offset 4: the line cannot be read"):
        read("c.txt", b"abc\n\xff\n")
    with pytest.raises(ConfigError, match=r"--decontaminate - is not supported. Use \.jsonl or \.txt"):
        EvaluationSets(replace(choice, files=("-",)))
    with pytest.raises(ConfigError, match=r"reads the input twice.*but - can be read only once.*--ngram-occurrences 0"):
        clean_corpus(["-"], CleanOutputs(str(tmp_path / "o")), CleanOptions(contamination=choice), 1, quiet())
