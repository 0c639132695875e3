"""The command line of jax-lm-training and what it means to the trainer."""

from __future__ import annotations

import shlex

import pytest

from examples.jax_lm_training.jax_lm.flags import JaxLmFlags
from megatron.config import RunRequest, parse
from megatron.config.program_flags import read_program
from megatron.errors import ConfigError

PUBLISHED = """--model-config-name "gpt2" --train-dataset-paths "dataset/wikitext.train**"
    --eval-dataset-paths "dataset/wikitext.test**" --batch-size 16 --random-seed 0 --max-sequence-length 256
    --num-epochs 5 --learning-rate 3e-5 --dtype float32 --wandb-username "codertimo" --wandb-project "jax-lm-training"
    --wandb-run-dir ".wandb" --logging-frequency 100 --eval-frequency 5000 --save-frequency 5000
    --model-save-dir "artifacts/" """


def read(line: str) -> RunRequest:
    own, words = read_program(JaxLmFlags, shlex.split(line), "train_lm.py", "Trains.")
    return parse([*own.trainer_arguments(), *words], program=own.program)


def test_the_published_command() -> None:
    request = read(PUBLISHED)
    model, data, optim = request.model, request.data, request.optim
    report, evaluation, saving = request.report, request.evaluation, request.saving
    assert (model.num_layers, model.hidden_size, model.max_position_embeddings) == (12, 768, 1024)
    assert (data.train_data_path, data.valid_data_path) == (("dataset/wikitext.train**",), ("dataset/wikitext.test**",))
    assert (data.seq_length, data.tokenizer_type, data.tokenizer_name_or_path) == (256, "PretrainedFromHF", "gpt2")
    assert (optim.global_batch_size, optim.micro_batch_size, request.finetuning.epochs) == (16, None, 5)
    assert (optim.lr, optim.min_lr, optim.lr_decay_style, optim.lr_warmup_iters) == (3e-5, 0.0, "linear", 0)
    assert (optim.weight_decay, optim.adam_beta1, optim.adam_beta2, optim.adam_eps) == (0.01, 0.9, 0.98, 1e-8)
    assert (optim.clip_grad, request.precision.dtype_name, request.saving.keep_last) == (0.0, "float32", 3)
    assert (report.log_interval, evaluation.eval_interval, saving.save_interval) == (100, 5000, 5000)
    assert (report.wandb_entity, report.wandb_project, report.wandb_save_dir) == (
        "codertimo", "jax-lm-training", ".wandb",
    )  # fmt: skip
    assert (saving.save, request.loading.load) == ("artifacts/", None)
    assert (report.run_dir, report.tensorboard_dir) == ("artifacts/run", "artifacts/tensorboard")
    assert evaluation.full_validation and evaluation.eval_each_epoch and saving.save_each_epoch
    assert read(PUBLISHED.replace("seed 0", "seed 6")).random.seed == request.random.seed + 6 == 7


def test_the_defaults_are_upstreams() -> None:
    published = read(PUBLISHED.replace('"gpt2"', "distilgpt2"))
    for section in ("model", "data", "optim", "precision", "random", "finetuning", "saving"):
        assert getattr(read(""), section) == getattr(published, section)
    assert read("").report.wandb_project == ""


@pytest.mark.parametrize(
    ("name", "layers"),
    [("distilgpt2", 6), ("gpt2-medium", 24), ("gpt2-large", 36), ("gpt2-xl", 48), ("pythia-70m", 6)],
)
def test_networks_by_name(name: str, layers: int) -> None:
    assert read(f"--model-config-name {name}").model.num_layers == layers


def test_a_network_that_is_not_known() -> None:
    with pytest.raises(ConfigError, match="gpt5"):
        read("--model-config-name gpt5")


@pytest.mark.parametrize(
    ("path", "load", "step"),
    [("artifacts/", "artifacts", None), ("artifacts/iter_0005000", "artifacts", 5000), ("a/iter_x", "a/iter_x", None)],
)
def test_restoring_the_newest_or_one_checkpoint(path: str, load: str, step: int | None) -> None:
    loading = read(f"--restore-checkpoint-path {path}").loading
    assert (loading.load, loading.load_step) == (load, step)


def test_the_trainers_flags_win() -> None:
    request = read("--train-iters 7 --clip-grad 0.5 --lr 1 --dtype bfloat16 --log-style megatron --no-full-validation")
    assert (request.optim.train_iters, request.finetuning.epochs, request.optim.clip_grad) == (7, None, 0.5)
    assert (request.optim.lr, request.precision.dtype_name, request.report.log_style) == (1.0, "bfloat16", "megatron")
    assert not request.evaluation.full_validation


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--wandb-username me", "--wandb-username me has no effect without --wandb-project"),
        ("--wandb-run-dir here", "--wandb-run-dir here has no effect without --wandb-project"),
        ("--dtype int8", "--dtype int8 is unknown. Use one of: float32, float16, bfloat16"),
        ("--batch-size 0", "--batch-size 0 is out of range"),
    ],
)
def test_refusals(line: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(line)
