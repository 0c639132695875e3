"""Maps tensor names of a GPT in Megatron-LM, its forks and DeepSpeed's pipelines to global names, and back.

Source: bigscience and deepspeedai Megatron-DeepSpeed `megatron/model/{language_model,gpt_model}.py` (`GPTModelPipe`);
NVIDIA Megatron-LM `megatron/legacy/model/` and `megatron/core/models/gpt/gpt_model.py`; DeepSpeed
`deepspeed/runtime/pipe/module.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from megatron.config.sections.model import ModelConfig
from megatron.errors import ConversionError
from trident.convert.megatron_format.sharding_rules import tensor_rules

# Naming schemes that can be written. bigscience, deepspeedai: pipeline parameters by layer number; classic: modules of
# Megatron-LM before Megatron Core; core: modules of Megatron Core.
BIGSCIENCE, DEEPSPEEDAI, CLASSIC, CORE = "bigscience", "deepspeedai", "classic", "core"

_WORDS, _POSITIONS, _HEAD = "embedding.word_embeddings", "embedding.position_embeddings", "output_layer"
_WORDS_NORM, _FINAL_NORM = "embedding.word_embeddings_layernorm", "decoder.final_layernorm"
# Layer number of the first block, and offset of the final norm after the blocks.
_FIRST_BLOCK = {BIGSCIENCE: 3, DEEPSPEEDAI: 2}
_AFTER_BLOCKS = {BIGSCIENCE: 1, DEEPSPEEDAI: 0}
_OUR_BLOCK = re.compile(r"decoder\.layers\.(\d+)\..+")
# Buffers and copies of other tensors.
_IGNORED = re.compile(
    r".*_extra_state\d*|.*rotary_emb\.inv_freq|.*rotary_pos_emb\..*|.*attention\.(masked_)?bias|"
    r"(.*\.)?word_embeddings_for_head(\.weight)?|word_embeddings\.weight"
)
_BLOCK = re.compile(r"(?:language_model\.(?:encoder|transformer)|decoder|encoder)\.layers\.(\d+)\.(.+)")
_PIPELINE = re.compile(r"(\d+)\.(.+)")
_TIED = re.compile(r"tied_modules\.\w+\.(.+)")
# Global names inside a block (without weight or bias) -> theirs: the classic name, then others.
_BLOCK_NAMES = {
    "input_layernorm": ("input_layernorm", "input_norm"),
    "self_attention.linear_qkv": ("self_attention.query_key_value", "self_attention.linear_qkv"),
    "self_attention.linear_proj": ("self_attention.dense", "self_attention.linear_proj"),
    "self_attention.q_layernorm": ("self_attention.q_layernorm",),
    "self_attention.k_layernorm": ("self_attention.k_layernorm",),
    "pre_mlp_layernorm": ("post_attention_layernorm", "post_attention_norm", "pre_mlp_layernorm"),
    "mlp.linear_fc1": ("mlp.dense_h_to_4h", "mlp.linear_fc1"),
    "mlp.linear_fc2": ("mlp.dense_4h_to_h", "mlp.linear_fc2"),
}
_OURS_BY_BLOCK_NAME = {theirs: ours for ours, names in _BLOCK_NAMES.items() for theirs in names}
_FUSED_NORMS = {"self_attention.linear_qkv": "input_layernorm", "mlp.linear_fc1": "pre_mlp_layernorm"}
# The same outside the blocks, without the enclosing module.
_OUTER_NAMES = {
    _WORDS: ("word_embeddings",),
    _WORDS_NORM: ("word_embeddings.norm",),
    _POSITIONS: ("position_embeddings",),
    _FINAL_NORM: ("final_layernorm", "final_norm"),
    _HEAD: ("output_layer", "lm_head"),
}
_OURS_BY_OUTER_NAME = {theirs: ours for ours, names in _OUTER_NAMES.items() for theirs in names}
_PREFIXES = re.compile(
    r"(?:language_model\.)?(?:(?:embedding|encoder|transformer|decoder)\.)?(?=word_embed|position_embed|final_|output_)"
)


def our_names(names: Collection[str], *, is_tied: bool) -> dict[str, str | None]:
    """Maps names to global names; None for buffers and copies.

    Args:
        is_tied: the head shares the word embedding, so that a stored head is a copy.

    Raises:
        ConversionError: unknown names; lists them.
    """
    # Layer numbers of a pipeline also count layers without parameters: only their order matters.
    plain = {name: name.removeprefix("module.") for name in names}
    numbers = sorted(
        {
            int(match.group(1))
            for name in plain.values()
            if (match := _PIPELINE.fullmatch(name)) and _in_block(0, match.group(2)) is not None
        }
    )
    blocks = {number: block for block, number in enumerate(numbers)}
    named = {name: _our_name(inner, blocks) for name, inner in plain.items()}
    unknown = [name for name, ours in named.items() if ours is None and not _IGNORED.fullmatch(plain[name])]
    if unknown:
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        raise ConversionError(
            f"tensors do not belong to a GPT: {', '.join(unknown[:8])}{more}. Only GPT networks are converted; "
            "experts, BERT, T5 and adapters are not."
        )
    if is_tied:
        named = {name: None if ours == "output_layer.weight" else ours for name, ours in named.items()}
    return named


@dataclass(frozen=True)
class StagedTensor:
    """A tensor in the file of a pipeline stage.

    Args:
        path: its keys in the nested dictionaries of the file.
        ours: its global name.
    """

    path: tuple[str, ...]
    ours: str


def parameter_name(ours: str, naming: str, config: ModelConfig) -> str:
    """The parameter name of a tensor in the whole network or pipeline."""
    stem, _, last = ours.rpartition(".")
    layer = _layer_of(ours)
    if naming == CLASSIC:
        if layer is not None:
            return f"language_model.encoder.layers.{layer}.{_classic_in_block(ours)}"
        module = {_FINAL_NORM: "encoder.", _HEAD: ""}.get(stem, "embedding.")
        return f"language_model.{module}{_OUTER_NAMES[stem][0]}.{last}"
    if naming == CORE:
        return ours
    first = _FIRST_BLOCK[naming]
    if layer is not None:
        return f"{first + layer}.{_classic_in_block(ours)}"
    final = first + config.num_layers + _AFTER_BLOCKS[naming]
    if stem == _FINAL_NORM:
        return f"{final}.{last}"
    if stem == _HEAD:
        return f"{final + 1}.lm_head.{last}"
    embedding = "1" if config.untie_embeddings_and_output_weights else "tied_modules.embed"
    return f"{embedding}.{_OUTER_NAMES[stem][0]}.{last}"


def stage_tensors(config: ModelConfig, naming: str, stage: int, stages: int) -> Iterator[StagedTensor]:
    """The tensors of a stage in the order of its modules; blocks are numbered from 0 in each of the equal stages.

    A tied head on another stage than the embedding has a copy of it.
    """
    share = config.num_layers // stages
    for ours in tensor_rules(config):
        layer = _layer_of(ours)
        owner = layer // share if layer is not None else 0 if ours.startswith("embedding.") else stages - 1
        if owner != stage:
            continue
        local = ours if layer is None else ours.replace(f"layers.{layer}.", f"layers.{layer - stage * share}.", 1)
        yield StagedTensor(_path(local, naming, config), ours)
    if stage == stages - 1 and stages > 1 and not config.untie_embeddings_and_output_weights:
        copy = ("output_layer.weight",) if naming == CORE else ("word_embeddings_for_head", "weight")
        yield StagedTensor(copy, f"{_WORDS}.weight")


def _path(ours: str, naming: str, config: ModelConfig) -> tuple[str, ...]:
    """The keys in a file: core has one flat dictionary, the classic layout one per module."""
    name = parameter_name(ours, naming, config)
    if naming == CORE:
        return (name,)
    first, second, rest = name.split(".", 2)
    if second == "embedding":
        module, _, inner = rest.partition(".")
        return (first, second, module, inner)
    return (first, second, rest)


def _our_name(name: str, blocks: Mapping[int, int]) -> str | None:
    if _IGNORED.fullmatch(name):
        return None
    if match := _TIED.fullmatch(name):
        return _outside(match[1])
    if match := _BLOCK.fullmatch(name):
        return _in_block(int(match[1]), match[2])
    if match := _PIPELINE.fullmatch(name):
        number, rest = int(match[1]), match[2]
        if number in blocks:
            return _in_block(blocks[number], rest)
        return f"decoder.final_layernorm.{rest}" if rest in ("weight", "bias") else _outside(rest)
    return _outside(_PREFIXES.sub("", name, count=1))


def _in_block(layer: int, name: str) -> str | None:
    if name.startswith("attention."):  # early versions
        name = "self_" + name
    stem, _, last = name.rpartition(".")
    if last in ("layer_norm_weight", "layer_norm_bias") and stem in _FUSED_NORMS:
        return f"decoder.layers.{layer}.{_FUSED_NORMS[stem]}.{last.removeprefix('layer_norm_')}"
    ours = _OURS_BY_BLOCK_NAME.get(stem)
    return f"decoder.layers.{layer}.{ours}.{last}" if ours is not None and last in ("weight", "bias") else None


def _outside(name: str) -> str | None:
    """The global name outside the blocks; only norms have a bias."""
    if name == "position_embeddings":  # a plain parameter in some forks
        return f"{_POSITIONS}.weight"
    stem, _, last = name.rpartition(".")
    ours = _OURS_BY_OUTER_NAME.get(stem, "")
    return f"{ours}.{last}" if (last == "weight" and ours) or (last == "bias" and "norm" in ours) else None


def _layer_of(name: str) -> int | None:
    match = _OUR_BLOCK.fullmatch(name)
    return int(match.group(1)) if match else None


def _classic_in_block(name: str) -> str:
    """The classic name of a tensor inside its block."""
    _, _, _, stem = name.split(".", 3)
    stem, _, last = stem.rpartition(".")
    return f"{_BLOCK_NAMES.get(stem, (stem,))[0]}.{last}"
