"""Rules for run requests, one by one; `test_parse` tests them with command lines."""

from __future__ import annotations

import pytest

from megatron.config import DataConfig, EvaluationConfig, FinetuningConfig, LoadingConfig, OptimRequest, SavingConfig
from megatron.config.objective.distillation import DistillationConfig
from megatron.config.request_rules import checkpoint_problems, data_problems, length_problems
from megatron.errors import ConfigError
from tests.config.command_lines import small

DATA = DataConfig(seq_length=8, data_path=("a",), vocab_file="v", merge_file="m")
OPTIM = OptimRequest(micro_batch_size=1, train_iters=3, lr=1.0)


def of_data(data: DataConfig, split: str = "default") -> list[str]:
    """The broken rules of data."""
    return list(data_problems(data, {"data.split": split}))


def of_checkpoints(loading: LoadingConfig, evaluation: EvaluationConfig) -> list[str]:
    """The broken rules of checkpoints, for a run that does not save and has no teacher."""
    return list(checkpoint_problems(loading, SavingConfig(), evaluation, DistillationConfig()))


def test_a_complete_request_breaks_no_rule() -> None:
    assert of_data(DATA) == [] == of_data(DATA, split="given")
    assert not list(length_problems(OPTIM, EvaluationConfig(), FinetuningConfig()))
    assert not of_checkpoints(LoadingConfig(), EvaluationConfig())


def test_an_evaluation_needs_weights_and_no_length() -> None:
    asked, evaluation = OptimRequest(micro_batch_size=1), EvaluationConfig(eval_only=True)
    assert len(list(length_problems(asked, EvaluationConfig(), FinetuningConfig()))) == 2
    assert not list(length_problems(asked, evaluation, FinetuningConfig()))
    assert of_checkpoints(LoadingConfig(load="x"), evaluation) == []
    (problem,) = of_checkpoints(LoadingConfig(), evaluation)
    assert problem.startswith("--eval-only needs --load")
    (problem,) = of_checkpoints(LoadingConfig(load="x", from_scratch=True), evaluation)
    assert problem.startswith("--from-scratch and --eval-only contradict each other")


@pytest.mark.parametrize(
    ("data", "start"),
    [
        ({"data_path": ()}, "--data-path is required"),
        ({"train_data_path": ("b",)}, "--data-path and --train-data-path are both given"),
        ({"merge_file": None}, "--merge-file is required by --tokenizer-type GPT2BPETokenizer"),
        ({"tokenizer_type": "HFTokenizer"}, "--tokenizer-name-or-path is required by --tokenizer-type HFTokenizer"),
    ],
)
def test_data_and_tokenizer(data: dict[str, object], start: str) -> None:
    settings = {"seq_length": 8, "data_path": ("a",), "vocab_file": "v", "merge_file": "m", **data}
    (problem,) = of_data(DataConfig(**settings))
    assert problem.startswith(start)


def test_a_split_needs_one_source_that_is_split() -> None:
    data = DataConfig(seq_length=8, train_data_path=("a",), vocab_file="v", merge_file="m")
    assert of_data(data) == []
    (problem,) = of_data(data, split="given")
    assert problem.startswith("--split 969,30,1 cannot be combined with --train-data-path, which already says")


@pytest.mark.parametrize(
    ("optim", "sentence"),
    [
        ({"train_iters": 3}, "--epochs 2 and --train-iters 3 are both given. A run has one length"),
        ({"train_samples": 8}, "--epochs 2 and --train-samples 8 are both given"),
        ({"train_tokens": 64}, "--epochs 2 and --train-tokens 64 are both given"),
        (
            {"lr_warmup_iters": 4},
            "--lr-warmup-iters 4 cannot be combined with --epochs, which counts samples. Use --lr-warmup-f",
        ),
        (
            {"lr_decay_iters": 5},
            "--lr-decay-iters 5 cannot be combined with --epochs, which counts samples. Use --lr-decay-s",
        ),
    ],
)
def test_epochs_are_the_only_length(optim: dict[str, int], sentence: str) -> None:
    asked = OptimRequest(micro_batch_size=1, lr=1.0, **optim)
    others = (EvaluationConfig(), FinetuningConfig(epochs=2))
    (problem,) = length_problems(asked, *others)
    assert problem.startswith(sentence)
    assert not list(length_problems(OptimRequest(micro_batch_size=1, lr=1.0), *others))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            "--zero-stage 3",
            "--compile cannot be combined with --zero-stage 3, .* Use --zero-stage 2, or drop --compile",
        ),
        (
            "--num-experts 4",
            "--compile cannot be combined with --num-experts 4: the host reads how many tokens an expert gets",
        ),
        (
            "--num-experts 4 --moe-expert-capacity-factor 1",
            "--compile cannot be combined with --num-experts 4: routers record by the number of their layer",
        ),
        (
            "--pipeline-model-parallel-size 2 --enable-zbh1-pipeline",
            "--compile cannot be combined with the pipeline schedule zb-h1: .* Use --pipeline-schedule 1f1b, or drop",
        ),
        (
            "--curriculum-learning --curriculum-min-length 8 --curriculum-steps 2",
            "--compile cannot be combined with --curriculum-learning: every length would be compiled anew",
        ),
    ],
)
def test_what_cannot_be_compiled(flags: str, sentence: str) -> None:
    assert not small(flags).kernels.compile and small("--compile").kernels.compile_backend == "inductor"
    with pytest.raises(ConfigError, match=sentence):
        small(f"--compile {flags}")
