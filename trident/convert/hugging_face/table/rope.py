"""Rules for rotary embeddings: base, rotated fraction and frequency scaling, in all forms in use.

Older files have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`; both forms are written. If a file has
both, they must not contradict each other.

Source: transformers `modeling_rope_utils.py`, version 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig
from megatron.config.architecture.latent_attention import yarn_magnitude
from trident.convert.hugging_face.table.config_fields import Entries, FieldRule

_ORIGINAL = "original_max_position_embeddings"
# Their key -> our field, by kind of scaling.
_KEYS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "linear": {"factor": "rope_scaling_factor"},
    "dynamic": {"factor": "rope_scaling_factor"},
    "llama3": {
        "factor": "rope_scaling_factor",
        _ORIGINAL: "rope_original_max_positions",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
    },
    "yarn": {
        "factor": "rope_scaling_factor",
        _ORIGINAL: "rope_original_max_positions",
        "beta_fast": "rope_beta_fast",
        "beta_slow": "rope_beta_slow",
        "attention_factor": "rope_attention_factor",
    },
    "longrope": {
        _ORIGINAL: "rope_original_max_positions",
        "short_factor": "rope_short_factors",
        "long_factor": "rope_long_factors",
        "attention_factor": "rope_attention_factor",
    },
}
_NAMES = {"default": "none", **{kind: kind for kind in _KEYS if kind != "none"}, "su": "longrope"}  # su: first Phi-3
_LISTS = ("short_factor", "long_factor")
_REQUIRED = ("factor", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor")


def rope_fields(
    default_theta: float = 10000.0,
    default_percent: float | None = None,
    *,
    theta_name: str = "rope_theta",
    percent_name: str = "partial_rotary_factor",
) -> FieldRule:
    """The rule for the same rotary embedding in all layers.

    Args:
        default_theta: the family's default base.
        default_percent: the family's default rotated fraction of each head; None if it always rotates whole heads.
        theta_name: name of the base in older files.
        percent_name: name of the fraction in older files.
    """

    def read(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
        merged, name = merged_parameters(entries, theta_name, percent_name)
        merged.setdefault("rope_theta", default_theta)
        percent = merged.setdefault("partial_rotary_factor", default_percent or 1.0)
        if default_percent is None and percent != 1.0:
            raise entries.refused(percent_name, percent, "this family ignores; it rotates whole heads")
        return {"position_embedding_type": "rope", **read_parameters(merged, name, fields)}

    def write(model: ModelConfig) -> dict[str, Any]:
        if not model.uses_rope:
            return {}
        parameters = write_parameters(model)
        older = {theta_name: model.rotary_base}
        if default_percent is not None:
            parameters["partial_rotary_factor"] = older[percent_name] = model.rotary_percent
        # The older form has the base outside the object.
        scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
        scaled = parameters["rope_type"] != "default"
        older_scaling = {"type": parameters["rope_type"], **scaling} if scaled else None
        return {"rope_parameters": parameters, **older, "rope_scaling": older_scaling}

    return FieldRule(read, write)


def merged_parameters(entries: Entries, theta_name: str, percent_name: str) -> tuple[dict[str, Any], str]:
    """Merges the rotary parameters of all forms; also returns the name of the object with the scaling.

    Raises:
        ConversionError: two forms contradict each other.
    """
    merged: dict[str, Any] = {}
    outside = ((theta_name, "rope_theta"), (percent_name, "partial_rotary_factor"), (_ORIGINAL, _ORIGINAL))
    for name, key in outside:
        value = entries.take(name, None)
        if value is not None:
            merged[key] = value
    found_in = "rope_parameters"
    for name in ("rope_parameters", "rope_scaling"):
        inner = entries.take(name, None)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            raise entries.refused(name, inner, "should be an object")
        found_in = name
        for key, value in _one_form(inner).items():
            if key != _ORIGINAL and merged.setdefault(key, value) != value:
                raise entries.refused(name, inner, f"contradicts {key} {merged[key]!r} elsewhere in the file")
            merged.setdefault(key, value)  # values outside the object win
    return merged, found_in


def read_parameters(parameters: Mapping[str, Any], name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads our fields of a rotary embedding from an object of parameters.

    Args:
        name: the name of the object, for error messages.
        fields: our fields read so far, including the sizes of heads.

    Raises:
        ConversionError: a parameter is unknown, missing or not supported.
    """
    entries = Entries(parameters, f"{name}.")
    rope_type = entries.take("rope_type", "default")
    kind = _NAMES.get(rope_type) if isinstance(rope_type, str) else None
    if kind is None:
        raise entries.refused("rope_type", rope_type, f"is not among {', '.join(_NAMES)}")
    read: dict[str, Any] = {
        "rotary_base": _numbers(entries, "rope_theta", entries.take("rope_theta")),
        "rotary_percent": _numbers(entries, "partial_rotary_factor", entries.take("partial_rotary_factor", 1.0)),
        "rope_scaling_type": kind,
    }
    for theirs, ours in _KEYS[kind].items():
        value = entries.take(theirs) if theirs in _REQUIRED else entries.take(theirs, None)
        if value is not None:
            is_count = theirs == _ORIGINAL and type(value) is int
            read[ours] = value if is_count else _numbers(entries, theirs, value, theirs in _LISTS)
    width = fields.get("kv_channels", fields["hidden_size"] // fields["num_attention_heads"])
    width = fields.get("qk_pos_emb_head_dim", width)
    if int(width * read["rotary_percent"]) % 2:
        what = f"rotates {int(width * read['rotary_percent'])} of {width} channels, not a number of pairs"
        raise entries.refused("partial_rotary_factor", read["rotary_percent"], what)
    if kind == "yarn":
        rounded = entries.take("truncate", True)
        if type(rounded) is not bool:
            raise entries.refused("truncate", rounded, "should be true or false")
        if not rounded:
            read["yarn_correction_range_round_to_int"] = False
    entries.skip("truncate", _ORIGINAL, "finetuned", "type")
    _read_attention_factor(entries, kind, read, fields)
    entries.check_all_read()
    return read


def write_parameters(model: ModelConfig) -> dict[str, Any]:
    """The object of parameters of an architecture."""
    kind = model.rope_scaling_type
    written: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind, "rope_theta": model.rotary_base}
    for theirs, ours in _KEYS[kind].items():
        value = getattr(model, ours)
        if value is None and theirs == _ORIGINAL:
            value = model.max_position_embeddings
        if value is not None:
            written[theirs] = list(value) if isinstance(value, tuple) else value
    if kind == "yarn" and not model.yarn_correction_range_round_to_int:
        written["truncate"] = False
    if kind == "yarn" and model.multi_latent_attention and model.mscale_all_dim:
        written |= {"mscale": model.mscale, "mscale_all_dim": model.mscale_all_dim}
    return written


