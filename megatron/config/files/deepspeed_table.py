"""Every key of a DeepSpeed settings file, with what happens to it.

A row is `key | status | values | reason`. Statuses: *supported* keys are passed on to DeepSpeed once their value is
checked; *governed* ones are compared with a flag, and the flag's value is used; *ignored* ones have no effect and are
named in a notice; *refused* ones stop the run with the reason. A key that is ignored or refused counts only if its
value turns something on: null, "auto", false, 0, an empty value, a section with `"enabled": false` and the value that
the row names are accepted in silence. A section that is ignored or refused stands for everything in it.

Values: `bool`, `whole 1..9`, `number 0..1`, `one of a, b`, `texts` (a list), `wholes 1..9` (a list), `section`; `off x`
in rows that are ignored or refused.

Source: DeepSpeed 0.19.8 (`runtime/config.py`, `runtime/constants.py`, `runtime/precision_config.py`, `zero/config.py`
and the configurations of its other parts), with the keys that older releases had.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

SUPPORTED = "supported"
GOVERNED = "governed"
IGNORED = "ignored"
REFUSED = "refused"

_REASONS: Mapping[str, str] = types.MappingProxyType(
    {
        "@removed": "DeepSpeed 0.19 has removed it",
        "@old": "DeepSpeed 0.19 does not read it any more",
        "@disk": "weights and optimizer state are offloaded to the CPU's memory only",
        "@quantized": "weights and gradients are communicated as they are",
        "@masters": "the optimizer's weights and moments are float32, which checkpoints rely on",
        "@dtype": "the precision is chosen by --fp16 or --bf16",
        "@loader": "the data order is fixed by the seed and the samples planned",
        "@difficulty": "samples are not ordered by what DeepSpeed's data analyzer found in them; a curriculum by "
        'length is "curriculum_learning" with "curriculum_type": "seqlen"',
        "@kernels": "kernels are chosen by --no-apex and the other kernel flags",
        "@report": "reports come from --tensorboard-dir, --wandb-project, --run-dir and the log",
        "@flops": "the log shows the TFLOPs of each interval",
        "@checkpoints": "checkpoints are written by this framework (--save, --load)",
        "@recompute": "the layers recompute themselves (--checkpoint-activations)",
        "@layout": "the layout is chosen by --tensor-model-parallel-size and the other parallelism flags",
        "@inference": "it is for inference, and this is training",
        "@compile": "the network is not compiled",
        "@batch": "batch sizes are --micro-batch-size and --global-batch-size",
    }
)

_TOP = """
train_batch_size | governed | whole 1..1000000000 | --global-batch-size
train_micro_batch_size_per_gpu | governed | whole 1..1000000000 | --micro-batch-size
gradient_accumulation_steps | governed | whole 1..1000000000 | the batch sizes and the data-parallel ranks
gradient_clipping | governed | number 0..1e30 | --clip-grad
optimizer | supported | section |
scheduler | refused | | the learning rate is a function of consumed samples (--lr-decay-style and the --lr-* flags)
fp16 | supported | section |
bf16 | supported | section |
bfloat16 | supported | section |
zero_optimization | supported | section |
data_types | supported | section |
pipeline | supported | section |
timers | supported | section |
comms_logger | supported | section |
communication_data_type | supported | one of fp32, bf16, fp16 |
prescale_gradients | supported | bool |
gradient_predivide_factor | supported | number 1e-6..1e6 |
steps_per_print | supported | whole 1..2147483647 |
wall_clock_breakdown | supported | bool |
memory_breakdown | supported | bool |
dump_state | supported | bool |
disable_python_gc | supported | bool |
log_level | supported | one of debug, info, warning, error, critical |
gradient_allreduce_op | refused | off mean | losses are means over all tokens, which "mean" gives
managed_gradient_accumulation | refused | off true | steps are counted by the batch sizes
zero_allow_untested_optimizer | ignored | off true | the optimizers here are tested with ZeRO
zero_force_ds_cpu_optimizer | refused | | the optimizers are those of PyTorch, on the CPU too
amp | refused | | @dtype; @removed
torch_autocast | refused | | @dtype
sparse_gradients | refused | | gradients of embeddings are dense; @removed
sparse_attention | refused | | attention is dense or within a window (--window-size); @removed
progressive_layer_drop | refused | | every layer is trained at each step; @removed
curriculum_learning | supported | section |
data_efficiency | supported | section |
compression_training | refused | | compression is not supported; @removed
quantize_training | refused | | quantized training is not supported; @removed
weight_quantization | refused | | quantized weights are not supported
eigenvalue | refused | | quantized training is not supported; @removed
elasticity | refused | | @batch; @removed
autotuning | refused | | it is a mode of DeepSpeed's launcher; @batch
hybrid_engine | refused | | @inference
tensor_parallel | refused | | @layout
expert_parallel | refused | | @layout
use_data_before_expert_parallelism | refused | | @layout
sequence_parallel_size | refused | off 1 | @layout
data_parallel_size | refused | | @layout
mesh_device | refused | | @layout
compile | refused | | @compile
graph_harvesting | refused | | @compile; @removed
nebula | refused | | @checkpoints; @removed
datastates_ckpt | refused | | @checkpoints
checkpoint | ignored | | @checkpoints
checkpoint_serialization | ignored | off true | @checkpoints
activation_checkpointing | ignored | | @recompute
aio | ignored | | @disk
flops_profiler | ignored | | @flops
monitor_config | ignored | | @report
tensorboard | ignored | | @report
wandb | ignored | | @report
csv_monitor | ignored | | @report
comet | ignored | | @report
dataloader_drop_last | ignored | | @loader
seq_parallel_communication_data_type | ignored | | @layout
vocabulary_size | ignored | | the tokenizer decides it
disable_allgather | ignored | | @old
allgather_size | ignored | | @old
fp32_allreduce | ignored | | @old; communication_data_type does the same
allreduce_always_fp32 | ignored | | @old; communication_data_type does the same
"""
_PRECISION = """
fp16.enabled | governed | bool | --fp16
fp16.loss_scale | governed | number 0..1e38 | --loss-scale
fp16.initial_scale_power | governed | whole 0..127 | --initial-loss-scale
fp16.loss_scale_window | governed | whole 1..1000000000 | --loss-scale-window
fp16.hysteresis | governed | whole 1..1000000000 | --hysteresis
fp16.min_loss_scale | governed | whole 1..1000000000 | --min-loss-scale
fp16.consecutive_hysteresis | supported | bool |
fp16.auto_cast | refused | | inputs are token numbers
fp16.fp16_master_weights_and_grads | refused | | @masters
bf16.enabled | governed | bool | --bf16
bf16.immediate_grad_update | supported | bool |
bf16.check_grad_overflow | supported | bool |
bf16.check_overflow | ignored | | @old; its name is check_grad_overflow now
bf16.bf16_master_weights_and_grads | refused | | @masters
bf16.bf16_optimizer_states | refused | | @masters
data_types.grad_accum_dtype | supported | one of fp32, bf16, fp16 |
data_types.param_dtype | refused | | @dtype
data_types.buffer_dtype | refused | | @dtype
data_types.keep_in_fp32_modules | refused | | @dtype
"""
_ZERO = """
stage | governed | whole 0..3 | --zero-stage
contiguous_gradients | supported | bool |
reduce_scatter | supported | bool |
reduce_bucket_size | supported | whole 1..10000000000 |
use_multi_rank_bucket_allreduce | supported | bool |
allgather_partitions | supported | bool |
allgather_bucket_size | supported | whole 0..10000000000 |
overlap_comm | supported | bool |
sub_group_size | supported | whole 1..1000000000000000 |
round_robin_gradients | supported | bool |
parameter_alignment | supported | bool |
ignore_unused_parameters | supported | bool |
log_trace_cache_warnings | supported | bool |
enable_sanity_checks | supported | bool |
memory_efficient_linear | supported | bool |
override_module_apply | supported | bool |
compute_grad_norm | refused | off true | the norm of the gradients is logged and clipped
legacy_stage1 | refused | | @old
elastic_checkpoint | ignored | | @checkpoints
load_from_fp32_weights | ignored | off true | @checkpoints
pipeline_loading_checkpoint | ignored | | @checkpoints
gather_fp16_weights_on_model_save | ignored | | @checkpoints
stage3_gather_fp16_weights_on_model_save | ignored | | @checkpoints
save_muon_momentum_buffer_in_memory | ignored | | Muon is not among the optimizers
offload_param | supported | section |
offload_param.device | supported | one of none, cpu |
offload_param.pin_memory | supported | bool |
offload_param.buffer_count | supported | whole 1..1000000 |
offload_param.buffer_size | supported | whole 1..10000000000 |
offload_param.max_in_cpu | supported | whole 0..1000000000000000 |
offload_param.nvme_path | ignored | | @disk
offload_optimizer | supported | section |
offload_optimizer.device | supported | one of none, cpu |
offload_optimizer.pin_memory | supported | bool |
offload_optimizer.buffer_count | supported | whole 1..1000000 |
offload_optimizer.nvme_path | ignored | | @disk
offload_optimizer.pipeline | ignored | | @disk
offload_optimizer.pipeline_read | ignored | | @disk
offload_optimizer.pipeline_write | ignored | | @disk
offload_optimizer.fast_init | ignored | | @disk
offload_optimizer.cpuadam_cores_perc | ignored | off 0.8 | the optimizers are those of PyTorch, on the CPU too
offload_optimizer.ratio | refused | off 1 | the state of the optimizer is offloaded as a whole
offload_optimizer.super_offload | refused | | the optimizers are those of PyTorch, on the CPU too
cpu_offload | supported | bool |
cpu_offload_param | supported | bool |
cpu_offload_params | refused | | @old; its name is offload_param now
cpu_offload_use_pin_memory | supported | bool |
zenflow | refused | | the optimizers are those of PyTorch, on the CPU too
zero_hpz_partition_size | refused | off 1 | @layout
zero_quantized_weights | refused | | @quantized
zero_quantized_nontrainable_weights | refused | | @quantized
zero_quantized_gradients | refused | | @quantized
zeropp_loco_param | refused | | @quantized; @removed
mics_shard_size | refused | off -1 | @layout; @removed
mics_hierarchical_params_gather | refused | | @layout; @removed
leaf_module | refused | | every layer's parameters are gathered on their own
"""
# These are read with and without `stage3_` in front.
_ZERO_STAGE3 = """
prefetch_bucket_size | supported | whole 0..10000000000 |
param_persistence_threshold | supported | whole 0..1000000000000 |
model_persistence_threshold | supported | whole 0..9223372036854775807 |
max_live_parameters | supported | whole 0..1000000000000000 |
max_reuse_distance | supported | whole 0..1000000000000000 |
module_granularity_threshold | refused | | every layer's parameters are gathered on their own
use_all_reduce_for_fetch_params | supported | bool |
allgather_sequential | supported | bool |
gather_16bit_weights_on_model_save | ignored | | @checkpoints
"""
_PARTS = """
pipeline.activation_checkpoint_interval | refused | | @recompute
pipeline.stages | refused | off auto | @layout
pipeline.partition | ignored | off best | layers are divided by --pp-partition-method
pipeline.seed_layers | ignored | | weights are drawn from the seed and their names
pipeline.pipe_partitioned | supported | bool |
pipeline.grad_partitioned | supported | bool |
pipeline.use_reentrant | ignored | off true | @recompute
timers.throughput | supported | section |
timers.throughput.enabled | supported | bool |
timers.throughput.synchronized | supported | bool |
comms_logger.enabled | supported | bool |
optimizer.type | supported | one of Adam, AdamW |
optimizer.params | ignored | | the optimizer's values are those of the flags, as upstream (--lr, --weight-decay ...)
optimizer.legacy_fusion | ignored | | @kernels
curriculum_learning.enabled | governed | bool | --curriculum-learning
curriculum_learning.curriculum_type | supported | one of seqlen |
curriculum_learning.min_difficulty | governed | whole 1..2147483647 | --curriculum-min-length
curriculum_learning.max_difficulty | governed | whole 1..2147483647 | --curriculum-max-length
curriculum_learning.schedule_type | governed | one of fixed_linear, fixed_root, fixed_discrete | --curriculum-schedule
curriculum_learning.schedule_config | supported | section |
curriculum_learning.schedule_config.total_curriculum_step | governed | whole 1..1000000000000 | --curriculum-steps
curriculum_learning.schedule_config.difficulty_step | governed | whole 1..2147483647 | --curriculum-length-step
curriculum_learning.schedule_config.root_degree | governed | number 1..1000 | --curriculum-root-degree
curriculum_learning.schedule_config.difficulty | governed | wholes 1..2147483647 | --curriculum-lengths
curriculum_learning.schedule_config.max_step | governed | wholes 1..1000000000000 | --curriculum-max-steps
data_efficiency.enabled | ignored | off true | its parts are switched on by themselves
data_efficiency.seed | ignored | | the order of samples follows from --seed
data_efficiency.data_routing | refused | | every layer sees every token (no random-LTD)
data_efficiency.data_sampling | refused | | @difficulty
comms_logger.prof_all | supported | bool |
comms_logger.prof_ops | supported | texts |
comms_logger.verbose | supported | bool |
comms_logger.debug | supported | bool |
"""


@dataclass(frozen=True)
class DeepSpeedKey:
    """One key: its dotted name, what happens to it, which values it takes, and why.

    Args:
        values: the check of a supported or governed key, empty for the others.
        off: a value of an ignored or refused key that turns nothing on, beside the usual ones.
        reason: of an ignored or refused key; of a governed one, the flag.
    """

    name: str
    status: str
    values: str
    off: str
    reason: str


def _rows() -> Iterator[tuple[str, str]]:
    """(name, rest of the row) of every key."""
    for line in f"{_TOP}{_PRECISION}{_PARTS}".strip().splitlines():
        if line:
            name, _, rest = line.partition(" | ")
            yield name, rest
            if name.startswith("bf16."):
                yield f"bfloat16.{name.removeprefix('bf16.')}", rest
    for line in _ZERO.strip().splitlines():
        name, _, rest = line.partition(" | ")
        yield f"zero_optimization.{name}", rest
    for line in _ZERO_STAGE3.strip().splitlines():
        name, _, rest = line.partition(" | ")
        yield f"zero_optimization.{name}", rest
        yield f"zero_optimization.stage3_{name}", rest


def _key(name: str, row: str) -> DeepSpeedKey:
    status, values, reason = (part.strip() for part in row.split("|"))
    shown = "; ".join(_REASONS.get(part, part) for part in reason.split("; "))
    is_off = values.startswith("off ")
    return DeepSpeedKey(name, status, "" if is_off else values, values.removeprefix("off ") if is_off else "", shown)


KEYS: Mapping[str, DeepSpeedKey] = types.MappingProxyType({name: _key(name, row) for name, row in _rows()})


def key_table() -> list[tuple[str, str, str, str]]:
    """Name, status, values and reason of every key, sorted by name."""
    return [
        (key.name, key.status, key.values or (f"off: {key.off}" if key.off else ""), key.reason)
        for key in sorted(KEYS.values(), key=lambda key: key.name)
    ]
