"""Every key of a DeepSpeed settings file, with what happens to it.

*Supported* keys are passed on to DeepSpeed once their value is checked; *governed* ones are compared with a flag, and
the flag's value is used; *ignored* ones have no effect and are named in a notice; *refused* ones stop the run with the
reason. A key that is ignored or refused counts only if its value turns something on: null, "auto", false, 0, an empty
value, a section with `"enabled": false` and the value that the row calls `off` are accepted in silence. The row of an
ignored or refused section covers everything in it.

Source: DeepSpeed 0.19.8 (`runtime/config.py`, `runtime/constants.py`, `runtime/precision_config.py`, `zero/config.py`
and the configurations of its other parts), with the keys that older releases had.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

SUPPORTED = "supported"
GOVERNED = "governed"
IGNORED = "ignored"
REFUSED = "refused"


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`, or lists of such numbers."""

    least: float
    most: float
    is_whole: bool = True
    is_list: bool = False

    def __str__(self) -> str:
        kind = ("whole" if self.is_whole else "number") + ("s" if self.is_list else "")
        return f"{kind} {_short(self.least)}..{_short(self.most)}"

    @property
    def words(self) -> str:
        """What a value must be, for messages."""
        bounds = f"{_short(self.least)} to {_short(self.most)}"
        if self.is_list:
            return f"a list of {'integers' if self.is_whole else 'numbers'} from {bounds}"
        return f"{'an integer' if self.is_whole else 'a number'} from {bounds}"


Values = type | tuple[str, ...] | Range


@dataclass(frozen=True)
class DeepSpeedKey:
    """One key: its dotted name, what happens to it, which values it takes, and why.

    Args:
        values: of a supported or governed key: `bool`, `dict` (a section), `list` (of texts), words to choose from, or
            a range of numbers.
        off: a value of an ignored or refused key that turns nothing on, in addition to the usual ones.
        reason: of an ignored or refused key; of a governed one, the flag.
    """

    name: str
    status: str
    values: Values | None = None
    off: Any = None
    reason: str = ""

    @property
    def shown_values(self) -> str:
        """The values it takes, or the one that turns nothing on, as the list of keys shows them."""
        if self.values is None:
            return "" if self.off is None else f"off: {as_text(self.off)}"
        if isinstance(self.values, type):
            return {bool: "bool", dict: "section", list: "texts"}[self.values]
        return str(self.values) if isinstance(self.values, Range) else f"one of {', '.join(self.values)}"


def _supported(name: str, values: Values) -> DeepSpeedKey:
    return DeepSpeedKey(name, SUPPORTED, values)


def _governed(name: str, values: Values, flag: str) -> DeepSpeedKey:
    return DeepSpeedKey(name, GOVERNED, values, reason=flag)


def _ignored(name: str, reason: str, off: Any = None) -> DeepSpeedKey:
    return DeepSpeedKey(name, IGNORED, off=off, reason=reason)


def _refused(name: str, reason: str, off: Any = None) -> DeepSpeedKey:
    return DeepSpeedKey(name, REFUSED, off=off, reason=reason)


