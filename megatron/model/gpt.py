"""GPT as a list of layers."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch

from megatron.config import ModelConfig
from megatron.config.architecture.norms import POST
from megatron.config.architecture.positions import LEARNED
from megatron.model.blocks.embedding import EmbeddingDropout, OutputHead, PositionEmbedding, WordEmbedding
from megatron.model.blocks.norm import build_norm_layer
from megatron.model.blocks.transformer import TransformerBlock
from megatron.model.costs import block_cost, head_cost, multi_token_cost, norm_size
from megatron.model.initial_values import place_initial_values
from megatron.model.interface.layer_cost import LayerCost
from megatron.model.interface.network import LayerKind, LayerSpec
from megatron.model.multi_token_prediction import MultiTokenPrediction
from megatron.parallel.mesh import Axis, ParallelMesh
from megatron.parallel.tensor.collectives import gather_from

WORD_EMBEDDINGS = "embedding.word_embeddings"
EMBEDDING_NORM = "embedding.word_embeddings_layernorm"
POSITION_EMBEDDINGS = "embedding.position_embeddings"
EMBEDDING_DROPOUT = "embedding.dropout"
BLOCKS = "decoder.layers"
FINAL_LAYERNORM = "decoder.final_layernorm"
MULTI_TOKEN = "mtp"
OUTPUT_LAYER = "output_layer"


def gpt_layers(config: ModelConfig, mesh: ParallelMesh) -> list[LayerSpec]:
    """The layers of a GPT: word embedding, positions, blocks, final norm, and a head that may share the word embedding.

    The first layer takes tokens `[b, s]`, the last returns logits `[b, s, v/t]`; with multi-token prediction, in
    training, followed by the logits of every depth: `[(1 + depths) b, s, v/t]`.
    """
    tied_to = None if config.untie_embeddings_and_output_weights else WORD_EMBEDDINGS
    layers = [
        *_embedding_layers(config, mesh),
        *block_layers(config, mesh),
        *final_norm(config, mesh),
        *_multi_token_layers(config, mesh),
        LayerSpec(OUTPUT_LAYER, LayerKind.HEAD, head_cost(config), partial(OutputHead, config, mesh), tied_to=tied_to),
    ]
    complete_spec = partial(place_initial_values, config)
    return [dataclasses.replace(layer, complete_spec=complete_spec) for layer in layers]


def block_layers(config: ModelConfig, mesh: ParallelMesh) -> list[LayerSpec]:
    return [
        LayerSpec(
            f"{BLOCKS}.{index}",
            LayerKind.BLOCK,
            block_cost(config, index),
            partial(TransformerBlock, config, mesh, index),
        )
        for index in range(config.num_layers)
    ]


def final_norm(config: ModelConfig, mesh: ParallelMesh) -> list[LayerSpec]:
    """The norm after the last block; none if blocks end with a norm of the residual stream."""
    if config.norm_placement == POST:
        return []
    build = partial(build_norm_layer, config, mesh)
    return [LayerSpec(FINAL_LAYERNORM, LayerKind.NORM, LayerCost(norm_size(config)), build)]


def _multi_token_layers(config: ModelConfig, mesh: ParallelMesh) -> list[LayerSpec]:
    if not config.mtp_num_layers:
        return []
    build = partial(MultiTokenPrediction, config, mesh)
    cost = multi_token_cost(config)
    return [LayerSpec(MULTI_TOKEN, LayerKind.MULTI_TOKEN, cost, build, tied_to=WORD_EMBEDDINGS)]


def _embedding_layers(config: ModelConfig, mesh: ParallelMesh) -> list[LayerSpec]:
    kind, hidden = LayerKind.EMBEDDING, config.hidden_size
    table = LayerCost(config.vocab_size * hidden)
    layers = [LayerSpec(WORD_EMBEDDINGS, kind, table, partial(WordEmbedding, config, mesh))]
    if config.embed_layernorm:
        cost = LayerCost(norm_size(config))
        layers.append(LayerSpec(EMBEDDING_NORM, kind, cost, partial(build_norm_layer, config, mesh)))
    if config.position_embedding_type == LEARNED:
        positions = LayerCost(config.max_position_embeddings * hidden)
        layers.append(LayerSpec(POSITION_EMBEDDINGS, kind, positions, partial(PositionEmbedding, config, mesh)))
    else:
        layers.append(LayerSpec(EMBEDDING_DROPOUT, kind, LayerCost(0), partial(EmbeddingDropout, config, mesh)))
    return layers


def whole_logits(logits: torch.Tensor, axis: Axis, vocab_size: int) -> torch.Tensor:
    """Gathers the logits of all tensor-parallel ranks and removes the padding.

    Shapes: `[..., v/t]` to `[..., vocab_size]`.
    """
    return gather_from(logits, axis)[..., :vocab_size]
