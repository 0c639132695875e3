"""Which family a `config.json` names, and which one an export takes."""

from __future__ import annotations

import pytest

from megatron.errors import ConversionError
from tests.helpers.networks import tiny_config
from trident.convert.hugging_face.registry import FAMILIES, family_for, family_of, known_types


def test_every_model_type_is_one_family_s() -> None:
    types = [family.model_type for family in FAMILIES]
    assert len(set(types)) == len(types)
    assert all(family_of({"model_type": name}) in FAMILIES for name in types)


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": "t5"}, {"model_type": ["gpt2"]}])
def test_another_model_type_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(
        ConversionError, match=r'"model_type": .*cannot be converted. Known are gpt2, llama, .*bloom, .*bert\.'
    ):
        family_of(config)
    with pytest.raises(ConversionError, match='"qwen3_next", which cannot be converted: .*linear attention .*Known'):
        family_of({"model_type": "qwen3_next"})


def test_the_first_family_that_can_express_a_network_is_taken() -> None:
    assert family_for(tiny_config()).model_type == "gpt2"
    assert family_for(tiny_config(), "gpt2").model_type == "gpt2"
    encoder = {"bidirectional": True, "masked_lm_head": True, "norm_placement": "post", "embed_layernorm": True}
    kinds = [family_for(tiny_config(**encoder, token_types=types, activation_function="gelu")) for types in (1, 2)]
    assert [family.model_type for family in kinds] == ["roberta", "bert"]


def test_a_network_that_none_can_express_is_refused() -> None:
    with pytest.raises(
        ConversionError, match=r"no family can express this network. gpt2 is closest: .*--embed-layernorm\."
    ):
        family_for(tiny_config(embed_layernorm=True))
    experts = {"num_experts": 8, "moe_router_topk": 2, "position_embedding_type": "rope", "normalization": "RMSNorm",
               "gated_linear_unit": True, "activation_function": "silu", "add_bias_linear": False}  # fmt: skip
    with pytest.raises(ConversionError, match=r"mixtral is closest: .*--moe-residual\b"):
        family_for(tiny_config(**experts, moe_residual=True))
    with pytest.raises(ConversionError, match=r"mixtral is closest: .*--moe-expert-counts 4 8"):
        family_for(tiny_config(**experts, moe_expert_counts=(4, 8)))
    with pytest.raises(ConversionError, match=r"--model-type t5 is unknown. Known are gpt2"):
        family_for(tiny_config(), "t5")
    assert known_types().startswith("Known are ")
