"""A model family: the table of its fields and tensors, used in both directions, and properties of its files."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.config import ModelConfig
from megatron.config.flags.fields import MUST_MATCH, as_written, resume_rule
from megatron.config.rules.checking import checked_model
from megatron.config.sections.model import unused_fields
from megatron.errors import ConfigError, ConversionError
from trident.convert.hugging_face.table.config_fields import Entries, FieldRule, read_fields, write_fields
from trident.convert.hugging_face.table.tensors import TensorMapping

_NEAR, _FAR = 3, 1000  # distances for obstacles without countable fields


@dataclass(frozen=True)
class Obstacle:
    """The reason why a family cannot express an architecture, and the number of lost fields."""

    distance: int
    text: str


@dataclass(frozen=True)
class Family:
    """A model family, for both directions; defaults are Llama's names.

    Args:
        model_type: the value of `model_type` in its `config.json`.
        architecture: the class in `architectures`.
        fields: field rules, applied in this order.
        tensors: tensor rules, at most one per tensor of ours.
        ignored_tensors: names of stored buffers; `{layer}` is any number, a trailing dot matches any suffix.
        later_layers: name prefix of additional layers after the network's in some files; `{layer}` is their number.
        optional_prefix: prefix of the names in `tensors` that some published files omit.
        head: name of the output matrix; with a tied head, a copy of the embedding.
        embedding: name of the embedding.
        text_field: for multimodal models, the field of the text network; such a family is only imported.
        older_endings: name suffixes in older files, and their present ones.
        copies: (copy, original) of tensors that some files store twice.
        padding_id: the required id of the padding token; positions are counted from it.
        with_heads: corrects the heads of a `config.json` by the names of the stored tensors.
    """

    model_type: str
    architecture: str
    fields: tuple[FieldRule, ...]
    tensors: tuple[TensorMapping, ...]
    ignored_tensors: tuple[str, ...] = (
        "model.layers.{layer}.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
    )
    later_layers: str = ""
    optional_prefix: str = ""
    head: str = "lm_head.weight"
    embedding: str = "model.embed_tokens.weight"
    text_field: str = ""
    older_endings: tuple[tuple[str, str], ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
    padding_id: int | None = None
    with_heads: Callable[[ModelConfig, Collection[str]], ModelConfig] = lambda model, names: model

    def read_config(self, config: Mapping[str, Any]) -> ModelConfig:
        """The architecture of a `config.json`.

        Raises:
            ConversionError: a field is missing, unknown or has an unsupported value.
        """
        if self.text_field:
            config = Entries(config).object(self.text_field)
        fields = read_fields(self.fields, config)
        try:
            return checked_model(ModelConfig(**fields, padded_vocab_size=fields["vocab_size"]))
        except ConfigError as failure:
            raise ConversionError(
                f"config.json describes a network that cannot be built: {failure} Use the config.json that was "
                "published with the weights."
            ) from failure

    def write_config(self, model: ModelConfig) -> dict[str, Any]:
        """The fields of a `config.json` for an architecture.

        Raises:
            ConversionError: the family cannot express it; names the flags and their values.
        """
        obstacle = self.obstacle(model)
        if obstacle is not None:
            raise ConversionError(f"a model of type {self.model_type} cannot express this network: {obstacle.text}")
        return self._written(model)

    def obstacle(self, model: ModelConfig, written: Mapping[str, Any] | None = None) -> Obstacle | None:
        """The obstacle to expressing an architecture, if any.

        Args:
            written: the fields of the `config.json`; None to write them by the rules.
        """
        if self.text_field:
            return Obstacle(_FAR, "it is multimodal, and the checkpoint has only a text network.")
        try:
            again = self.read_config(self._written(model) if written is None else written)
        except ConversionError as failure:
            return Obstacle(_NEAR, f"the written {failure}")
        ours, theirs = essential_fields(model), essential_fields(again)
        lost = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
        if not lost:
            return None
        # Fields that only one kind of positions has differ too: name the common ones.
        named = [name for name in lost if name in ours and name in theirs] or lost
        expected, actual = (
            ", ".join(as_written(f"--{name.replace('_', '-')}", fields[name]) for name in named if name in fields)
            for fields in (ours, theirs)
        )
        has = f" It has {actual}." if actual else ""
        return Obstacle(len(lost), f"it has no equivalent of {expected}.{has}")

    def _written(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **write_fields(self.fields, model),
        }

    def is_ignored(self, tensor: str) -> bool:
        """True if a stored tensor, with or without the optional prefix, is an ignored buffer."""
        patterns = [re.escape(name).replace(r"\{layer\}", "[0-9]+") for name in self.ignored_tensors]
        return any(
            re.fullmatch(pattern + (".*" if pattern.endswith(".") else ""), name)
            for pattern in patterns
            for name in (tensor, self.optional_prefix + tensor)
        )

    def is_later(self, tensor: str, layers: int) -> bool:
        """True if a stored tensor belongs to a layer after the network's `layers`."""
        before, number, _ = self.later_layers.partition("{layer}")
        match = re.match(re.escape(before) + r"([0-9]+)\.", tensor) if number else None
        return match is not None and int(match[1]) >= layers


def essential_fields(model: ModelConfig) -> dict[str, Any]:
    """The fields of an architecture that affect its logits, without unused ones."""
    fields = {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(model)
        if resume_rule(field) == MUST_MATCH
    }
    meaningless = {"add_bias_linear"}  # each kind of matrix has its own flag, derived from it
    meaningless |= {name for name in fields if "mup" in name.split("_")}  # they set learning rates and other fields
    scaling = model.rope_scaling_type if model.uses_rope else "none"
    meaningless |= unused_fields(model).keys()
    if model.rope_original_max_positions is None:
        fields["rope_original_max_positions"] = model.max_position_embeddings
    if fields["rotary_base_windowed"] is None and scaling == "none":
        fields["rotary_base_windowed"] = model.rotary_base
    if (
        model.num_experts > 1
        and not model.moe_residual
        and all(model.has_experts(layer) for layer in range(model.num_layers))
    ):
        meaningless.add("ffn_hidden_size")
    if fields["softmax_scale"] is None:
        fields["softmax_scale"] = model.kv_channels**-0.5
    for layered in ("attention_window_pattern", "rope_layer_pattern", "moe_layer_pattern"):
        pattern = fields[layered] or (1,)  # empty means 1 for each layer
        fields[layered] = tuple(pattern[layer % len(pattern)] for layer in range(model.num_layers))
    if model.attention_window is None or not any(fields["attention_window_pattern"]):
        meaningless |= {"attention_window", "attention_window_pattern", "rotary_base_windowed"}
    return {name: value for name, value in fields.items() if name not in meaningless}
