"""Flags of published launch scripts that set other fields, such as `--swiglu`.

Each row of `_SHORTHANDS` has the values that a flag sets, which must not contradict explicit flags, and defaults for
fields that are not set otherwise.

Source: bigscience-workshop/Megatron-DeepSpeed and deepspeedai's fork, `megatron/arguments.py` and
`megatron/model/transformer.py`; NVIDIA Megatron-LM `megatron/training/arguments.py`.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config.flags.blends import MOCK_DATA
from megatron.config.flags.fields import Flag, FlagFacts
from megatron.errors import ConfigError

_MAX_ENTRIES = 10_000


def read_pattern(option: str, text: str, num_layers: int | None) -> int | tuple[int, ...]:
    """Reads a number, or a list of zeros and ones that may be written with `+`, `*` and parentheses.

    Args:
        option: the flag, for the message.
        text: the value, which is parsed but never executed.
        num_layers: expected length of a list, if known.

    Raises:
        ConfigError: it is neither, or the list has another length.

    Source: NVIDIA Megatron-LM `megatron/training/arguments.py`, `moe_freq_type`.
    """
    try:
        pattern = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pattern = None
    if isinstance(pattern, int) and 1 <= pattern <= _MAX_ENTRIES:
        return pattern
    if not isinstance(pattern, tuple) or not pattern or not set(pattern) <= {0, 1}:
        raise ConfigError(
            f"{option} {text} is not a layer pattern. Expected a number from 1 to {_MAX_ENTRIES}, or a list of 0 and 1 "
            "such as ([0]*1+[1]*3)*2."
        )
    if num_layers is not None and len(pattern) != num_layers:
        raise ConfigError(
            f"{option} {text} has {len(pattern)} entries, but --num-layers is {num_layers}. Give one entry per layer."
        )
    return pattern


def shortest_period(pattern: tuple[int, ...]) -> tuple[int, ...]:
    """The shortest pattern that gives the same layers when repeated; empty if all entries are 1."""
    if set(pattern) == {1}:
        return ()
    for length in range(1, len(pattern)):
        if len(pattern) % length == 0 and pattern[:length] * (len(pattern) // length) == pattern:
            return pattern[:length]
    return pattern


def _value(node: ast.expr) -> int | tuple[int, ...]:
    """Evaluates numbers, lists, sums of lists and multiples of lists.

    Raises:
        ValueError: the expression is anything else, or too long.
    """
    match node:
        case ast.Constant(value=number) if type(number) is int:
            return number
        case ast.List(elts=items):
            entries = tuple(value for value in map(_value, items) if isinstance(value, int))
            if len(entries) == len(items):
                return entries
        case ast.BinOp():
            match node.op, _value(node.left), _value(node.right):
                case ast.Add(), tuple() as left, tuple() as right:
                    return left + right
                case ast.Mult(), tuple() as left, int() as times if 0 <= len(left) * times <= _MAX_ENTRIES:
                    return left * times
    raise ValueError("not a pattern")


Values = Mapping[str, Any]

_PREFIX = "shorthand."
_MODEL = "model."
_LLAMA3_SCALING: Mapping[str, float] = types.MappingProxyType(
    {"rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0, "rope_original_max_positions": 8192}
)
_GLU_ACTIVATIONS: Mapping[str, str] = types.MappingProxyType(
    {"geglu": "gelu", "reglu": "relu", "liglu": "linear", "swiglu": "silu"}
)


@dataclass(frozen=True)
class Expansion:
    """The fields that a flag sets: fields of the model by name, others as "section.name".

    Attributes:
        values: values that the flag sets.
        defaults: values for fields that are not set otherwise.
    """

    values: Values = field(default_factory=dict)
    defaults: Values = field(default_factory=dict)


_Expand = Callable[[Any, Values], Expansion]


@dataclass(frozen=True)
class Shorthand:
    """A flag and its expansion, a function of its value and of the known values of the model."""

    flag: Flag
    expand: _Expand


def shorthand_flags() -> dict[str, Shorthand]:
    """The shorthands by destination `shorthand.name`."""
    return {f"{_PREFIX}{entry.flag.field}": entry for entry in _SHORTHANDS}


def expand_shorthands(
    layers: Sequence[Values], *, with_defaults: bool = True
) -> tuple[list[dict[str, Any]], list[str]]:
    """Replaces the shorthands by the fields they set.

    Args:
        layers: values by destination, in order of precedence, the command line last. Within a layer a shorthand and a
            field must not contradict each other; between layers the later one wins.
        with_defaults: True to set the defaults of shorthands for fields that are not set otherwise.

    Returns:
        The layers without shorthands, and a sentence for every contradiction or unknown value.
    """
    table, problems = shorthand_flags(), []
    fields = {name: value for layer in layers for name, value in layer.items() if name not in table}
    expanded: list[dict[str, Any]] = []
    used: list[tuple[dict[str, Any], Shorthand, Any]] = []
    for layer in layers:
        full = {name: value for name, value in layer.items() if name not in table}
        sources: dict[str, str] = {}
        for name, entry in table.items():
            if layer.get(name, False) is False:
                continue
            try:
                expansion = entry.expand(layer[name], _of_model({**fields, **full}))
            except ConfigError as failure:
                problems.extend(failure.problems)
                continue
            used.append((full, entry, layer[name]))
            problems += _apply(entry.flag.positive_name, expansion.values, full, sources)
        fields.update(full)
        expanded.append(full)
    for full, entry, value in used if with_defaults else []:
        for key, default in entry.expand(value, _of_model(fields)).defaults.items():
            if _MODEL + key not in fields:
                full[_MODEL + key] = default
    return expanded, problems


def _of_model(values: Values) -> dict[str, Any]:
    return {name.removeprefix(_MODEL): value for name, value in values.items() if name.startswith(_MODEL)}


def _apply(option: str, values: Values, full: dict[str, Any], sources: dict[str, str]) -> list[str]:
    """Writes the values of a shorthand into a layer; returns a sentence for each contradiction."""
    problems = []
    for key, value in values.items():
        name, target = key if "." in key else _MODEL + key, "--" + key.rpartition(".")[2].replace("_", "-")
        if name in full and full[name] != value:
            other = sources.get(name, f"{target} {_shown(full[name])}")
            problems.append(
                f"{option} cannot be combined with {other}: it sets {target} {_shown(value)}. Drop one of them."
            )
            continue
        full[name] = value
        sources[name] = option
    return problems


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _swiglu(value: Any, known: Values) -> Expansion:
    width = known.get("hidden_size", 0) // 24 * 64  # 8/3 of it, down to a multiple of 64
    return Expansion(
        {"activation_function": "silu", "gated_linear_unit": True}, {"ffn_hidden_size": width} if width else {}
    )


def _glu_activation(value: str, known: Values) -> Expansion:
    if value not in _GLU_ACTIVATIONS:
        raise ConfigError(f"--glu-activation {value} is unknown. Use one of: {', '.join(_GLU_ACTIVATIONS)}.")
    return Expansion({"activation_function": _GLU_ACTIVATIONS[value], "gated_linear_unit": True})


def _no_position_embedding(value: Any, known: Values) -> Expansion:
    """With RoPE or ALiBi there is no position embedding anyway."""
    if known.get("position_embedding_type") in ("rope", "alibi"):
        return Expansion()
    return Expansion({"position_embedding_type": "none"})


def _rope_type(value: str, known: Values) -> Expansion:
    if value not in ("rope", "yarn"):
        raise ConfigError(f"--rope-type {value} is unknown. Use one of: rope, yarn.")
    scaling = {"rope_scaling_factor": 1.0, "rope_original_max_positions": 4096} if value == "yarn" else {}
    return Expansion({"rope_scaling_type": "yarn" if value == "yarn" else "none"}, scaling)


def _window_size(arguments: tuple[str, ...], known: Values) -> Expansion:
    """Upstream does not count the token itself: (127, 0) is a window of 128."""
    parts = " ".join(arguments).strip("()[] ").replace(",", " ").split()
    try:
        left, right = (int(part) for part in parts)
    except ValueError:
        left, right = -2, 0
    if left < -1 or (right != 0 and (left, right) != (-1, -1)):
        raise ConfigError(
            f"--window-size {' '.join(arguments)} is not a causal window. Expected the number of earlier tokens and 0, "
            "for example 127,0."
        )
    return Expansion({"attention_window": None if left == -1 else left + 1})


def _every(option: str, field_name: str, lone: int, *, lone_first: bool = False, flipped: bool = False) -> _Expand:
    """Returns an expansion: N gives every N-th layer the entry `lone`; a list gives the entries themselves.

    Args:
        option: the flag.
        field_name: the pattern field that it sets.
        lone: entry of every N-th layer, opposite to the others'.
        lone_first: True if the first of N layers has it, False if the last.
        flipped: True if a list has 1 where the pattern has 0.
    """

    def expand(value: Any, known: Values) -> Expansion:
        text = " ".join(value) if isinstance(value, tuple) else str(value)
        pattern = read_pattern(option, text, known.get("num_layers"))
        if isinstance(pattern, int):
            others = (1 - lone,) * (pattern - 1)
            pattern = (lone, *others) if lone_first else (*others, lone)
        elif flipped:
            pattern = tuple(1 - entry for entry in pattern)
        return Expansion({field_name: shortest_period(pattern)})

    return expand


# Values of Megatron-LM's flag -> scope of the load-balancing loss.
_BALANCING: Mapping[str, str] = types.MappingProxyType(
    {"aux_loss": "micro_batch", "seq_aux_loss": "sample", "global_aux_loss": "global"}
)


def _load_balancing(value: str, known: Values) -> Expansion:
    if value == "none":
        return Expansion({"moe_aux_loss_coeff": 0.0})
    if value in ("sinkhorn", "quantile_balancing"):
        raise ConfigError(
            f"--moe-router-load-balancing-type {value} is not supported: it assigns experts over a whole micro-batch, "
            "which is impossible in token-by-token generation. Use aux_loss, or none with "
            "--moe-router-enable-expert-bias."
        )
    if value not in _BALANCING:
        raise ConfigError(
            f"--moe-router-load-balancing-type {value} is unknown. Use one of: {', '.join(_BALANCING)}, none."
        )
    return Expansion({"moe_aux_loss_scope": _BALANCING[value]})


def _topk(value: int, known: Values) -> Expansion:
    """In the fork with this flag, the weight of a single expert is its score among all experts."""
    is_single = value == 1 and _is_routed(known) and _has_softmax(known)
    return Expansion({"moe_router_topk": value}, {"moe_router_pre_softmax": True} if is_single else {})


def _has_softmax(known: Values) -> bool:
    return known.get("moe_router_score_function", "softmax") == "softmax"


def _mlp_type(value: str, known: Values) -> Expansion:
    """Residual experts, which the fork with this flag combines with one routed expert."""
    if value not in ("standard", "residual"):
        raise ConfigError(f"--mlp-type {value} is unknown. Use one of: standard, residual.")
    is_residual = value == "residual" and _is_routed(known)
    alone = is_residual and known.get("moe_router_topk", 1) == 1 and _has_softmax(known)
    defaults = {"moe_router_topk": 1} if is_residual else {}
    return Expansion(
        {"moe_residual": value == "residual"}, {**defaults, **({"moe_router_pre_softmax": True} if alone else {})}
    )


def _is_routed(known: Values) -> bool:
    experts = known.get("num_experts", 1)
    return (max(experts) if isinstance(experts, tuple) else experts) > 1


def _interpolation(value: float, known: Values) -> Expansion:
    return Expansion({"rope_scaling_type": "linear", "rope_scaling_factor": value})


def _always(values: Values, defaults: Values | None = None) -> _Expand:
    return lambda value, known: Expansion(values, defaults or {})


def _row(name: str, element: type, expand: _Expand, help: str, *, many: bool = False) -> Shorthand:
    facts, default = FlagFacts(help=help, once=many), False if element is bool else None
    return Shorthand(Flag(name, element, facts, default, required=False, is_tuple=many, count=None), expand)


# In order of expansion: --no-position-embedding depends on earlier ones.
_SHORTHANDS: tuple[Shorthand, ...] = (
    _row("swiglu", bool, _swiglu,
         "SwiGLU; --ffn-hidden-size is 8/3 x hidden size, rounded down to a multiple of 64, if unset"),
    _row("glu_activation", str, _glu_activation, "gated linear unit: geglu (exact GELU), reglu, liglu (no activation) "
         "or swiglu; --ffn-hidden-size stays 4 x hidden size"),
    _row("squared_relu", bool, _always({"activation_function": "squared_relu"}),
         "same as --activation-function squared_relu"),
    _row("quick_geglu", bool, _always({"activation_function": "quick_gelu", "gated_linear_unit": True}),
         "same as --activation-function quick_gelu --gated-linear-unit"),
    _row("disable_bias_linear", bool, _always({"add_bias_linear": False}, {"bias_gelu_fusion": False}),
         "no biases in linear layers, except with --add-qkv-bias; exact GELU"),
    _row("group_query_attention", bool, _always({}, {"num_query_groups": 1}),
         "grouped-query attention with --num-query-groups, or 1 if unset"),
    _row("use_rotary_position_embeddings", bool, _always({"position_embedding_type": "rope"}),
         "same as --position-embedding-type rope"),
    _row("no_position_embedding", bool, _no_position_embedding, "no position embedding; RoPE and ALiBi are kept"),
    _row("use_rope_scaling", bool, _always({"rope_scaling_type": "llama3"}, _LLAMA3_SCALING),
         "same as --rope-scaling-type llama3, with an original context of 8192"),
    _row("rope_type", str, _rope_type,
         "RoPE of latent attention: rope, or yarn with an original context of 4096"),
    _row("rotary_seq_len_interpolation_factor", float, _interpolation,
         "same as --rope-scaling-type linear with this --rope-scaling-factor"),
    _row("no_rope_freq", str, _every("--no-rope-freq", "rope_layer_pattern", 0, flipped=True),
         "N: every N-th layer has no RoPE; or a list with 1 for layers without RoPE", many=True),
    _row("window_size", str, _window_size, "L,0: sliding window of L earlier tokens and the token itself", many=True),
    _row("window_attn_skip_freq", str, _every("--window-attn-skip-freq", "attention_window_pattern", 0),
         "N: every N-th layer has full attention; or a list with 1 for sliding-window layers", many=True),
    _row("moe_layer_freq", str, _every("--moe-layer-freq", "moe_layer_pattern", 1, lone_first=True),
         "N: the first of every N layers is an MoE layer; or a list with 1 for MoE layers", many=True),
    _row("expert_interval", int, _every("--expert-interval", "moe_layer_pattern", 1),
         "the last of every N layers is an MoE layer"),
    _row("mock_data", bool, _always({"data.data_path": (MOCK_DATA,)}),
         f"same as --data-path {MOCK_DATA}: random token ids, the same in every layout"),
    _row("topk", int, _topk, "same as --moe-router-topk, with --moe-router-pre-softmax if 1"),
    _row("mlp_type", str, _mlp_type, "standard, or residual: --moe-residual, with --moe-router-topk 1 if unset"),
    _row("moe_router_load_balancing_type", str, _load_balancing,
         "load balancing: aux_loss, seq_aux_loss or global_aux_loss (--moe-aux-loss-scope), or none (coefficient 0)"),
)  # fmt: skip
