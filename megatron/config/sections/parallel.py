"""How the run is laid out over processes, and how they are started."""

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


@dataclass(frozen=True)
class ParallelRequest(ConfigSection):
    """Tensor, pipeline and data parallelism, ZeRO, and the launcher's flags, as they were asked for."""

    tensor_model_parallel_size: int = flag(1, "ranks that the matrices of each layer are split over", at_least=1)
    sequence_parallel: bool = flag(
        False,
        "split the tokens of a sample over the tensor-parallel ranks between the split matrices, where each of them "
        "would otherwise keep all; nothing without tensor parallelism",
    )
    pipeline_model_parallel_size: int = flag(1, "stages the layers are spread over", at_least=1)
    zero_stage: int = flag(
        1,
        "what is sharded over data-parallel ranks: 1 optimizer state, 2 also gradients, 3 also weights",
        choices=(0, 1, 2, 3),
    )
    expert_model_parallel_size: int = flag(
        1,
        "ranks that the experts of a layer are divided over; they exchange tokens. Neighbours among the data-parallel "
        "and context-parallel ranks",
        spelled=("--moe-expert-parallel-size", "--ep-world-size"),
        at_least=1,
    )
    expert_tensor_parallel_size: int | None = flag(
        None,
        "ranks that each expert is split over: those of --tensor-model-parallel-size if unset, or 1, and then whole "
        "experts are divided over the tensor-parallel ranks too",
        at_least=1,
    )
    context_parallel_size: int = flag(
        1, "ranks that share each sequence, every one with a part of its tokens", at_least=1
    )
    cp_comm_type: str = flag(
        RING,
        "how attention reaches the tokens of other ranks: p2p passes keys and values on in a ring, a2a exchanges "
        "tokens for heads, a2a+p2p does that within groups that make a ring",
        choices=(RING, ULYSSES, RING_OF_ULYSSES),
        remedy="All layers have the same, since it decides which tokens a rank has; Megatron-LM's allgather, with "
        f"which every rank holds all keys and values, is {RING} here, with which it holds those of two ranks.",
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] = flag(
        (), "ranks of a group and groups of the ring, for --cp-comm-type a2a+p2p", nargs="+", at_least=1
    )
    ds_sequence_parallel_size: int = flag(
        1,
        "ranks that share each sequence and exchange tokens for heads around attention; with --context-parallel-size "
        "each rank of its ring is such a group",
        at_least=1,
        spelled=("--sequence-parallel-size",),
    )
    elastic: bool = flag(
        False, "if the layout does not fit the number of processes, choose one that does and keeps the global batch"
    )
    cpu_optimizer: bool = flag(
        False, "keep and update the optimizer's state in host memory; the GPUs hold weights and gradients"
    )
    pipeline_schedule: str | None = flag(
        None,
        f"the order of forward and backward passes on the stages: {', '.join(SCHEDULE_CHUNKS)} or FILE.csv "
        "(docs/pipelines.md); if unset, interleaved with virtual stages and else 1f1b",
    )
    pipeline_engine: str = flag(
        DEFAULT_ENGINE, "what runs the stages: own, or DeepSpeed's PipelineEngine", choices=tuple(ENGINES)
    )
    virtual_pipeline_model_parallel_size: int | None = flag(
        None,
        "chunks of the network on each pipeline rank (virtual stages)",
        spelled=("--num-virtual-stages-per-pipeline-rank",),
        at_least=1,
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "the same, as the number of layers in a chunk", at_least=1
    )
    enable_zbh1_pipeline: bool = flag(False, "--pipeline-schedule zb-h1", spelled=("--enable-zbh1-exact-semantics",))
    pp_partition_method: str | None = flag(
        None,
        f"what is spread evenly over pipeline stages: {' or '.join(_PARTITIONS)}; operations, the head's included, if "
        "unset",
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "blocks on the first pipeline rank; the others share the rest evenly", at_least=1
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "blocks on the last pipeline rank; the others share the rest evenly", at_least=1
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        False, "spread blocks evenly over pipeline stages, with the embedding as one more block"
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False, "spread blocks evenly over pipeline stages, with the head and its loss as one more block"
    )
    distributed_backend: str | None = flag(
        None, "communication library; nccl on CUDA and gloo on CPU if unset", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = flag(
        10, "minutes until a collective that waits for other ranks times out", at_least=1, at_most=525_600
    )
    local_rank: int | None = flag(
        None, "device number of this process; filled in by launchers", spelled=("--local_rank",)
    )
    deepspeed: bool = flag(
        False, "accepted for old launch scripts; DeepSpeed is always the engine", spelled=("--deepscale",)
    )
    deepspeed_config: str | None = flag(
        None,
        "JSON file with more DeepSpeed settings",
        spelled=("--deepspeed_config", "--deepscale_config", "--deepscale-config"),
        path=PathUse.SMALL_FILE,
    )
    make_vocab_size_divisible_by: int = flag(
        128,
        "the vocabulary is padded up to a multiple of this times the tensor-parallel size",
        at_least=1,
        at_most=2**20,
    )
    pad_vocab_size_to: int | None = flag(
        None, "pad the vocabulary to exactly this size instead", at_least=1, at_most=2**31 - 1
    )

    @property
    def counted_ends(self) -> tuple[int, int]:
        """What the layers before the first block and after the last one count as, where blocks are counted."""
        by_method = self.pp_partition_method == WITH_EMBEDDING
        embedding, loss = self.account_for_embedding_in_pipeline_split, self.account_for_loss_in_pipeline_split
        return int(by_method or embedding), int(by_method or loss)

    @property
    def splits_sequence(self) -> bool:
        """Whether the tokens of a sample are split over the tensor-parallel ranks."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    @property
    def splits_each_expert(self) -> bool:
        """Whether every expert is split over the tensor-parallel ranks."""
        return self.expert_tensor_parallel_size in (None, self.tensor_model_parallel_size)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def ring_size(self) -> int:
        """Ranks, or groups of Ulysses, between which keys and values travel."""
        if self.cp_comm_type == RING_OF_ULYSSES:
            return self.context_parallel_size // max(1, self._ulysses_within_ring)
        return 1 if self.cp_comm_type == ULYSSES else self.context_parallel_size

    @property
    def ulysses_size(self) -> int:
        """Ranks that exchange tokens for heads."""
        if self.cp_comm_type == RING_OF_ULYSSES:
            return self._ulysses_within_ring
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
    def _ulysses_within_ring(self) -> int:
        return self.hierarchical_context_parallel_sizes[0] if self.hierarchical_context_parallel_sizes else 1

    @property
    def _named_schedule(self) -> str | None:
        return "zb-h1" if self.enable_zbh1_pipeline else self.pipeline_schedule

    def chunks_for(self, num_layers: int) -> int:
        """The chunks of the network that each pipeline rank holds; what a schedule needs where no flag says it."""
        asked, layers = self.virtual_pipeline_model_parallel_size, self.num_layers_per_virtual_pipeline_stage
        if asked is not None:
            return asked
        if layers is not None:
            counted = num_layers + sum(self.counted_ends)
            return max(1, counted // (self.pipeline_model_parallel_size * layers))
        return SCHEDULE_CHUNKS.get(self._named_schedule or "", (1, 1))[0]

    def schedule_for(self, num_layers: int) -> str:
        """The pipeline schedule, by name or file: what was asked for, else by the number of chunks."""
        return self._named_schedule or ("interleaved" if self.chunks_for(num_layers) > 1 else "1f1b")

    def most_stages(self, num_layers: int) -> int:
        """The most pipeline ranks that the other flags allow."""
        if self.zero_stage not in ENGINES[self.pipeline_engine].zero_stages:
            return 1
        chunks = 1 if self.num_layers_per_virtual_pipeline_stage else self.chunks_for(num_layers)
        return max(1, num_layers // chunks)

    def length_unit(self, *, causal: bool) -> int:
        """The number that lengths must be a multiple of: a ring cuts causal samples into two blocks a rank, and each
        rank's tokens are divided once more over the tensor-parallel ranks under sequence parallelism.
        """
        ring = self.ring_size
        within = self.tensor_model_parallel_size if self.splits_sequence else 1
        return math.lcm(2 * ring if causal and ring > 1 else ring, self.sequence_size * within)

    def padded_length(self, length: int, *, causal: bool) -> int:
        """The length to which samples are padded so that ranks can share them."""
        unit = self.length_unit(causal=causal)
        return -(-length // unit) * unit

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Rows of the word embedding over all ranks, for a vocabulary of this many entries.

        Source: bigscience Megatron-DeepSpeed `megatron/tokenizer/tokenizer.py`, `_vocab_size_with_padding`.
        """
        multiple = self.make_vocab_size_divisible_by * self.tensor_model_parallel_size
        return self.pad_vocab_size_to or -(-vocab_size // multiple) * multiple

    def problems(self) -> Iterator[str]:
        method = self.pp_partition_method
        if method is not None and method not in _PARTITIONS:
            yield (
                f"--pp-partition-method {method} is not supported: stages are cut between transformer blocks, and each "
                "gets one. Use type:transformer, which spreads the blocks evenly, or drop the flag, which spreads "
                "operations."
            )


@dataclass(frozen=True)
class ParallelConfig(ParallelRequest):
    """The layout of a run on the machine that was found."""

    distributed_backend: str = flag(help="communication library", choices=("nccl", "gloo"))
    world_size: int = derived("processes of the run")
    data_parallel_size: int = derived("replicas of the model")
    effective_zero_stage: int = derived("the ZeRO stage DeepSpeed is given")
    schedule_name: str = derived("the pipeline schedule, by name or file", default="1f1b")
    chunks_per_rank: int = derived("chunks of the network on each pipeline rank", default=1)
    offloads_optimizer: bool = derived(
        "whether the optimizer's state is moved from the device to the host", default=False
    )


_Layout = TypeVar("_Layout", bound=ParallelRequest)

# What computes without gradients divides matrices and layers over ranks, and whole copies.
_OF_TRAINING = (
    "sequence_parallel",
    "zero_stage",
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("context_parallel_size", "cp_comm_type", "hierarchical_context_parallel_sizes", "ds_sequence_parallel_size"),
    *("pipeline_schedule", "pipeline_engine", "enable_zbh1_pipeline"),
    *("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)


def without_training(layout: _Layout, tensor_size: int, pipeline_size: int) -> _Layout:
    """A layout for inference: fields that only training has get their default values."""
    usual = {entry.name: entry.default for entry in dataclasses.fields(ParallelRequest) if entry.name in _OF_TRAINING}
    sizes = {"tensor_model_parallel_size": tensor_size, "pipeline_model_parallel_size": pipeline_size}
    return dataclasses.replace(layout, **usual, **sizes)  # type: ignore[arg-type]
