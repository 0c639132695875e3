"""The command lines of HelloDeepSpeed's programs: what they mean to the trainer, and how an experiment is continued."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from examples.hello_deepspeed.flags import (
    HelloDeepSpeedEngineFlags,
    HelloDeepSpeedFlags,
    continued,
)
from megatron.config import parse
from megatron.config.program_flags import read_program
from megatron.errors import ConfigError

# The command of the tutorial, with the defaults of HelloDeepSpeed written out.
EVERY_FLAG = shlex.split(
    "--checkpoint_dir ./experiments --mask_prob 0.15 --random_replace_prob 0.1 --unmask_replace_prob 0.1 "
    "--max_seq_length 512 --tokenizer roberta-base --num_layers 6 --num_heads 8 --ff_dim 512 --h_dim 256 "
    "--dropout 0.1 --batch_size 8 --num_iterations 10000 --checkpoint_every 1000 --log_every 10 --local_rank -1"
)


def read(*words: str, cls: type[Any] = HelloDeepSpeedFlags) -> tuple[Any, list[str]]:
    return read_program(cls, words, "train_bert.py", "")


def request_of(*words: str, cls: type[Any] = HelloDeepSpeedFlags) -> Any:
    own, more = read(*words, cls=cls)
    return parse([*own.trainer_arguments(), *more], program=own.program)


def test_every_flag_of_the_program_is_known() -> None:
    own, more = read(*EVERY_FLAG)
    assert more == []
    assert own == HelloDeepSpeedFlags(
        checkpoint_dir="./experiments", tokenizer="roberta-base", num_iterations=10_000
    )  # all else is as by default


def test_the_trainer_gets_roberta() -> None:
    request = request_of(*EVERY_FLAG, "--seed", "7")
    model, optim = request.model, request.optim
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.ffn_hidden_size) == (6, 256, 8, 512)
    assert (model.bidirectional, model.masked_lm_head, model.token_types) == (True, True, 1)
    assert (model.norm_placement, model.activation_function) == ("post", "gelu")
    assert (model.hidden_dropout, model.attention_dropout) == (0.1, 0.1)
    assert (optim.lr, optim.lr_decay_style, optim.weight_decay, optim.clip_grad) == (1e-4, "constant", 0.0, 0.0)
    assert (optim.micro_batch_size, optim.train_iters, request.random.seed) == (8, 10_000, 7)
    assert (request.loss.objective, request.masking.masked_samples) == ("masked", "documents")
    assert request.data.tokenizer_name_or_path == "roberta-base"
    assert request.report.run_dir == "experiments/{experiment}"
    assert request.saving.save == "experiments/{experiment}/checkpoints"
    assert json.loads(request.report.program_flags)["h_dim"] == 256
    assert not request.precision.bf16


def test_a_flag_of_the_trainer_wins() -> None:
    request = request_of("--checkpoint_dir", "a", "--lr", "3e-4", "--norm-placement", "pre")
    assert (request.optim.lr, request.model.norm_placement) == (3e-4, "pre")
    with pytest.raises(ConfigError, match="--objective causal"):
        request_of("--checkpoint_dir", "a", "--objective", "causal")


def test_the_program_for_deepspeed_computes_in_bf16_with_zero_1(tmp_path: Path) -> None:
    request = request_of("--checkpoint_dir", ".", cls=HelloDeepSpeedEngineFlags)
    assert (request.precision.bf16, request.parallel.zero_stage) == (True, 1)
    request = request_of("--checkpoint_dir", ".", "--dtype", "fp32", "--zero-stage", "3", cls=HelloDeepSpeedEngineFlags)
    assert (request.precision.bf16, request.precision.fp16, request.parallel.zero_stage) == (False, False, 3)
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}))
    words = ("--checkpoint_dir", ".", "--deepspeed", "--deepspeed_config", str(file))
    assert request_of(*words, cls=HelloDeepSpeedEngineFlags).parallel.zero_stage == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "exactly one of --checkpoint_dir .* neither is given"),
        (("--checkpoint_dir", "a", "--load_checkpoint_dir", "b"), "exactly one of .* both are given"),
        (("--checkpoint_dir", "a", "--h_dim", "30", "--num_heads", "4"), "--h_dim 30 cannot be divided among 4 heads"),
        (
            ("--checkpoint_dir", "a", "--random_replace_prob", "0.7", "--unmask_replace_prob", "0.6"),
            "--random_replace_prob 0.7 and --unmask_replace_prob 0.6",
        ),
    ],
)
def test_a_command_line_that_cannot_work_is_refused(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(*words)


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """The folder of an experiment of five iterations."""
    own, _ = read("--checkpoint_dir", str(tmp_path), "--h_dim", "32", "--num_iterations", "5", "--dataset", "a.txt")
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "hparams.json").write_text(json.dumps(own.hparams()))
    return folder


@pytest.mark.parametrize(
    ("given", "expected"), [((), 5), (("--num_iterations", "3"), 5), (("--num_iterations", "9"), 9)]
)
def test_an_experiment_is_continued_with_its_own_flags(experiment: Path, given: tuple[str, ...], expected: int) -> None:
    own = continued(read("--load_checkpoint_dir", str(experiment), "--log_every", "1", *given)[0])
    assert (own.h_dim, own.dataset, own.log_every, own.num_iterations) == (32, "a.txt", 1, expected)
    assert own.prepared == read("--checkpoint_dir", str(experiment.parent), "--dataset", "a.txt")[0].prepared
    request = parse(own.trainer_arguments(), program=own.program)
    assert request.loading.load == request.saving.save == str(experiment / "checkpoints")
    assert request.report.run_dir == str(experiment)


def test_an_experiment_keeps_its_shape(experiment: Path) -> None:
    with pytest.raises(ConfigError, match="--h_dim 64 was given, but the experiment in .* has 32"):
        continued(read("--load_checkpoint_dir", str(experiment), "--h_dim", "64")[0])
    with pytest.raises(ConfigError, match="--h_dim 256 was given, but the experiment in .* has 32"):
        continued(read("--load_checkpoint_dir", str(experiment), "--h_dim", "256")[0])  # the default, but given


def test_a_flag_that_is_given_counts_though_it_is_the_default(experiment: Path) -> None:
    hparams = json.loads((experiment / "hparams.json").read_text())
    (experiment / "hparams.json").write_text(json.dumps({**hparams, "log_every": 2}))
    words = ("--load_checkpoint_dir", str(experiment))
    assert continued(read(*words)[0]).log_every == 2
    assert continued(read(*words, "--log_every", "10")[0]).log_every == 10


def test_a_dataset_is_found_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("a text")
    monkeypatch.chdir(tmp_path)
    own, _ = read("--checkpoint_dir", "experiments", "--dataset", "text.txt")
    assert own.hparams()["dataset"] == str(tmp_path / "text.txt")
    assert own.prepared == read("--checkpoint_dir", "experiments", "--dataset", "./text.txt")[0].prepared


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"h_dim": "wide"}', '"h_dim" must be'),
        ('{"width": 3}', "holds width, which is not a flag"),
        ("[1]", "holds a list, not the flags"),
        ('{"h_dim": 3, "h_dim": 4}', "hparams.json has the key"),
    ],
)
def test_hparams_that_were_edited_are_refused(experiment: Path, content: str, sentence: str) -> None:
    (experiment / "hparams.json").write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        continued(read("--load_checkpoint_dir", str(experiment))[0])


def test_the_folder_of_all_experiments_is_not_an_experiment(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--load_checkpoint_dir .* holds no hparams.json"):
        continued(read("--load_checkpoint_dir", str(tmp_path))[0])
