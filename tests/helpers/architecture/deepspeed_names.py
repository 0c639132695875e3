"""Every name of DeepSpeed that its documentation does not promise and that is used: who has it, and what for."""

from __future__ import annotations

import ast
import functools
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.helpers.architecture.syntax import dotted

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_ENGINE_MODULE = "deepspeed.runtime.engine"
_PIPELINE_ENGINE = "deepspeed.runtime.pipe.engine:PipelineEngine"
_PIPELINE_MODULE = "deepspeed.runtime.pipe.module:PipelineModule"
_PARTS = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_PARTS_BASE = "deepspeed.runtime.base_optimizer:ZeROOptimizer"
_BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
_STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_PARTITIONING = "deepspeed.runtime.zero.partition_parameters"
_FRAGMENTS = "deepspeed.utils.tensor_fragment"
_NORMS = "deepspeed.runtime.utils"
_GROUPS = "deepspeed.utils.groups"
_SCALER = "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler"

# Of each owner its names, and what breaks without them.
PROMISES: dict[str, dict[str, tuple[str, ...]]] = {
    _ENGINE: {
        "the optimizer, and torch's inside it, are reached": ("optimizer", "basic_optimizer"),
        "the engine neither averages nor clips gradients that are averaged and clipped here": (
            "buffered_allreduce_fallback",
            "clip_fp32_gradients",
        ),
        "gradients are averaged in the dtype and with the factor of the settings": (
            "communication_data_type",
            "gradient_predivide_factor",
            "postscale_gradients",
        ),
        "every call of its step is to update": ("set_gradient_accumulation_boundary",),
        "it clears gradients, which are freed here, nowhere else": ("zero_grad",),
        "float16 is known": ("fp16_enabled",),
    },
    _ENGINE_MODULE: {
        "optimizers that know of experts stand in for its own": ("BF16_Optimizer", "DeepSpeedZeroOptimizer"),
        "no optimizer is compared with its Muon at the start": ("is_zero_supported_optimizer",),
    },
    "deepspeed.runtime.compiler": {"its functions are not compiled at the start": ("compile",)},
    "deepspeed.ops": {"collectives of the CPU are not compiled at the start": ("__compatible_ops__",)},
    "deepspeed.ops.op_builder.cpu.comm": {
        "the operation for messages in shared memory is named": ("deepspeed_shm_comm",)
    },
    "deepspeed.comm.comm": {"its messages go through what records or counts them": ("cdb",)},
    _PIPELINE_ENGINE: {
        "phases of its schedule are announced": ("_INSTRUCTION_MAP",),
        "it leaves the accumulation of gradients to the optimizer": ("using_bf16_optimizer",),
        "it calls what accumulates": ("update_hp_grads",),
    },
    _PIPELINE_MODULE: {
        "a stage that is built here is one to the engine": (
            *("_grid", "_local_start", "_local_stop", "activation_checkpoint_func", "activation_checkpoint_interval"),
            *("dynamic_shape", "get_additional_losses", "loss_fn", "tied_comms"),
        )
    },
    _PARTS: {
        "the network's parameters, their groups and this rank's part of each are known": (
            *("bit16_groups", "bit16_groups_flat", "parallel_partitioned_bit16_groups", "partition_gradients"),
        ),
        "the network's float32 weights are updated in place unless the optimizer is offloaded": ("cpu_offload",),
        "its hooks, which would average gradients, are removed": ("_grad_acc_hooks",),
        "gradients are added up in the dtype of the settings": ("gradient_accumulation_dtype",),
        "the norm of a step is reported": ("_global_grad_norm",),
        "the loss scale is the one of the settings": ("loss_scaler",),
        "its step is replaced": ("step",),
        "it is told of experts when it is made": (
            *("expert_data_parallel_group", "expert_parallel_group", "has_moe_layers"),
        ),
        "experts are a group of their own": ("moe", "name"),
    },
    _PARTS_BASE: {"what ends a backward pass is replaced": ("backward_epilogue",)},
    _BF16: {
        "its buffers take the sums of gradients": ("fp32_groups_gradients_flat",),
        "the network's parameters, their groups and this rank's part of each are known": (
            *("bf16_groups", "bf16_groups_flat", "bf16_partitioned_groups"),
        ),
        "sums are cleared once, here": ("clear_hp_grads", "clear_lp_grads"),
        "gradients may be added within the backward pass": ("immediate_grad_update",),
    },
    _STAGE_3: {
        "this rank's part of a parameter is found in the fp32 weights": (
            *("fp16_groups", "fp32_partitioned_groups_flat", "get_param_id", "grad_position"),
        ),
        "the gradients are found before the update": ("averaged_gradients", "grad_partitions_flat_buffer"),
        "weights that every rank keeps whole are refreshed": ("persistent_parameters",),
        "a part of the weights can stay on the device": ("backup_optimizer", "subgroup_to_device"),
        "experts are found by a mark": ("autoep_expert", "ds_zero_placement_family", "ds_zero_partition_group_name"),
    },
    _PARTITIONING: {
        "the part of a divided parameter is found, and its size": ("ds_numel", "ds_tensor"),
        "a gathered parameter is recognised": ("AVAILABLE", "ds_status"),
        "this rank's place among those that divide a parameter is known": ("ds_zero_partition_rank",),
        "experts are divided over the ranks that hold the same ones": ("ds_zero_partition_process_group",),
        "parameters are marked before they are divided": ("_zero_init_param",),
        "weights that every rank keeps whole are divided and gathered": ("all_gather", "partition"),
    },
    _FRAGMENTS: {
        "the place of a parameter in the fp32 weights is found": (
            *("_hp_mapping", "hp_fragment_address", "lp_fragment_address", "param_group_index", "start"),
        ),
        "weights that are updated in place are not held twice": ("hp_fragment",),
    },
    _NORMS: {"each parameter is counted once in norms": ("ds_pipe_replicated", "tensor_model_parallel")},
    _GROUPS: {
        "the ranks of experts are known": (
            *("_EXPERT_DATA_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP_RANKS", "_EXPERT_PARALLEL_GROUP"),
        )
    },
    "deepspeed.moe.utils": {"experts are recognised among parameters": ("allreduce", "group_name")},
    _SCALER: {
        "the loss scale follows its rule": (
            *("consecutive_hysteresis", "delayed_shift", "dynamic", "min_scale", "scale_window"),
        ),
        "a checkpoint keeps the state of the scaler": (
            *("cur_hysteresis", "cur_iter", "cur_scale", "last_overflow_iter"),
        ),
    },
}


