"""Rules for the storage of each tensor in Megatron-LM and its forks: tensor-parallel sharding and row order.

Source: NVIDIA Megatron-LM `megatron/core/tensor_parallel/layers.py`; bigscience Megatron-DeepSpeed
`megatron/model/transformer.py`, `megatron/checkpointing.py` (`fix_query_key_value_ordering`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megatron.config import ModelConfig
from megatron.config.architecture.norms import LAYER_NORM, POST_BRANCH, PRE, SANDWICH
from megatron.config.architecture.positions import LEARNED
from megatron.errors import ConversionError

Rows = Literal["plain", "qkv", "gated", "vocabulary"]

# Name suffixes of matrices whose columns are sharded.
ROW_PARALLEL = ("linear_proj.weight", "linear_fc2.weight")
# The checkpoint version with the current order of query, key and value rows.
CURRENT_VERSION = 3.0


@dataclass(frozen=True)
class StoredRowOrder:
    """The row order of a program's files.

    Args:
        version: the checkpoint version; fused query-key-value rows have other orders below 2.
        gate_last: the gate is the second half of a gated matrix instead of the first (bigscience).
    """

    version: float = CURRENT_VERSION
    gate_last: bool = False


@dataclass(frozen=True)
class ShardingRule:
    """The storage of a tensor.

    Args:
        shape: logical shape.
        split: the logical dimension sharded over tensor-parallel ranks; None if replicated.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    rows: Rows = "plain"

    def stored_shape(self, ranks: int, rows: int | None = None) -> tuple[int, ...]:
        """The shape of a rank's shard; `rows` is the size of the padded vocabulary."""
        local = list(self.shape if rows is None else (rows, *self.shape[1:]))
        if self.split is not None:
            local[self.split] //= ranks
        if len(local) == 1 or self.name.endswith("bias"):
            return (math.prod(local),)
        if self.name.endswith(ROW_PARALLEL):
            return (local[0], math.prod(local[1:]))
        return (math.prod(local[:-1]), local[-1])

    def joined(self, parts: Sequence[torch.Tensor], order: StoredRowOrder) -> torch.Tensor:
        """Joins the shards of all ranks. Shapes: see `stored_shape`; result `shape`."""
        blocks = [self._in_blocks(part, len(parts), order) for part in parts]
        whole = blocks[0] if self.split is None or len(blocks) == 1 else torch.cat(blocks, dim=self.split)
        if self.rows == "gated" and order.gate_last:
            whole = whole.flip(0)
        return whole[: self.shape[0]] if self.rows == "vocabulary" else whole

    def cut(
        self, whole: torch.Tensor, rank: int, ranks: int, order: StoredRowOrder, rows: int | None = None
    ) -> torch.Tensor:
        """The shard of a rank; `rows` is the size of the padded vocabulary."""
        if self.rows == "vocabulary" and rows is not None and rows > whole.shape[0]:
            whole = torch.cat([whole, whole.new_zeros(rows - whole.shape[0], *whole.shape[1:])])
        if self.rows == "gated" and order.gate_last:
            whole = whole.flip(0)
        local = whole if self.split is None else whole.chunk(ranks, dim=self.split)[rank]
        return local.reshape(self.stored_shape(ranks, rows)).contiguous()

    def _in_blocks(self, part: torch.Tensor, ranks: int, order: StoredRowOrder) -> torch.Tensor:
        """A shard with logical dimensions, and query-key-value rows in the current order."""
        local = list(self.shape)
        if self.rows == "vocabulary":
            local[0] = part.shape[0]
        elif self.split is not None:
            local[self.split] //= ranks
        if self.rows != "qkv" or order.version >= 2:
            return part.reshape(local)
        groups, thirds, width, *rest = local
        if order.version >= 1:
            return part.reshape(groups, width, thirds, *rest).movedim(2, 1)
        return part.reshape(thirds, groups, width, *rest).movedim(0, 1)


