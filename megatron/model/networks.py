"""The network of a configuration: a GPT or an encoder."""

from __future__ import annotations

from megatron.config import ModelConfig
from megatron.model.bert import bert_layers
from megatron.model.gpt import gpt_layers
from megatron.model.interface.network import LayerSpec
from megatron.parallel.mesh import ParallelMesh


def network_layers(config: ModelConfig, mesh: ParallelMesh) -> list[LayerSpec]:
    """The layers of an encoder if the configuration is bidirectional, otherwise of a GPT."""
    return bert_layers(config, mesh) if config.bidirectional else gpt_layers(config, mesh)
