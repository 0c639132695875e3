"""GPT2-ALL-IN's configuration files: what they stand for on the trainer's command line, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from examples.gpt2_all_in.flags import PROGRAM, AllInOneFlags, checkpoints_of, command_line, read_all_in_one
from megatron.config import parse
from megatron.config.run_config import RunRequest
from megatron.errors import ConfigError
from megatron.secret_text import reveal

SMALL = {"n_head": 4, "n_layer": 2, "n_ctx": 32, "d_model": 32}


def write(folder: Path, tree: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(tree))
    return path


def request(path: Path | str, *others: str) -> RunRequest:
    return parse(command_line(AllInOneFlags(config=str(path)), others), program=PROGRAM)


@pytest.mark.parametrize("name", ["cpu", "cpu_ckp", "gpu", "gpu_ckp"])
def test_the_shipped_files_are_found_by_name_and_are_runs(name: str) -> None:
    found = request(f"{name}.json")
    assert found.model.ffn_hidden_size == 4 * found.model.hidden_size
    assert found.recompute.checkpoint_activations is name.endswith("_ckp")
    assert found.data.data_path[0].endswith("examples/gpt2_all_in/data/dev_text_document")


def test_every_field_reaches_the_trainer(tmp_path: Path) -> None:
    model = {
        **SMALL, "vocab_size": 3000, "d_mlp": 48, "resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.3,
        "layer_norm_epsilon": 1e-6, "initializer_range": 0.01, "mlp_activation": "ELU",
    }  # fmt: skip
    trainer = {
        "dataset": "shards/a-*.parquet", "valid_dataset": "held_out", "tokenizer": "words", "ckpt_path": "c",
        "log_path": "l", "n_workers": 1, "batch_size": 8, "lr": 2e-3, "optimizer": "AdamW", "n_epochs": 3,
        "warmup_steps": 5, "log_interval": 7, "ckpt_interval": 11, "valid_interval": 13, "gradient_checkpoint": True,
        "bfloat16": True, "gradient_accumulation_steps": 4, "attention_opt": True,
    }  # fmt: skip
    found = request(write(tmp_path, {"dataset": "full", "model": model, "trainer": trainer}))
    sizes = found.model
    assert (sizes.num_layers, sizes.num_attention_heads, sizes.hidden_size, sizes.ffn_hidden_size) == (2, 4, 32, 48)
    assert (sizes.max_position_embeddings, found.data.seq_length, sizes.vocab_size) == (32, 32, 3000)
    assert (sizes.hidden_dropout, sizes.attention_dropout, sizes.activation_function) == (0.2, 0.3, "elu")
    assert (sizes.layernorm_epsilon, sizes.init_method_std) == (1e-6, 0.01)
    assert (found.data.train_data_path, found.data.valid_data_path) == (("shards/a-*.parquet",), ("held_out",))
    assert (found.data.vocab_file, found.data.merge_file) == ("words/vocab.json", "words/merges.txt")
    optim = found.optim
    assert (optim.micro_batch_size, optim.global_batch_size, optim.lr_warmup_samples) == (8, 32, 160)
    assert (optim.lr, optim.lr_decay_style, optim.weight_decay, optim.clip_grad) == (2e-3, "constant", 0.01, 0.0)
    report, saving = found.report, found.saving
    assert (report.log_interval, saving.save_interval, found.evaluation.eval_interval) == (7, 11, 13)
    assert report.tensorboard_log_interval == 7 and report.tensorboard_dir == "l/{run}/tb"
    assert (report.run_dir, saving.save) == ("l/{run}", "c/{run}/ckpt")
    assert found.recompute.checkpoint_activations and found.precision.bf16 and found.kernels.fused_attention
    assert (found.finetuning.epochs, found.data.num_workers) == (3, 1)


def test_a_password_in_the_address_of_the_data_reaches_the_trainer(tmp_path: Path) -> None:
    address = "mongodb://user:word-of-mouth@localhost/corpus?collection=web"
    found = request(write(tmp_path, {"dataset": "full", "model": SMALL, "trainer": {"dataset": address}}))
    assert reveal(found.data.data_path[0]) == address and "word-of-mouth" not in str(found)


def test_defaults_are_those_of_the_original_but_for_the_vocabulary_and_the_width_of_the_mlp(tmp_path: Path) -> None:
    found = request(write(tmp_path, {"dataset": "dev", "model": {"d_model": 64, "n_head": 4}}))
    assert (found.model.ffn_hidden_size, found.model.vocab_size, found.model.activation_function) == (256, None, "gelu")
    assert (found.optim.lr, found.optim.weight_decay, found.optim.micro_batch_size) == (6.25e-5, 0.0, 64)
    assert found.optim.global_batch_size is None and not found.kernels.fused_attention


def test_a_tokenizer_may_be_a_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    tree = {"dataset": "dev", "model": SMALL, "trainer": {"tokenizer": str(tmp_path)}}
    data = request(write(tmp_path, tree)).data
    assert (data.tokenizer_type, data.tokenizer_name_or_path) == ("PretrainedFromHF", str(tmp_path))


def test_a_length_of_the_command_line_replaces_the_epochs(tmp_path: Path) -> None:
    path = write(tmp_path, {"dataset": "dev", "model": SMALL})
    shorter = request(path, "--train-iters", "3", "--lr", "1")
    assert (shorter.optim.train_iters, shorter.finetuning.epochs, shorter.optim.lr) == (3, None, 1.0)


DEV = {"dataset": "dev", "model": SMALL}


@pytest.mark.parametrize(
    ("tree", "sentences"),
    [
        ({"dataset": "foo"}, ["\"dataset\" must be dev or full, not 'foo'"]),
        ({}, ['"dataset" must be dev or full, not None']),
        ([1], [r"holds \[1\]. It must hold an object with dataset, model, trainer"]),
        ({**DEV, "seed": 1}, ['the key "seed" is unknown.* Known are dataset, model, trainer']),
        ({**DEV, "model": 3}, ['"model" must be an object, not 3']),
        (
            {**DEV, "model": {"n_heads": 8}},
            ['the key "model.n_heads" is unknown. Did you mean "n_head"\\? Known are .*n_head.*mlp_activation'],
        ),
        (
            {**DEV, "model": {"gradient_checkpoint": True}},
            ['the key "model.gradient_checkpoint" is unknown. It belongs to "trainer"'],
        ),
        (
            {**DEV, "trainer": {"bfloat16": "false", "lr": "1e-3", "n_epochs": 1.5, "batch_size": 0}},
            [
                "\"trainer.lr\" must be a number, not '1e-3'",
                '"trainer.n_epochs" must be an integer, not 1.5',
                "\"trainer.bfloat16\" must be true or false, not 'false'",
                '"trainer.batch_size" must be at least 1, not 0',
            ],
        ),
        ({**DEV, "trainer": {"optimizer": "SGD"}}, ["\"trainer.optimizer\" must be one of Adam, AdamW, not 'SGD'"]),
        (
            {"dataset": "dev", "model": {"n_head": 5, "d_model": 64, "attn_pdrop": 1}},
            [
                '"model.attn_pdrop" must be at least 0 and less than 1, not 1.0',
                '"model.n_head" 5 does not divide "model.d_model" 64. Use one of 1, 2, 4, 8, 16, 32, 64',
            ],
        ),
        ({**DEV, "model": {"resid_pdrop": 0.0}}, ['"model.resid_pdrop" 0.0 and "model.embd_pdrop" 0.1 differ']),
        ({**DEV, "dataset": "full"}, ['"dataset" full needs "trainer.dataset", where dataset full is: a pattern']),
        ({**DEV, "trainer": {"dataset": "x"}}, ['"trainer.dataset" x is for "dataset" full, not dev']),
    ],
)
def test_what_is_refused_names_file_key_and_what_is_allowed(tmp_path: Path, tree: Any, sentences: list[str]) -> None:
    path = write(tmp_path, tree)
    with pytest.raises(ConfigError) as caught:
        read_all_in_one(path)
    assert len(caught.value.problems) == len(sentences)
    for sentence, problem in zip(sentences, caught.value.problems, strict=True):
        assert re.match(f"{path}:? {sentence}", problem), problem


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"--config tpu.json is neither in this folder nor in .*configs, which has cpu.json"
    ):
        AllInOneFlags(config="tpu.json").trainer_arguments()


def test_a_run_goes_on_in_its_folder_wherever_that_is(tmp_path: Path) -> None:
    run = tmp_path / "jolly_noether-26112211"
    with pytest.raises(ConfigError, match=f"--resume {run} is not the folder of a run"):
        AllInOneFlags(resume=str(run)).trainer_arguments()
    run.mkdir()
    (run / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a run of train.py: it holds no ckpt"):
        AllInOneFlags(resume=str(run)).trainer_arguments()
    (run / "ckpt").mkdir()
    words = AllInOneFlags(resume=str(run)).trainer_arguments()
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    assert pairs["--load"] == pairs["--save"] == str(run / "ckpt") and pairs["--config"] == str(run / "config.json")


def test_a_model_is_named_by_a_folder_or_by_its_run(tmp_path: Path) -> None:
    (tmp_path / "logs" / "jolly_noether-26112211" / "ckpt").mkdir(parents=True)
    (tmp_path / "plain").mkdir()
    saved = tmp_path / "logs" / "jolly_noether-26112211" / "ckpt"
    assert checkpoints_of("jolly_noether-26112211", tmp_path / "logs") == saved
    assert checkpoints_of(str(saved.parent)) == checkpoints_of(str(saved)) == saved
    assert checkpoints_of(str(tmp_path / "plain")) == tmp_path / "plain"
    with pytest.raises(ConfigError, match=r"--model gpt2 is neither .* \(jolly_noether-26112211\).*import_hf.py"):
        checkpoints_of("gpt2", tmp_path / "logs")
