"""Configurations of published models: read, written and read again, and with their published number of parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from megatron.config import ModelConfig
from megatron.config.files.flag_files import preset_names, preset_path
from megatron.config.run_config import frozen
from megatron.errors import ConversionError
from megatron.model.interface.network import LayerStack
from megatron.model.networks import network_layers
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.shard_spec import shard_spec_of
from tests.trident.convert.hugging_face.families.published import PARAMETERS, PRESETS, PUBLISHED
from trident.convert.hugging_face.families.bert import BERT, ROBERTA
from trident.convert.hugging_face.registry import FAMILIES, family_for, family_of
from trident.convert.hugging_face.table.family import essential_fields
from trident.convert.hugging_face.table.tensors import bind, their_shapes

EACH = pytest.mark.parametrize("name", PUBLISHED)
TEXT_ONLY = pytest.mark.parametrize("name", [name for name in PUBLISHED if "text_config" not in PUBLISHED[name]])


def read(config: Mapping[str, Any]) -> ModelConfig:
    return family_of(config).read_config(config)


def preset(name: str) -> ModelConfig:
    fields = {key: frozen(value) for key, value in yaml.safe_load(preset_path(name).read_text()).items()}
    return ModelConfig(**fields, padded_vocab_size=fields["vocab_size"])


@TEXT_ONLY
def test_a_published_configuration_is_read_and_written(name: str) -> None:
    config = PUBLISHED[name]
    family, model = family_of(config), read(config)
    written = family.write_config(model)
    assert essential_fields(read(written)) == essential_fields(model)
    assert family_for(model, family.model_type) is family
    first = family_for(model).model_type
    assert first == ("mistral" if name == "Phi-3 mini" else family.model_type)  # which has all options of this one
    lost = {key for key in config if key in written and _plain(written[key]) != _plain(config[key])}
    assert lost <= {
        "rope_scaling", "sliding_window", "max_window_layers", "mlp_only_layers", "num_nextn_predict_layers"
    }  # fmt: skip


@EACH
def test_the_network_has_the_published_number_of_parameters(name: str) -> None:
    config = PUBLISHED[name]
    stack = LayerStack(network_layers(read(config), ParallelMesh.single("meta")))
    shapes = {name: shard_spec_of(parameter).shape for name, parameter in stack.named_parameters()}
    theirs = their_shapes(bind(family_of(config).tensors, shapes))
    assert sum(map(math.prod, theirs.values())) == PARAMETERS[name]


def test_the_text_part_of_a_model_with_images_is_that_of_one_without() -> None:
    model = read(PUBLISHED["Gemma 3 4B"])
    assert (model.attention_window, model.rope_scaling_factor, model.num_attention_heads) == (1024, 8.0, 8)
    assert family_for(model).model_type == "gemma3_text"
    with pytest.raises(ConversionError, match="type gemma3 cannot .* multimodal"):
        family_for(model, "gemma3").write_config(model)
    with pytest.raises(ConversionError, match='"text_config": 3, which should be an object'):
        read({"model_type": "gemma3", "text_config": 3})


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_published_network(name: str) -> None:
    assert essential_fields(preset(PRESETS[name])) == essential_fields(read(PUBLISHED[name]))


@pytest.mark.parametrize("name", ["bert-base-uncased", "bert-large-uncased"])
def test_the_heads_of_published_bert_are_those_of_its_files(name: str) -> None:
    sizes = {"bert-large-uncased": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}}
    config = {**PUBLISHED["BERT base"], **sizes.get(name, {})}
    config["intermediate_size"] = 4 * config["hidden_size"]
    head = "cls.predictions.transform.dense.weight"
    both, one = (BERT.with_heads(read(config), names) for names in ([head, "cls.seq_relationship.weight"], [head]))
    assert essential_fields(preset(name)) == essential_fields(both) and not one.sentence_order_head
    assert BERT.write_config(both)["architectures"] == ["BertForPreTraining"]
    with pytest.raises(ConversionError, match=r"no cls\.predictions\.transform\.dense, .* saved as BertForMaskedLM"):
        BERT.with_heads(one, ["bert.pooler.dense.weight"])
    with pytest.raises(ConversionError, match=r"no lm_head\.dense, .* saved as RobertaForMaskedLM"):
        ROBERTA.with_heads(one, ["classifier.dense.weight"])


def test_every_preset_can_be_exported() -> None:
    families = {family.model_type for family in FAMILIES}
    assert {
        family_for(preset(name)).model_type for name in preset_names() if name not in ("laptop", "workstation")
    } <= families


def test_every_family_has_a_published_model() -> None:
    assert {family_of(config).model_type for config in PUBLISHED.values()} == {family.model_type for family in FAMILIES}


@pytest.mark.parametrize(
    ("name", "field", "value", "says"),
    [
        ("GPT-2", "scale_attn_by_inverse_layer_idx", True, 'scale_attn_by_inverse_layer_idx": true'),
        ("GPT-2", "activation_function", "mish", '"activation_function": "mish"'),
        ("Pythia 70M", "rotary_pct", 0.3, "rotates 19 of 64 channels"),
        ("BLOOM 176B", "n_inner", 100, '"n_inner": 100'),
        ("BLOOM 176B", "skip_bias_add_qkv", True, '"skip_bias_add_qkv": true'),
        ("Llama 3.2 1B", "partial_rotary_factor", 0.5, '"partial_rotary_factor": 0.5, which this family ignores'),
        ("Llama 3.2 1B", "quantization_config", {"bits": 4}, '"quantization_config": {"bits": 4}'),
        ("Mistral 7B v0.1", "sliding_window", "all", '"sliding_window": "all"'),
        ("Mistral 7B v0.1", "sliding_window", 0, '"sliding_window": 0'),
        ("Qwen 2.5 0.5B", "use_mrope", True, '"use_mrope": true'),
        ("Qwen 2.5 0.5B", "layer_types", ["full_attention"], "a list of 24 kinds"),
        ("Qwen 2.5 0.5B", "layer_types", ["chunked_attention"] * 24, '"layer_types": "chunked_attention"'),
        ("Qwen 2.5 0.5B", "layer_types", ["sliding_attention"] * 24, 'contradicts "use_sliding_window": false'),
        ("OLMo 3 7B", "rope_parameters", {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
         "should not be scaled"),
        ("SmolLM3 3B", "no_rope_layers", [1, 0], "a list of 36 numbers"),
        ("SmolLM3 3B", "no_rope_layer_interval", 0, '"no_rope_layer_interval": 0'),
        ("SmolLM3 3B", "layer_types", ["sliding_attention"] * 36, "supported only as full_attention"),
        ("SmolLM3 3B", "use_sliding_window", True, '"use_sliding_window": true'),
        ("Granite 3.1 2B", "logits_scaling", 0, '"logits_scaling": 0'),
        ("Granite 3.1 2B", "attention_multiplier", "1", '"attention_multiplier": "1"'),
        ("Gemma 2 2B", "query_pre_attn_scalar", 0, '"query_pre_attn_scalar": 0'),
        ("Gemma 2 2B", "attn_logit_softcapping", -1, '"attn_logit_softcapping": -1'),
        ("Gemma 3 1B", "use_bidirectional_attention", True, '"use_bidirectional_attention": true'),
        ("Gemma 3 1B", "sliding_window", None, '"sliding_window": null'),
        ("Gemma 3 1B", "sliding_window_pattern", 0, '"sliding_window_pattern": 0'),
        ("Gemma 3 1B", "rope_parameters", {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
         "should not be scaled"),
        ("Phi-3 mini", "rope_scaling", {"type": "linear", "factor": 2.0}, "supported only as longrope"),
        ("Phi-3 mini", "lm_head_bias", True, '"lm_head_bias": true'),
        ("Mixtral 8x7B", "router_jitter_noise", 0.1, '"router_jitter_noise": 0.1'),
        ("gpt-oss 20B", "quantization_config", {"quant_method": "awq"}, "supported only as mxfp4; dequantize"),
        ("gpt-oss 20B", "swiglu_alpha", 1.5, '"swiglu_alpha": 1.5'),
        ("gpt-oss 20B", "hidden_act", "gelu", '"hidden_act": "gelu"'),
        ("gpt-oss 20B", "attention_dropout", 0.1, '"attention_dropout": 0.1'),
        ("BERT base", "position_embedding_type", "relative_key", '"position_embedding_type": "relative_key"'),
        ("BERT base", "tie_word_embeddings", False, '"tie_word_embeddings": false'),
        ("RoBERTa base", "hidden_act", "gelu_new", '"hidden_act": "gelu_new"'),
        ("RoBERTa base", "pad_token_id", 0, '"pad_token_id": 0'),
        ("RoBERTa base", "max_position_embeddings", 2, '"max_position_embeddings": 2, which should be a number above'),
        ("RoBERTa base", "type_vocab_size", 2, '"type_vocab_size": 2'),
        ("Qwen 3 30B-A3B", "decoder_sparse_step", 0, '"decoder_sparse_step": 0'),
        ("Qwen 3 30B-A3B", "mlp_only_layers", 3, '"mlp_only_layers": 3'),
        ("Qwen 3 30B-A3B", "mlp_only_layers", list(range(48)), "leaves no layer with experts"),
        ("DeepSeek V3", "first_k_dense_replace", 61, '"first_k_dense_replace": 61, which should be fewer than the 61'),
        ("DeepSeek V3", "n_shared_experts", 0, '"n_shared_experts": 0, which should be a number of experts'),
        ("DeepSeek V3", "q_lora_rank", "none", '"q_lora_rank": "none", which should be an integer'),
        ("DeepSeek V3", "scoring_func", "softmax", '"scoring_func": "softmax", which is supported only as "sigmoid"'),
        ("DeepSeek V2", "norm_topk_prob", True, '"norm_topk_prob": true, which is supported only as false'),
        ("DeepSeek V2", "topk_method", "noaux_tc", '"topk_method": "noaux_tc", which is supported only as'),
    ],
)  # fmt: skip
def test_what_cannot_be_expressed_is_refused_by_field_and_value(name: str, field: str, value: Any, says: str) -> None:
    with pytest.raises(ConversionError, match="config.json has") as refusal:
        read({**PUBLISHED[name], field: value})
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "field", "value", "expected"),
    [
        ("Mistral 7B v0.1", "sliding_window", None, {"attention_window": None}),
        ("BLOOM 176B", "apply_residual_connection_post_layernorm", True,
         {"apply_residual_connection_post_layernorm": True}),
        ("Qwen 2.5 0.5B", "use_sliding_window", True, {"attention_window": None}),  # from layer 24 of 24 on
        ("SmolLM3 3B", "no_rope_layers", None, {"rope_layer_pattern": (1, 1, 1, 0)}),
        ("SmolLM3 3B", "no_rope_layers", [1] * 36, {"rope_layer_pattern": ()}),
        ("OLMo 3 7B", "layer_types", None, {"attention_window": 4096, "attention_window_pattern": (1, 1, 1, 0)}),
        ("Granite 3.1 2B", "logits_scaling", 16, {"logit_multiplier": 0.0625, "softmax_scale": 0.015625}),
        ("Granite 3.1 2B", "logits_scaling", 0.3, {"logit_multiplier": 1 / 0.3}),
        ("Gemma 2 2B", "attn_logit_softcapping", None, {"attention_logit_softcap": None}),
        ("Gemma 3 1B", "rope_scaling", {"factor": 8.0, "rope_type": "linear"},
         {"rope_scaling_type": "linear", "rope_scaling_factor": 8.0, "rotary_base_windowed": 10000.0}),
        ("Phi-3 mini", "rope_scaling", None, {"rope_scaling_type": "none"}),
        ("Phi-3 mini", "rope_scaling", {"type": "yarn", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
         {"rope_scaling_type": "longrope", "rope_long_factors": (2.0,) * 48, "rope_original_max_positions": 4096}),
        ("Qwen 3 30B-A3B", "decoder_sparse_step", 2, {"moe_layer_pattern": (0, 1)}),
        ("Qwen 3 30B-A3B", "norm_topk_prob", False, {"moe_router_pre_softmax": True}),
        ("DeepSeek V2", "topk_method", "greedy", {"moe_router_num_groups": None}),
        ("DeepSeek V3", "n_group", 1, {"moe_router_num_groups": None}),
        ("DeepSeek V3", "q_lora_rank", None, {"q_lora_rank": None}),
        ("DeepSeek V3", "rope_scaling", {"type": "yarn", "factor": 4, "mscale_all_dim": 1.0},
         {"rope_attention_factor": 1 + 0.1 * math.log(4),
          "softmax_scale": (1 + 0.1 * math.log(4)) ** 2 / math.sqrt(192)}),
        ("DeepSeek V3", "rope_scaling", {"type": "yarn", "factor": 4, "mscale": 0.5},
         {"rope_attention_factor": None, "mscale": 1.0, "mscale_all_dim": 0.0, "softmax_scale": None}),
        ("Qwen 3 30B-A3B", "use_sliding_window", True, {"attention_window": 4096, "attention_window_pattern": ()}),
    ],
)  # fmt: skip
def test_options_are_read(name: str, field: str, value: Any, expected: Mapping[str, Any]) -> None:
    config = {**PUBLISHED[name], field: value}
    model = read(config)
    assert {key: getattr(model, key) for key in expected} == expected
    assert essential_fields(read(family_of(config).write_config(model))) == essential_fields(model)


def test_a_field_that_is_absent_is_not_one_that_is_null() -> None:
    config = {key: value for key, value in PUBLISHED["Mistral 7B v0.1"].items() if key != "sliding_window"}
    assert read(config).attention_window == 4096


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("Llama 3.2 1B", {"rotary_percent": 0.5}, "--rotary-percent 0.5"),
        ("Gemma 3 1B", {"attention_logit_softcap": 50.0}, "--attention-logit-softcap 50.0"),
        ("Gemma 2 2B", {"embedding_multiplier": 1.0}, "--embedding-multiplier 1.0"),
        ("BLOOM 176B", {"ffn_hidden_size": 1024}, "--ffn-hidden-size 1024"),
        ("Mistral 7B v0.1", {"attention_window_pattern": (1, 0)}, "--attention-window 4096"),
        ("SmolLM3 3B", {"rotary_percent": 0.5}, "--rotary-percent 0.5"),
        ("Mixtral 8x7B", {"moe_layer_pattern": (1, 0)}, "--moe-layer-pattern"),
        ("DeepSeek V3", {"latent_layernorm_epsilon": 1e-5}, "--latent-layernorm-epsilon 1e-05"),
        ("DeepSeek V3", {"moe_router_group_scored_experts": 1}, "--moe-router-group-scored-experts 1"),
        ("DeepSeek V2", {"moe_shared_expert_intermediate_size": 1000}, '"n_shared_experts": 0'),
    ],
)
def test_what_a_family_cannot_say_is_not_exported(name: str, changes: Mapping[str, Any], says: str) -> None:
    config = PUBLISHED[name]
    fields = family_of(config).read_config(config)
    model = ModelConfig(**{**_fields(fields), **changes})
    with pytest.raises(ConversionError, match="cannot express") as refusal:
        family_of(config).write_config(model)
    assert says in str(refusal.value)


def _fields(model: ModelConfig) -> dict[str, Any]:
    return {name: getattr(model, name) for name in model.__dataclass_fields__}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value
