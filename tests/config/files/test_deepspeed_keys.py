"""Every key that DeepSpeed reads has a status, and every entry of a file is checked by it."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.config.files.deepspeed_keys import check_settings
from megatron.config.files.deepspeed_table import deepspeed_keys
from megatron.config.flags.status_table import IGNORED, REFUSED

KEYS = deepspeed_keys()
# The classes that describe a section, and where it stands in the file.
MODELS = {
    "zero_optimization": ("runtime.zero.config", "DeepSpeedZeroConfig"),
    "zero_optimization.offload_param": ("runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig"),
    "zero_optimization.offload_optimizer": ("runtime.zero.offload_config", "DeepSpeedZeroOffloadOptimizerConfig"),
    "zero_optimization.zenflow": ("runtime.zenflow.zenflow_config", "ZenFlowConfig"),
    "zero_optimization.leaf_module": ("runtime.zero.leaf_module_config", "DeepSpeedZeroLeafModuleConfig"),
    "fp16": ("runtime.precision_config", "DeepSpeedFP16Config"),
    "bf16": ("runtime.precision_config", "DeepSpeedBF16Config"),
    "bfloat16": ("runtime.precision_config", "DeepSpeedBF16Config"),
    "tensorboard": ("monitor.config", "TensorBoardConfig"),
    "wandb": ("monitor.config", "WandbConfig"),
    "csv_monitor": ("monitor.config", "CSVConfig"),
    "comet": ("monitor.config", "CometConfig"),
    "comms_logger": ("comm.config", "CommsLoggerConfig"),
    "timers.throughput": ("utils.config", "DeepSpeedThroughputTimerConfig"),
    "tensor_parallel": ("runtime.tensor_parallel.config", "TPTrainingConfig"),
    "hybrid_engine": ("runtime.config", "HybridEngineConfig"),
    "compile": ("compile.config", "CompileConfig"),
    "weight_quantization": ("inference.config", "WeightQuantConfig"),
}
_NO_KEYS = {"train", "eval", "predict", "encode", "params", "type", "legacy_fusion", "ddp_bf16"}
# Names of attributes and groups in `constants.py` that are no keys of the file.
_NO_KEYS |= {"data_parallel_group", "global_rank"}


def status_of(name: str) -> str | None:
    """The status of a key, or of the ignored or refused section that it stands in."""
    while name:
        if name in KEYS:
            return KEYS[name].status
        name = name.rpartition(".")[0]
        if name in KEYS and KEYS[name].status not in (IGNORED, REFUSED):
            return None
    return None


def checked(tree: dict[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    found = check_settings(tree, "ds.json")
    return found.settings, found.problems, found.notices


def test_every_key_that_deepspeed_reads_has_a_status() -> None:
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        pytest.skip("deepspeed is not installed")
    names = set()
    for section, (module, model) in MODELS.items():
        for name, facts in getattr(importlib.import_module(f"deepspeed.{module}"), model).model_fields.items():
            names |= {f"{section}.{name}", f"{section}.{facts.alias or name}"}
    assert len(names) > 100
    folder = Path(spec.origin).parent
    config = (folder / "runtime/config.py").read_text()
    for removed, prefix in (
        ("_REMOVED_TOP_LEVEL_CONFIG_KEYS", ""),
        ("_REMOVED_ZERO_CONFIG_KEYS", "zero_optimization."),
    ):
        body = config.partition(f"{removed} = {{")[2].partition("\n}")[0]
        found = re.findall(r'^    "(\w+)":', body, re.MULTILINE)
        assert len(found) >= 3
        names |= {prefix + name for name in found}
        assert all(status_of(prefix + name) == REFUSED for name in found if name != "curriculum_learning")
    constants = dict(
        re.findall(r"""^([A-Z_0-9]+) = ['"](\w+)['"]""", (folder / "runtime/constants.py").read_text(), re.M)
    )
    read = re.findall(r"(?:get_scalar_param\(\s*param_dict,\s*|param_dict\.get\(|param_dict\[)([A-Z_0-9]+)", config)
    assert len({constants[one] for one in read if one in constants}) > 20
    names |= {constants[one] for one in read if one in constants}
    names |= set(re.findall(r"""param_dict(?:\.get\(|\[)['"](\w+)['"]""", config))
    sections = {"data_types": "GRAD_ACCUM_DTYPE PARAM_DTYPE BUFFER_DTYPE KEEP_IN_FP32_MODULES"}
    names |= {f"{section}.{constants[one]}" for section, ones in sections.items() for one in ones.split()}
    assert sorted(name for name in names - _NO_KEYS if status_of(name) is None) == []


