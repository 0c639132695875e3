"""Rules for run requests, one by one; `test_parse` tests them with command lines."""

from __future__ import annotations

import pytest

from megatron.config import ControlConfig, DataConfig, FinetuningConfig, OptimRequest
from megatron.config.objective.distillation import DistillationConfig
from megatron.config.request_rules import request_problems

DATA = DataConfig(seq_length=8, data_path=("a",), vocab_file="v", merge_file="m")
OPTIM = OptimRequest(micro_batch_size=1, train_iters=3, lr=1.0)


def found(
    optim: OptimRequest = OPTIM, data: DataConfig = DATA, control: ControlConfig | None = None, split: str = "default"
) -> list[str]:
    """The broken rules."""
    control, provenance = control or ControlConfig(), {"data.split": split}
    return list(request_problems(provenance, optim, data, control, FinetuningConfig(), DistillationConfig()))


def test_a_complete_request_breaks_no_rule() -> None:
    assert found() == [] == found(split="given")


def test_an_evaluation_needs_weights_and_no_length() -> None:
    asked = OptimRequest(micro_batch_size=1)
    assert len(found(asked)) == 2
    assert found(asked, control=ControlConfig(eval_only=True, load="x")) == []
    (problem,) = found(asked, control=ControlConfig(eval_only=True))
    assert problem.startswith("--eval-only needs --load")


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
    (problem,) = found(data=DataConfig(**settings))
    assert problem.startswith(start)


def test_a_split_needs_one_source_that_is_split() -> None:
    data = DataConfig(seq_length=8, train_data_path=("a",), vocab_file="v", merge_file="m")
    assert found(data=data) == []
    (problem,) = found(data=data, split="given")
    assert problem.startswith("--split 969,30,1 does not go with --train-data-path, which already says")


@pytest.mark.parametrize(
    ("optim", "sentence"),
    [
        ({"train_iters": 3}, "--epochs 2 and --train-iters 3 are both given. A run has one length"),
        ({"train_samples": 8}, "--epochs 2 and --train-samples 8 are both given"),
        ({"train_tokens": 64}, "--epochs 2 and --train-tokens 64 are both given"),
        (
            {"lr_warmup_iters": 4},
            "--lr-warmup-iters 4 does not go with --epochs, which counts samples. Use --lr-warmup-f",
        ),
        ({"lr_decay_iters": 5}, "--lr-decay-iters 5 does not go with --epochs, which counts samples. Use --lr-decay-s"),
    ],
)
def test_epochs_are_the_only_length(optim: dict[str, int], sentence: str) -> None:
    asked = OptimRequest(micro_batch_size=1, lr=1.0, **optim)
    others = (DATA, ControlConfig(), FinetuningConfig(epochs=2), DistillationConfig())
    (problem,) = request_problems({}, asked, *others)
    assert problem.startswith(sentence)
    complete = OptimRequest(micro_batch_size=1, lr=1.0)
    assert not list(request_problems({}, complete, *others))
