"""Encoders: BERT, with heads for masked tokens and for sentence order, and RoBERTa.

Norms follow the residual additions. RoBERTa has one token type and one head, and counts positions from the id of the
padding token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from megatron.config import ModelConfig
from megatron.errors import ConversionError
from trident.convert.hugging_face.table.config_fields import (
    ACTIVATION_NAMES,
    Entries,
    FieldRule,
    constant,
    irrelevant,
    mapped,
    only,
    same,
)
from trident.convert.hugging_face.table.family import Family
from trident.convert.hugging_face.table.tensors import (
    OUR_LAYER,
    MappedPart,
    TensorMapping,
    linear,
    matrix,
    norm,
    separate_query_key_value,
    vector,
)

_BOTH_HEADS, _ONE_HEAD = "BertForPreTraining", "BertForMaskedLM"
_ORDER_HEAD = "cls.seq_relationship.weight"

# Fields of all encoders.
ENCODER_FIELDS: tuple[FieldRule, ...] = (
    constant(
        bidirectional=True,
        masked_lm_head=True,
        norm_placement="post",
        embed_layernorm=True,
        normalization="LayerNorm",
        position_embedding_type="learned_absolute",
    ),
    same("num_layers", "num_hidden_layers", 12),
    same("hidden_size", "hidden_size", 768),
    same("num_attention_heads", "num_attention_heads", 12),
    same("ffn_hidden_size", "intermediate_size", 3072),
    same("hidden_dropout", "hidden_dropout_prob", 0.1),
    same("attention_dropout", "attention_probs_dropout_prob", 0.1),
    same("init_method_std", "initializer_range", 0.02),
    same("layernorm_epsilon", "layer_norm_eps", 1e-12),
    only("tie_word_embeddings", True),  # without it, versions of transformers disagree about the bias of the head
    only("position_embedding_type", "absolute", is_written=False),
    irrelevant("classifier_dropout"),
)


def encoder_tensors(prefix: str, transform: tuple[str, str], bias: str) -> tuple[TensorMapping, ...]:
    """The tensors of all encoders, without positions.

    Args:
        prefix: name prefix of the encoder.
        transform: names of the dense layer and the norm before the output matrix.
        bias: the name of the output bias.
    """
    layer = prefix + "encoder.layer.{layer}."
    query, key, value = (f"{layer}attention.self.{name}" for name in ("query", "key", "value"))
    return (
        matrix("embedding.word_embeddings.weight", prefix + "embeddings.word_embeddings.weight"),
        matrix("embedding.tokentype_embeddings.weight", prefix + "embeddings.token_type_embeddings.weight"),
        *norm("embedding.layernorm", prefix + "embeddings.LayerNorm"),
        *separate_query_key_value(OUR_LAYER + "self_attention.linear_qkv", query, key, value),
        *linear(OUR_LAYER + "self_attention.linear_proj", layer + "attention.output.dense"),
        *norm(OUR_LAYER + "post_self_attn_layernorm", layer + "attention.output.LayerNorm"),
        *linear(OUR_LAYER + "mlp.linear_fc1", layer + "intermediate.dense"),
        *linear(OUR_LAYER + "mlp.linear_fc2", layer + "output.dense"),
        *norm(OUR_LAYER + "post_mlp_layernorm", layer + "output.LayerNorm"),
        *linear("output_layer.lm_head.dense", transform[0]),
        *norm("output_layer.lm_head.layer_norm", transform[1]),
        vector("output_layer.bias", bias),
    )


def check_masked_head(names: Collection[str], transform: str, architecture: str) -> None:
    """Checks that the stored tensors include the masked LM head, by the name of its dense layer.

    Raises:
        ConversionError: the encoder has no head, or another one.
    """
    if f"{transform}.weight" not in names:
        raise ConversionError(
            f"the weights have no {transform}, the masked LM head: this is an encoder without a head, or for "
            f"another task. Use a model that was saved as {architecture}."
        )


def _with_heads(model: ModelConfig, names: Collection[str]) -> ModelConfig:
    # Published models name one head and contain both.
    check_masked_head(names, _TRANSFORM, _ONE_HEAD)
    return dataclasses.replace(model, sentence_order_head=_ORDER_HEAD in names)


_TRANSFORM = "cls.predictions.transform.dense"

# Source: transformers `models/bert/configuration_bert.py` and `modeling_bert.py`.
BERT = Family(
    model_type="bert",
    architecture=_ONE_HEAD,
    fields=(
        *ENCODER_FIELDS,
        FieldRule(
            lambda entries, fields: {"sentence_order_head": _BOTH_HEADS in entries.take("architectures", [])},
            lambda model: {"architectures": [_BOTH_HEADS if model.sentence_order_head else _ONE_HEAD]},
        ),
        mapped("activation_function", "hidden_act", ACTIVATION_NAMES, "gelu"),
        same("vocab_size", "vocab_size", 30522),
        same("max_position_embeddings", "max_position_embeddings", 512),
        same("token_types", "type_vocab_size", 2),
        # Left by the conversion of the first, multilingual and Chinese models from TensorFlow.
        irrelevant("directionality", "pooler_type", "pooler_fc_size", "pooler_num_fc_layers"),
        irrelevant("pooler_num_attention_heads", "pooler_size_per_head"),
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


_ARCHITECTURE = "RobertaForMaskedLM"
_PADDING_ID = 1
_UNUSED_POSITIONS = _PADDING_ID + 1  # the position of padding is its id, and the first of a text follows it


def _read_positions(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
    entries.check_only("pad_token_id", (_PADDING_ID,))
    stored = entries.take("max_position_embeddings", 512)
    if type(stored) is not int or stored <= _UNUSED_POSITIONS:
        raise entries.refused("max_position_embeddings", stored, f"should be a number above {_UNUSED_POSITIONS}")
    return {"max_position_embeddings": stored - _UNUSED_POSITIONS}


def _with_one_head(model: ModelConfig, names: Collection[str]) -> ModelConfig:
    check_masked_head(names, "lm_head.dense", _ARCHITECTURE)
    return model


# Source: transformers `models/roberta/configuration_roberta.py` and `modeling_roberta.py`.
ROBERTA = Family(
    model_type="roberta",
    architecture=_ARCHITECTURE,
    fields=(
        *ENCODER_FIELDS,
        constant(sentence_order_head=False, token_types=1),
        mapped("activation_function", "hidden_act", (("gelu", "gelu"),), "gelu"),  # the head has the same
        same("vocab_size", "vocab_size", 50265),
        FieldRule(
            _read_positions,
            lambda model: {"max_position_embeddings": model.max_position_embeddings + _UNUSED_POSITIONS},
        ),
        FieldRule(
            lambda entries, fields: entries.check_only("type_vocab_size", (1,), default=2),
            lambda model: {"type_vocab_size": 1},
        ),
    ),
    tensors=(
        *encoder_tensors("roberta.", ("lm_head.dense", "lm_head.layer_norm"), "lm_head.bias"),
        TensorMapping(
            "embedding.position_embeddings.weight",
            (MappedPart("roberta.embeddings.position_embeddings.weight", unused_rows=_UNUSED_POSITIONS),),
        ),
    ),
    ignored_tensors=("roberta.embeddings.position_ids", "roberta.embeddings.token_type_ids", "roberta.pooler."),
    head="lm_head.decoder.weight",
    embedding="roberta.embeddings.word_embeddings.weight",
    copies=(("lm_head.decoder.bias", "lm_head.bias"),),
    padding_id=_PADDING_ID,
    with_heads=_with_one_head,
)
