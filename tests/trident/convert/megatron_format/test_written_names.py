"""Tensors get the names of the program that is written for, in the order of its modules."""

from __future__ import annotations

import pytest

from tests.helpers.networks import tiny_config
from trident.convert.megatron_format.names import our_names, parameter_name, stage_tensors
from trident.convert.megatron_format.sharding_rules import tensor_rules

UNTIED = tiny_config(untie_embeddings_and_output_weights=True)


@pytest.mark.parametrize(
    ("naming", "names"),
    [
        (
            "bigscience",
            ["tied_modules.embed.word_embeddings.weight", "4.self_attention.query_key_value.bias", "6.bias"],
        ),
        (
            "deepspeedai",
            ["tied_modules.embed.word_embeddings.weight", "3.self_attention.query_key_value.bias", "4.bias"],
        ),
        (
            "classic",
            [
                "language_model.embedding.word_embeddings.weight",
                "language_model.encoder.layers.1.self_attention.query_key_value.bias",
                "language_model.encoder.final_layernorm.bias",
            ],
        ),
    ],
)
def test_names_of_parameters(naming: str, names: list[str]) -> None:
    ours = ["embedding.word_embeddings.weight", "decoder.layers.1.self_attention.linear_qkv.bias"]
    ours.append("decoder.final_layernorm.bias")
    config = tiny_config()
    assert [parameter_name(name, naming, config) for name in ours] == names


@pytest.mark.parametrize("naming", ["deepspeedai", "classic", "core"])
def test_the_importer_knows_every_name(naming: str) -> None:
    theirs = {parameter_name(name, naming, UNTIED): name for name in tensor_rules(UNTIED)}
    assert our_names(theirs, is_tied=False) == theirs
    head = {"deepspeedai": "5.lm_head.weight", "classic": "language_model.output_layer.weight"}
    assert theirs[head.get(naming, "output_layer.weight")] == "output_layer.weight"


def test_stages_hold_every_tensor_once_and_a_copy_of_a_tied_head() -> None:
    config = tiny_config(num_layers=4)
    stages = [list(stage_tensors(config, "classic", stage, 2)) for stage in range(2)]
    ours = [tensor.ours for tensors in stages for tensor in tensors]
    assert sorted(ours[:-1]) == sorted(tensor_rules(config))
    assert stages[1][-1].path == ("word_embeddings_for_head", "weight")
    assert stages[1][-1].ours == "embedding.word_embeddings.weight"
    assert stages[0][0].path == ("language_model", "embedding", "word_embeddings", "weight")
    assert stages[1][0].path == ("language_model", "encoder", "layers.0.input_layernorm.weight")
    assert stages[1][0].ours == "decoder.layers.2.input_layernorm.weight"
    core = list(stage_tensors(config, "core", 1, 2))
    assert core[-1].path == ("output_layer.weight",)
    assert not any(tensor.path[0].startswith("word_embeddings") for tensor in stage_tensors(UNTIED, "classic", 1, 2))
