"""How fast a run is, and how fast it could be: operations of a step, peaks of devices, rates."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.config import ModelConfig
from megatron.model.costs import block_cost, heads_cost, multi_token_cost
from megatron.parallel.schedule.building import idle_share

_TERA = 1e12

# Words that must all be in the device's name, and TFLOP/s in bfloat16 with dense matrices: half of what data sheets
# call "with sparsity". The first row that fits counts. Source: NVIDIA's data sheets of these devices.
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
        device_name: as the driver gives it, such as "NVIDIA A100-SXM4-80GB".
        is_half_precision: whether matrices are multiplied in bfloat16 or float16; the table knows no other peaks.
        given_teraflops: the value given by the user (--peak-tflops).
    """
    if given_teraflops is not None:
        return given_teraflops * _TERA
    if not is_half_precision:
        return None
    words = set(device_name.replace("-", " ").split())
    return next((peak * _TERA for names, peak in _PEAKS if words.issuperset(names)), None)


@dataclass(frozen=True)
class Workload:
    """The constants of a run that convert samples and seconds into rates.

    Attributes:
        tokens_per_sample: sequence length.
        flops_per_sample: FLOPs per sample for forward, backward and recompute, by upstream's formula.
        device_count: number of devices.
        replica_count: number of data-parallel replicas.
        parameters_without_embeddings: parameters of the whole network without embeddings.
        model_flops_per_sample: FLOPs per sample that training takes without recompute, see `model_flops_per_sample`.
        peak_flops_per_second: what a device could do at most; None if unknown.
        stages: number of pipeline stages.
        schedule: of the pipeline, by name or file.
        chunks_per_rank: chunks of the network on each stage.
        chunk_costs: what a pass of each chunk of the network costs, in any unit; empty if all cost the same.
        micro_batch_size: samples of a micro-batch.
        attention_flops_per_sample: the part of `flops_per_sample` that grows with the square of the length.
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
        upstreams, upstreams_of_two = (
            flops_per_sample(model, length, recomputes, predicted_share) for length in lengths
        )
        own, own_of_two = (model_flops_per_sample(model, length, predicted_share) for length in lengths)
        return cls(
            sequence_length,
            upstreams,
            model_flops_per_sample=own,
            attention_flops_per_sample=upstreams_of_two / 2 - upstreams,
            model_attention_flops_per_sample=own_of_two / 2 - own,
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
        """Model FLOPs utilization: the share of the devices' peak that training without recompute would take.

        Source: Chowdhery et al., "PaLM", 2022, appendix B.
        """
        if not self.peak_flops_per_second or samples_per_second <= 0.0:
            return None
        return samples_per_second * self.model_flops_per_sample / self.device_count / self.peak_flops_per_second

    def bubble_ratio(self, global_batch_size: int) -> float | None:
        """The share of a step that a stage of a pipeline has nothing to do, if passes take as long as chunks cost.

        That is the simulated share of the schedule; (p - 1) / (m + p - 1) for 1F1B with p equal stages and m
        micro-batches. None without a pipeline. Transfers between stages and what follows the last backward pass are not
        in it.

        Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, of the ideal time; here of the whole time.
        """
        if self.stages == 1:
            return None
        micro_batches = global_batch_size // (self.micro_batch_size * self.replica_count)
        return idle_share(self.schedule, self.stages, self.chunks_per_rank, micro_batches, self.chunk_costs)


def flops_per_sample(
    model: ModelConfig, sequence_length: int, recomputes: bool = False, predicted_share: float = 1.0
) -> float:
    """FLOPs of training on one sequence: 3 times the blocks' FLOPs in a forward pass, or 4 times with recompute.

    Multi-token prediction counts as a block, its passes through the head included.

    For GPT-2's network this is upstream's 24 * 3 * s * L * h^2 * (1 + s / (6 h) + V / (16 L h)), which counts attention
    to all s tokens, and 3/4 of the output head's passes, which it assumes not to be recomputed; so does this, for
    encoders, whose tokens do attend to all, as well. Of the experts, a token counts those it goes to.

    Args:
        predicted_share: share of the positions that pass through the heads.

    Source: bigscience-workshop/Megatron-DeepSpeed, megatron/training.py; Narayanan et al. 2021 (arXiv 2104.04473),
    appendix.
    """
    blocks, head = _forward_flops_per_token(model, sequence_length)
    return (4 if recomputes else 3) * sequence_length * (blocks + 0.75 * predicted_share * head)


def model_flops_per_sample(model: ModelConfig, sequence_length: int, predicted_share: float = 1.0) -> float:
    """FLOPs of forward and backward on one sequence, without recompute: 3 times the FLOPs of a forward pass.

    That is 6 for each parameter of a matrix and token, and 12 L h s for each token's attention to all s tokens. Of the
    experts, a token counts those it goes to.

    Args:
        predicted_share: share of the positions that pass through the heads.

    Source: Chowdhery et al., "PaLM", 2022, appendix B.
    """
    blocks, head = _forward_flops_per_token(model, sequence_length)
    return 3 * sequence_length * (blocks + predicted_share * head)


def _forward_flops_per_token(model: ModelConfig, sequence_length: int) -> tuple[float, float]:
    """FLOPs of a forward pass for one token: of the blocks and of the heads."""
    costs = [block_cost(model, layer) for layer in range(model.num_layers)]
    costs.append(multi_token_cost(model))
    blocks = sum(cost.flops_per_token + sequence_length * cost.flops_per_token_pair for cost in costs)
    return blocks, heads_cost(model).flops_per_token
