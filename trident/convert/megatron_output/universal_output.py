"""Writes DeepSpeed's universal checkpoints: whole fp32 weights and moments, one folder per parameter.

Any tensor, pipeline and data parallel sizes can load it (`"checkpoint": {"load_universal": true}`). The word embedding
has no padding rows: the loader of ZeRO 1 and 2 adds them, but not the loader of ZeRO 3 (`keep_padding`).

Source: DeepSpeed 0.19.8, `deepspeed/checkpoint/universal_checkpoint.py` (`load_hp_checkpoint_state`),
`deepspeed/runtime/base_optimizer.py`, `deepspeed/runtime/zero/stage3.py`, `deepspeed/checkpoint/ds_to_universal.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron import log
from megatron.checkpoint.storage import write_text
from trident.convert.hugging_face.importing import unfinished_folder
from trident.convert.megatron_format.arguments import scheduler_state
from trident.convert.megatron_format.names import parameter_name
from trident.convert.megatron_format.sharding_rules import ROW_PARALLEL, ShardingRule
from trident.convert.megatron_output.output_tensors import MOMENTS, CheckpointTensors, OutputRequest, write_object

# The version of DeepSpeed with this format; its loader requires one.
DEEPSPEED_VERSION = "0.19.8"
_FORMAT_VERSION = 0.2
_POINTER = "latest_universal"


def write_universal(request: OutputRequest) -> Path:
    """Creates a folder with a universal checkpoint and the file that points to it; returns the checkpoint's folder.

    One tensor is in memory at a time. Without optimizer state, the moments are zeros as in a new optimizer.

    Raises:
        ConversionError: the network cannot be expressed, or the target exists.
        DamagedError: the checkpoint is damaged.
        StorageError: a file cannot be written.
    """
    tensors = CheckpointTensors.of(request)
    model_state = _model_state(request)
    record = request.checkpoint.record
    updates = record.optimizer_updates if tensors.has_moments else 0
    if not tensors.has_moments:
        log.info(f"{request.checkpoint.folder} has no optimizer state to write; the moments are zeros")
    name = f"global_step{record.progress.step}_universal"
    rows = request.model.padded_vocab_size if request.keep_padding else None
    with unfinished_folder(request.target) as folder:
        zero = folder / name / "zero"
        for ours, rule in tensors.rules.items():
            parameter = zero / parameter_name(ours, request.naming, request.model)
            split = _split_fields(rule, request.keep_padding)
            weight = tensors.part(ours, "weight", request.order, rows=rows).float()
            write_object(parameter / "fp32.pt", {"param": weight, **split})
            for kind in MOMENTS:
                has = tensors.has_moments
                values = tensors.part(ours, kind, request.order, rows=rows) if has else torch.zeros_like(weight)
                write_object(parameter / f"{kind}.pt", {"param": values, **split})
            write_object(parameter / "step.pt", torch.tensor(float(updates)))
        write_object(zero / "optimizer_state.pt", _optimizer_state(updates))
        for rank in range(request.tensor_ranks * request.stages):
            for prefix in ("", "zero_pp_rank_0_"):  # the second for ZeRO 3
                write_object(folder / name / f"{prefix}mp_rank_{rank:02d}_model_states.pt", model_state)
        write_text(folder / _POINTER, name)
    return request.target / name


def _split_fields(rule: ShardingRule, keep_padding: bool) -> dict[str, Any]:
    """The loader's fields for sharding a tensor; empty if replicated."""
    if rule.split is None:
        return {}
    split: dict[str, Any] = {"cat_dim": int(rule.name.endswith(ROW_PARALLEL))}
    if rule.rows == "gated":
        split["param_n_sub_params"] = 2
    if rule.rows == "vocabulary" and not keep_padding:
        split["vocab_tensor"] = True
    return split


def _optimizer_state(updates: int) -> dict[str, Any]:
    """The parameter groups (matrices, others) for ZeRO 1 and 2 and, nested, for ZeRO 3."""
    # Without learning rate and decay, so that the loading program keeps its own. The loader of ZeRO 3 shares the
    # counter in `state` among its groups: it is a number, since each group would increment a tensor.
    groups = [{"params": [], "step": updates} for _ in range(2)]
    state = {0: {"step": updates}}
    return {
        "param_groups": groups,
        "ds_version": DEEPSPEED_VERSION,
        "optimizer_state_dict": {"state": state, "param_groups": groups},
    }


def _model_state(request: OutputRequest) -> dict[str, Any]:
    """The content of `mp_rank_XX_model_states.pt`."""
    progress, described = request.checkpoint.record.progress, request.described
    return {
        "module": None,
        "optimizer": None,
        "buffer_names": [],
        "param_shapes": None,
        "lr_scheduler": scheduler_state(request.run, progress, request.naming),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": progress.skipped_steps,
        "global_steps": progress.step,
        "global_samples": progress.consumed_samples,
        "dp_world_size": 1,
        "mp_world_size": request.tensor_ranks,
        "ds_version": DEEPSPEED_VERSION,
        **described,
        "universal_checkpoint_info": {"universal_checkpoint_version": _FORMAT_VERSION, **described["checkpoint_info"]},
    }
