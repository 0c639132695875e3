"""The DeepSpeed configuration for each dtype and ZeRO stage, and settings from a user's file."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron.config import Machine, RunConfig, TokenizerFacts, resolve
from megatron.engine.ds_config import deepspeed_config
from megatron.errors import ConfigError
from tests.config.command_lines import small

# The small command line: micro-batches of 2, a global batch of 8.
COMMON = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 2**31 - 1,
    "wall_clock_breakdown": False,
    "timers": {"throughput": {"enabled": False}},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
FP16 = {
    "enabled": True,
    "loss_scale": 0,
    "initial_scale_power": 32,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}


def run(text: str = "", world_size: int = 1, device_type: str = "cpu") -> RunConfig:
    """The small command line, resolved on a machine that can do every dtype."""
    return resolve(small(text), Machine(device_type, world_size, True, True), TokenizerFacts(1000, 999, "f"))


def written(folder: Path, content: Any) -> str:
    """The flag that names a DeepSpeed file with this content."""
    path = folder / "ds.json"
    path.write_text(json.dumps(content))
    return f"--deepspeed_config {shlex.quote(str(path))}"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_float32(stage: int) -> None:
    assert deepspeed_config(run(f"--zero-stage {stage}")) == {**COMMON, "zero_optimization": {"stage": stage}}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision(dtype: str, stage: int) -> None:
    accumulation: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}}
    if stage == 1:  # else the sums are rounded before ranks add them
        accumulation["communication_data_type"] = "fp32"
    if stage == 3 and dtype == "fp16":
        accumulation = {}
    section = FP16 if dtype == "fp16" else {"enabled": True}
    expected = {**COMMON, "zero_optimization": {"stage": stage}, dtype: section, **accumulation}
    assert deepspeed_config(run(f"--{dtype} --zero-stage {stage}")) == expected


@pytest.mark.parametrize("dtype", ["--bf16", "--fp16"])
def test_half_precision_without_zero_runs_as_stage_one(dtype: str) -> None:
    assert deepspeed_config(run(f"{dtype} --zero-stage 0")) == deepspeed_config(run(f"{dtype} --zero-stage 1"))


def test_loss_scale_flags() -> None:
    flags = "--fp16 --initial-loss-scale 65536 --min-loss-scale 2 --loss-scale-window 50 --hysteresis 4"
    assert deepspeed_config(run(flags))["fp16"] == {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 50,
        "hysteresis": 4,
        "min_loss_scale": 2.0,
    }
    assert deepspeed_config(run("--fp16 --loss-scale 128"))["fp16"]["loss_scale"] == 128


def test_batch_and_clipping_flags() -> None:
    settings = deepspeed_config(run("--micro-batch-size 1 --global-batch-size 6 --clip-grad 0", world_size=2))
    assert settings["train_batch_size"] == 6
    assert settings["train_micro_batch_size_per_gpu"] == 1
    assert settings["gradient_clipping"] == 0.0


def test_a_file_adds_settings_and_objects_are_merged(tmp_path: Path) -> None:
    flag = written(
        tmp_path,
        {
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 7},
            "wall_clock_breakdown": True,
            "comms_logger": {"enabled": True, "verbose": "auto"},
        },
    )
    assert deepspeed_config(run(flag)) == {
        **COMMON,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 7},
        "wall_clock_breakdown": True,
        "comms_logger": {"enabled": True},
    }


def test_auto_means_our_value_at_every_depth(tmp_path: Path) -> None:
    content = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": "auto"},
        "bf16": "auto",
    }
    assert deepspeed_config(run(written(tmp_path, content))) == {
        **COMMON,
        "zero_optimization": {"stage": 1},
    }


def test_governed_settings_of_a_file_are_applied_consistently(tmp_path: Path) -> None:
    content = {
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12},
    }
    settings = deepspeed_config(run(written(tmp_path, content)))
    assert settings["gradient_clipping"] == 0.5
    assert settings["fp16"] == {**FP16, "initial_scale_power": 12}
    assert "gradient_accumulation_steps" not in settings


def test_the_effective_zero_stage_overrides_the_requested_one(tmp_path: Path) -> None:
    flag = written(tmp_path, {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}})
    assert deepspeed_config(run(flag))["zero_optimization"] == {"stage": 1}


@pytest.mark.parametrize(
    ("text", "zero", "stage"),
    [
        ("--zero-stage 2", {"offload_param": {"device": "cpu"}}, 2),
        ("", {"stage": 0, "cpu_offload_param": True}, 0),
        ("", {"offload_param": {"device": "cpu"}}, 1),
        ("", {"offload_param": {"device": "none", "pin_memory": True}}, None),
        ("--zero-stage 3", {"offload_param": {"device": "cpu"}}, None),
    ],
)
def test_weights_are_offloaded_at_stage_3_only(tmp_path: Path, text: str, zero: Any, stage: int | None) -> None:
    """DeepSpeed reads the entry at stage 3 only and ignores it below."""
    config = run(f"{text} {written(tmp_path, {'zero_optimization': zero})}")
    said = [notice for notice in config.notices if "offload_param" in notice]
    assert len(said) == (stage is not None)
    assert stage is None or f'offload_param" has no effect with ZeRO stage {stage}, as in DeepSpeed' in said[0]
    kept = deepspeed_config(config).get("zero_optimization", {})
    assert ("offload_param" in kept) == ("3" in text) and "cpu_offload_param" not in kept


def test_the_optimizer_moves_to_the_host_where_there_is_a_device_to_leave(tmp_path: Path) -> None:
    def zero(text: str, device_type: str) -> Any:
        return deepspeed_config(run(text, device_type=device_type))["zero_optimization"]

    offloaded = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    assert zero("--cpu-optimizer", "cuda") == offloaded and zero("--cpu-optimizer", "cpu") == {"stage": 1}
    pinned = written(tmp_path, {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}})
    assert zero(f"--cpu-optimizer {pinned}", "cuda")["offload_optimizer"] == {"device": "cpu", "pin_memory": True}


def test_a_file_that_is_changed_for_the_worse_after_the_start_is_refused(tmp_path: Path) -> None:
    config = run(written(tmp_path, {}))
    written(tmp_path, {"optimizer": {"type": "Lamb"}, "scheduler": {"type": "x"}, "warp_drive": 2})
    with pytest.raises(ConfigError, match=r'"optimizer.type" must be one of Adam') as caught:
        deepspeed_config(config)
    assert len(caught.value.problems) == 3


def test_the_older_name_of_bf16_is_the_same_section(tmp_path: Path) -> None:
    flag = written(tmp_path, {"bfloat16": {"enabled": True, "check_grad_overflow": False}})
    assert deepspeed_config(run(flag))["bf16"] == {"enabled": True, "check_grad_overflow": False}


def test_null_counts_as_no_entry(tmp_path: Path) -> None:
    content = dict.fromkeys(
        ("gradient_accumulation_steps", "optimizer", "zero_optimization", "fp16", "train_batch_size")
    )
    assert deepspeed_config(run(written(tmp_path, content))) == {**COMMON, "zero_optimization": {"stage": 1}}


@pytest.mark.parametrize("section", ["curriculum_learning", "data_efficiency"])
def test_a_disabled_section_is_accepted(tmp_path: Path, section: str) -> None:
    content = {section: {"enabled": False}, "optimizer": {}, "sparse_gradients": False}
    assert deepspeed_config(run(written(tmp_path, content))).keys() == {*COMMON, "zero_optimization"}


def test_accumulation_counts_the_replicas(tmp_path: Path) -> None:
    flag = written(tmp_path, {"gradient_accumulation_steps": 2})
    assert deepspeed_config(run(flag, world_size=2))["train_batch_size"] == 8
    with pytest.raises(ConfigError, match=r"on 4 data-parallel rank\(s\) gives 1\..*change --global-batch-size to 16"):
        run(flag, world_size=4)
