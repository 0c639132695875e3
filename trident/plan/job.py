"""The job to plan: a network, its batches and the devices, independent of the layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron.config import ModelConfig
from megatron.config.architecture.norms import LAYER_NORM
from megatron.config.architecture.positions import LEARNED
from megatron.config.sections.parallel import default_bucket_elements
from megatron.model.costs import (
    attention_matrices,
    block_cost,
    expert_parameters,
    experts_cost,
    head_cost,
    heads_cost,
    norm_size,
    token_work,
)
from megatron.observe.speed import model_flops_per_sample
from megatron.parallel.schedule.actions import Placement
from megatron.parallel.schedule.division import BY_COST, Division
from trident.plan.hardware import Cluster
from trident.plan.layouts import Layout, blocks_of_chunks


@dataclass(frozen=True)
class Parameters:
    """Parameters on a rank: dense ones, replicated on all data-parallel ranks, and its experts'."""

    dense: int
    experts: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.dense + other.dense, self.experts + other.experts)

    @property
    def total(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True)
class Stage:
    """The blocks of a pipeline rank, and the ends of the network that it has."""

    blocks: Sequence[int]
    first: bool
    last: bool


@dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        model: the architecture, with padded vocabulary.
        sequence_length: tokens per sample.
        global_batch: samples per step.
        weight_bytes: bytes of a weight and of an activation, 2 or 4.
        cluster: the devices.
        has_fused_kernels: attention stores no scores and a gated activation only its input, as on GPUs.
        block_state_bytes: optimizer state per element of a block, without its fp32 weight.
        end_state_bytes: optimizer state per element of embeddings and head.
        is_orthogonalized: matrices of blocks are gathered for the update, as in Muon.
        offloads_optimizer: the optimizer state is in host memory.
        head_share: fraction of the tokens that pass through the head.
        division: of the blocks over pipeline chunks.
        overlaps_messages: with ZeRO 0 to 2, messages of gradients and weights are sent during computation.
        bucket_elements: the elements of a message of gradients or weights, by the number of ranks that divide them.
    """

    model: ModelConfig
    sequence_length: int
    global_batch: int
    weight_bytes: int
    cluster: Cluster
    has_fused_kernels: bool = True
    block_state_bytes: int = 8
    end_state_bytes: int = 8
    is_orthogonalized: bool = False
    offloads_optimizer: bool = False
    head_share: float = 1.0
    division: Division = BY_COST
    overlaps_messages: bool = True
    bucket_elements: Callable[[int], int] = default_bucket_elements

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.sequence_length * self.global_batch

    @cached_property
    def parameters(self) -> int:
        model = self.model
        blocks = sum(cost.parameters for cost in self.block_costs)
        joins = model.mtp_num_layers * self._joining(1)
        return blocks + self._embedding(1) + norm_size(model) + head_cost(model).parameters + joins

    @cached_property
    def block_costs(self) -> tuple:  # type: ignore[type-arg]
        """The cost of each block, with multi-token prediction last."""
        blocks = range(self.model.num_layers + self.model.mtp_num_layers)
        return tuple(block_cost(self.model, index) for index in blocks)

    @cached_property
    def head_flops(self) -> int:
        """Mean forward FLOPs per token of the head, and of multi-token prediction outside its blocks."""
        model, head = self.model, heads_cost(self.model).flops_per_token
        return int(self.head_share * head) + model.mtp_num_layers * (head + 4 * model.hidden_size**2)

    def chunks(self, placement: Placement) -> tuple[tuple[range, ...], Mapping[int, int]]:
        """The blocks of each pipeline chunk, and the kinds of ranks, see `blocks_of_chunks`.

        Multi-token prediction is in the last chunk.
        """
        layers = self.model.num_layers
        after = self.head_flops + sum(self._block_flops[layers:])
        chunks, ranks = blocks_of_chunks(self._block_flops[:layers], after, placement, self.division)
        return (*chunks[:-1], range(chunks[-1].start, len(self._block_flops))), ranks

    def stage(self, placement: Placement, rank: int) -> Stage:
        """The stage of a pipeline rank."""
        (chunks, _), local = self.chunks(placement), placement.chunks_of(rank)
        return Stage([block for chunk in local for block in chunks[chunk]], 0 in local, len(chunks) - 1 in local)

    @cached_property
    def _block_flops(self) -> tuple[int, ...]:
        work = token_work(self.model, self.sequence_length)
        return tuple(cost.flops(work.pairs) for cost in self.block_costs)

    @cached_property
    def model_flops(self) -> float:
        """FLOPs per step, without recomputation."""
        return self.global_batch * model_flops_per_sample(self.model, self.sequence_length)

    def block_parameters(self, index: int, layout: Layout) -> Parameters:
        """Parameters of a block on a rank."""
        model, tp = self.model, layout.tp
        hidden, attention = model.hidden_size, attention_matrices(model, tp)
        rest = self.block_costs[index].parameters - attention_matrices(model)
        if not model.has_experts(index):
            feed_forward = hidden * model.ffn_hidden_size * (3 if model.gated_linear_unit else 2)
            return Parameters(attention + feed_forward // tp + rest - feed_forward)
        everything, expert = experts_cost(model, index), expert_parameters(model)
        routed = model.experts_of(index) * expert
        others = everything.parameters - routed - model.experts_of(index) * hidden
        rest -= everything.parameters - model.experts_of(index) * hidden
        return Parameters(
            attention + others // tp + rest, routed // (layout.ep if layout.keeps_experts_whole else tp * layout.ep)
        )

    def blocks_parameters(self, layout: Layout, stage: Stage) -> Parameters:
        """Parameters of a stage's blocks on a rank."""
        return sum((self.block_parameters(block, layout) for block in stage.blocks), Parameters(0))

    def ends_parameters(self, layout: Layout, stage: Stage) -> Parameters:
        """Parameters outside the blocks on a rank of a stage."""
        model, first, dense = self.model, stage.first, 0
        if first:
            dense += self._embedding(layout.tp)
        if stage.last:
            dense += norm_size(model) + model.mtp_num_layers * self._joining(layout.tp)
            looks_up = model.mtp_num_layers > 0 and model.untie_embeddings_and_output_weights and not first
            dense += looks_up * model.padded_vocab_size * model.hidden_size // layout.tp
            is_copy = not model.untie_embeddings_and_output_weights and not first
            if is_copy or model.untie_embeddings_and_output_weights:
                dense += model.padded_vocab_size * model.hidden_size // layout.tp
        return Parameters(dense)

    def _joining(self, tp: int) -> int:
        """Parameters of a multi-token prediction depth outside its block: a projection and three norms."""
        return 2 * self.model.hidden_size**2 // tp + 3 * norm_size(self.model)

    def _embedding(self, tp: int) -> int:
        model = self.model
        positions = model.max_position_embeddings if model.position_embedding_type == LEARNED else 0
        norm = model.hidden_size * (2 if model.normalization == LAYER_NORM else 1) * model.embed_layernorm
        return model.padded_vocab_size * model.hidden_size // tp + positions * model.hidden_size + norm
