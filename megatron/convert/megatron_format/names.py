"""The names that Megatron-LM, its forks and DeepSpeed's pipelines give to the tensors of a GPT, and ours for them.

Source: bigscience Megatron-DeepSpeed `megatron/model/{language_model,gpt_model}.py`; NVIDIA Megatron-LM
`megatron/core/models/gpt/gpt_model.py`; DeepSpeed `deepspeed/runtime/pipe/module.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from megatron.errors import ConversionError

# Buffers and copies that hold nothing of their own.
_IGNORED = re.compile(
    r".*_extra_state\d*|.*rotary_emb\.inv_freq|.*rotary_pos_emb\..*|.*attention\.(masked_)?bias|"
    r"(.*\.)?word_embeddings_for_head(\.weight)?|word_embeddings\.weight"
)
_BLOCK = re.compile(r"(?:language_model\.(?:encoder|transformer)|decoder|encoder)\.layers\.(\d+)\.(.+)")
_PIPELINE = re.compile(r"(\d+)\.(.+)")
_TIED = re.compile(r"tied_modules\.\w+\.(.+)")
# (name inside a block, ours), the last word (weight or bias) left out
_IN_BLOCK = {
    "input_layernorm": "input_layernorm",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.linear_qkv": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "self_attention.linear_proj": "self_attention.linear_proj",
    "self_attention.q_layernorm": "self_attention.q_layernorm",
    "self_attention.k_layernorm": "self_attention.k_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "post_attention_norm": "pre_mlp_layernorm",
    "input_norm": "input_layernorm",
    "pre_mlp_layernorm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.linear_fc1": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
    "mlp.linear_fc2": "mlp.linear_fc2",
}
_FUSED_NORMS = {"self_attention.linear_qkv": "input_layernorm", "mlp.linear_fc1": "pre_mlp_layernorm"}
_OUTSIDE = {
    "word_embeddings.weight": "embedding.word_embeddings.weight",
    "word_embeddings.norm.weight": "embedding.word_embeddings_layernorm.weight",
    "word_embeddings.norm.bias": "embedding.word_embeddings_layernorm.bias",
    "position_embeddings.weight": "embedding.position_embeddings.weight",
    "position_embeddings": "embedding.position_embeddings.weight",
    "final_layernorm.weight": "decoder.final_layernorm.weight",
    "final_layernorm.bias": "decoder.final_layernorm.bias",
    "final_norm.weight": "decoder.final_layernorm.weight",
    "final_norm.bias": "decoder.final_layernorm.bias",
    "output_layer.weight": "output_layer.weight",
    "lm_head.weight": "output_layer.weight",
}
_PREFIXES = re.compile(
    r"(?:language_model\.)?(?:(?:embedding|encoder|transformer|decoder)\.)?(?=word_embed|position_embed|final_|output_)"
)


def our_names(names: Collection[str], *, is_tied: bool) -> dict[str, str | None]:
    """Our name of each of theirs; None for what holds nothing of its own.

    Blocks of a pipeline are named by the number of their layer, which counts layers without parameters, too; their
    order is what counts.

    Args:
        is_tied: whether the head shares the word embedding, so that a stored head is a copy.

    Raises:
        ConversionError: a name is not known; all of them are shown.
    """
    plain = {name: name.removeprefix("module.") for name in names}
    numbers = sorted(
        {
            int(match.group(1))
            for name in plain.values()
            if (match := _PIPELINE.fullmatch(name)) and _in_block(match.group(2)) is not None
        }
    )
    blocks = {number: place for place, number in enumerate(numbers)}
    named = {name: _our_name(inner, blocks) for name, inner in plain.items()}
    unknown = [name for name, ours in named.items() if ours is None and not _IGNORED.fullmatch(plain[name])]
    if unknown:
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        raise ConversionError(
            f"tensors are not known in a GPT: {', '.join(unknown[:8])}{more}. Only GPT networks are converted; "
            "experts, BERT, T5 and adapters are not."
        )
    if is_tied:
        named = {name: None if ours == "output_layer.weight" else ours for name, ours in named.items()}
    return named


def _our_name(name: str, blocks: Mapping[int, int]) -> str | None:
    if _IGNORED.fullmatch(name):
        return None
    tied = _TIED.fullmatch(name)
    if tied:
        return _OUTSIDE.get(tied.group(1))
    match = _BLOCK.fullmatch(name)
    if match:
        inner = _in_block(match.group(2))
        return None if inner is None else f"decoder.layers.{int(match.group(1))}.{inner}"
    match = _PIPELINE.fullmatch(name)
    if match:
        number, rest = int(match.group(1)), match.group(2)
        if number in blocks:
            inner = _in_block(rest)
            return None if inner is None else f"decoder.layers.{blocks[number]}.{inner}"
        return f"decoder.final_layernorm.{rest}" if rest in ("weight", "bias") else _OUTSIDE.get(rest)
    return _OUTSIDE.get(_PREFIXES.sub("", name, count=1))


def _in_block(name: str) -> str | None:
    """Our name inside a block."""
    if name.startswith("attention."):  # of the first versions
        name = "self_" + name
    stem, _, last = name.rpartition(".")
    if last in ("layer_norm_weight", "layer_norm_bias") and stem in _FUSED_NORMS:
        return f"{_FUSED_NORMS[stem]}.{last.removeprefix('layer_norm_')}"
    return f"{_IN_BLOCK[stem]}.{last}" if stem in _IN_BLOCK and last in ("weight", "bias") else None


# Ours -> the classic names inside a block and outside, for writing.
_CLASSIC_BLOCK = {
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
_OUR_BLOCK = re.compile(r"decoder\.layers\.(\d+)\.(.+)\.(weight|bias)")


def layer_of(name: str) -> int | None:
    """The block that one of our tensors belongs to."""
    match = _OUR_BLOCK.fullmatch(name)
    return int(match.group(1)) if match else None


def classic_in_block(name: str) -> str:
    """The name inside its block that the forks give to one of our tensors."""
    match = _OUR_BLOCK.fullmatch(name)
    if match is None:
        raise ConversionError(f"{name} is not a tensor of a block.")
    return f"{_CLASSIC_BLOCK.get(match.group(2), match.group(2))}.{match.group(3)}"