def _one_form(parameters: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in parameters.items() if value is not None}
    kind = given.pop("type", None)
    if kind is not None:
        given.setdefault("rope_type", kind)
    return given


def _read_attention_factor(entries: Entries, kind: str, read: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Reads alternatives to `attention_factor`: yarn's `mscale`, and a non-default `factor` of longrope."""
    # With latent attention, `mscale_all_dim` also scales the scores; cosine and sine depend on both, or on neither if
    # one is missing or 0.
    is_open = "rope_attention_factor" not in read
    if kind == "yarn":
        mscale, over_all = (_numbers(entries, name, entries.take(name, 0)) for name in ("mscale", "mscale_all_dim"))
        factor = read["rope_scaling_factor"]
        if fields.get("multi_latent_attention") and over_all:
            read |= {"mscale": mscale or 1.0, "mscale_all_dim": over_all}
            if not mscale and is_open:
                read["rope_attention_factor"] = yarn_magnitude(factor, 1.0)
        elif mscale and over_all and is_open:
            read["rope_attention_factor"] = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, over_all)
    if kind == "longrope":
        factor = entries.take("factor", None)
        original = read.get("rope_original_max_positions", fields["max_position_embeddings"])
        factor = None if factor is None else _numbers(entries, "factor", factor)
        if factor is not None and is_open:
            read["rope_attention_factor"] = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _numbers(entries: Entries, name: str, value: Any, is_list: bool = False) -> Any:
    """Converts a parameter to a float, or to a tuple of floats."""
    values = value if is_list and isinstance(value, list) else [value]
    is_wrong = is_list != isinstance(value, list) or name == _ORIGINAL
    if is_wrong or not all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in values):
        what = "a list of numbers" if is_list else "an integer" if name == _ORIGINAL else "a number"
        raise entries.refused(name, value, f"should be {what}")
    return tuple(map(float, values)) if is_list else float(value)
