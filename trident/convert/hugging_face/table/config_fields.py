"""How fields of a `config.json` correspond to fields of the architecture: rules that read and write.

Every field of a `config.json` is read by a rule, known to be irrelevant, or refused with its value, because a field
that is ignored may change the logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config import ModelConfig
from megatron.config.flags.fields import flags_of
from megatron.errors import ConversionError

REQUIRED: Any = object()  # in place of a default

# Fields of every family that say nothing about the network: how texts are generated, who wrote the file.
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
# Fields of every family that must have their usual value.
_USUAL_EVERYWHERE: Mapping[str, Any] = {"is_encoder_decoder": False, "is_decoder": False, "add_cross_attention": False}


class Entries:
    """The fields of a `config.json`, or of an object in it: each is handed out and counted as read.

    Args:
        place: what comes before the names in error texts, such as "rope_parameters.".
    """

    def __init__(self, values: Mapping[str, Any], place: str = "") -> None:
        self._values = values
        self._read: set[str] = set()
        self._place = place

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """The value of a field, or the default where it is absent or null.

        Raises:
            ConversionError: it is absent and has no default.
        """
        self._read.add(name)
        value = self._values.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ConversionError(
                f"config.json has no {self._place}{name}, which this family needs. Take the config.json that was "
                "published with the weights."
            )
        return default

    def positive(
        self, name: str, default: Any, kinds: tuple[type, ...] = (int, float), what: str = "a positive number"
    ) -> Any:
        """The value of a field that must be above 0 where it is there.

        Raises:
            ConversionError: it is not, or of another kind.
        """
        value = self.take(name, default)
        if value is not None and (type(value) not in kinds or value <= 0):
            raise self.refused(name, value, f"should be {what}")
        return value

    def is_null(self, name: str) -> bool:
        """Whether a field is there and null, which some families tell from an absent one."""
        return name in self._values and self._values[name] is None

    def has(self, name: str) -> bool:
        """Whether a field is there and not null; does not count as reading it."""
        return self._values.get(name) is not None

    def inner(self, name: str) -> Entries | None:
        """The fields of an object; None if it is absent or null.

        Raises:
            ConversionError: it is something else.
        """
        self._read.add(name)
        return Entries(self.object(name), f"{self._place}{name}.") if self.has(name) else None

    def object(self, name: str) -> Mapping[str, Any]:
        """The value of a field that must be an object.

        Raises:
            ConversionError: it is absent, or something else.
        """
        value = self.take(name)
        if not isinstance(value, Mapping):
            raise self.refused(name, value, "should be an object")
        return value

    def skip(self, *names: str) -> None:
        """Counts fields as read that do not matter."""
        self._read.update(names)

    def check_only(self, name: str, allowed: Sequence[Any], default: Any = None) -> None:
        """Checks that a field is absent or has one of the values that can be expressed.

        Raises:
            ConversionError: it has another one.
        """
        value = self.take(name, default)
        if value is not None and value not in allowed:
            shown = " or ".join(json.dumps(item) for item in allowed)
            raise self.refused(name, value, f"is supported only as {shown}")

    def refused(self, name: str, value: Any, why: str) -> ConversionError:
        """The error for a value that cannot be expressed."""
        shown = json.dumps(value, default=str)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return ConversionError(f'config.json has "{self._place}{name}": {shown}, which {why}.')

    def check_all_read(self) -> None:
        """Checks that nothing is left that no rule knows; null says nothing.

        Raises:
            ConversionError: a field is unknown.
        """
        for name, value in self._values.items():
            if name not in self._read and value is not None:
                why = "no rule of this family knows; remove it from the file if the logits do not depend on it"
                if name == "quantization_config":  # without the key the stored numbers would be taken for weights
                    why = "says that the weights are quantized; dequantize the model with transformers and save it"
                raise self.refused(name, value, why)


@dataclass(frozen=True)
class FieldRule:
    """How some fields correspond, in both directions.

    Args:
        read: our fields, from theirs and from our fields that earlier rules have read; None if it only checks theirs.
        write: their fields, from ours; what is not written is noticed when the result is read back.
        names: our name and theirs, where the rule is about one field with two names.
    """

    read: Callable[[Entries, Mapping[str, Any]], Mapping[str, Any] | None]
    write: Callable[[ModelConfig], Mapping[str, Any]] = lambda model: {}
    names: tuple[str, str] = ("", "")


def same(
    ours: str, theirs: str, default: Any | Callable[[Mapping[str, Any]], Any] = REQUIRED, also: tuple[str, ...] = ()
) -> FieldRule:
    """A field that both have, by different names.

    Args:
        default: their value where the field is absent or null: a value, or a function of our fields read so far.
        also: other names of the same field in some files; one of the names is given.
    """

    def read(entries: Entries, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        usual = default(fields) if callable(default) else default
        for name in also:
            usual = entries.take(name, usual)
        value = entries.take(theirs, usual)
        wanted = _OUR_TYPES.get(ours, int)
        if value is not None and (type(value), wanted) not in ((wanted, wanted), (int, float)):
            raise entries.refused(theirs, value, f"should be {_TYPE_WORDS[wanted]}")
        return {ours: float(value) if wanted is float and value is not None else value}

    return FieldRule(read, lambda model: {theirs: getattr(model, ours)}, (ours, theirs))


def mapped(ours: str, theirs: str, pairs: Sequence[tuple[Any, Any]], default: Any = REQUIRED) -> FieldRule:
    """A field that both have, with other words for its values.

    Args:
        pairs: (their value, our value); where ours comes twice, the first is written.
        default: their value where the field is absent or null.
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
    """Our fields that have one value in this family; nothing in `config.json` says so."""
    return FieldRule(lambda entries, fields: values)


