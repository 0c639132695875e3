"""The commands of docs/seeds/dsgpt2.md: vocabulary and the eight scripts."""

from __future__ import annotations

import json
import re

import pytest

from megatron.observe.metrics_file import read_steps
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from tests.seeds.dsgpt2.guide import (
    FINETUNE_STEPS,
    ROOT,
    TRAIN_STEPS,
    commands_of_the_guide,
    dsgpt2_example,
)

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("dsGPT2")]

FIRST = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<sys>", "<usr>")
TEXTS = ("안녕하세요, 세상아!", "İstanbul'da çığ, Iğdır'da ışık", "👍🏽 🇹🇷 👩‍👩‍👧", "tab\tand\r\nlines", "Ａé½")


def test_000_3_vocabulary_from_the_store() -> None:
    run = dsgpt2_example()
    drawn = sorted(path.name for path in (run.folder / "vocab").glob("text*.txt"))
    assert drawn == ["text0.txt", "text1.txt"]  # one a process
    folder = run.folder / "vocab" / "vocab_500"
    files = folder / "demo-vocab.json", folder / "demo-merges.txt"
    vocabulary = json.loads(files[0].read_text())
    unused = [f"<unused{number}>" for number in range(100)]
    assert [vocabulary[token] for token in (*FIRST, *unused)] == list(range(107))
    assert len(vocabulary) == 500
    tokenizer = build_tokenizer(TokenizerChoice("GPT2BPETokenizer", *map(str, files)))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode_flat([text])[0].tolist()).encode() == text.encode()
    output = run.output_of("3_vocabulary")
    assert "round trip: 2 of 2 documents come back byte for byte" in output
    assert re.search(r"^speed: [\d,]+ lines/s", output, flags=re.MULTILINE)


SCRIPTS = sorted((ROOT / "examples" / "dsgpt2").glob("[0-9]_*.sh"))
LEAST_RIGHT = 0.95


def test_000_7_scripts_run_without_a_container() -> None:
    run = dsgpt2_example()
    named = [word for command in commands_of_the_guide() for word in command.split() if word.endswith(".sh")]
    assert list(dict.fromkeys(named)) == [f"examples/dsgpt2/{path.name}" for path in SCRIPTS]
    assert len(SCRIPTS) == 8
    assert "total: 200 documents" in run.output_of("1_upload")
    assert "total: 188 documents" in run.output_of("2_clean")  # without the short ones and the second copies
    assert "188 documents, " in run.output_of("4_statistics")
    trained, tuned = read_steps(run.folder / "run-pretrained"), read_steps(run.folder / "run-chat")
    assert max(trained) == TRAIN_STEPS and trained[TRAIN_STEPS]["lm_loss"] < trained[1]["lm_loss"] - 1
    assert max(tuned) == FINETUNE_STEPS and tuned[FINETUNE_STEPS]["sample_loss"] < 0.1
    assert "INFO: [Loss (eval)]" in run.output_of("7_evaluate")
    right = re.search(r"^right answers: (\d+) of 15$", run.output_of("7_evaluate"), flags=re.MULTILINE)
    assert right is not None and int(right.group(1)) >= LEAST_RIGHT * 15
