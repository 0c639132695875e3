"""The name of each metric in each destination; extend this table for a new metric.

`metrics.jsonl` has every metric under its own name, and the metrics of a group as one object.

Source: labels and tags of bigscience-workshop/Megatron-DeepSpeed, megatron/training.py.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megatron.objective.metric import StepMetrics


class Names(NamedTuple):
    """The names of a metric; empty if a destination does not show it. In a group, `{name}` is the rest of its name.

    Attributes:
        line: label and number format in the line of Megatron's style.
        tensorboard: the tag.
        wandb: the key in Weights & Biases.
    """

    line: str = ""
    tensorboard: str = ""
    wandb: str = ""


def _routing(label: str) -> Names:
    return Names(f"{label}: {{value:.4f}}", f"routing/{label}", f"routing/{label}")


def _timing(tag: str, wandb: str, line: str = "") -> Names:
    return Names(line, f"iteration-time/{tag}", wandb)


# In the order of the log line. A name that ends with a slash stands for all metrics of the group.
NAMES: Mapping[str, Names] = types.MappingProxyType(
    {
        "consumed_samples": Names("consumed samples: {value:12d}", "", "consumed-samples"),
        "consumed_tokens": Names("consumed tokens: {value:12d}", "", "consumed-tokens"),
        "seconds_per_iteration": _timing(
            "iteration-time", "iteration-time", "elapsed time per iteration (s): {value:.2f}"
        ),
        "learning_rate": Names("learning rate: {value:.3E}", "learning-rate/learning-rate", "learning-rate"),
        "global_batch_size": Names("global batch size: {value:5d}", "batch-size/batch-size", "batch-size"),
        "lm_loss": Names("lm loss: {value:.6E}", "lm-loss-training/lm loss", "lm-loss-training"),
        "source_losses/": Names(
            "lm loss {name}: {value:.6E}", "lm-loss-training-by-source/{name}", "lm-loss-training/{name}"
        ),
        "order_loss": Names("sop loss: {value:.6E}", "lm-loss-training/sop loss", "sop-loss-training"),
        "sample_loss": Names(
            "loss per sample: {value:.6E}", "lm-loss-training/loss per sample", "sample-loss-training"
        ),
        "distillation_loss": Names("kd loss: {value:.6E}", "lm-loss-training/kd loss", "kd-loss-training"),
        "z_loss": Names("z loss: {value:.6E}", "lm-loss-training/z loss", "z-loss-training"),
        "mtp_losses/": Names("{name} loss: {value:.6E}", "lm-loss-training/{name} loss", "{name}-loss-training"),
        "routing/load_balancing_loss": _routing("load balancing loss"),
        "routing/z_loss": _routing("router z loss"),
        "routing/entropy": _routing("router entropy"),
        "routing/largest_load": _routing("largest expert load"),
        "routing/mean_largest_load": _routing("mean largest expert load"),
        "routing/idle_experts": _routing("idle experts"),
        "routing/dropped_ratio": _routing("dropped tokens"),
        "loss_scale": Names("loss scale: {value:.1f}", "loss-scale/loss-scale", "loss-scale"),
        "gradient_norm": Names("grad norm: {value:.3f}", "grad-norm/grad-norm", "grad-norm"),
        "gradient_norms/": Names("", "grad-norm-by-layer/{name}"),
        "gradient_zeros": Names("num zeros: {value:.1f}", "num-zeros/num-zeros", "num-zeros"),
        "weight_norm": Names("params norm: {value:.3f}", "params-norm/params-norm", "params-norm"),
        "weight_norms/": Names("", "params-norm-by-layer/{name}"),
        "noise_scale": Names(
            "noise scale: {value:.1f}", "gradient-noise-scale/gradient-noise-scale", "gradient-noise-scale"
        ),
        "skipped_iterations": Names("number of skipped iterations: {value:3d}"),
        "nan_iterations": Names("number of nan iterations: {value:3d}"),
        "empty_iterations": Names("number of empty iterations: {value:3d}"),
        "samples_per_second": _timing("samples per second", "samples-per-second", "samples per second: {value:.3f}"),
        "tokens_per_second": _timing("tokens per second", "tokens-per-second", "tokens per second: {value:.1f}"),
        "teraflops_per_device": _timing("TFLOPs per gpu (estimated)", "tflops-per-gpu"),
        "model_flops_utilization_ratio": _timing("model FLOPs utilization", "model-flops-utilization"),
        "data_wait_seconds": _timing("data wait", "data-wait-seconds"),
        "communication_seconds": _timing("communication", "communication-seconds"),
        "transfer_seconds": _timing("transfers between stages", "transfer-seconds"),
        "bubble_ratio": _timing("pipeline bubble", "pipeline-bubble-ratio"),
        "memory_bytes": _timing("memory (GiB)", "memory-bytes"),
        "eta_seconds": Names(wandb="eta-seconds"),
    }
)

# The entries of every record in metrics.jsonl, in this order; null if a step has no such metric. Others follow.
RECORDED = (
    *("iteration", "train_iterations", "consumed_samples", "consumed_tokens", "seconds_per_iteration"),
    *("learning_rate", "global_batch_size", "lm_loss", "loss_scale", "gradient_norm", "skipped_iterations"),
    *("nan_iterations", "samples_per_second", "tokens_per_second", "teraflops_per_device"),
    *("gigaflops_without_embeddings", "weight_norm", "weight_norms", "gradient_norms", "gradient_zeros"),
    *("gradient_noise", "gradient_signal", "noise_scale", "source_losses", "empty_iterations", "z_loss"),
    *("sample_loss", "order_loss", "distillation_loss", "mtp_losses", "routing", "model_flops_utilization_ratio"),
    *("data_wait_seconds", "communication_seconds", "transfer_seconds", "bubble_ratio", "memory_bytes", "eta_seconds"),
)


def named(metrics: StepMetrics, destination: str) -> Iterator[tuple[str, Any]]:
    """The names of the metrics that have a value in a destination, with the values, in the order of the table.

    Args:
        destination: a field of `Names`.
    """
    for name, names in NAMES.items():
        template: str = getattr(names, destination)
        members = [each for each in metrics if each.startswith(name)] if name.endswith("/") else [name]
        for member in members if template else ():
            value = metrics.value(member)
            if value is not None:
                yield template.format(name=member.removeprefix(name), value=value), value
