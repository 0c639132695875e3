"""What the tensors of a GPT are called in each of the forms that are written.

Source: bigscience and deepspeedai Megatron-DeepSpeed, `megatron/model/gpt_model.py` (`GPTModelPipe`); NVIDIA
Megatron-LM, `megatron/legacy/model/` and `megatron/core/models/gpt/gpt_model.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config import ModelConfig
from megatron.convert.megatron_format.names import classic_in_block, layer_of
from megatron.convert.megatron_format.sharding_rules import tensor_rules

# bigscience and deepspeedai: parameters of their pipelines, by number of the layer; classic: the modules of Megatron-LM
# before its core; core: the modules of NVIDIA's Megatron Core.
BIGSCIENCE, DEEPSPEEDAI, CLASSIC, CORE = "bigscience", "deepspeedai", "classic", "core"

_WORDS, _POSITIONS, _HEAD = "embedding.word_embeddings", "embedding.position_embeddings", "output_layer"
_WORDS_NORM, _FINAL_NORM = "embedding.word_embeddings_layernorm", "decoder.final_layernorm"
# Number of a pipeline's first block, and of its last norm after the blocks.
_FIRST_BLOCK = {BIGSCIENCE: 3, DEEPSPEEDAI: 2}
_AFTER_BLOCKS = {BIGSCIENCE: 1, DEEPSPEEDAI: 0}
_CLASSIC_OUTSIDE = {
    _WORDS: "embedding.word_embeddings",
    _WORDS_NORM: "embedding.word_embeddings.norm",
    _POSITIONS: "embedding.position_embeddings",
    _FINAL_NORM: "encoder.final_layernorm",
    _HEAD: "output_layer",
}


@dataclass(frozen=True)
class StagedTensor:
    """One tensor in the file of a pipeline stage.

    Args:
        path: the keys that lead to it in the file's network.
        ours: our name of it.
    """

    path: tuple[str, ...]
    ours: str


def parameter_name(ours: str, naming: str, config: ModelConfig) -> str:
    """The name of one of our tensors as a parameter of the whole network or of a whole pipeline."""
    stem, _, last = ours.rpartition(".")
    layer = layer_of(ours)
    if naming == CLASSIC:
        inner = _CLASSIC_OUTSIDE.get(stem, "") if layer is None else f"encoder.layers.{layer}"
        return f"language_model.{inner}.{last if layer is None else classic_in_block(ours)}"
    if naming == CORE:
        return ours
    first = _FIRST_BLOCK[naming]
    if layer is not None:
        return f"{first + layer}.{classic_in_block(ours)}"
    final = first + config.num_layers + _AFTER_BLOCKS[naming]
    if stem == _FINAL_NORM:
        return f"{final}.{last}"
    if stem == _HEAD:
        return f"{final + 1}.lm_head.{last}"
    embedding = "1" if config.untie_embeddings_and_output_weights else "tied_modules.embed"
    return f"{embedding}.{_CLASSIC_OUTSIDE[stem].removeprefix('embedding.')}.{last}"


def stage_tensors(config: ModelConfig, naming: str, stage: int, stages: int) -> Iterator[StagedTensor]:
    """The tensors of one of equal stages, in the order of its modules; blocks are numbered from 0 in each stage.

    A tied head on another stage than the embedding has a copy of it.
    """
    share = config.num_layers // stages
    for ours in tensor_rules(config):
        layer = layer_of(ours)
        own = stage if layer is not None and layer // share == stage else None
        if layer is None:
            own = 0 if ours.startswith("embedding.") else stages - 1
        if own != stage:
            continue
        local = ours if layer is None else ours.replace(f"layers.{layer}.", f"layers.{layer - stage * share}.", 1)
        yield StagedTensor(_path(local, naming, config), ours)
    if stage == stages - 1 and stages > 1 and not config.untie_embeddings_and_output_weights:
        copy = ("output_layer.weight",) if naming == CORE else ("word_embeddings_for_head", "weight")
        yield StagedTensor(copy, f"{_WORDS}.weight")


def _path(ours: str, naming: str, config: ModelConfig) -> tuple[str, ...]:
    """The keys in a file: core keeps one flat dictionary, the classic layout one for each module."""
    name = parameter_name(ours, naming, config)
    if naming == CORE:
        return (name,)
    first, second, rest = name.split(".", 2)
    if second == "embedding":
        module, _, inner = rest.partition(".")
        return (first, second, module, inner)
    return (first, second, rest)
