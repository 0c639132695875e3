"""Rules for fields: each reads and writes, and nothing of a `config.json` goes unread."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.errors import ConversionError
from tests.helpers.networks import tiny_config
from trident.convert.hugging_face.table.config_fields import (
    Entries,
    FieldRule,
    constant,
    irrelevant,
    mapped,
    only,
    read_fields,
    same,
    tied_head,
    write_fields,
)


@pytest.mark.parametrize(
    ("rule", "given", "read"),
    [
        (same("hidden_size", "n_embd"), {"n_embd": 32}, {"hidden_size": 32}),
        (same("hidden_size", "n_embd", 64), {}, {"hidden_size": 64}),
        (same("hidden_size", "n_embd", 64), {"n_embd": None}, {"hidden_size": 64}),
        (same("layernorm_epsilon", "eps"), {"eps": 1}, {"layernorm_epsilon": 1.0}),
        (same("ffn_hidden_size", "n_inner", lambda found: 4 * found["hidden_size"]), {}, {"ffn_hidden_size": 128}),
        (mapped("activation_function", "act", (("relu", "relu"),)), {"act": "relu"}, {"activation_function": "relu"}),
        (tied_head(default=True), {}, {"untie_embeddings_and_output_weights": False}),
        (tied_head(default=True), {"tie_word_embeddings": False}, {"untie_embeddings_and_output_weights": True}),
        (constant(normalization="RMSNorm"), {}, {"normalization": "RMSNorm"}),
        (only("scale", True), {"scale": True}, {}),
        (only("scale", True), {}, {}),
        (irrelevant("summary"), {"summary": "anything"}, {}),
    ],
)
def test_a_rule_reads(rule: FieldRule, given: dict[str, Any], read: dict[str, Any]) -> None:
    start = constant(hidden_size=32)
    assert read_fields((start, rule), given) == {"hidden_size": 32, **read}


def test_rules_write_what_they_read() -> None:
    rules = (
        same("hidden_size", "n_embd"),
        mapped("activation_function", "act", (("gelu_new", "gelu_tanh"), ("gelu_fast", "gelu_tanh"))),
        mapped("normalization", "norm", (("rms", "RMSNorm"),)),
        constant(normalization="LayerNorm"),
        only("scale", True, False),
        irrelevant("summary"),
        FieldRule(lambda entries, found: {}, lambda model: {"pattern": (1, 0)}),
    )
    assert write_fields(rules, tiny_config()) == {"n_embd": 32, "act": "gelu_new", "scale": True, "pattern": [1, 0]}


@pytest.mark.parametrize(
    ("rule", "given", "says"),
    [
        (same("hidden_size", "n_embd"), {}, "config.json has no n_embd, which this family requires"),
        (same("hidden_size", "n_embd"), {"n_embd": "32"}, '"n_embd": "32", which should be an integer'),
        (same("hidden_size", "n_embd"), {"n_embd": True}, '"n_embd": true, which should be an integer'),
        (same("hidden_size", "n_embd"), {"n_embd": 32.0}, '"n_embd": 32.0, which should be an integer'),
        (same("layernorm_epsilon", "eps"), {"eps": "1e-5"}, '"eps": "1e-5", which should be a number'),
        (mapped("hidden_size", "size", ((1, 1),)), {"size": True}, '"size": true, which is not among .* 1'),
        (only("scale", 1, 2), {"scale": 3}, '"scale": 3, which is supported only as 1 or 2'),
        (irrelevant(), {"unknown": {"a": 1}}, r'"unknown": \{"a": 1\}, which is unknown in this family'),
        (
            irrelevant(),
            {"quantization_config": {"bits": 4}},
            r"weights are quantized; dequantize the model with [^;]*$",
        ),
        (irrelevant(), {"is_encoder_decoder": True}, '"is_encoder_decoder": true, which is supported only as false'),
        (irrelevant(), {"long": "x" * 200}, r'"long": "xxx.*\.\.\., which is unknown'),
    ],
)
def test_what_does_not_fit_is_refused_with_its_value(rule: FieldRule, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConversionError, match=says):
        read_fields((rule,), given)


def test_null_and_what_every_file_has_go_unread() -> None:
    assert read_fields((), {"unknown": None, "architectures": ["X"], "torch_dtype": "float32"}) == {}


def test_objects_have_fields_of_their_own() -> None:
    entries = Entries({"inner": {"a": 1}, "number": 3})
    inner = entries.inner("inner")
    assert inner is not None and entries.inner("absent") is None
    with pytest.raises(ConversionError, match='"inner.a": 1, which is unknown'):
        inner.check_all_read()
    with pytest.raises(ConversionError, match='"number": 3, which should be an object'):
        entries.inner("number")
