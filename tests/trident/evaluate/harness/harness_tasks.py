"""Local tasks of the evaluation harness, one of each kind, and the harness without a network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
import pytest

from tests.helpers.ranks import LAUNCH_VARIABLES

TASKS = ("own_choices", "own_text", "own_answers")
SENTENCES = ("import os and run", "def main of a program:", "the return value is None", "for each word", "x")


def write_tasks(folder: Path) -> Path:
    """A task of each kind over local files; one text is longer than the network's positions."""
    rows = [
        {
            "query": f"{text} ",
            "choices": ["one", "two words", " three"],
            "label": number % 3,
            "text": f"{text}. " * (12 if number == 1 else 1),
            "answer": text[:2],
        }
        for number, text in enumerate(SENTENCES)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    start = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}}
    start |= {"test_split": "test", "metadata": {"version": 1}}
    kinds = {
        "own_choices": {
            "output_type": "multiple_choice",
            "doc_to_text": "query",
            "doc_to_choice": "choices",
            "doc_to_target": "label",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "own_text": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "text",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "own_answers": {
            "output_type": "generate_until",
            "doc_to_text": "text",
            "doc_to_target": "answer",
            "generation_kwargs": {"until": ["\n", " "], "max_gen_toks": 8, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, kind in kinds.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **start, **kind}))
    return folder


@contextmanager
def offline(cache: Path) -> Iterator[None]:
    """Datasets are cached in this folder, nothing is downloaded, and accelerate sees one process."""
    with pytest.MonkeyPatch.context() as patch:
        for name in LAUNCH_VARIABLES:  # left by a run in this process; accelerate would join a group and never leave it
            patch.delenv(name, raising=False)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
            patch.setenv(name, "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        patch.setenv("HF_DATASETS_CACHE", str(cache))
        yield
