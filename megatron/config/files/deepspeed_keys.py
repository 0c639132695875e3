"""The keys DeepSpeed reads from its settings file; DeepSpeed itself ignores a misspelt key silently.

Source: DeepSpeed 0.19.8 (`runtime/config.py`, `runtime/constants.py`, `runtime/precision_config.py`, `zero/config.py`
and the constants of its other parts), with the keys that older releases had.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Mapping
from typing import Any

_BATCH = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
    sequence_parallel_size gradient_clipping gradient_predivide_factor gradient_allreduce_op prescale_gradients
    sparse_gradients communication_data_type seq_parallel_communication_data_type disable_allgather
    fp32_allreduce allreduce_always_fp32 allgather_size dataloader_drop_last
"""
_PARTS = """
    optimizer scheduler fp16 bf16 bfloat16 amp torch_autocast data_types zero_optimization zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer activation_checkpointing pipeline tensor_parallel expert_parallel hybrid_engine
    use_data_before_expert_parallelism checkpoint checkpoint_serialization datastates_ckpt nebula aio compile
    compression_training weight_quantization data_efficiency curriculum_learning elasticity autotuning eigenvalue
    progressive_layer_drop quantize_training sparse_attention graph_harvesting mesh_device
"""
_REPORTS = """
    steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level timers flops_profiler comms_logger
    monitor_config tensorboard wandb csv_monitor comet vocabulary_size disable_python_gc
"""
_ZERO = """
    stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
    allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint offload_param
    offload_optimizer zenflow sub_group_size cpu_offload cpu_offload_params cpu_offload_param
    cpu_offload_use_pin_memory ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment
    zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients
    memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings
    enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module mics_shard_size
    mics_hierarchical_params_gather zeropp_loco_param stage3_gather_fp16_weights_on_model_save
    gather_fp16_weights_on_model_save
"""
# These are read with and without `stage3_` in front.
_ZERO_STAGE3 = """
    prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance
    gather_16bit_weights_on_model_save module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential
"""
_FP16 = """
    enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale
    fp16_master_weights_and_grads
"""
_BF16 = """
    enabled immediate_grad_update check_grad_overflow check_overflow bf16_master_weights_and_grads bf16_optimizer_states
"""

TOP_LEVEL_KEYS = frozenset((_BATCH + _PARTS + _REPORTS).split())
SECTION_KEYS: Mapping[str, frozenset[str]] = types.MappingProxyType(
    {
        "zero_optimization": frozenset(
            [*_ZERO.split(), *_ZERO_STAGE3.split(), *(f"stage3_{key}" for key in _ZERO_STAGE3.split())]
        ),
        "fp16": frozenset(_FP16.split()),
        "bf16": frozenset(_BF16.split()),
        "bfloat16": frozenset(_BF16.split()),
    }
)
# A key may contain one typing error for this many letters, and always at least one.
_LETTERS_PER_ERROR = 6
_SHORTEST_BEGINNING = 4


def unknown_keys(tree: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """The keys of a DeepSpeed file that DeepSpeed does not read, each with the known key it probably stands for.

    Looks at the top level and at the sections whose keys are listed here. A name that looks like a
    comment (`_comment`, `//`, `#`) is left alone.

    Returns:
        (dotted key, dotted known key) pairs; the second is None where nothing known resembles the first, as with a key
        that a newer DeepSpeed has added.
    """
    found = _unknown(tree, TOP_LEVEL_KEYS, "")
    for section, known in SECTION_KEYS.items():
        inside = tree.get(section)
        if isinstance(inside, Mapping):
            found += _unknown(inside, known, f"{section}.")
    return found


def _unknown(section: Mapping[str, Any], known: frozenset[str], prefix: str) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for key in section:
        if key not in known and not key.startswith(("_", "/", "#")):
            meant = _closest_key(key, known)
            found.append((prefix + key, None if meant is None else prefix + meant))
    return found


def _closest_key(key: str, known: Iterable[str]) -> str | None:
    """The known key that `key` probably stands for: misspelt, in another style (zeroOptimization) or cut short.

    Sharing words is not enough: a key of a newer DeepSpeed may share all but one of its words with an old key.
    """
    letters = _letters(key)
    distances = {name: _edit_distance(letters, _letters(name)) for name in sorted(known)}
    best = min(distances, key=lambda name: (distances[name], sorted(letters) != sorted(_letters(name))))
    if distances[best] <= max(1, len(letters) // _LETTERS_PER_ERROR):
        return best
    longer = [name for name in distances if _letters(name).startswith(letters)]
    return min(longer, key=lambda name: len(name)) if longer and len(letters) >= _SHORTEST_BEGINNING else None


def _letters(key: str) -> str:
    return re.sub(r"[^a-z0-9]", "", key.lower())


def _edit_distance(left: str, right: str) -> int:
    """How many letters must be inserted, deleted, replaced or swapped with a neighbour to turn one text into the other.

    Source: the restricted Damerau-Levenshtein distance (optimal string alignment).
    """
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, letter in enumerate(left, 1):
        following = [i]
        for j, other in enumerate(right, 1):
            cost = min(row[j] + 1, following[j - 1] + 1, row[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == right[j - 2] and left[i - 2] == other:
                cost = min(cost, before[j - 2] + 1)
            following.append(cost)
        before, row = row, following
    return row[-1]