def tensor_rules(config: ModelConfig) -> dict[str, ShardingRule]:
    """The rules of all tensors of a network by global name, in the order of the layers.

    Raises:
        ConversionError: these formats do not support the network.
    """
    if config.num_experts > 1:
        raise ConversionError(
            f"--num-experts {config.num_experts}: experts are not converted to or from Megatron's and DeepSpeed's "
            "formats. Use a Hugging Face directory (tools/convert/export_hf.py)."
        )
    if config.mtp_num_layers:
        raise ConversionError(
            f"--mtp-num-layers {config.mtp_num_layers}: multi-token prediction is not converted to or from Megatron's "
            "and DeepSpeed's formats. Use a Hugging Face directory (tools/convert/export_hf.py), which leaves it out."
        )
    rules = [*_embeddings(config)]
    for layer in range(config.num_layers):
        rules += _block(config, f"decoder.layers.{layer}")
    rules += _norm(config, "decoder.final_layernorm", (config.hidden_size,))
    if config.untie_embeddings_and_output_weights:
        rules.append(_table(config, "output_layer.weight"))
    return {rule.name: rule for rule in rules}


def _embeddings(config: ModelConfig) -> Iterator[ShardingRule]:
    yield _table(config, "embedding.word_embeddings.weight")
    if config.embed_layernorm:
        yield from _norm(config, "embedding.word_embeddings_layernorm", (config.hidden_size,))
    if config.position_embedding_type == LEARNED:
        yield ShardingRule("embedding.position_embeddings.weight", (config.max_position_embeddings, config.hidden_size))


def _table(config: ModelConfig, name: str) -> ShardingRule:
    return ShardingRule(name, (config.vocab_size, config.hidden_size), 0, "vocabulary")


def _norm(config: ModelConfig, name: str, shape: tuple[int, ...]) -> Iterator[ShardingRule]:
    yield ShardingRule(f"{name}.weight", shape)
    if config.normalization == LAYER_NORM:
        yield ShardingRule(f"{name}.bias", shape)


def _block(config: ModelConfig, block: str) -> Iterator[ShardingRule]:
    hidden, inner, width = config.hidden_size, config.ffn_hidden_size, config.kv_channels
    heads, groups = config.num_attention_heads, config.num_query_groups
    fused = (groups, heads // groups * (1 + config.attention_output_gate) + 2, width)
    first = (2, inner) if config.gated_linear_unit else (inner,)
    attention, mlp = f"{block}.self_attention", f"{block}.mlp"
    if config.norm_placement in (PRE, SANDWICH):
        yield from _norm(config, f"{block}.input_layernorm", (hidden,))
    yield ShardingRule(f"{attention}.linear_qkv.weight", (*fused, hidden), 0, "qkv")
    if config.add_qkv_bias:
        yield ShardingRule(f"{attention}.linear_qkv.bias", fused, 0, "qkv")
    if config.qk_layernorm:
        for name, count in (("q_layernorm", heads), ("k_layernorm", groups)):
            shape = (count, width) if config.qk_layernorm_scope == "all" else (width,)
            yield from _norm(config, f"{attention}.{name}", shape)
    yield ShardingRule(f"{attention}.linear_proj.weight", (hidden, heads * width), 1)
    if config.attention_output_bias:
        yield ShardingRule(f"{attention}.linear_proj.bias", (hidden,))
    if config.norm_placement in (SANDWICH, POST_BRANCH):
        yield from _norm(config, f"{block}.post_self_attn_layernorm", (hidden,))
    if config.norm_placement in (PRE, SANDWICH):
        yield from _norm(config, f"{block}.pre_mlp_layernorm", (hidden,))
    split, rows = (1, "gated") if config.gated_linear_unit else (0, "plain")
    yield ShardingRule(f"{mlp}.linear_fc1.weight", (*first, hidden), split, rows)  # type: ignore[arg-type]
    if config.mlp_bias:
        yield ShardingRule(f"{mlp}.linear_fc1.bias", first, split, rows)  # type: ignore[arg-type]
    yield ShardingRule(f"{mlp}.linear_fc2.weight", (hidden, inner), 1)
    if config.mlp_bias:
        yield ShardingRule(f"{mlp}.linear_fc2.bias", (hidden,))
    if config.norm_placement in (SANDWICH, POST_BRANCH):
        yield from _norm(config, f"{block}.post_mlp_layernorm", (hidden,))
