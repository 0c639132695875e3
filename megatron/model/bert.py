"""BERT and its relatives as a list of layers."""

from __future__ import annotations

import dataclasses
from functools import partial

from megatron.config import ModelConfig
from megatron.config.architecture.positions import LEARNED
from megatron.model.blocks.bert_head import BertHead
from megatron.model.blocks.embedding import EmbeddingDropout, PositionEmbedding, TokenTypeEmbedding, WordEmbedding
from megatron.model.blocks.norm import build_norm_layer
from megatron.model.costs import bert_head_cost, norm_size
from megatron.model.gpt import (
    EMBEDDING_DROPOUT,
    OUTPUT_LAYER,
    POSITION_EMBEDDINGS,
    WORD_EMBEDDINGS,
    block_layers,
    final_norm,
)
from megatron.model.initial_values import place_initial_values
from megatron.model.interface.layer_cost import LayerCost
from megatron.model.interface.network import LayerKind, LayerSpec
from megatron.parallel.mesh import ParallelMesh

TOKEN_TYPE_EMBEDDINGS = "embedding.tokentype_embeddings"
EMBEDDING_NORM = "embedding.layernorm"


def bert_layers(config: ModelConfig, mesh: ParallelMesh) -> list[LayerSpec]:
    """The layers of BERT: word, position and token-type embeddings, norm and dropout of their sum, blocks, norm, heads.

    The first layer takes tokens `[b, s]`, the last returns the outputs of `BertHead`. Blocks are pre-norm with a final
    norm, as in Megatron-LM's BERT, or with `--norm-placement post` post-norm, as in the original.
    """
    tied_to = None if config.untie_embeddings_and_output_weights else WORD_EMBEDDINGS
    head = LayerSpec(
        OUTPUT_LAYER, LayerKind.HEAD, bert_head_cost(config), partial(BertHead, config, mesh), tied_to=tied_to
    )
    layers = [*_embedding_layers(config, mesh), *block_layers(config, mesh), *final_norm(config, mesh), head]
    complete_spec = partial(place_initial_values, config)
    return [dataclasses.replace(layer, complete_spec=complete_spec) for layer in layers]


def _embedding_layers(config: ModelConfig, mesh: ParallelMesh) -> list[LayerSpec]:
    kind, hidden = LayerKind.EMBEDDING, config.hidden_size
    layers = [
        LayerSpec(WORD_EMBEDDINGS, kind, LayerCost(config.vocab_size * hidden), partial(WordEmbedding, config, mesh))
    ]
    if config.position_embedding_type == LEARNED:
        cost = LayerCost(config.max_position_embeddings * hidden)
        layers.append(LayerSpec(POSITION_EMBEDDINGS, kind, cost, partial(PositionEmbedding, config, mesh, dropout=0.0)))
    if config.token_types:
        cost = LayerCost(config.token_types * hidden)
        layers.append(LayerSpec(TOKEN_TYPE_EMBEDDINGS, kind, cost, partial(TokenTypeEmbedding, config, mesh)))
    if config.embed_layernorm:
        cost = LayerCost(norm_size(config))
        layers.append(LayerSpec(EMBEDDING_NORM, kind, cost, partial(build_norm_layer, config, mesh)))
    layers.append(LayerSpec(EMBEDDING_DROPOUT, kind, LayerCost(0), partial(EmbeddingDropout, config, mesh)))
    return layers
