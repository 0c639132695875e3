"""Parallelism: the layout of the run over processes, and how they communicate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from megatron.config.flags.fields import derived, flag
from megatron.config.flags.paths import PathUse
from megatron.config.flags.section import ConfigSection
from megatron.config.sections.pipelines import DEFAULT_ENGINE, ENGINES, SCHEDULE_CHUNKS

RING, ULYSSES, RING_OF_ULYSSES = "p2p", "a2a", "a2a+p2p"
WITH_EMBEDDING = "type:transformer|embedding"
_PARTITIONS = ("type:transformer", WITH_EMBEDDING)


def default_bucket_elements(ranks: int) -> int:
    """Elements of a bucket by default: smaller parts of a rank do not use the bandwidth of the network.

    Source: Megatron-LM, `core/distributed/distributed_data_parallel.py`.
    """
    return max(40_000_000, 1_000_000 * ranks)


@dataclass(frozen=True)
class ParallelRequest(ConfigSection):
    """Tensor, pipeline and data parallelism, ZeRO, and the launcher's flags, as requested."""

    tensor_model_parallel_size: int = flag(1, "degree of tensor parallelism", at_least=1)
    sequence_parallel: bool = flag(
        False,
        "sequence parallelism: split activations along the sequence over the tensor-parallel ranks, outside of "
        "attention and MLP; no effect without tensor parallelism",
    )
    async_tensor_model_parallel_allreduce: bool = flag(
        True, "overlap the sums of input gradients over tensor-parallel ranks with the products of weight gradients"
    )
    pipeline_model_parallel_size: int = flag(1, "degree of pipeline parallelism", at_least=1)
    zero_stage: int = flag(
        1,
        "ZeRO stage: 1 shards optimizer state over data-parallel ranks, 2 also gradients, 3 also weights",
        choices=(0, 1, 2, 3),
    )
    expert_model_parallel_size: int = flag(
        1,
        "degree of expert parallelism: ranks, among the data-parallel and context-parallel ones, that share the "
        "experts of a layer",
        spelled=("--moe-expert-parallel-size", "--ep-world-size"),
        at_least=1,
    )
    expert_tensor_parallel_size: int | None = flag(
        None,
        "degree of tensor parallelism of experts: --tensor-model-parallel-size if unset; with 1, expert parallelism "
        "includes the tensor-parallel ranks",
        at_least=1,
    )
    context_parallel_size: int = flag(1, "degree of context parallelism: ranks that split each sequence", at_least=1)
    cp_comm_type: str = flag(
        RING,
        "communication of context parallelism: p2p is ring attention, a2a exchanges tokens for heads (Ulysses), "
        "a2a+p2p is Ulysses within groups and ring attention between them",
        choices=(RING, ULYSSES, RING_OF_ULYSSES),
        remedy="It is the same for all layers, since it determines the tokens of a rank; instead of Megatron-LM's "
        f"allgather, which holds all keys and values on every rank, use {RING}, which holds those of two ranks.",
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] = flag(
        (), "for --cp-comm-type a2a+p2p: ranks per Ulysses group, and groups in the ring", nargs="+", at_least=1
    )
    ds_sequence_parallel_size: int = flag(
        1,
        "degree of DeepSpeed-Ulysses: ranks that split each sequence and exchange tokens for heads around attention; "
        "with --context-parallel-size, each member of the ring is such a group",
        at_least=1,
        spelled=("--sequence-parallel-size",),
    )
    elastic: bool = flag(
        False,
        "if the layout does not fit the number of processes, choose one that does, with the same global batch size",
    )
    overlap_grad_reduce: bool = flag(
        True,
        "with ZeRO 0 to 2, data-parallel ranks exchange gradients during the backward pass, and updated weights during "
        "the next forward pass",
    )
    ddp_bucket_size: int | None = flag(
        None,
        "with ZeRO 0 to 2, elements of the buckets that data-parallel ranks exchange; by default 40 million, "
        "or 1 million for each of these ranks if that is more",
        at_least=1,
    )
    ddp_reduce_scatter_with_fp32_accumulation: bool = flag(
        False,
        "with ZeRO 1 and 2 in half precision, data-parallel ranks exchange gradients in half precision and sum them in "
        "float32: half the bytes of ZeRO 1, and no rounding between the ranks of ZeRO 2",
    )
    cpu_optimizer: bool = flag(False, "offload the optimizer: keep and update its state in host memory")
    pipeline_schedule: str | None = flag(
        None,
        f"pipeline schedule: {', '.join(SCHEDULE_CHUNKS)} or FILE.csv (docs/pipelines.md); if unset, interleaved with "
        "virtual stages, else 1f1b",
    )
    pipeline_engine: str = flag(
        DEFAULT_ENGINE, "pipeline engine: own, or DeepSpeed's PipelineEngine", choices=tuple(ENGINES)
    )
    virtual_pipeline_model_parallel_size: int | None = flag(
        None,
        "virtual pipeline stages (model chunks) per pipeline rank",
        spelled=("--num-virtual-stages-per-pipeline-rank",),
        at_least=1,
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "number of layers per virtual pipeline stage", at_least=1
    )
    enable_zbh1_pipeline: bool = flag(
        False, "same as --pipeline-schedule zb-h1", spelled=("--enable-zbh1-exact-semantics",)
    )
    pp_partition_method: str | None = flag(
        None,
        f"what is balanced over pipeline stages: {' or '.join(_PARTITIONS)}; FLOPs, with those of the output layer, if "
        "unset",
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "number of layers on the first pipeline rank; the others share the rest evenly", at_least=1
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "number of layers on the last pipeline rank; the others share the rest evenly", at_least=1
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        False, "divide layers evenly over pipeline stages, with the embedding as one more layer"
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False, "divide layers evenly over pipeline stages, with the output layer and its loss as one more layer"
    )
    distributed_backend: str | None = flag(
        None, "backend of torch.distributed; nccl on CUDA and gloo on CPU if unset", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = flag(10, "timeout of collectives in minutes", at_least=1, at_most=525_600)
    local_rank: int | None = flag(None, "local rank of this process, set by launchers", spelled=("--local_rank",))
    deepspeed: bool = flag(False, "accepted for old launch scripts; DeepSpeed is always used", spelled=("--deepscale",))
    deepspeed_config: str | None = flag(
        None,
        "JSON file of DeepSpeed settings",
        spelled=("--deepspeed_config", "--deepscale_config", "--deepscale-config"),
        path=PathUse.SMALL_FILE,
    )
    make_vocab_size_divisible_by: int = flag(
        128, "pad the vocabulary size to a multiple of this times the tensor-parallel size", at_least=1, at_most=2**20
    )
    pad_vocab_size_to: int | None = flag(
        None, "pad the vocabulary size to this value instead", at_least=1, at_most=2**31 - 1
    )

    @property
    def counted_ends(self) -> tuple[int, int]:
        """Layers that the embedding and the output layer count as in the division over stages."""
        by_method = self.pp_partition_method == WITH_EMBEDDING
        embedding, loss = self.account_for_embedding_in_pipeline_split, self.account_for_loss_in_pipeline_split
        return int(by_method or embedding), int(by_method or loss)

    @property
    def splits_sequence(self) -> bool:
        """True if sequence parallelism is in effect."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    @property
    def splits_each_expert(self) -> bool:
        """True if each expert is split over the tensor-parallel ranks."""
        return self.expert_tensor_parallel_size in (None, self.tensor_model_parallel_size)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def ring_size(self) -> int:
        """Ranks, or Ulysses groups, that pass keys and values around in ring attention."""
        if self.cp_comm_type == RING_OF_ULYSSES:
            return self.context_parallel_size // max(1, self._ulysses_group_size)
        return 1 if self.cp_comm_type == ULYSSES else self.context_parallel_size

    @property
    def ulysses_size(self) -> int:
        """Ranks that exchange tokens for heads."""
        if self.cp_comm_type == RING_OF_ULYSSES:
            return self._ulysses_group_size
        return (self.context_parallel_size if self.cp_comm_type == ULYSSES else 1) * self.ds_sequence_parallel_size

    @property
    def sequence_size(self) -> int:
        """Ranks that share each sequence."""
        return self.ring_size * self.ulysses_size

    @property
    def replica_size(self) -> int:
        """Ranks that read the same samples."""
        return self.model_parallel_size * self.sequence_size

    @property
    def _ulysses_group_size(self) -> int:
        return self.hierarchical_context_parallel_sizes[0] if self.hierarchical_context_parallel_sizes else 1

    @property
    def _named_schedule(self) -> str | None:
        return "zb-h1" if self.enable_zbh1_pipeline else self.pipeline_schedule

    def chunks_for(self, num_layers: int) -> int:
        """Model chunks on each pipeline rank; without a flag for them, the minimum of the schedule."""
        chunks, layers = self.virtual_pipeline_model_parallel_size, self.num_layers_per_virtual_pipeline_stage
        if chunks is not None:
            return chunks
        if layers is not None:
            counted = num_layers + sum(self.counted_ends)
            return max(1, counted // (self.pipeline_model_parallel_size * layers))
        return SCHEDULE_CHUNKS.get(self._named_schedule or "", (1, 1))[0]

    def schedule_for(self, num_layers: int) -> str:
        """The pipeline schedule, by name or file: the requested one, else by the number of chunks."""
        return self._named_schedule or ("interleaved" if self.chunks_for(num_layers) > 1 else "1f1b")

    def most_stages(self, num_layers: int) -> int:
        """Maximum number of pipeline ranks with the other flags."""
        if self.zero_stage not in ENGINES[self.pipeline_engine].zero_stages:
            return 1
        chunks = 1 if self.num_layers_per_virtual_pipeline_stage else self.chunks_for(num_layers)
        return max(1, num_layers // chunks)

    def bucket_elements(self, ranks: int) -> int:
        """Elements of a bucket that this many data-parallel ranks exchange."""
        return self.ddp_bucket_size or default_bucket_elements(ranks)

    def length_unit(self, *, causal: bool) -> int:
        """The number that sequence lengths must be a multiple of.

        Ring attention splits causal sequences into two blocks per rank; sequence parallelism divides each rank's tokens
        again over the tensor-parallel ranks.
        """
        ring = self.ring_size
        tensor = self.tensor_model_parallel_size if self.splits_sequence else 1
        return math.lcm(2 * ring if causal and ring > 1 else ring, self.sequence_size * tensor)

    def padded_length(self, length: int, *, causal: bool) -> int:
        """The length of samples after padding, so that they can be split over ranks."""
        unit = self.length_unit(causal=causal)
        return -(-length // unit) * unit

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Rows of the word embedding over all ranks for a vocabulary of this size.

        Source: bigscience Megatron-DeepSpeed `megatron/tokenizer/tokenizer.py`, `_vocab_size_with_padding`.
        """
        multiple = self.make_vocab_size_divisible_by * self.tensor_model_parallel_size
        return self.pad_vocab_size_to or -(-vocab_size // multiple) * multiple

    def problems(self) -> Iterator[str]:
        method = self.pp_partition_method
        if method is not None and method not in _PARTITIONS:
            yield (
                f"--pp-partition-method {method} is not supported: stages consist of whole transformer layers. Use "
                "type:transformer to balance the number of layers, or drop the flag to balance FLOPs."
            )


@dataclass(frozen=True)
class ParallelConfig(ParallelRequest):
    """The layout of a run, resolved for its machine."""

    distributed_backend: str = flag(help="backend of torch.distributed", choices=("nccl", "gloo"))
    world_size: int = derived("processes of the run")
    data_parallel_size: int = derived("replicas of the model")
    effective_zero_stage: int = derived("the ZeRO stage passed to DeepSpeed")
    schedule_name: str = derived("the pipeline schedule, by name or file", default="1f1b")
    chunks_per_rank: int = derived("model chunks on each pipeline rank", default=1)
    offloads_optimizer: bool = derived(
        "True if the optimizer state is offloaded from the device to the host", default=False
    )


_Layout = TypeVar("_Layout", bound=ParallelRequest)

# Inference uses tensor, pipeline and data parallelism only.
_TRAINING_FIELDS = (
    *("overlap_grad_reduce", "ddp_bucket_size", "ddp_reduce_scatter_with_fp32_accumulation"),
    *("sequence_parallel", "async_tensor_model_parallel_allreduce"),
    "zero_stage",
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("context_parallel_size", "cp_comm_type", "hierarchical_context_parallel_sizes", "ds_sequence_parallel_size"),
    *("pipeline_schedule", "pipeline_engine", "enable_zbh1_pipeline"),
    *("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)


def without_training(layout: _Layout, tensor_size: int, pipeline_size: int) -> _Layout:
    """A layout for inference: fields that only training uses are reset to their defaults."""
    defaults = {
        entry.name: entry.default for entry in dataclasses.fields(ParallelRequest) if entry.name in _TRAINING_FIELDS
    }
    sizes = {"tensor_model_parallel_size": tensor_size, "pipeline_model_parallel_size": pipeline_size}
    return dataclasses.replace(layout, **defaults, **sizes)  # type: ignore[arg-type]
