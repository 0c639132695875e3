"""Bidirectional rules between fields of a `config.json` and fields of the architecture.

Every field of a `config.json` is read by a rule, declared irrelevant, or rejected with its value: an ignored field may
change the logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config import ModelConfig
from megatron.config.flags.fields import flags_of
from megatron.errors import ConversionError

REQUIRED: Any = object()  # marks a field without default

# Fields of every family that do not describe the network, such as generation settings.
IRRELEVANT_EVERYWHERE = frozenset(
    """
    model_type architectures _name_or_path name_or_path transformers_version torch_dtype dtype use_cache auto_map
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id cls_token_id
    task_specific_params id2label label2id num_labels problem_type finetuning_task
    output_hidden_states output_attentions return_dict torchscript pruned_heads chunk_size_feed_forward
    gradient_checkpointing _attn_implementation attn_implementation _attn_implementation_internal
    max_length min_length max_new_tokens do_sample temperature top_k top_p typical_p num_beams num_beam_groups
    diversity_penalty length_penalty early_stopping repetition_penalty encoder_no_repeat_ngram_size
    no_repeat_ngram_size num_return_sequences bad_words_ids suppress_tokens begin_suppress_tokens
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
    return_dict_in_generate output_scores use_bfloat16 tokenizer_class prefix tf_legacy_loss
    unsloth_fixed unsloth_version
    """.split()  # noqa: SIM905 (one name a line would take sixty)
)
# Fields of every family that must have their default.
_DEFAULT_EVERYWHERE: Mapping[str, Any] = {
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
}


class Entries:
    """The fields of a `config.json`, or of an object in it; tracks the fields that were read.

    Args:
        prefix: prefix of the names in error messages, such as "rope_parameters.".
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._read: set[str] = set()
        self._prefix = prefix

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """The value of a field, or the default if it is missing or null.

        Raises:
            ConversionError: it is missing and has no default.
        """
        self._read.add(name)
        value = self._values.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ConversionError(
                f"config.json has no {self._prefix}{name}, which this family requires. Use the config.json that was "
                "published with the weights."
            )
        return default

    def positive(
        self, name: str, default: Any, kinds: tuple[type, ...] = (int, float), what: str = "a positive number"
    ) -> Any:
        """The value of a field that must be positive if present.

        Raises:
            ConversionError: it is not positive, or has another type.
        """
        value = self.take(name, default)
        if value is not None and (type(value) not in kinds or value <= 0):
            raise self.refused(name, value, f"should be {what}")
        return value

    def is_null(self, name: str) -> bool:
        """True if a field is present and null, which some families distinguish from a missing field."""
        return name in self._values and self._values[name] is None

    def has(self, name: str) -> bool:
        """True if a field is present and not null; does not mark it as read."""
        return self._values.get(name) is not None

    def inner(self, name: str) -> Entries | None:
        """The fields of an object; None if it is missing or null.

        Raises:
            ConversionError: it is something else.
        """
        self._read.add(name)
        return Entries(self.object(name), f"{self._prefix}{name}.") if self.has(name) else None

    def object(self, name: str) -> Mapping[str, Any]:
        """The value of a field that must be an object.

        Raises:
            ConversionError: it is missing, or something else.
        """
        value = self.take(name)
        if not isinstance(value, Mapping):
            raise self.refused(name, value, "should be an object")
        return value

    def skip(self, *names: str) -> None:
        """Marks irrelevant fields as read."""
        self._read.update(names)

    def check_only(self, name: str, allowed: Sequence[Any], default: Any = None) -> None:
        """Checks that a field is missing or has a supported value.

        Raises:
            ConversionError: it has another value.
        """
        value = self.take(name, default)
        if value is not None and value not in allowed:
            shown = " or ".join(json.dumps(item) for item in allowed)
            raise self.refused(name, value, f"is supported only as {shown}")

    def refused(self, name: str, value: Any, why: str) -> ConversionError:
        """The error for an unsupported value."""
        shown = json.dumps(value, default=str)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return ConversionError(f'config.json has "{self._prefix}{name}": {shown}, which {why}.')

    def check_all_read(self) -> None:
        """Checks that all fields were read or are null.

        Raises:
            ConversionError: a field is unknown.
        """
        for name, value in self._values.items():
            if name not in self._read and value is not None:
                why = "is unknown in this family; remove it from the file if the logits do not depend on it"
                if name == "quantization_config":  # without it, quantized numbers would be read as weights
                    why = "means that the weights are quantized; dequantize the model with transformers and save it"
                raise self.refused(name, value, why)


@dataclass(frozen=True)
class FieldRule:
    """A correspondence of fields in both directions.

    Args:
        read: returns our fields, from theirs and our fields read so far; None if it only checks.
        write: returns their fields; missing ones are detected when the result is read back.
        names: our name and theirs, for a rule of a single field.
    """

    read: Callable[[Entries, Mapping[str, Any]], Mapping[str, Any] | None]
    write: Callable[[ModelConfig], Mapping[str, Any]] = lambda model: {}
    names: tuple[str, str] = ("", "")


