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


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_dtype_and_stage(dtype: str, stage: int) -> None:
    accumulation: dict[str, Any] = {} if dtype == "fp32" else {"data_types": {"grad_accum_dtype": "fp32"}}
    if dtype != "fp32":
        stage = max(stage, 1)
        accumulation |= {dtype: FP16 if dtype == "fp16" else {"enabled": True}}
    if stage == 1 and dtype != "fp32":  # else the sums are rounded before ranks add them
        accumulation["communication_data_type"] = "fp32"
    if stage == 3 and dtype == "fp16":
        del accumulation["data_types"]
    flags = f"--zero-stage {stage} {'' if dtype == 'fp32' else '--' + dtype}"
    assert deepspeed_config(run(flags)) == {**COMMON, "zero_optimization": {"stage": stage}, **accumulation}


def test_flags_are_settings() -> None:
    scale = "--fp16 --initial-loss-scale 65536 --min-loss-scale 2 --loss-scale-window 50 --hysteresis 4"
    changed = {"initial_scale_power": 16, "loss_scale_window": 50, "hysteresis": 4, "min_loss_scale": 2.0}
    assert deepspeed_config(run(scale))["fp16"] == {**FP16, **changed}
    assert deepspeed_config(run("--fp16 --loss-scale 128"))["fp16"]["loss_scale"] == 128
    settings = deepspeed_config(run("--micro-batch-size 1 --global-batch-size 6 --clip-grad 0", world_size=2))
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping")
    assert [settings[name] for name in names] == [6, 1, 0.0]


STAGE_1 = {"zero_optimization": {"stage": 1}}
NULLS = ("gradient_accumulation_steps", "optimizer", "zero_optimization", "fp16", "train_batch_size")
AUTO: dict[str, Any] = {
    **dict.fromkeys(("train_batch_size", "gradient_accumulation_steps", "gradient_clipping", "bf16"), "auto"),
    **{"zero_optimization": {"stage": "auto"}, "fp16": {"enabled": "auto", "loss_scale": "auto"}},
}
MERGED = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 7}, "wall_clock_breakdown": True}
HALF = {"enabled": True, "loss_scale": 0, "initial_scale_power": 12}
OFF = {"optimizer": {}, "sparse_gradients": False}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (MERGED | {"comms_logger": {"enabled": True, "verbose": "auto"}}, MERGED | {"comms_logger": {"enabled": True}}),
        (AUTO, STAGE_1),
        ({"gradient_accumulation_steps": 4, "gradient_clipping": 0.5}, {"gradient_clipping": 0.5, **STAGE_1}),
        ({"fp16": HALF}, {"fp16": {**FP16, **HALF}}),
        ({"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}, STAGE_1),
        ({"bfloat16": {"enabled": True, "check_grad_overflow": False}},
         {"bf16": {"enabled": True, "check_grad_overflow": False}}),
        (dict.fromkeys(NULLS), STAGE_1),
        ({"curriculum_learning": {"enabled": False}, **OFF}, STAGE_1),
        ({"data_efficiency": {"enabled": False}, **OFF}, STAGE_1),
    ],
    ids=["merged", "auto", "governed", "fp16", "effective stage", "bfloat16", "null", "curriculum", "efficiency"],
)  # fmt: skip
def test_a_file_adds_settings(tmp_path: Path, content: Any, expected: Any) -> None:
    settings = deepspeed_config(run(written(tmp_path, content)))
    known, is_half = {**COMMON, **expected}, "bf16" in settings or "fp16" in settings
    assert settings == known or (is_half and known.items() <= settings.items())
    assert "gradient_accumulation_steps" not in settings


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


def test_accumulation_counts_the_replicas(tmp_path: Path) -> None:
    flag = written(tmp_path, {"gradient_accumulation_steps": 2})
    assert deepspeed_config(run(flag, world_size=2))["train_batch_size"] == 8
    with pytest.raises(ConfigError, match=r"on 4 data-parallel rank\(s\) gives 1\..*change --global-batch-size to 16"):
        run(flag, world_size=4)