class PrivateName(NamedTuple):
    """A name, the class or module that has it, and what breaks without it."""

    name: str
    owner: str
    promise: str

    def is_kept(self) -> bool:
        """Whether the installed version has it: as an attribute, or in the source of the owner."""
        owner, name = pkgutil.resolve_name(self.owner), re.escape(self.name)
        is_written = re.compile(rf"\.{name}\b|[\"']{name}[\"']|^\s+{name}:|\b{name}=", re.MULTILINE)
        return hasattr(owner, self.name) or is_written.search(_source_of(self.owner)) is not None


@functools.cache
def _source_of(owner: str) -> str:
    return inspect.getsource(pkgutil.resolve_name(owner))


PRIVATE_NAMES = [
    PrivateName(name, owner, promise)
    for owner, promises in PROMISES.items()
    for promise, names in promises.items()
    for name in names
]

# Names that others may use for something else.
_COMMON = {
    *(
        "all_gather",
        "allreduce",
        "compile",
        "dynamic",
        "get_additional_losses",
        "group_name",
        "min_scale",
        "moe",
        "name",
    ),
    *("optimizer", "partition", "set_gradient_accumulation_boundary", "start", "step"),
}
DEEPSPEED_PRIVATE = {each.name for each in PRIVATE_NAMES} - _COMMON

# What the variables of the door hold that have such names, or parts of them.
_HOLDERS = {
    *("engine", "wrapper", "_wrapper", "scaler", "loss_scaler", "parameter", "mapping", "address", "groups"),
    *("deepspeed_engine", "ZeroParamStatus", "persistent"),
}
# What they have of torch, and names of ours.
_OTHERS = {"_mesh", "data", "experts", "grad", "nan", "numel", "params", "register_post_accumulate_grad_hook"}


def used_names(tree: ast.Module) -> Iterator[str]:
    """The names of DeepSpeed in a file of the door.

    They are attributes of what is DeepSpeed's, what a class derived from one of its own defines and sets, and strings
    that are names, by which attributes are read, set and handed over.
    """
    prefixes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("deepspeed")
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = dotted(node.value.value if isinstance(node.value, ast.Subscript) else node.value)
            is_module = owner.startswith("deepspeed.") and id(node) not in prefixes and owner != "deepspeed.zero"
            if (is_module or owner.rpartition(".")[2] in _HOLDERS) and node.attr not in _OTHERS:
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            if node.value.isidentifier() and node.value not in _OTHERS:
                yield node.value
        elif isinstance(node, ast.ClassDef):
            bases = {dotted(base) for base in node.bases}
            if bases & imported or any(base.startswith("deepspeed.") for base in bases):
                yield from (name for name in _defined(node) if name not in _OTHERS)


def _defined(node: ast.ClassDef) -> Iterator[str]:
    """The methods that a class replaces, and the attributes of its instances that it sets."""
    yield from (each.name for each in node.body if isinstance(each, ast.FunctionDef) and each.name != "__init__")
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and dotted(each.value) == "self":
            yield each.attr
