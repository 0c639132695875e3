"""Benchmarks of a trained checkpoint: a number, five mistakes and a log file, and the order of models.

The corpus is made of sentences whose last word depends on a word before the last two, so that a network that learned
it is better than a bigram model, that than a unigram model, and that than the uniform one.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.gpt2_all_in import benchmark
from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.tokenizers.tokenizer import build_tokenizer
from tests.helpers.tiny_run import TinyCorpus, train_here
from tests.helpers.vocabulary import write_vocabulary
from trident.evaluate.results import read_results

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.xdist_group("benchmarks of GPT-2"),  # one worker, so that the network is trained once
]
PLACES = {"cat": "mat", "dog": "rug", "hen": "egg", "cow": "hay", "owl": "oak", "fox": "den"}
TASKS = """
- {task: perplexity, name: wikitext103, data: text.txt}
- {task: lambada, name: lambada, data: lambada.jsonl}
- {task: cloze, name: cbt, data: cbt.txt}
- {task: multiple_choice, name: choice, data: choice.jsonl}
"""


def sentence(animal: str) -> str:
    return f"the {animal} sat on the {PLACES[animal]}."


def text(drawn: random.Random, count: int) -> str:
    return " ".join(sentence(drawn.choice(list(PLACES))) for _ in range(count))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Trains a network on the sentences, and what the tool writes about it."""
    folder = tmp_path_factory.mktemp("benchmarks")
    choice = write_vocabulary(folder)
    tokenizer = build_tokenizer(choice)
    drawn = random.Random(7)
    prefix = str(folder / "sentences_text_document")
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(200):
            writer.add_document([np.array([*tokenizer.encode(text(drawn, 8)), tokenizer.eod_id])])
    corpus = TinyCorpus(folder, prefix, str(choice.vocab_file), str(choice.merge_file))
    flags = corpus.flags(
        *("--no-position-embedding", "--position-embedding-type", "rotary"),
        folder=folder, hidden_size=64, seq_length=64, max_position_embeddings=64, micro_batch_size=8,
        global_batch_size=8, train_iters=120, lr=8e-3, lr_warmup_fraction=0.1, save_interval=1000, hidden_dropout=0,
        attention_dropout=0, split="100,0,0", log_interval=20,
    )  # fmt: skip
    assert train_here(0, flags) == (0, "")
    write_tasks(folder, random.Random(8))
    argv = ["--model", str(folder / "checkpoints"), "--dev", "--log-dir", str(folder / "logs")]
    assert benchmark.main([*argv, "--tasks", str(folder / "tasks.yaml")]) == 0
    (log_file,) = (folder / "logs").glob("*.log")
    results = {task["name"]: task for task in read_results(log_file.with_suffix(".json"))["tasks"]}
    return {**results, "log": log_file.read_text()}


def write_tasks(folder: Path, drawn: random.Random) -> None:
    """Sentences in another order; some of them end as none in the corpus does, which no model can foresee."""
    animals = [drawn.choice(list(PLACES)) for _ in range(24)]
    ends = [PLACES[animal] if number % 4 else "moon" for number, animal in enumerate(animals)]
    (folder / "tasks.yaml").write_text(TASKS)
    (folder / "text.txt").write_text(text(drawn, 60))
    starts = [f"{text(drawn, 1)} the {animal} sat on the" for animal in animals]
    items = zip(animals, starts, ends, strict=True)
    lambada, choices, cloze = [], [], []
    for animal, start, end in items:
        lambada.append(json.dumps({"text": f"{start} {end}"}))
        offered = [end, *drawn.sample([place for place in PLACES.values() if place != PLACES[animal]], 3)]
        drawn.shuffle(offered)
        choices.append(json.dumps({"question": start, "choices": offered, "answer": offered.index(end)}))
        cloze.append(f"1 {text(drawn, 1)}\n2 the {animal} sat on the XXXXX.\t{end}\t\t{'|'.join(offered)}\n")
    (folder / "lambada.jsonl").write_text("\n".join(lambada))
    (folder / "choice.jsonl").write_text("\n".join(choices))
    (folder / "cbt.txt").write_text("\n".join(cloze))


@pytest.mark.parametrize("name", ["wikitext103", "lambada"])
def test_002_5_perplexities_order_the_models(results: dict[str, Any], name: str) -> None:
    found = [results[name]["baselines"][model]["ppl"] for model in ("uniform", "unigram", "bigram")]
    found.append(results[name]["figures"]["ppl"])
    assert found == sorted(found, reverse=True)
    assert found[2] > 1.5 * found[3]


def test_the_perplexity_of_the_uniform_model_is_the_vocabulary(results: dict[str, Any]) -> None:
    assert results["wikitext103"]["baselines"]["uniform"]["ppl"] == pytest.approx(600)


@pytest.mark.parametrize(("name", "metric"), [("lambada", "acc"), ("cbt", "acc"), ("choice", "acc")])
def test_the_network_answers_what_counting_cannot(results: dict[str, Any], name: str, metric: str) -> None:
    task = results[name]
    assert 16 / 24 <= task["figures"][metric] <= 18 / 24  # six end on the moon
    assert task["figures"][metric] - task["baselines"]["bigram"][metric] > 2 * task["errors"][metric]


@pytest.mark.parametrize("name", ["lambada", "cbt", "choice"])
def test_five_mistakes_are_shown(results: dict[str, Any], name: str) -> None:
    assert results[name]["count"] == 24
    assert len(results[name]["wrong"]) == 5
    assert sum(mistake["expected"].strip() == "moon" for mistake in results[name]["wrong"]) >= 3
    shown = results["log"].partition(f"{name} (")[2].partition(" items")[2].split("\n\n")[0]
    assert shown.count("wrong at") >= 5, "the log file has the table and the mistakes"
