"""The convertible model families, by the `model_type` of their `config.json`. A new family is one line here."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig
from megatron.errors import ConversionError
from trident.convert.hugging_face.families.bert import BERT, ROBERTA
from trident.convert.hugging_face.families.bloom import BLOOM
from trident.convert.hugging_face.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from trident.convert.hugging_face.families.gemma import GEMMA2, GEMMA3, GEMMA3_WITH_IMAGES
from trident.convert.hugging_face.families.gpt2 import GPT2
from trident.convert.hugging_face.families.gpt_neox import GPT_NEOX
from trident.convert.hugging_face.families.gpt_oss import GPT_OSS
from trident.convert.hugging_face.families.granite import GRANITE
from trident.convert.hugging_face.families.llama import LLAMA
from trident.convert.hugging_face.families.mistral import MISTRAL, MIXTRAL
from trident.convert.hugging_face.families.olmo import OLMO2, OLMO3
from trident.convert.hugging_face.families.phi3 import PHI3
from trident.convert.hugging_face.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from trident.convert.hugging_face.families.smollm3 import SMOLLM3
from trident.convert.hugging_face.table.family import Family, Obstacle

# In the order in which an export tries them.
FAMILIES: tuple[Family, ...] = (
    GPT2,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    SMOLLM3,
    GRANITE,
    OLMO2,
    OLMO3,
    GEMMA2,
    GEMMA3,
    GEMMA3_WITH_IMAGES,
    PHI3,
    MIXTRAL,
    QWEN3_MOE,
    GPT_OSS,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GPT_NEOX,
    BLOOM,
    ROBERTA,
    BERT,
)

# Published families that are not supported, and the reason.
_LACKING: Mapping[str, str] = types.MappingProxyType(
    {"qwen3_next": "three of four of its layers have linear attention (the gated delta rule)"}
)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a `config.json`.

    Raises:
        ConversionError: it names no family, or one that is not supported.
    """
    model_type = config.get("model_type")
    for family in FAMILIES:
        if model_type == family.model_type:
            return family
    lacking = _LACKING.get(model_type) if isinstance(model_type, str) else None
    why = f": {lacking}, which is not supported" if lacking else ""
    raise ConversionError(
        f'config.json has "model_type": {json.dumps(model_type)}, which cannot be converted{why}. {known_types()}'
    )


def family_for(model: ModelConfig, model_type: str | None = None, origin: str = "") -> Family:
    """The family to export a network as: the requested one, or the first that can express it, starting with `origin`.

    Args:
        origin: the family that the weights were imported from, or empty.

    Raises:
        ConversionError: the name is unknown, or no family can express the network.
    """
    if model_type is not None:
        for family in FAMILIES:
            if family.model_type == model_type:
                return family
        raise ConversionError(f"--model-type {model_type} is unknown. {known_types()}")
    obstacles: list[tuple[Family, Obstacle]] = []
    for family in sorted(FAMILIES, key=lambda family: family.model_type != origin):
        obstacle = family.obstacle(model)
        if obstacle is None:
            return family
        obstacles.append((family, obstacle))
    nearest, obstacle = min(obstacles, key=lambda entry: entry[1].distance)
    raise ConversionError(
        f"no family can express this network. {nearest.model_type} is closest: {obstacle.text} {known_types()}"
    )


def known_types() -> str:
    """A sentence with every model type."""
    return f"Known are {', '.join(family.model_type for family in FAMILIES)}."
