"""BERT: an encoder with norms after the residual additions, and heads for masked tokens and for sentence order."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from megatron.config import ModelConfig
from megatron.convert.hugging_face.table.family import Family
from megatron.convert.hugging_face.table.fields import (
    ACTIVATION_NAMES,
    Constant,
    Entries,
    FieldRule,
    Functions,
    Irrelevant,
    Mapped,
    Only,
    Same,
)
from megatron.convert.hugging_face.table.tensors import (
    TensorMapping,
    linear,
    matrix,
    norm,
    separate_query_key_value,
    vector,
)
from megatron.errors import ConversionError

_BOTH_HEADS, _ONE_HEAD = "BertForPreTraining", "BertForMaskedLM"
_ORDER_HEAD = "cls.seq_relationship.weight"
_OURS = "decoder.layers.{layer}."

# What all of BERT's relatives have.
ENCODER_FIELDS: tuple[FieldRule, ...] = (
    Constant(
        {
            "bidirectional": True,
            "masked_lm_head": True,
            "norm_placement": "post",
            "embed_layernorm": True,
            "normalization": "LayerNorm",
            "position_embedding_type": "learned_absolute",
        }
    ),
    Same("num_layers", "num_hidden_layers", 12),
    Same("hidden_size", "hidden_size", 768),
    Same("num_attention_heads", "num_attention_heads", 12),
    Same("ffn_hidden_size", "intermediate_size", 3072),
    Same("hidden_dropout", "hidden_dropout_prob", 0.1),
    Same("attention_dropout", "attention_probs_dropout_prob", 0.1),
    Same("init_method_std", "initializer_range", 0.02),
    Same("layernorm_epsilon", "layer_norm_eps", 1e-12),
    Only("tie_word_embeddings", (True,)),  # without it, versions of transformers disagree about the bias of the head
    Only("position_embedding_type", ("absolute",), is_written=False),
    Irrelevant(("classifier_dropout",)),
)


def encoder_tensors(prefix: str, transform: tuple[str, str], bias: str) -> tuple[TensorMapping, ...]:
    """The tensors that all of BERT's relatives have, without the positions.

    Args:
        prefix: what the names of the encoder begin with.
        transform: names of the dense layer and the norm before the output matrix.
        bias: the name of the bias of each vocabulary entry.
    """
    layer = prefix + "encoder.layer.{layer}."
    query, key, value = (f"{layer}attention.self.{name}" for name in ("query", "key", "value"))
    return (
        matrix("embedding.word_embeddings.weight", prefix + "embeddings.word_embeddings.weight"),
        matrix("embedding.tokentype_embeddings.weight", prefix + "embeddings.token_type_embeddings.weight"),
        *norm("embedding.layernorm", prefix + "embeddings.LayerNorm"),
        *separate_query_key_value(_OURS + "self_attention.linear_qkv", query, key, value),
        *linear(_OURS + "self_attention.linear_proj", layer + "attention.output.dense"),
        *norm(_OURS + "post_self_attn_layernorm", layer + "attention.output.LayerNorm"),
        *linear(_OURS + "mlp.linear_fc1", layer + "intermediate.dense"),
        *linear(_OURS + "mlp.linear_fc2", layer + "output.dense"),
        *norm(_OURS + "post_mlp_layernorm", layer + "output.LayerNorm"),
        *linear("output_layer.lm_head.dense", transform[0]),
        *norm("output_layer.lm_head.layer_norm", transform[1]),
        vector("output_layer.bias", bias),
    )


def check_masked_head(names: Collection[str], transform: str, architecture: str) -> None:
    """Checks that the stored tensors have the head of masked tokens, by the name of its dense layer.

    Raises:
        ConversionError: they are an encoder alone, or one with another head.
    """
    if f"{transform}.weight" not in names:
        raise ConversionError(
            f"the weights have no {transform}, the head that predicts masked tokens: this is an encoder alone, or one "
            f"for another task. Take a model that was saved as {architecture}."
        )


def _read_order_head(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"sentence_order_head": _BOTH_HEADS in entries.take("architectures", [])}


def _write_order_head(model: ModelConfig) -> dict[str, Any]:
    return {"architectures": [_BOTH_HEADS if model.sentence_order_head else _ONE_HEAD]}


def _with_heads(model: ModelConfig, names: Collection[str]) -> ModelConfig:
    """Published models name the one head and hold both."""
    check_masked_head(names, _TRANSFORM, _ONE_HEAD)
    return dataclasses.replace(model, sentence_order_head=_ORDER_HEAD in names)


_TRANSFORM = "cls.predictions.transform.dense"

# Source: transformers `models/bert/configuration_bert.py` and `modeling_bert.py`.
BERT = Family(
    model_type="bert",
    architecture=_ONE_HEAD,
    fields=(
        *ENCODER_FIELDS,
        Functions(_read_order_head, _write_order_head),
        Mapped("activation_function", "hidden_act", ACTIVATION_NAMES, "gelu"),
        Same("vocab_size", "vocab_size", 30522),
        Same("max_position_embeddings", "max_position_embeddings", 512),
        Same("token_types", "type_vocab_size", 2),
        # Left by the conversion of the first, multilingual and Chinese models from TensorFlow.
        Irrelevant(("directionality", "pooler_type", "pooler_fc_size", "pooler_num_fc_layers")),
        Irrelevant(("pooler_num_attention_heads", "pooler_size_per_head")),
    ),
    tensors=(
        *encoder_tensors("bert.", (_TRANSFORM, "cls.predictions.transform.LayerNorm"), "cls.predictions.bias"),
        matrix("embedding.position_embeddings.weight", "bert.embeddings.position_embeddings.weight"),
        *linear("output_layer.pooler.dense", "bert.pooler.dense"),
        *linear("output_layer.binary_head", "cls.seq_relationship"),
    ),
    ignored_tensors=("bert.embeddings.position_ids", "bert.pooler."),
    head="cls.predictions.decoder.weight",
    embedding="bert.embeddings.word_embeddings.weight",
    older_endings=((".gamma", ".weight"), (".beta", ".bias")),
    copies=(("cls.predictions.decoder.bias", "cls.predictions.bias"),),
    with_heads=_with_heads,
)
