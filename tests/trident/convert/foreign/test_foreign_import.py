"""Imported checkpoints are trained on: a run is continued with its moments, weights alone are a start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpoint import read_record, read_tensors
from megatron.errors import CheckpointError, ConversionError
from tests.helpers.tiny_run import TinyCorpus, losses, train, write_tiny_corpus
from tests.helpers.vocabulary import write_vocabulary
from tests.trident.convert.foreign.foreign_files import Foreign, foreign, gpt2_arguments, write_torch_layout
from tools.convert.import_megatron import main


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


def tokenizer_flags(corpus: TinyCorpus) -> list[str]:
    """The tokenizer of the corpus."""
    return [
        *("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", corpus.vocab_file),
        *("--merge-file", corpus.merge_file),
    ]


def written(folder: Path) -> Foreign:
    """A run of four blocks of which all moments are positive, as Adam's are."""
    made = foreign(gpt2_arguments(), ranks=2, stages=2)
    for name, value in made.tensors["weight"].items():
        value.mul_(0.05)
        made.tensors["exp_avg"][name].mul_(1e-3)
        made.tensors["exp_avg_sq"][name].abs_().mul_(1e-4)
    write_torch_layout(folder, made)
    return made


def test_a_run_is_continued_under_another_layout(corpus: TinyCorpus, tmp_path: Path) -> None:
    made = written(tmp_path / "theirs")
    imported = tmp_path / "imported"
    assert main([str(tmp_path / "theirs"), "--save", str(imported), *tokenizer_flags(corpus)]) == 0
    folder = imported / "iter_0000003"
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        for name, tensor in read_tensors(folder, kind=kind):  # type: ignore[arg-type]
            assert torch.equal(tensor, made.tensors[kind][name]), (name, kind)
    record = read_record(folder)
    assert record["config"]["files"]["config"] == str(imported / "model.yaml")  # not where it was written first
    assert record["progress"] == {"step": 3, "consumed_samples": 12, "consumed_tokens": 384, "skipped_steps": 0}
    flags = ["--config", str(imported / "model.yaml"), "--load", str(imported), "--data-path", corpus.prefix]
    flags += ["--train-iters", "5", "--log-interval", "1", "--eval-iters", "0"]
    flags += ["--data-cache-path", str(corpus.folder / "cache")]
    split = ["--tensor-model-parallel-size", "2", "--run-dir", str(tmp_path / "split" / "run")]
    assert train([*flags, *split], world_size=2) == (0, "")
    assert train([*flags, "--run-dir", str(tmp_path / "alone" / "run")]) == (0, "")
    found = losses(tmp_path / "alone")
    assert sorted(found) == [4, 5] and found == pytest.approx(losses(tmp_path / "split"), rel=1e-4)
    with pytest.raises(ConversionError, match="imported already exists"):
        main([str(tmp_path / "theirs"), "--save", str(imported), *tokenizer_flags(corpus)])


def test_weights_alone_are_a_start(corpus: TinyCorpus, tmp_path: Path) -> None:
    written(tmp_path / "theirs")
    imported = tmp_path / "imported"
    words = [str(tmp_path / "theirs"), "--save", str(imported), "--weights-only", *tokenizer_flags(corpus)]
    assert main(words) == 0
    flags = ["--config", str(imported / "model.yaml"), "--load", str(imported), "--data-path", corpus.prefix]
    flags += ["--seq-length", "32", "--micro-batch-size", "2", "--lr", "1e-3", "--train-iters", "2"]
    flags += ["--log-interval", "1", "--eval-iters", "0", "--data-cache-path", str(corpus.folder / "cache")]
    code, said = train([*flags, "--run-dir", str(tmp_path / "resumed" / "run")])
    assert code == int(CheckpointError.exit_code) and "--finetune" in said
    assert train([*flags, "--finetune", "--run-dir", str(tmp_path / "tuned" / "run")]) == (0, "")
    assert sorted(losses(tmp_path / "tuned")) == [1, 2]


def test_another_tokenizer_is_refused(corpus: TinyCorpus, tmp_path: Path) -> None:
    written(tmp_path / "theirs")
    choice = write_vocabulary(tmp_path, 700)
    words = [str(tmp_path / "theirs"), "--save", str(tmp_path / "out"), "--tokenizer-type", "GPT2BPETokenizer"]
    words += ["--vocab-file", str(choice.vocab_file), "--merge-file", str(choice.merge_file)]
    with pytest.raises(ConversionError, match=r"embedding\.word_embeddings\.weight has shape"):
        main(words)
    assert not (tmp_path / "out").exists()


def test_a_stored_run_that_is_none_is_refused(corpus: TinyCorpus, tmp_path: Path) -> None:
    made = foreign(gpt2_arguments(num_layers=1, lr=1e-3, min_lr=1.0))
    write_torch_layout(tmp_path / "theirs", made)
    words = [str(tmp_path / "theirs"), "--save", str(tmp_path / "out"), *tokenizer_flags(corpus)]
    with pytest.raises(ConversionError, match=r"--min-lr 1\.0 is more than --lr 0\.001"):
        main(words)
    assert main([*words, "--weights-only"]) == 0
    assert "min-lr" not in (tmp_path / "out" / "model.yaml").read_text()
