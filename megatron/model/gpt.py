"""GPT as a list of layers."""

from __future__ import annotations

import math
from functools import partial

import torch

from megatron.config import ModelConfig
from megatron.model.blocks.embedding import FinalLayerNorm, OutputHead, PositionEmbedding, WordEmbedding
from megatron.model.blocks.transformer import TransformerBlock
from megatron.model.interface.network import LayerCost, LayerKind, LayerSpec
from megatron.parallel.mesh import Axis, ParallelMesh
from megatron.parallel.tensor.collectives import gather_from

WORD_EMBEDDINGS = "embedding.word_embeddings"
POSITION_EMBEDDINGS = "embedding.position_embeddings"
BLOCKS = "decoder.layers"
FINAL_LAYERNORM = "decoder.final_layernorm"
OUTPUT_LAYER = "output_layer"


def gpt_layers(config: ModelConfig, mesh: ParallelMesh) -> list[LayerSpec]:
    """The network: word embedding, position embedding, blocks, final norm, and a head tied to the word embedding.

    The first layer takes tokens `[b, s]`, the last returns logits `[b, s, v/t]`.
    """
    hidden, vocabulary = config.hidden_size, config.padded_vocab_size
    table = LayerCost(config.vocab_size * hidden)
    positions = LayerCost(config.max_position_embeddings * hidden)
    head = LayerCost(0, flops_per_token=2 * vocabulary * hidden)
    residual_std = residual_init_std(config)
    return [
        LayerSpec(WORD_EMBEDDINGS, LayerKind.EMBEDDING, table, partial(WordEmbedding, config, mesh)),
        LayerSpec(POSITION_EMBEDDINGS, LayerKind.EMBEDDING, positions, partial(PositionEmbedding, config, mesh)),
        *(
            LayerSpec(
                f"{BLOCKS}.{index}",
                LayerKind.BLOCK,
                block_cost(config),
                partial(TransformerBlock, config, mesh, index, residual_std),
            )
            for index in range(config.num_layers)
        ),
        LayerSpec(FINAL_LAYERNORM, LayerKind.NORM, LayerCost(2 * hidden), partial(FinalLayerNorm, config, mesh)),
        LayerSpec(OUTPUT_LAYER, LayerKind.HEAD, head, partial(OutputHead, config, mesh), tied_to=WORD_EMBEDDINGS),
    ]


def block_cost(config: ModelConfig) -> LayerCost:
    """Parameters and operations of one block: four attention and two feed-forward matrices with biases, two norms."""
    hidden, inner = config.hidden_size, config.ffn_hidden_size
    attention = config.num_attention_heads * config.kv_channels
    matrices = 4 * hidden * attention + 2 * hidden * inner
    vectors = 3 * attention + hidden + inner + hidden + 4 * hidden
    return LayerCost(matrices + vectors, flops_per_token=2 * matrices, flops_per_token_pair=4 * attention)


def residual_init_std(config: ModelConfig) -> float:
    """Initial standard deviation of the matrices that write to the residual stream, scaled down by their number.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019, section 2.3 (residual layers
    scaled by 1/sqrt(N)), with N = 2 * num_layers as in Megatron-LM `scaled_init_method_normal`.
    """
    return config.init_method_std / math.sqrt(2 * config.num_layers)


def whole_logits(logits: torch.Tensor, axis: Axis, vocab_size: int) -> torch.Tensor:
    """Gathers the logits of all tensor-parallel ranks and removes the padding.

    Shapes: `[..., v/t]` to `[..., vocab_size]`.
    """
    return gather_from(logits, axis)[..., :vocab_size]
