"""Initial values and learning rates of the parameters, by their role in the network.

Layers only define shape and split of their parameters. `place_initial_values` derives the role of a parameter from its
global name, and from that its initial distribution and the multiplier of its learning rate.
"""

from __future__ import annotations

import dataclasses
import math
import types
from enum import Enum

from megatron.config import ModelConfig
from megatron.config.architecture.scales import (
    NORMAL,
    SCALED,
    SMALL,
    TRUNCATED_NORMAL,
    WANG,
    XAVIER_NORMAL,
    XAVIER_UNIFORM,
)
from megatron.kernels.initial_values import Distribution
from megatron.parallel.shard_spec import ShardSpec


class ParameterRole(Enum):
    """The role of a parameter in the network; `ROUTER` stands for all outputs without the logits' multiplier."""

    EMBEDDING = "embedding"
    HEAD = "head"
    ROUTER = "router"
    RESIDUAL_OUTPUT = "residual output"
    HIDDEN = "hidden"
    VECTOR = "vector"


# Matrices by the last component of their module's global name.
_ROLES = types.MappingProxyType(
    {
        "word_embeddings": ParameterRole.EMBEDDING,
        "position_embeddings": ParameterRole.EMBEDDING,
        "tokentype_embeddings": ParameterRole.EMBEDDING,
        "output_layer": ParameterRole.HEAD,
        "router": ParameterRole.ROUTER,
        "binary_head": ParameterRole.ROUTER,
        "coefficient": ParameterRole.ROUTER,
        "linear_proj": ParameterRole.RESIDUAL_OUTPUT,
        "linear_fc2": ParameterRole.RESIDUAL_OUTPUT,
    }
)


def role_of(global_name: str, spec: ShardSpec) -> ParameterRole:
    """The role of a parameter; a matrix with an unknown name is a hidden one."""
    if not spec.is_matrix:
        return ParameterRole.VECTOR
    module = global_name.rpartition(".")[0].rpartition(".")[2]
    return _ROLES.get(module, ParameterRole.HIDDEN)


def place_initial_values(config: ModelConfig, global_name: str, spec: ShardSpec) -> ShardSpec:
    """The spec of a parameter with its initial distribution and the multiplier of its learning rate."""
    role = role_of(global_name, spec)
    if role is ParameterRole.VECTOR:
        return spec
    # a stack of experts holds one matrix for each
    shape = spec.shape[1:] if ".experts." in global_name else spec.shape
    return dataclasses.replace(
        spec,
        init_std=initial_std(config, role, fan_in=shape[-1], fan_out=math.prod(shape[:-1])),
        init_distribution=_distribution(config, role),
        lr_multiplier=lr_multiplier(config, role),
    )


def initial_std(config: ModelConfig, role: ParameterRole, *, fan_in: int, fan_out: int) -> float:
    """The standard deviation of a matrix's initial values.

    With muP, it falls with the square root of the width for hidden matrices, and with the width for a router, whose
    outputs have no multiplier as the logits have; embeddings and head keep the value of the base width.

    Args:
        fan_in: inputs of the matrix; only Xavier's distributions depend on it.
        fan_out: outputs of the matrix.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019, section 2.3 (scaled, with
    N = 2 * num_layers as in Megatron-LM); Nguyen and Salazar, "Transformers without tears", 2019 (small); Black et al.,
    "GPT-NeoX-20B", 2022, section 2.1 (wang); Glorot and Bengio, 2010, equation 16 (Xavier); Yang et al., "Tensor
    programs V", 2022, tables 3 and 8 (muP).
    """
    if role is ParameterRole.EMBEDDING and config.embedding_init_method_std is not None:
        return config.embedding_init_method_std
    width = config.hidden_size / config.width_ratio
    if role is ParameterRole.RESIDUAL_OUTPUT and config.output_layer_init_method == WANG:
        std = 2 / (config.num_layers * math.sqrt(width))
    elif config.init_method in (XAVIER_UNIFORM, XAVIER_NORMAL):
        std = math.sqrt(2 / (fan_in + fan_out))
    elif config.init_method == SMALL:
        std = math.sqrt(2 / (5 * width))
    else:
        std = config.init_method_std
    if role is ParameterRole.RESIDUAL_OUTPUT and config.output_layer_init_method == SCALED:
        std /= math.sqrt(2 * config.num_layers)
    if role in (ParameterRole.HIDDEN, ParameterRole.RESIDUAL_OUTPUT):
        std /= math.sqrt(config.width_ratio)
    return std / config.width_ratio if role is ParameterRole.ROUTER else std


def lr_multiplier(config: ModelConfig, role: ParameterRole) -> float:
    """The factor of the learning rate: with muP it falls with the width for matrices inside the network.

    Source: Yang et al., "Tensor programs V", 2022, table 8, the rows for Adam.
    """
    is_inside = role in (ParameterRole.HIDDEN, ParameterRole.RESIDUAL_OUTPUT, ParameterRole.ROUTER)
    return 1 / config.width_ratio if is_inside else 1.0


def _distribution(config: ModelConfig, role: ParameterRole) -> Distribution:
    is_normal = (
        config.embedding_init_method_std is not None
        if role is ParameterRole.EMBEDDING
        else role is ParameterRole.RESIDUAL_OUTPUT and config.output_layer_init_method == WANG
    )
    if is_normal or config.init_method in (NORMAL, SMALL, XAVIER_NORMAL):
        return Distribution.NORMAL
    return Distribution.TRUNCATED_NORMAL if config.init_method == TRUNCATED_NORMAL else Distribution.UNIFORM
