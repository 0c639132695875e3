"""Throughput of a run: FLOPs per step, peak FLOP/s of devices, utilization."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.config import ModelConfig
from megatron.model.costs import block_cost, heads_cost, multi_token_cost
from megatron.parallel.schedule.building import idle_share

_TERA = 1e12

# Words in the device's name, and dense bfloat16 TFLOP/s (half of the data sheets' figures "with sparsity"). The first
# match counts. Source: NVIDIA's data sheets.
_PEAKS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("B200",), 2250.0),
    (("H200", "NVL"), 835.5),
    (("H200",), 989.4),
    (("GH200",), 989.4),
    (("H100", "NVL"), 835.5),
    (("H100", "PCIe"), 756.0),
    (("H100",), 989.4),
    (("H800", "PCIe"), 756.0),
    (("H800",), 989.4),
    (("H20",), 148.0),
    (("A100",), 312.0),
    (("A800",), 312.0),
    (("A30",), 165.0),
    (("A40",), 149.7),
    (("A10G",), 70.0),
    (("A10",), 125.0),
    (("L40S",), 362.1),
    (("L40",), 181.1),
    (("L4",), 121.0),
)


def peak_flops_per_second(device_name: str, *, is_half_precision: bool, given_teraflops: float | None) -> float | None:
    """The peak of a device; None if unknown.

    Args:
        device_name: as reported by the driver, such as "NVIDIA A100-SXM4-80GB".
        is_half_precision: matrices are multiplied in bfloat16 or float16; the table has no other peaks.
        given_teraflops: --peak-tflops.
    """
    if given_teraflops is not None:
        return given_teraflops * _TERA
    if not is_half_precision:
        return None
    parts = set(device_name.replace("-", " ").split())
    return next((peak * _TERA for names, peak in _PEAKS if parts.issuperset(names)), None)


@dataclass(frozen=True)
class Workload:
    """The constants of a run that convert samples and seconds into rates.

    Attributes:
        tokens_per_sample: sequence length.
        flops_per_sample: FLOPs per sample for forward, backward and recompute, by upstream's formula.
        device_count: number of devices.
        replica_count: number of data-parallel replicas.
        parameters_without_embeddings: parameters of the whole network without embeddings.
        model_flops_per_sample: FLOPs per sample without recompute, see the function of that name.
        peak_flops_per_second: peak of a device; None if unknown.
        stages: number of pipeline stages.
        schedule: of the pipeline, by name or file.
        chunks_per_rank: chunks of the network on each stage.
        chunk_costs: cost of each chunk of the network, in any unit; empty if all cost the same.
        micro_batch_size: samples per micro-batch.
        attention_flops_per_sample: the part of `flops_per_sample` that is quadratic in the length.
        model_attention_flops_per_sample: the same part of `model_flops_per_sample`.
    """

    tokens_per_sample: int
    flops_per_sample: float
    device_count: int = 1
    replica_count: int = 1
    parameters_without_embeddings: int = 0
    model_flops_per_sample: float = 0.0
    peak_flops_per_second: float | None = None
    stages: int = 1
    schedule: str = "1f1b"
    chunks_per_rank: int = 1
    chunk_costs: tuple[int, ...] = ()
    micro_batch_size: int = 1
    attention_flops_per_sample: float = dataclasses.field(default=0.0, compare=False)
    model_attention_flops_per_sample: float = dataclasses.field(default=0.0, compare=False)

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        sequence_length: int,
        *,
        recomputes: bool = False,
        predicted_share: float = 1.0,
        **constants: float | str | tuple[int, ...] | None,
    ) -> Workload:
        """The workload of a resolved model.

        Args:
            predicted_share: share of the positions whose logits are computed.
            **constants: the other attributes.
        """
        lengths = (sequence_length, 2 * sequence_length)
        hardware, hardware_double = (flops_per_sample(model, length, recomputes, predicted_share) for length in lengths)
        needed, needed_double = (model_flops_per_sample(model, length, predicted_share) for length in lengths)
        return cls(
            sequence_length,
            hardware,
            model_flops_per_sample=needed,
            attention_flops_per_sample=hardware_double / 2 - hardware,
            model_attention_flops_per_sample=needed_double / 2 - needed,
            **constants,  # type: ignore[arg-type]
        )

    def at_length(self, length: int) -> Workload:
        """The workload of a step whose samples have this many tokens."""
        if length == self.tokens_per_sample:
            return self
        share = length / self.tokens_per_sample
        squared = {
            "flops_per_sample": "attention_flops_per_sample",
            "model_flops_per_sample": "model_attention_flops_per_sample",
        }
        changed: dict[str, float] = {}
        for whole, part in squared.items():
            attention = getattr(self, part)
            changed[part] = attention * share**2
            changed[whole] = (getattr(self, whole) - attention) * share + changed[part]
        return dataclasses.replace(self, tokens_per_sample=length, **changed)  # type: ignore[arg-type]

    def gigaflops_without_embeddings(self, tokens: int) -> float:
        """GFLOPs for training on `tokens` tokens, by the 6 N rule, without embeddings and recompute."""
        return 6.0 * tokens * self.parameters_without_embeddings / 1e9

    def utilization_ratio(self, samples_per_second: float) -> float | None:
        """Model FLOPs utilization (MFU): FLOPs without recompute relative to the devices' peak.

        Source: Chowdhery et al., "PaLM", 2022, appendix B.
        """
        if not self.peak_flops_per_second or samples_per_second <= 0.0:
            return None
        return samples_per_second * self.model_flops_per_sample / self.device_count / self.peak_flops_per_second

    def bubble_ratio(self, global_batch_size: int) -> float | None:
        """The idle share of a pipeline stage by simulation of the schedule; None without a pipeline.

        For 1F1B with p equal stages and m micro-batches it is (p - 1) / (m + p - 1). Transfers between stages and work
        after the last backward pass are excluded.

        Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, relative to the ideal time; here to the total.
        """
        if self.stages == 1:
            return None
        micro_batches = global_batch_size // (self.micro_batch_size * self.replica_count)
        return idle_share(self.schedule, self.stages, self.chunks_per_rank, micro_batches, self.chunk_costs)


def flops_per_sample(
    model: ModelConfig, sequence_length: int, recomputes: bool = False, predicted_share: float = 1.0
) -> float:
    """FLOPs of training on one sequence: 3 times the blocks' forward FLOPs, or 4 times with recompute.

    Multi-token prediction counts as a block, including its passes through the head.

    For GPT-2 this is upstream's 24 * 3 * s * L * h^2 * (1 + s / (6 h) + V / (16 L h)), which counts attention to all s
    tokens, and 3/4 of the output head, assuming that it is not recomputed. Only the active experts of a token count.

    Args:
        predicted_share: share of the positions that pass through the heads.

    Source: bigscience-workshop/Megatron-DeepSpeed, megatron/training.py; Narayanan et al. 2021 (arXiv 2104.04473),
    appendix.
    """
    blocks, head = _forward_flops_per_token(model, sequence_length)
    return (4 if recomputes else 3) * sequence_length * (blocks + 0.75 * predicted_share * head)


def model_flops_per_sample(model: ModelConfig, sequence_length: int, predicted_share: float = 1.0) -> float:
    """FLOPs of forward and backward on one sequence without recompute: 3 times the FLOPs of a forward pass.

    That is 6 per matrix parameter and token, and 12 L h s per token for attention to all s tokens. Only the active
    experts of a token count.

    Args:
        predicted_share: share of the positions that pass through the heads.

    Source: Chowdhery et al., "PaLM", 2022, appendix B.
    """
    blocks, head = _forward_flops_per_token(model, sequence_length)
    return 3 * sequence_length * (blocks + predicted_share * head)


def _forward_flops_per_token(model: ModelConfig, sequence_length: int) -> tuple[float, float]:
    """Forward FLOPs per token of the blocks and of the heads."""
    costs = [block_cost(model, layer) for layer in range(model.num_layers)]
    costs.append(multi_token_cost(model))
    blocks = sum(cost.flops_per_token + sequence_length * cost.flops_per_token_pair for cost in costs)
    return blocks, heads_cost(model).flops_per_token