def as_text(value: Any) -> str:
    """A value as JSON writes it, whatever kind of number it is; empty for a list or a section."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, (bool, int, str)) else ""


def _short(number: float) -> str:
    return (
        str(number)
        if isinstance(number, int)
        else f"{number:g}".replace("+", "").replace("e0", "e").replace("e-0", "e-")
    )


_REMOVED = "DeepSpeed 0.19 has removed it"
_OLD = "DeepSpeed 0.19 does not read it any more"
_NO_DISK = "weights and optimizer state are offloaded to the CPU's memory only"
_UNQUANTIZED = "weights and gradients are communicated as they are"
_MASTERS = "the optimizer's weights and moments are float32, which checkpoints rely on"
_DTYPE = "the precision is chosen by --fp16 or --bf16"
_LOADER = "the data order is fixed by the seed and the samples planned"
_DIFFICULTY = (
    "samples are not ordered by what DeepSpeed's data analyzer found in them; a curriculum by length is "
    '"curriculum_learning" with "curriculum_type": "seqlen"'
)
_KERNELS = "kernels are chosen by --kernels"
_SCHEDULE = "the learning rate rises from 0 once, and then stays or falls"
_REPORTS = "reports come from --tensorboard-dir, --wandb-project, --run-dir and the log"
_FLOPS = "the log shows the TFLOPs of each interval"
_CHECKPOINTS = "checkpoints are written by this framework (--save, --load)"
_RECOMPUTE = "the layers recompute themselves (--checkpoint-activations)"
_LAYOUT = "the layout is chosen by --tensor-model-parallel-size and the other parallelism flags"
_INFERENCE = "it only applies to inference"
_COMPILE = "the network is not compiled"
_BATCH = "batch sizes are --micro-batch-size and --global-batch-size"

_TOP = (
    _governed("train_batch_size", Range(1, 10**9), "--global-batch-size"),
    _governed("train_micro_batch_size_per_gpu", Range(1, 10**9), "--micro-batch-size"),
    _governed("gradient_accumulation_steps", Range(1, 10**9), "the batch sizes and the data-parallel ranks"),
    _governed("gradient_clipping", Range(0, 1e30, is_whole=False), "--clip-grad"),
    _supported("optimizer", dict),
    _supported("scheduler", dict),
    _supported("fp16", dict),
    _supported("bf16", dict),
    _supported("bfloat16", dict),
    _supported("zero_optimization", dict),
    _supported("data_types", dict),
    _supported("pipeline", dict),
    _supported("timers", dict),
    _supported("comms_logger", dict),
    _supported("communication_data_type", ("fp32", "bf16", "fp16")),
    _supported("prescale_gradients", bool),
    _supported("gradient_predivide_factor", Range(1e-6, 1e6, is_whole=False)),
    _supported("steps_per_print", Range(1, 2**31 - 1)),
    _supported("wall_clock_breakdown", bool),
    _supported("memory_breakdown", bool),
    _supported("dump_state", bool),
    _supported("disable_python_gc", bool),
    _supported("log_level", ("debug", "info", "warning", "error", "critical")),
    _refused("gradient_allreduce_op", 'losses are means over all tokens, which "mean" gives', off="mean"),
    _refused("managed_gradient_accumulation", "steps are counted by the batch sizes", off=True),
    _ignored("zero_allow_untested_optimizer", "the optimizers here are tested with ZeRO", off=True),
    _refused("zero_force_ds_cpu_optimizer", "the optimizers are PyTorch's, on the CPU too"),
    _refused("amp", f"{_DTYPE}; {_REMOVED}"),
    _refused("torch_autocast", _DTYPE),
    _refused("sparse_gradients", f"gradients of embeddings are dense; {_REMOVED}"),
    _refused("sparse_attention", f"attention is dense or within a window (--window-size); {_REMOVED}"),
    _refused("progressive_layer_drop", f"every layer is trained at each step; {_REMOVED}"),
    _supported("curriculum_learning", dict),
    _supported("data_efficiency", dict),
    _refused("compression_training", f"compression is not supported; {_REMOVED}"),
    _refused("quantize_training", f"quantized training is not supported; {_REMOVED}"),
    _refused("weight_quantization", "quantized weights are not supported"),
    _refused("eigenvalue", f"quantized training is not supported; {_REMOVED}"),
    _refused("elasticity", f"{_BATCH}; {_REMOVED}"),
    _refused("autotuning", f"it is a mode of DeepSpeed's launcher; {_BATCH}"),
    _refused("hybrid_engine", _INFERENCE),
    _refused("tensor_parallel", _LAYOUT),
    _refused("expert_parallel", _LAYOUT),
    _refused("use_data_before_expert_parallelism", _LAYOUT),
    _refused("sequence_parallel_size", _LAYOUT, off=1),
    _refused("data_parallel_size", _LAYOUT),
    _refused("mesh_device", _LAYOUT),
    _refused("compile", "blocks are compiled with --compile"),
    _refused("graph_harvesting", f"{_COMPILE}; {_REMOVED}"),
    _refused("nebula", f"{_CHECKPOINTS}; {_REMOVED}"),
    _refused("datastates_ckpt", _CHECKPOINTS),
    _ignored("checkpoint", _CHECKPOINTS),
    _ignored("none_ckpt_config", _CHECKPOINTS),
    _ignored("checkpoint_serialization", _CHECKPOINTS, off=True),
    _ignored("activation_checkpointing", _RECOMPUTE),
    _ignored("aio", _NO_DISK),
    _ignored("flops_profiler", _FLOPS),
    _ignored("monitor_config", _REPORTS),
    _ignored("tensorboard", _REPORTS),
    _ignored("wandb", _REPORTS),
    _ignored("csv_monitor", _REPORTS),
    _ignored("comet", _REPORTS),
    _ignored("dataloader_drop_last", _LOADER),
    _ignored("seq_parallel_communication_data_type", _LAYOUT),
    _ignored("vocabulary_size", "the tokenizer decides it"),
    _ignored("disable_allgather", _OLD),
    _ignored("allgather_size", _OLD),
    _ignored("fp32_allreduce", f"{_OLD}; communication_data_type does the same"),
    _ignored("allreduce_always_fp32", f"{_OLD}; communication_data_type does the same"),
)
_PRECISION = (
    _governed("fp16.enabled", bool, "--fp16"),
    _governed("fp16.loss_scale", Range(0, 1e38, is_whole=False), "--loss-scale"),
    _governed("fp16.initial_scale_power", Range(0, 127), "--initial-loss-scale"),
    _governed("fp16.loss_scale_window", Range(1, 10**9), "--loss-scale-window"),
    _governed("fp16.hysteresis", Range(1, 10**9), "--hysteresis"),
    _governed("fp16.min_loss_scale", Range(1, 10**9), "--min-loss-scale"),
    _supported("fp16.consecutive_hysteresis", bool),
    _refused("fp16.auto_cast", "inputs are token ids"),
    _refused("fp16.fp16_master_weights_and_grads", _MASTERS),
    _governed("bf16.enabled", bool, "--bf16"),
    _supported("bf16.immediate_grad_update", bool),
    _supported("bf16.check_grad_overflow", bool),
    _ignored("bf16.check_overflow", f"{_OLD}; it was renamed check_grad_overflow"),
    _refused("bf16.bf16_master_weights_and_grads", _MASTERS),
    _refused("bf16.bf16_optimizer_states", _MASTERS),
    _supported("data_types.grad_accum_dtype", ("fp32", "bf16", "fp16")),
    _refused("data_types.param_dtype", _DTYPE),
    _refused("data_types.buffer_dtype", _DTYPE),
    _refused("data_types.keep_in_fp32_modules", _DTYPE),
)
_ZERO = (
    _governed("stage", Range(0, 3), "--zero-stage"),
    _supported("contiguous_gradients", bool),
    _supported("reduce_scatter", bool),
    _supported("reduce_bucket_size", Range(1, 10**10)),
    _supported("use_multi_rank_bucket_allreduce", bool),
    _supported("allgather_partitions", bool),
    _supported("allgather_bucket_size", Range(0, 10**10)),
    _supported("overlap_comm", bool),
    _supported("sub_group_size", Range(1, 10**15)),
    _supported("round_robin_gradients", bool),
    _supported("parameter_alignment", bool),
    _supported("ignore_unused_parameters", bool),
    _supported("log_trace_cache_warnings", bool),
    _supported("enable_sanity_checks", bool),
    _supported("memory_efficient_linear", bool),
    _supported("override_module_apply", bool),
    _refused("compute_grad_norm", "the norm of the gradients is logged and clipped", off=True),
    _refused("legacy_stage1", _OLD),
    _ignored("elastic_checkpoint", _CHECKPOINTS),
    _ignored("load_from_fp32_weights", _CHECKPOINTS, off=True),
    _ignored("pipeline_loading_checkpoint", _CHECKPOINTS),
    _ignored("gather_fp16_weights_on_model_save", _CHECKPOINTS),
    _ignored("stage3_gather_fp16_weights_on_model_save", _CHECKPOINTS),
    _ignored("save_muon_momentum_buffer_in_memory", "Muon is ours, and keeps its momentum with the weights"),
    _supported("offload_param", dict),
    _supported("offload_param.device", ("none", "cpu")),
    _supported("offload_param.pin_memory", bool),
    _supported("offload_param.buffer_count", Range(1, 10**6)),
    _supported("offload_param.buffer_size", Range(1, 10**10)),
    _supported("offload_param.max_in_cpu", Range(0, 10**15)),
    _ignored("offload_param.nvme_path", _NO_DISK),
    _supported("offload_optimizer", dict),
    _supported("offload_optimizer.device", ("none", "cpu")),
    _supported("offload_optimizer.pin_memory", bool),
    _supported("offload_optimizer.buffer_count", Range(1, 10**6)),
    _ignored("offload_optimizer.nvme_path", _NO_DISK),
    _ignored("offload_optimizer.pipeline", _NO_DISK),
    _ignored("offload_optimizer.pipeline_read", _NO_DISK),
    _ignored("offload_optimizer.pipeline_write", _NO_DISK),
    _ignored("offload_optimizer.fast_init", _NO_DISK),
    _ignored("offload_optimizer.cpuadam_cores_perc", "the optimizers are PyTorch's, on the CPU too", off=0.8),
    _supported("offload_optimizer.ratio", Range(0, 1, is_whole=False)),
    _refused("offload_optimizer.super_offload", "the optimizers are PyTorch's, on the CPU too"),
    _supported("cpu_offload", bool),
    _supported("cpu_offload_param", bool),
    _refused("cpu_offload_params", f"{_OLD}; it was renamed offload_param"),
    _supported("cpu_offload_use_pin_memory", bool),
    _refused("zenflow", "the optimizers are PyTorch's, on the CPU too"),
    _ignored("zero_hpz_partition_size", _LAYOUT, off=1),
    _ignored("zero_quantized_weights", _UNQUANTIZED),
    _ignored("zero_quantized_nontrainable_weights", _UNQUANTIZED),
    _ignored("zero_quantized_gradients", _UNQUANTIZED),
    _refused("zeropp_loco_param", f"{_UNQUANTIZED}; {_REMOVED}"),
    _refused("mics_shard_size", f"{_LAYOUT}; {_REMOVED}", off=-1),
    _refused("mics_hierarchical_params_gather", f"{_LAYOUT}; {_REMOVED}"),
    _refused("leaf_module", "each layer's parameters are gathered separately"),
)
# These are read with and without `stage3_` in front.
_ZERO_STAGE3 = (
    _supported("prefetch_bucket_size", Range(0, 10**10)),
    _supported("param_persistence_threshold", Range(0, 10**12)),
    _supported("model_persistence_threshold", Range(0, 2**63 - 1)),
    _supported("max_live_parameters", Range(0, 10**15)),
    _supported("max_reuse_distance", Range(0, 10**15)),
    _refused("module_granularity_threshold", "each layer's parameters are gathered separately"),
    _supported("use_all_reduce_for_fetch_params", bool),
    _supported("allgather_sequential", bool),
    _ignored("gather_16bit_weights_on_model_save", _CHECKPOINTS),
)
_PARTS = (
    _refused("pipeline.activation_checkpoint_interval", _RECOMPUTE),
    _refused("pipeline.stages", _LAYOUT, off="auto"),
    _ignored("pipeline.partition", "layers are divided by --pp-partition-method", off="best"),
    _ignored("pipeline.seed_layers", "weights are drawn from the seed and their names"),
    _supported("pipeline.pipe_partitioned", bool),
    _supported("pipeline.grad_partitioned", bool),
    _ignored("pipeline.use_reentrant", _RECOMPUTE, off=True),
    _supported("timers.throughput", dict),
    _supported("timers.throughput.enabled", bool),
    _supported("timers.throughput.synchronized", bool),
    _supported("comms_logger.enabled", bool),
    _supported("optimizer.type", ("Adam", "AdamW")),
    _supported("optimizer.params", dict),
    _governed("optimizer.params.lr", Range(0, 1e30, is_whole=False), "--lr"),
    _supported("optimizer.params.betas", Range(0, 1, is_whole=False, is_list=True)),
    _governed("optimizer.params.eps", Range(0, 1e30, is_whole=False), "--adam-eps"),
    _governed("optimizer.params.weight_decay", Range(0, 1e30, is_whole=False), "--weight-decay"),
    _supported("optimizer.params.adam_w_mode", bool),
    _supported("optimizer.params.bias_correction", bool),
    _refused("optimizer.params.amsgrad", "AMSGrad's maximum of the moments is not kept"),
    _ignored("optimizer.params.max_grad_norm", 'gradients are clipped by "gradient_clipping", as upstream'),
    _ignored("optimizer.params.torch_adam", _KERNELS),
    _ignored("optimizer.params.fused", _KERNELS),
    _ignored("optimizer.params.foreach", _KERNELS),
    _ignored("optimizer.params.set_grad_none", "it does not change results"),
    _ignored("optimizer.legacy_fusion", _KERNELS),
    _supported("scheduler.type", ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")),
    _supported("scheduler.params", dict),
    _governed("scheduler.params.warmup_max_lr", Range(0, 1e30, is_whole=False), "--lr"),
    _supported("scheduler.params.warmup_num_steps", Range(1, 10**12)),
    _supported("scheduler.params.warmup_type", ("linear", "log")),
    _supported("scheduler.params.total_num_steps", Range(1, 10**12)),
    _supported("scheduler.params.cos_min_ratio", Range(0, 1, is_whole=False)),
    _refused("scheduler.params.lr_range_test_min_lr", _SCHEDULE),
    _refused("scheduler.params.lr_range_test_step_size", _SCHEDULE),
    _refused("scheduler.params.lr_range_test_step_rate", _SCHEDULE),
    _refused("scheduler.params.lr_range_test_staircase", _SCHEDULE),
    _refused("scheduler.params.cycle_min_lr", _SCHEDULE),
    _refused("scheduler.params.cycle_max_lr", _SCHEDULE),
    _refused("scheduler.params.decay_lr_rate", _SCHEDULE),
    _refused("scheduler.params.cycle_first_step_size", _SCHEDULE),
    _refused("scheduler.params.cycle_second_step_size", _SCHEDULE),
    _refused("scheduler.params.cycle_first_stair_count", _SCHEDULE),
    _refused("scheduler.params.cycle_second_stair_count", _SCHEDULE),
    _refused("scheduler.params.decay_step_size", _SCHEDULE),
    _refused("scheduler.params.cycle_momentum", _SCHEDULE),
    _refused("scheduler.params.cycle_min_mom", _SCHEDULE),
    _refused("scheduler.params.cycle_max_mom", _SCHEDULE),
    _refused("scheduler.params.decay_mom_rate", _SCHEDULE),
    _refused("scheduler.params.warmup_min_lr", "the learning rate rises from 0"),
    _refused("scheduler.params.warmup_min_ratio", "the learning rate rises from 0"),
    _refused("scheduler.params.last_batch_iteration", "a resumed run continues at its step", off=-1),
    _governed("curriculum_learning.enabled", bool, "--curriculum-learning"),
    _supported("curriculum_learning.curriculum_type", ("seqlen",)),
    _governed("curriculum_learning.min_difficulty", Range(1, 2**31 - 1), "--curriculum-min-length"),
    _governed("curriculum_learning.max_difficulty", Range(1, 2**31 - 1), "--curriculum-max-length"),
    _governed(
        "curriculum_learning.schedule_type", ("fixed_linear", "fixed_root", "fixed_discrete"), "--curriculum-schedule"
    ),
    _supported("curriculum_learning.schedule_config", dict),
    _governed("curriculum_learning.schedule_config.total_curriculum_step", Range(1, 10**12), "--curriculum-steps"),
    _governed("curriculum_learning.schedule_config.difficulty_step", Range(1, 2**31 - 1), "--curriculum-length-step"),
    _governed(
        "curriculum_learning.schedule_config.root_degree", Range(1, 1000, is_whole=False), "--curriculum-root-degree"
    ),
    _governed(
        "curriculum_learning.schedule_config.difficulty", Range(1, 2**31 - 1, is_list=True), "--curriculum-lengths"
    ),
    _governed("curriculum_learning.schedule_config.max_step", Range(1, 10**12, is_list=True), "--curriculum-max-steps"),
    _ignored("data_efficiency.enabled", "its parts are switched on separately", off=True),
    _ignored("data_efficiency.seed", "the order of samples follows from --seed"),
    _refused("data_efficiency.data_routing", "every layer sees every token (no random-LTD)"),
    _refused("data_efficiency.data_sampling", _DIFFICULTY),
    _supported("comms_logger.prof_all", bool),
    _supported("comms_logger.prof_ops", list),
    _supported("comms_logger.verbose", bool),
    _supported("comms_logger.debug", bool),
)


def _keys() -> Iterator[DeepSpeedKey]:
    for key in (*_TOP, *_PRECISION, *_PARTS):
        yield key
        if key.name.startswith("bf16."):
            yield replace(key, name=f"bfloat16.{key.name.removeprefix('bf16.')}")
    for key in (*_ZERO, *_ZERO_STAGE3):
        yield replace(key, name=f"zero_optimization.{key.name}")
    for key in _ZERO_STAGE3:
        yield replace(key, name=f"zero_optimization.stage3_{key.name}")


KEYS: Mapping[str, DeepSpeedKey] = types.MappingProxyType({key.name: key for key in _keys()})


def key_table() -> list[tuple[str, str, str, str]]:
    """Name, status, values and reason of every key, sorted by name."""
    keys = sorted(KEYS.values(), key=lambda key: key.name)
    return [(key.name, key.status, key.shown_values, key.reason) for key in keys]