def test_unknown_keys_are_refused_in_every_section() -> None:
    _, problems, _ = checked(
        {"warp_drive": 1, "fp16": {"enable": True}, "timers": {"throughput": {"on": 1}}, "x" * 10**6: 1}
    )
    assert problems[:3] == [
        'ds.json: "warp_drive" is unknown. DeepSpeed 0.19 has no such key. Remove it.',
        'ds.json: "fp16.enable" is unknown. Did you mean "fp16.enabled"?',
        'ds.json: "timers.throughput.on" is unknown. DeepSpeed 0.19 has no such key. Remove it.',
    ]
    assert len(problems) == 4 and len(problems[3]) < 200
    _, problems, _ = checked({f"key{number}": 1 for number in range(10_000)})
    assert len(problems) == 21 and problems[-1] == "ds.json: 9980 more keys are unknown. Is it the right file?"


_SECTIONS = (
    "amp", "progressive_layer_drop", "elasticity", "autotuning", "flops_profiler", "tensorboard", "wandb",
    "csv_monitor", "torch_autocast", "hybrid_engine", "eigenvalue",
)  # fmt: skip
SWITCHED_OFF: list[dict[str, Any]] = [
    {name: {"enabled": False, "anything": {"deep": [1, 2]}} for name in _SECTIONS},
    {"sparse_gradients": False, "sparse_attention": None, "compression_training": {}, "optimizer": "auto"},
    {
        "compression_training": {
            "weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {"a": 1}}
        }
    },
    {"zero_optimization": {"zero_quantized_weights": False, "zero_hpz_partition_size": 1, "mics_shard_size": -1}},
    {"zero_optimization": {"offload_optimizer": {"device": "none", "pin_memory": True}, "offload_param": None}},
    {"zero_optimization": {"compute_grad_norm": True, "load_from_fp32_weights": True, "elastic_checkpoint": False}},
    {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None, "profile": False}},
    {"gradient_allreduce_op": "mean", "sequence_parallel_size": 1, "managed_gradient_accumulation": True},
    {"pipeline": {"stages": "auto", "partition": "best"}, "zero_optimization": {"stage": "auto"}},
    {"data_efficiency": {"enabled": True, "data_routing": {"enabled": False}, "data_sampling": {"enabled": False}}},
]


@pytest.mark.parametrize("tree", SWITCHED_OFF)
def test_what_is_switched_off_is_accepted_in_silence(tree: dict[str, Any]) -> None:
    settings, problems, notices = checked(tree)
    assert (problems, notices) == ([], []) and not any(settings.values())


def test_each_key_without_effect_says_why() -> None:
    for name, key in KEYS.items():
        tree: Any = {"enabled": True, "value": 7}
        for part in reversed(name.split(".")):
            tree = {part: tree}
        if key.status in (IGNORED, REFUSED):
            settings, problems, notices = checked(tree)
            (said,) = problems if key.status == REFUSED else notices
            assert len(problems) + len(notices) == 1 and key.reason in said and not any(settings.values()), name


def test_supported_values_are_passed_on() -> None:
    tree = {
        "zero_optimization": {
            "reduce_bucket_size": 5e8,
            "stage": "auto",
            "offload_optimizer": {"device": "cpu", "ratio": 1.0},
        },
        "fp16": {"enabled": False, "loss_scale": 128, "initial_scale_power": 9999},
        "steps_per_print": 10,
        "timers": {"throughput": {"enabled": True}},
        "tensorboard": {"enabled": True, "output_path": "x"},
    }
    settings, problems, notices = checked(tree)
    assert settings == {
        "zero_optimization": {"reduce_bucket_size": 500_000_000, "offload_optimizer": {"device": "cpu", "ratio": 1.0}},
        "fp16": {"enabled": False},
        "steps_per_print": 10,
        "timers": {"throughput": {"enabled": True}},
    }
    assert problems == [] and len(notices) == 1 and "--tensorboard-dir" in notices[0]
