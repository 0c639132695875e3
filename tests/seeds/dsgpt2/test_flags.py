"""dsGPT2's command line, as flags of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.dsgpt2.flags import DsGpt2Flags
from megatron.config import RunRequest, parse
from megatron.config.program_flags import read_program
from megatron.errors import ConfigError

# The command lines of the README and of the scripts, without their launcher.
PRETRAIN = (
    "--model_select 112m --seed 7 --ckpt_dir c --workspace test25 --train_iters 300 --tr_ratio 0.9 --loss_type lm_loss "
    "--distributed-backend gloo --eval_batch_size 64 --config_train db.json --deepspeed"
)
FINETUNE = (
    "--enable_padding False --enable_bos True --enable_eos True --truncated_len 122 --wandb_dir kg --model_select 112m "
    "--workspace finetune5 --train_mode finetune --workspace_finetune test25 --ckpt_id_finetune epoch1-step144000 "
    "--eval_batch_size 128 --train_iters 150000 --ckpt_save_steps 1000 --config_train chat.json --alpha 0.25"
)


@pytest.fixture(autouse=True)
def vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "vocab" / "vocab_50257"
    folder.mkdir(parents=True)
    for name in ("ko-vocab.json", "ko-merges.txt"):
        (folder / name).write_text("{}")
    return folder


def request(line: str) -> RunRequest:
    flags, words = read_program(DsGpt2Flags, line.split(), "ds_trainer.py", "")
    return parse([*flags.trainer_arguments(), *words], program=flags.program)


def test_pretraining() -> None:
    parsed = request(PRETRAIN)
    assert (parsed.model.num_layers, parsed.model.hidden_size, parsed.model.max_position_embeddings) == (12, 768, 128)
    assert (parsed.data.data_path, parsed.data.split, parsed.data.seq_length) == (("db.json",), "90,10,0", 128)
    assert parsed.data.vocab_file == "vocab/vocab_50257/ko-vocab.json"
    assert (parsed.saving.save, parsed.saving.save_interval, parsed.loading.load) == ("c/test25", 2000, None)
    assert (parsed.optim.train_iters, parsed.random.seed) == (300, 7)
    assert parsed.saving.checkpoint_link == "epoch{epoch}-step{step}"
    assert (parsed.loss.loss_mean, parsed.loss.loss_on_targets_only) == ("samples", False)
    assert parsed.report.log_style == "dsgpt2"
    optim = parsed.optim
    assert (optim.lr, optim.adam_beta1, optim.weight_decay, optim.clip_grad) == (3.5e-4, 0.95, 1e-5, 0.25)
    assert (parsed.evaluation.eval_interval, parsed.evaluation.eval_iters) == (100, 1)


def test_fine_tuning() -> None:
    parsed = request(FINETUNE)
    assert parsed.loading.finetune and parsed.loading.load == "checkpoints/test25/epoch1-step144000"
    assert (parsed.saving.save, parsed.saving.save_interval) == ("checkpoints/finetune5", 1000)
    assert parsed.finetuning.chat_template == "dsgpt2" and parsed.loss.loss_on_targets_only
    assert (parsed.finetuning.copy_prompt_probability, parsed.report.wandb_project) == (0.25, "kg")
    assert (parsed.data.seq_length, parsed.optim.lr, parsed.random.seed) == (122, 1e-3, 123)


@pytest.mark.parametrize(
    ("words", "load", "finetune"),
    [
        ("", None, False),
        ("--restart False", None, False),
        ("--restart True", "checkpoints/test0", False),
        ("--restart True --ckpt_id epoch0-step4000", "checkpoints/test0/epoch0-step4000", False),
        ("--restart True --load_dir old --ckpt_id epoch0-step4000", "old/epoch0-step4000", False),
        ("--train_mode finetune --workspace chat", "checkpoints/test0", True),
        ("--train_mode finetune --workspace chat --restart True", "checkpoints/test0", True),
        ("--train_mode finetune --workspace c --restart True --ckpt_id step9", "checkpoints/c/step9", False),
    ],
)
def test_where_training_begins(words: str, load: str | None, finetune: bool) -> None:
    loading = request(f"--config_train db.json {words}").loading
    assert (loading.load, loading.finetune) == (load, finetune)


@pytest.mark.parametrize(("name", "layers", "context"), [("112m_half", 6, 64), ("345m", 24, 64)])
def test_the_other_sizes(name: str, layers: int, context: int) -> None:
    parsed = request(f"--config_train db.json --model_select {name}")
    assert (parsed.model.num_layers, parsed.data.seq_length) == (layers, context)


def test_flags_of_the_trainer_win() -> None:
    assert request("--config_train db.json --lr-warmup-iters 5").optim.lr_warmup_fraction is None
    parsed = request("--config_train db.json --num-layers 2 --split 8,1,1 --lr 1 --tensor-model-parallel-size 2")
    assert (parsed.model.num_layers, parsed.data.split, parsed.optim.lr) == (2, "8,1,1", 1.0)
    assert parsed.parallel.tensor_model_parallel_size == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--restart maybe", r'--restart expects no value, true or false, got "maybe"'),
        ("--enable_bos False", r"--enable_bos false: chats are always written with <s>"),
        ("--enable_eos False", r"--enable_eos false: chats are always written with </s>"),
        ("--alpha 0.2", r"--alpha 0\.2 replaces answers by questions, and documents have neither"),
        ("--ckpt_id epoch0-step5", r"--ckpt_id epoch0-step5 is where a restart begins, and this is none"),
        ("--truncated_len 129", r"--truncated_len 129 is more than the 128 tokens that --model_select 112m reads"),
        ("--model_select 1b", r"--model-select 1b is unknown\. Use one of: 112m, 112m_half, 345m"),
        ("--loss_type mse", r"--loss-type mse is unknown"),
        ("--vocab_id_dir vocab_8000", r"vocab/vocab_8000 must hold one file \*-vocab\.json; it holds none"),
    ],
)
def test_what_is_refused(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        request(f"--config_train db.json {words}")


def test_two_vocabularies_in_a_folder_are_refused(vocabulary: Path) -> None:
    (vocabulary / "old-merges.txt").write_text("")
    with pytest.raises(ConfigError, match=r"one file \*-merges\.txt; it holds ko-merges\.txt, old-merges\.txt"):
        request("--config_train db.json")


def test_no_flag_of_dsgpt2_is_missing() -> None:
    words: dict[str, Any] = dict.fromkeys(
        ("--use_cpu", "--do_sample", "--enable_padding", "--deepspeed", "--deepscale"), "True"
    ) | {
        "--gpu_id": 0, "--min_length": 100, "--max_length": 120, "--top_k": 30, "--top_p": 1.0, "--temperature": 0.9,
        "--repetition_penalty": 1.2, "--num_beams": 1, "--port": 4000, "--local_rank": 0, "--vocab_load_dir": "vocab",
    }  # fmt: skip
    line = " ".join(f"{name} {value}" for name, value in words.items())
    assert request(f"--config_train db.json {line}").parallel.local_rank == 0