def same(
    ours: str, theirs: str, default: Any | Callable[[Mapping[str, Any]], Any] = REQUIRED, also: tuple[str, ...] = ()
) -> FieldRule:
    """A field with the same values under two names.

    Args:
        default: their value if the field is missing or null: a value, or a function of our fields read so far.
        also: alternative names of the field in some files.
    """

    def read(entries: Entries, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        fallback = default(fields) if callable(default) else default
        for name in also:
            fallback = entries.take(name, fallback)
        value = entries.take(theirs, fallback)
        expected = _OUR_TYPES.get(ours, int)
        if value is not None and (type(value), expected) not in ((expected, expected), (int, float)):
            raise entries.refused(theirs, value, f"should be {_TYPE_NAMES[expected]}")
        return {ours: float(value) if expected is float and value is not None else value}

    return FieldRule(read, lambda model: {theirs: getattr(model, ours)}, (ours, theirs))


def mapped(ours: str, theirs: str, pairs: Sequence[tuple[Any, Any]], default: Any = REQUIRED) -> FieldRule:
    """A field with different values on both sides.

    Args:
        pairs: (their value, our value); of several pairs with our value, the first is written.
        default: their value if the field is missing or null.
    """

    def read(entries: Entries, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        value = entries.take(theirs, default)
        for their_value, our_value in pairs:
            if value == their_value and type(value) is type(their_value):
                return {ours: our_value}
        known = ", ".join(json.dumps(their_value) for their_value, _ in pairs)
        raise entries.refused(theirs, value, f"is not among the supported values {known}")

    def write(model: ModelConfig) -> Mapping[str, Any]:
        value = getattr(model, ours)
        return next(({theirs: their_value} for their_value, our_value in pairs if our_value == value), {})

    return FieldRule(read, write)


def constant(**values: Any) -> FieldRule:
    """Our fields with a fixed value in this family, independent of `config.json`."""
    return FieldRule(lambda entries, fields: values)


def only(theirs: str, *allowed: Any, is_written: bool = True) -> FieldRule:
    """Their field that must be missing or have one of these values; the first is written if `is_written`."""
    return FieldRule(
        lambda entries, fields: entries.check_only(theirs, allowed),
        lambda model: {theirs: allowed[0]} if is_written else {},
    )


def irrelevant(*theirs: str) -> FieldRule:
    """Their fields that do not change the logits; never written."""
    return FieldRule(lambda entries, fields: entries.skip(*theirs))


def tied_head(default: bool) -> FieldRule:
    """The rule for `tie_word_embeddings`; `default` is the family's value if the field is missing."""
    return mapped("untie_embeddings_and_output_weights", "tie_word_embeddings", ((True, False), (False, True)), default)


def attention_biases(default: bool = False, *, elsewhere: bool = False) -> FieldRule:
    """The rule for `attention_bias`: the biases of queries, keys, values and output.

    Args:
        default: the family's value if the field is missing.
        elsewhere: the other matrices have biases.
    """

    def read(entries: Entries, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        biases = entries.take("attention_bias", default)
        return {"add_bias_linear": elsewhere, "add_qkv_bias": biases, "attention_output_bias": biases}

    return FieldRule(read, lambda model: {"attention_bias": model.add_qkv_bias})


# (their name, our name); families that write other names have their own pairs.
ACTIVATION_NAMES: tuple[tuple[str, str], ...] = (
    ("silu", "silu"),
    ("swish", "silu"),
    ("gelu_new", "gelu_tanh"),
    ("gelu_pytorch_tanh", "gelu_tanh"),
    ("gelu_fast", "gelu_tanh"),
    ("gelu", "gelu"),
    ("relu", "relu"),
    ("relu2", "squared_relu"),
    ("linear", "linear"),
)


def read_fields(rules: Sequence[FieldRule], config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the fields of the architecture from a `config.json`.

    Raises:
        ConversionError: a field is missing, unknown or has an unsupported value.
    """
    entries = Entries(config)
    entries.skip(*IRRELEVANT_EVERYWHERE)
    for name, default in _DEFAULT_EVERYWHERE.items():
        entries.check_only(name, (default,))
    fields: dict[str, Any] = {}
    for rule in rules:
        fields.update(rule.read(entries, fields) or {})
    entries.check_all_read()
    return fields


def write_fields(rules: Sequence[FieldRule], model: ModelConfig) -> dict[str, Any]:
    """The fields of a `config.json` for an architecture."""
    written: dict[str, Any] = {}
    for rule in rules:
        written.update(rule.write(model))
    return {name: list(value) if isinstance(value, tuple) else value for name, value in written.items()}


_TYPE_NAMES: Mapping[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
_OUR_TYPES: Mapping[str, type] = {flag.field: flag.element for flag in flags_of(ModelConfig) if not flag.is_tuple}