def only(theirs: str, *allowed: Any, is_written: bool = True) -> FieldRule:
    """Their field that must have one of these values (or be absent); the first is written, unless absence says it."""
    return FieldRule(
        lambda entries, fields: entries.check_only(theirs, allowed),
        lambda model: {theirs: allowed[0]} if is_written else {},
    )


def irrelevant(*theirs: str) -> FieldRule:
    """Their fields that do not change the logits; they are not written."""
    return FieldRule(lambda entries, fields: entries.skip(*theirs))


def tied_head(default: bool) -> FieldRule:
    """The rule for `tie_word_embeddings`; `default` is the family's value where the field is absent."""
    return mapped("untie_embeddings_and_output_weights", "tie_word_embeddings", ((True, False), (False, True)), default)


def attention_biases(default: bool = False, *, elsewhere: bool = False) -> FieldRule:
    """The rule for `attention_bias`: the biases of queries, keys, values and output.

    Args:
        default: the family's value where the field is absent.
        elsewhere: whether the other matrices have biases.
    """

    def read(entries: Entries, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        biases = entries.take("attention_bias", default)
        return {"add_bias_linear": elsewhere, "add_qkv_bias": biases, "attention_output_bias": biases}

    return FieldRule(read, lambda model: {"attention_bias": model.add_qkv_bias})


# (their name, our name); where a family writes another word for one, it has its own pairs.
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
    """Our fields of the architecture, from a `config.json`.

    Raises:
        ConversionError: a field is missing, unknown, or has a value that cannot be expressed.
    """
    entries = Entries(config)
    entries.skip(*IRRELEVANT_EVERYWHERE)
    for name, usual in _USUAL_EVERYWHERE.items():
        entries.check_only(name, (usual,))
    fields: dict[str, Any] = {}
    for rule in rules:
        fields.update(rule.read(entries, fields) or {})
    entries.check_all_read()
    return fields


def write_fields(rules: Sequence[FieldRule], model: ModelConfig) -> dict[str, Any]:
    """The fields of a `config.json`, from our architecture."""
    written: dict[str, Any] = {}
    for rule in rules:
        written.update(rule.write(model))
    return {name: list(value) if isinstance(value, tuple) else value for name, value in written.items()}


_TYPE_WORDS: Mapping[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
_OUR_TYPES: Mapping[str, type] = {flag.field: flag.element for flag in flags_of(ModelConfig) if not flag.is_tuple}
