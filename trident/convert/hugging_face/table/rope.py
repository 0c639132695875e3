"""Fields of rotary positions: base, rotated share, and the scaling of frequencies, in every form that is in use.

Older files have `rope_theta` and `rope_scaling`, newer ones `rope_parameters` with all of it; both forms are written.
Where a file has both, the same key must not have two values.

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
_NEEDED = ("factor", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor")


def rope_fields(
    default_theta: float = 10000.0,
    default_percent: float | None = None,
    *,
    theta_name: str = "rope_theta",
    percent_name: str = "partial_rotary_factor",
) -> FieldRule:
    """The rule for one kind of rotation in all layers.

    Args:
        default_theta: the family's base where the file does not say it.
        default_percent: the share of each head that is rotated where the file does not say it; None if the family
            always rotates whole heads, whatever its files say.
        theta_name: what the family's older files call the base.
        percent_name: what they call the share.
    """

    def read(entries: Entries, fields: Mapping[str, Any]) -> dict[str, Any]:
        merged, place = merged_parameters(entries, theta_name, percent_name)
        merged.setdefault("rope_theta", default_theta)
        percent = merged.setdefault("partial_rotary_factor", default_percent or 1.0)
        if default_percent is None and percent != 1.0:
            raise entries.refused(percent_name, percent, "this family ignores; it rotates whole heads")
        return {"position_embedding_type": "rope", **read_parameters(merged, place, fields)}

    def write(model: ModelConfig) -> dict[str, Any]:
        if not model.uses_rope:
            return {}
        parameters = write_parameters(model)
        older = {theta_name: model.rotary_base}
        if default_percent is not None:
            parameters["partial_rotary_factor"] = older[percent_name] = model.rotary_percent
        # Readers of the older form take the base from outside the object.
        scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
        scaled = parameters["rope_type"] != "default"
        older_scaling = {"type": parameters["rope_type"], **scaling} if scaled else None
        return {"rope_parameters": parameters, **older, "rope_scaling": older_scaling}

    return FieldRule(read, write)


def merged_parameters(entries: Entries, theta_name: str, percent_name: str) -> tuple[dict[str, Any], str]:
    """The parameters of the rotation from all the places they are in, and the place that scaling was found in.

    Raises:
        ConversionError: two places contradict each other.
    """
    merged: dict[str, Any] = {}
    outside = ((theta_name, "rope_theta"), (percent_name, "partial_rotary_factor"), (_ORIGINAL, _ORIGINAL))
    for name, key in outside:
        value = entries.take(name, None)
        if value is not None:
            merged[key] = value
    place = "rope_parameters"
    for name in ("rope_parameters", "rope_scaling"):
        inner = entries.take(name, None)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            raise entries.refused(name, inner, "should be an object")
        place = name
        for key, value in _one_form(inner).items():
            if key != _ORIGINAL and merged.setdefault(key, value) != value:
                raise entries.refused(name, inner, f"contradicts {key} {merged[key]!r} elsewhere in the file")
            merged.setdefault(key, value)  # a number outside the object wins over one in it
    return merged, place


def read_parameters(parameters: Mapping[str, Any], place: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Our fields of a rotation, from one object of parameters.

    Args:
        place: the name of the object, for error texts.
        fields: our fields read so far, the sizes of heads among them.

    Raises:
        ConversionError: a parameter is unknown, missing, or cannot be expressed.
    """
    entries = Entries(parameters, f"{place}.")
    name = entries.take("rope_type", "default")
    kind = _NAMES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise entries.refused("rope_type", name, f"is not among {', '.join(_NAMES)}")
    read: dict[str, Any] = {
        "rotary_base": _numbers(entries, "rope_theta", entries.take("rope_theta")),
        "rotary_percent": _numbers(entries, "partial_rotary_factor", entries.take("partial_rotary_factor", 1.0)),
        "rope_scaling_type": kind,
    }
    for theirs, ours in _KEYS[kind].items():
        value = entries.take(theirs) if theirs in _NEEDED else entries.take(theirs, None)
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
    """One object of parameters."""
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
    """What replaces `attention_factor`: yarn's `mscale`, and a `factor` of longrope other than the usual one.

    Under latent attention `mscale_all_dim` changes the scores as well; cosine and sine follow from both weights, or
    from none of them if one is absent or 0.
    """
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
    """A parameter as a float, or as a tuple of them."""
    values = value if is_list and isinstance(value, list) else [value]
    is_wrong = is_list != isinstance(value, list) or name == _ORIGINAL
    if is_wrong or not all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in values):
        what = "a list of numbers" if is_list else "an integer" if name == _ORIGINAL else "a number"
        raise entries.refused(name, value, f"should be {what}")
    return tuple(map(float, values)) if is_list else float(value)
