"""The network of a configuration."""

from __future__ import annotations

from megatron.model.networks import network_layers
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.networks import tiny_config


def test_a_bidirectional_configuration_is_an_encoder() -> None:
    mesh = ParallelMesh.single()
    encoder = [layer.name for layer in network_layers(tiny_config(bidirectional=True, token_types=2), mesh)]
    assert encoder == [
        "embedding.word_embeddings", "embedding.position_embeddings", "embedding.tokentype_embeddings",
        "embedding.dropout", "decoder.layers.0", "decoder.layers.1", "decoder.final_layernorm", "output_layer",
    ]  # fmt: skip
    gpt = [layer.name for layer in network_layers(tiny_config(), mesh)]
    assert gpt == [name for name in encoder if name not in ("embedding.tokentype_embeddings", "embedding.dropout")]
