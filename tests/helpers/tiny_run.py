"""A corpus, a tokenizer and a command line small enough to train in a second."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pretrain_gpt
from megatron.config import RunConfig
from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.errors import MegatronError
from megatron.observe.metrics_file import read_steps
from megatron.tokenizers.tokenizer import build_tokenizer
from tests.helpers.ranks import run_ranks
from tests.helpers.vocabulary import write_vocabulary

VOCAB_SIZE = 600


@dataclass(frozen=True)
class TinyCorpus:
    """Files of a corpus; the tokens count upwards with gaps, so that there is something to learn."""

    folder: Path
    prefix: str
    vocab_file: str
    merge_file: str

    def flags(self, *more: str, folder: Path | None = None, **changes: Any) -> list[str]:
        """The command line of a tiny run; `folder` makes it save, load and log there."""
        pairs: dict[str, Any] = {
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "seq_length": 32,
            "max_position_embeddings": 32,
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "train_iters": 8,
            "lr": 5e-3,
            "lr_decay_style": "cosine",
            "lr_warmup_fraction": 0.25,
            "min_lr": 1e-4,
            "log_interval": 1,
            "eval_interval": 1000,
            "eval_iters": 2,
            "split": "80,15,5",
            "data_path": self.prefix,
            "vocab_file": self.vocab_file,
            "merge_file": self.merge_file,
            "data_cache_path": str(self.folder / "cache"),
        }
        if folder is not None:
            pairs.update(
                save=folder / "checkpoints", load=folder / "checkpoints", save_interval=4, run_dir=folder / "run"
            )
        pairs.update(changes)
        flags = []
        for name, value in pairs.items():
            if value is not None:
                flags += [
                    "--" + name.replace("_", "-"),
                    *(map(str, value) if isinstance(value, tuple) else [str(value)]),
                ]
        return [*flags, *more]


def write_tiny_corpus(folder: Path, documents: int = 60, seed: int = 5) -> TinyCorpus:
    """Writes the corpus of a tiny run into a folder."""
    choice = write_vocabulary(folder, VOCAB_SIZE)
    tokenizer = build_tokenizer(choice)
    drawn = np.random.default_rng(seed)
    prefix = str(folder / "tiny_text_document")
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(documents):
            length = int(drawn.integers(20, 120))
            body = (int(drawn.integers(300)) + int(drawn.integers(1, 4)) * np.arange(length)) % 300
            writer.add_document([np.append(body, tokenizer.eod_id)])
    return TinyCorpus(folder, prefix, str(choice.vocab_file), str(choice.merge_file))


def train_here(rank: int, flags: Sequence[str]) -> tuple[int, str]:
    """Runs the program on one rank; returns its exit code and, if it failed, the text the user sees."""
    try:
        return int(pretrain_gpt.main(list(flags))), ""
    except MegatronError as failure:
        return int(failure.exit_code), str(failure)


def train(flags: Sequence[str], world_size: int = 1, timeout_seconds: float = 120) -> tuple[int, str]:
    """Runs the program on several ranks; returns the exit code and text of the first failing rank, or (0, "")."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    results = run_ranks(train_here, world_size, list(flags), timeout_seconds=timeout_seconds)
    return max(results)


def losses(folder: Path) -> dict[int, float]:
    """Loss of each step that a run logged; after a resume, the later one."""
    return {step: record["lm_loss"] for step, record in read_steps(folder / "run").items()}


def steps(folder: Path, *fields: str) -> dict[int, tuple[Any, ...]]:
    """Chosen fields of each step that a run logged."""
    return {step: tuple(record[name] for name in fields) for step, record in read_steps(folder / "run").items()}


def saved_config(folder: Path) -> RunConfig:
    """The configuration of a run, from its folder."""
    return RunConfig.from_json(json.loads((folder / "run" / "config.json").read_text()))
