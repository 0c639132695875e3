"""A DeepSpeed file fills in what was not given, and only a given flag can disagree with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules

from megatron.config import Machine, RunRequest, TokenizerFacts, resolve
from megatron.config.schedule import learning_rate
from megatron.errors import ConfigError
from tests.config.command_lines import small


def with_file(folder: Path, tree: Any, text: str = "", drop: str = "") -> RunRequest:
    """The small command line with a DeepSpeed file."""
    file = folder / "ds.json"
    file.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return small(f"--deepspeed --deepspeed_config {file} {text}", drop)


def test_what_was_not_given_comes_from_the_file(tmp_path: Path) -> None:
    tree = {
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": 16,
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 1, "min_loss_scale": 2},
        "bf16": {"enabled": False},
    }
    config = with_file(tmp_path, tree, drop="--micro-batch-size --global-batch-size")
    optim = config.optim
    assert (optim.micro_batch_size, optim.global_batch_size, optim.clip_grad) == (4, 16, 0.3)
    scale = config.precision
    assert (scale.loss_scale, scale.initial_loss_scale, scale.hysteresis, scale.min_loss_scale) == (None, 4096, 1, 2)
    assert config.parallel.zero_stage == 2 and config.precision.dtype_name == "float16"
    assert config.provenance["optim.clip_grad"] == "file"


def test_a_curriculum_comes_from_the_file(tmp_path: Path) -> None:
    schedule = {"total_curriculum_step": 9, "difficulty_step": 4, "root_degree": 3}
    section = {
        "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 4, "max_difficulty": 32,
        "schedule_type": "fixed_root", "schedule_config": schedule,
    }  # fmt: skip
    optim = with_file(tmp_path, {"curriculum_learning": section}).optim
    assert (optim.curriculum_learning, optim.curriculum_schedule) == (True, "fixed_root")
    assert (optim.curriculum_min_length, optim.curriculum_max_length, optim.curriculum_steps) == (4, 32, 9)
    assert (optim.curriculum_length_step, optim.curriculum_root_degree) == (4, 3.0)
    parts = {"difficulty": [8, 32], "max_step": [5]}
    section = {"enabled": True, "schedule_type": "fixed_discrete", "schedule_config": parts}
    optim = with_file(tmp_path, {"curriculum_learning": section}).optim
    assert (optim.curriculum_lengths, optim.curriculum_max_steps) == ((8, 32), (5,))
    assert not with_file(tmp_path, {"curriculum_learning": {**section, "enabled": False}}).optim.curriculum_learning


ADAM = {"type": "AdamW", "params": {"lr": 9.0, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.3}}
DECAY = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": 0, "warmup_max_lr": 0.5, "warmup_num_steps": 3, "total_num_steps": 9, "warmup_type": "linear",
    },
}  # fmt: skip
COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_type": "linear"}}


def test_what_upstream_takes_from_flags_is_not_taken_from_the_file(tmp_path: Path) -> None:
    tree = {"fp16": {"enabled": True, "loss_scale": 0}, "optimizer": ADAM}
    config = with_file(tmp_path, tree, "--fp16 --loss-scale 12 --lr-decay-tokens 90 --lr-decay-iters 5")
    assert (config.precision.loss_scale, config.optim.lr, config.optim.adam_beta1) == (None, 1e-3, 0.8)
    assert [text.partition(": ")[2] for text in config.notices if "deepspeed_config" in text] == [
        '"fp16.loss_scale" is 0, so the loss scale is dynamic: --loss-scale 12.0 is ignored, as in upstream.',
        '"optimizer.params.lr" is 9.0, but --lr 0.001 is set: the flag is used, as in upstream.',
    ]
    assert "--lr-decay-iters 5 is overridden by --lr-decay-tokens 90." in config.notices


def test_the_optimizer_comes_from_the_file(tmp_path: Path) -> None:
    config = with_file(tmp_path, {"optimizer": ADAM}, drop="--lr")
    optim = config.optim
    assert (optim.lr, optim.adam_beta1, optim.adam_beta2, optim.adam_eps) == (9.0, 0.8, 0.95, 1e-6)
    assert (optim.weight_decay, config.provenance["optim.lr"], config.notices) == (0.3, "file", ())


@pytest.mark.parametrize(
    ("scheduler", "style", "lr", "decay", "floor"),
    [
        (DECAY, "linear", 0.5, 9, 0.0),
        (COSINE, "cosine", 9.0, 9, 9e-4),
        ({**COSINE, "params": {**COSINE["params"], "cos_min_ratio": 0.1}}, "cosine", 9.0, 9, 0.9),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}}, "constant", 9.0, None, 0.0),
    ],
)
def test_the_schedule_comes_from_the_file(
    tmp_path: Path, scheduler: Any, style: str, lr: float, decay: int | None, floor: float
) -> None:
    config = with_file(tmp_path, {"optimizer": ADAM, "scheduler": scheduler}, drop="--lr")
    optim = config.optim
    assert (optim.lr_decay_style, optim.lr, optim.lr_warmup_iters, optim.lr_decay_iters) == (style, lr, 3, decay)
    assert optim.min_lr == pytest.approx(floor)
    replaces = '"scheduler.params.warmup_max_lr" is 0.5, which is used: a schedule replaces the learning rate'
    assert [replaces in text for text in config.notices] == ([True] if scheduler is DECAY else [])


def test_the_rates_are_deepspeeds_one_step_earlier(tmp_path: Path) -> None:
    machine = Machine(device_type="cpu", world_size=1, supports_fp16=False, supports_bf16=True)
    weight = torch.nn.Parameter(torch.zeros(1))
    for scheduler in (DECAY, COSINE):
        request = with_file(tmp_path, {"optimizer": ADAM, "scheduler": scheduler}, drop="--lr")
        optim = resolve(request, machine, TokenizerFacts(100, 0, "none")).optim
        theirs = getattr(lr_schedules, scheduler["type"])(torch.optim.SGD([weight], lr=optim.lr), **scheduler["params"])
        for step in range(9):
            theirs.step()
            shift = 0 if scheduler is DECAY or step < 3 else 1  # its cosine begins one step on
            assert learning_rate(optim, 8 * (step + shift)) == pytest.approx(theirs.get_last_lr()[0], abs=1e-9), step


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}},
            r'ds\.json: "scheduler\.params\.warmup_type" must be linear, not log \(DeepSpeed',
        ),
        ({"scheduler": {**DECAY, "params": {**DECAY["params"], "warmup_max_lr": 0.5}}}, "warmup_max_lr.* but --lr is"),
        ({"scheduler": {"params": {"warmup_type": "linear"}}}, r'"scheduler" has no "type"\. Use one of WarmupLR, W'),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "linear"}}},
            "total_num_steps.* is required",
        ),
        (
            {"scheduler": {**COSINE, "params": {**COSINE["params"], "warmup_max_lr": 1e-3}}},
            r'"scheduler\.params\.warmup_max_lr" is not a parameter of WarmupCosineLR',
        ),
        (
            {"scheduler": {**COSINE, "params": {**COSINE["params"], "warmup_min_ratio": 0.1}}},
            r'"scheduler\.params\.warmup_min_ratio" cannot be set here: the learning rate rises from 0',
        ),
        ({"scheduler": {"type": "OneCycle"}}, r'"scheduler\.type" must be one of WarmupLR, WarmupDecayLR, WarmupCos'),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, r"betas\" must be a list of 2 numbers, not \[0"),
        ({"optimizer": {"params": {"betas": [0.9, 2]}}}, r'betas" must be a list of numbers from 0 to 1'),
        (
            {"optimizer": {"params": {"adam_w_mode": False}}},
            r'"optimizer\.params\.adam_w_mode" must be true: the weight decay is decoupled',
        ),
        (
            {"optimizer": {"params": {"bias_correction": False}}},
            r'"optimizer\.params\.bias_correction" must be true: the moments are corrected',
        ),
        ({"optimizer": {"params": {"amsgrad": True}}}, r'"optimizer\.params\.amsgrad" cannot be set here'),
    ],
)
def test_what_flags_cannot_represent_is_refused(tmp_path: Path, tree: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        with_file(tmp_path, tree)


def test_auto_and_equal_values_are_fine(tmp_path: Path) -> None:
    tree = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": "auto", "overlap_comm": "auto"},
        "fp16": "auto",
    }
    assert with_file(tmp_path, tree).optim.clip_grad == 1.0


@pytest.mark.parametrize(
    ("tree", "text", "sentence"),
    [
        (
            {"train_batch_size": 16},
            "",
            r'"train_batch_size" is 16, but --global-batch-size is 8\. Make them equal',
        ),
        ({"gradient_clipping": 0.3}, "--clip-grad 1", r'"gradient_clipping" is 0\.3, but --clip-grad is 1\.0'),
        ({"bf16": {"enabled": True}}, "--no-bf16", r'"bf16\.enabled" is true, but --bf16 is False'),
        ({"bfloat16": {"enabled": True}}, "--fp16", "--fp16 cannot be combined with --bf16"),
        ({"fp16": {"loss_scale": 16}}, "--loss-scale 8", r'"fp16\.loss_scale" is 16, but --loss-scale is 8\.0'),
        (
            {"zero_optimization": {"stage": "two"}},
            "",
            r"zero_optimization\.stage\" \(--zero-stage\) must be an integer from 0 to 3, or be omitted, not 'two'",
        ),
        ({"zero_optimization": {"stage": 3}}, "--pipeline-model-parallel-size 2", "--zero-stage 3 cannot be combined"),
        ("{", "", r"ds\.json is not JSON"),
        ("[]", "", r"ds\.json must contain a JSON object, not list"),
    ],
)
def test_disagreements_name_both_values(tmp_path: Path, tree: Any, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        with_file(tmp_path, tree, text)
    assert len(caught.value.problems) == 1


def test_a_missing_file() -> None:
    with pytest.raises(ConfigError, match=r"--deepspeed_config none\.json cannot be read: No such file"):
        small("--deepspeed_config none.json")


@pytest.mark.parametrize(
    ("tree", "key", "meant"),
    [
        ({"zero_optimzation": {"stage": 1}}, "zero_optimzation", "zero_optimization"),
        ({"zeroOptimization": {"stage": 1}}, "zeroOptimization", "zero_optimization"),
        ({"gradient_clip": 1.0}, "gradient_clip", "gradient_clipping"),
        ({"train_micro_batch_size": 2}, "train_micro_batch_size", "train_micro_batch_size_per_gpu"),
        ({"pf16": {"enabled": True}}, "pf16", "fp16"),
        ({"zero_optimization": {"stgae": 1}}, "zero_optimization.stgae", "zero_optimization.stage"),
        (
            {"zero_optimization": {"overlap_com": True}},
            "zero_optimization.overlap_com",
            "zero_optimization.overlap_comm",
        ),
        ({"fp16": {"enable": True}}, "fp16.enable", "fp16.enabled"),
        ({"bf16": {"enabeld": True}}, "bf16.enabeld", "bf16.enabled"),
    ],
)
def test_a_misspelled_key_is_rejected(tmp_path: Path, tree: Any, key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_file(tmp_path, tree)
    assert caught.value.problems == [
        f'--deepspeed_config {tmp_path / "ds.json"}: "{key}" is unknown. Did you mean "{meant}"?'
    ]


def test_a_disabled_section_is_not_compared_with_flags(tmp_path: Path) -> None:
    tree = {
        "fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 5000},
        "bf16": {"enabled": False},
        "amp": {"enabled": False, "opt_level": "O1"},
    }
    config = with_file(tmp_path, tree, "--fp16 --loss-scale 8 --loss-scale-window 50")
    assert (config.precision.fp16, config.precision.loss_scale, config.precision.loss_scale_window) == (True, 8, 50)
    notices = [text for text in config.notices if "deepspeed_config" in text]
    assert len(notices) == 1 and '"fp16.enabled" is false, but --fp16 is set: the flag is used' in notices[0]
    assert with_file(tmp_path, tree).precision.dtype_name == "float32"


def test_bfloat16_of_the_file_holds_where_it_switches_fp16_off(tmp_path: Path) -> None:
    tree = {"fp16": {"enabled": False, "loss_scale": 0}, "bf16": {"enabled": True}}
    config = with_file(tmp_path, tree, "--fp16")
    assert config.precision.dtype_name == "bfloat16"
    (notice,) = (text for text in config.notices if "deepspeed_config" in text)
    assert "so the run trains in bfloat16: --fp16 is ignored, as in upstream" in notice
    with pytest.raises(ConfigError, match="--fp16 cannot be combined with --bf16"):
        with_file(tmp_path, tree, "--fp16 --bf16")


def test_an_unknown_key_without_a_similar_one_is_refused_too(tmp_path: Path) -> None:
    tree = {"warp_drive": 9, "zero_optimization": {"stage": 1, "zero_quantized_activations": True}, "_comment": "ours"}
    with pytest.raises(ConfigError, match=r"has no such key. Remove it") as caught:
        with_file(tmp_path, tree)
    keys = [text.split('"')[1] for text in caught.value.problems]
    assert keys == ["warp_drive", "zero_optimization.zero_quantized_activations"]


def test_what_has_no_effect_is_a_notice(tmp_path: Path) -> None:
    notices = with_file(tmp_path, {"tensorboard": {"enabled": True, "output_path": "/x"}}).notices
    assert [text for text in notices if '"tensorboard" is ignored: reports come from --tensorboard-dir' in text]
