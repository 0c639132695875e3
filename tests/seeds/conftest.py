"""Runs that several tests share: a fine-tuned network, HelloDeepSpeed's runs, and the executed pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpoint import read_tensors
from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.tokenizers.tokenizer import Tokenizer, TokenizerChoice, build_tokenizer
from tests.helpers.projects.jax_lm_page import PageRun, run_page
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import train
from tests.seeds.hello_deepspeed.runs import Alone, experiments, run_alone, write_text
from tests.seeds.turkish_gpt2.guide import Guide, follow_the_page
from trident.corpus.vocabulary.learning import save_byte_level_vocabulary, train_byte_level

DSGPT2_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<sys>", "<usr>")
_PLACES = {"Ankara": "Turkey", "Paris": "France", "Rome": "Italy", "Tokyo": "Japan", "Lima": "Peru", "Oslo": "Norway"}
_FORMS = ("Where is {}?", "Which country has {}?", "Tell me where {} lies.", "In what land is {}?")
_FROZEN = ("decoder.layers.0.*", "embedding.position_embeddings.*")
LENGTH = 32


@dataclass(frozen=True)
class FineTuning:
    """A fine-tuning that was interrupted at step 40 and continued by the same command.

    Attributes:
        pairs: (question, answer) of the training examples.
        flags: the command line, of which the interrupted start had --exit-interval in addition.
        outcomes: exit code and error text of both starts.
    """

    folder: Path
    pairs: Sequence[tuple[str, str]]
    flags: Sequence[str]
    outcomes: Sequence[tuple[int, str]]
    frozen: Sequence[str] = _FROZEN

    @property
    def base(self) -> Path:
        """The folder of the pretrained network's checkpoints."""
        return self.folder / "base"

    @property
    def tuned(self) -> Path:
        """The folder of the fine-tuned network's checkpoints."""
        return self.folder / "tuned"

    @property
    def run(self) -> Path:
        """The run folder of the fine-tuning."""
        return self.folder / "run"

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of both."""
        return build_tokenizer(_choice(self.folder))

    def weights(self, checkpoints: Path) -> dict[str, torch.Tensor]:
        """The weights of the newest checkpoint."""
        return {name: values.clone() for name, values in read_tensors(max(checkpoints.glob("iter_*")), None)}


@pytest.fixture(scope="session")
def turkish(tmp_path_factory: pytest.TempPathFactory) -> Guide:
    """The results of running all blocks of the page on Turkish GPT-2."""
    return follow_the_page(tmp_path_factory.mktemp("turkish"))


@pytest.fixture(scope="session")
def fine_tuning(tmp_path_factory: pytest.TempPathFactory) -> FineTuning:
    """Pretrains on text of counting tokens, then fine-tunes on questions in dsGPT2's chat layout."""
    folder = tmp_path_factory.mktemp("fine_tuning")
    pairs = [(form.format(city), f"{city} is in {country}.") for form in _FORMS for city, country in _PLACES.items()]
    held_out = [(f"Do you know {city}?", f"{city} is in {country}.") for city, country in _PLACES.items()]
    for name, rows in (("train", pairs), ("valid", held_out)):
        lines = [json.dumps({"q": question, "a": answer}) for question, answer in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    texts = [" ".join(pair) for pair in pairs]
    vocabulary, merges = train_byte_level(texts, 400, special=DSGPT2_TOKENS)
    save_byte_level_vocabulary(str(folder / "demo"), vocabulary, merges)
    with IndexedWriter(str(folder / "text_document"), np.uint16) as writer:
        for number in range(20):
            writer.add_document([(number * 7 + np.arange(80)) % 250 + 7])
    shared = _network(folder)
    pretraining = [
        *shared, "--data-path", str(folder / "text_document"), "--train-iters", "4", "--eval-iters", "0",
        "--save", str(folder / "base"), "--save-interval", "4", "--run-dir", str(folder / "pretraining"),
    ]  # fmt: skip
    assert train(pretraining) == (0, "")
    flags = [
        *shared, "--finetune", "--load", str(folder / "base"), "--save", str(folder / "tuned"),
        "--run-dir", str(folder / "run"), "--train-data-path", str(folder / "train.jsonl"),
        "--valid-data-path", str(folder / "valid.jsonl"), "--loss-on-targets-only", "--chat-template", "dsgpt2",
        "--epochs", "40", "--eval-interval", "10", "--eval-iters", "1", "--save-interval", "40",
        "--keep-last", "1", "--keep-best", "--freeze", *_FROZEN,
    ]  # fmt: skip
    outcomes = [train([*flags, "--exit-interval", "40"]), train(flags)]
    assert outcomes == [(0, ""), (0, "")]
    return FineTuning(folder, pairs, flags, outcomes)


def _choice(folder: Path) -> TokenizerChoice:
    files = next(folder.glob("demo*vocab.json")), next(folder.glob("demo*merges.txt"))
    return TokenizerChoice("GPT2BPETokenizer", *map(str, files))


def _network(folder: Path) -> list[str]:
    choice = _choice(folder)
    return [
        *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", str(LENGTH)),
        *("--max-position-embeddings", str(LENGTH), "--micro-batch-size", "8", "--global-batch-size", "8"),
        *("--lr", "1e-2", "--lr-decay-style", "cosine", "--lr-warmup-fraction", "0.1", "--hidden-dropout", "0"),
        *("--attention-dropout", "0", "--log-interval", "1", "--adam-beta2", "0.95"),
        *("--vocab-file", str(choice.vocab_file), "--merge-file", str(choice.merge_file)),
    ]


@pytest.fixture(scope="session")
def hello_alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Runs of HelloDeepSpeed's train_bert.py in one process."""
    folder = tmp_path_factory.mktemp("hello_alone")
    write_text(folder / "text.txt")
    ((five_steps, output),) = run_ranks(run_alone, 1, str(folder))
    (long,), (five,), (ten,) = (experiments(folder / name) for name in ("long", "short", "ten"))
    return Alone(long, five, ten, five_steps, output)


@pytest.fixture(scope="session")
def jax_lm(tmp_path_factory: pytest.TempPathFactory) -> PageRun:
    """The page of jax-lm-training, executed."""
    return run_page(tmp_path_factory.mktemp("jax_lm"))
