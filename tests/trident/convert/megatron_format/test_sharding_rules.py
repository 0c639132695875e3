"""The rules name every tensor of the network that is built, in its shape, and undo each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.errors import ConversionError
from tests.helpers.networks import tiny_config
from trident.convert.hugging_face.streaming import network_shapes
from trident.convert.megatron_format.sharding_rules import StoredRowOrder, tensor_rules

LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm", "num_query_groups": 2, "add_bias_linear": False, "gated_linear_unit": True,
    "activation_function": "silu", "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True,
}  # fmt: skip
NETWORKS: tuple[dict[str, Any], ...] = (
    {},
    {"embed_layernorm": True, "position_embedding_type": "alibi"},
    LLAMA,
    {**LLAMA, "qk_layernorm": True, "norm_placement": "sandwich", "add_qkv_bias": True, "attention_output_gate": True},
    {**LLAMA, "qk_layernorm": True, "qk_layernorm_scope": "all", "norm_placement": "post_branch"},
)


@pytest.mark.parametrize("changes", NETWORKS)
def test_the_rules_are_those_of_the_network(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    assert {name: rule.shape for name, rule in tensor_rules(config).items()} == network_shapes(config)


@pytest.mark.parametrize("changes", NETWORKS[:3])
@pytest.mark.parametrize("gate_last", [False, True])
def test_cutting_and_joining_undo_each_other(changes: dict[str, Any], gate_last: bool) -> None:
    order = StoredRowOrder(gate_last=gate_last)
    for rule in tensor_rules(tiny_config(**changes)).values():
        whole = torch.randn(rule.shape)
        rows = 128 if rule.rows == "vocabulary" else None
        parts = [rule.cut(whole, rank, 2, order, rows) for rank in range(2)]
        assert [tuple(part.shape) for part in parts] == [rule.stored_shape(2, rows)] * 2
        assert torch.equal(rule.joined(parts, order), whole), rule.name


def test_multi_token_prediction_is_refused() -> None:
    with pytest.raises(ConversionError, match="--mtp-num-layers 2: multi-token prediction is not converted"):
        tensor_rules(tiny_config(mtp_num_layers=2, position_embedding_type="rope"))


def test_experts_are_refused() -> None:
    with pytest.raises(ConversionError, match="--num-experts 4"):
        tensor_rules(tiny_config(num_experts=4))
