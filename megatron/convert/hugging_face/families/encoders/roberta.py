"""RoBERTa: BERT with one token type and one head, whose positions are counted from the id of the padding token."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megatron.config import ModelConfig
from megatron.convert.hugging_face.families.encoders.bert import ENCODER_FIELDS, check_masked_head, encoder_tensors
from megatron.convert.hugging_face.table.family import Family
from megatron.convert.hugging_face.table.fields import Constant, Entries, Functions, Mapped, Same
from megatron.convert.hugging_face.table.tensors import MappedPart, TensorMapping

_ARCHITECTURE = "RobertaForMaskedLM"
_PADDING_ID = 1
_UNUSED_POSITIONS = _PADDING_ID + 1  # the position of padding is its id, and the first of a text follows it


def _read_positions(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
    entries.check_only("pad_token_id", (_PADDING_ID,))
    stored = entries.take("max_position_embeddings", 512)
    if type(stored) is not int or stored <= _UNUSED_POSITIONS:
        raise entries.refused("max_position_embeddings", stored, f"should be a number above {_UNUSED_POSITIONS}")
    return {"max_position_embeddings": stored - _UNUSED_POSITIONS}


def _read_token_types(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
    entries.check_only("type_vocab_size", (1,), default=2)
    return {"token_types": 1}


def _with_heads(model: ModelConfig, names: Collection[str]) -> ModelConfig:
    check_masked_head(names, "lm_head.dense", _ARCHITECTURE)
    return model


# Source: transformers `models/roberta/configuration_roberta.py` and `modeling_roberta.py`.
ROBERTA = Family(
    model_type="roberta",
    architecture=_ARCHITECTURE,
    fields=(
        *ENCODER_FIELDS,
        Constant({"sentence_order_head": False}),
        Mapped("activation_function", "hidden_act", (("gelu", "gelu"),), "gelu"),  # the head has the same
        Same("vocab_size", "vocab_size", 50265),
        Functions(
            _read_positions,
            lambda model: {"max_position_embeddings": model.max_position_embeddings + _UNUSED_POSITIONS},
        ),
        Functions(_read_token_types, lambda model: {"type_vocab_size": 1}),
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
    with_heads=_with_heads,
)
