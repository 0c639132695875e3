"""Parses the command line and files of flags into a `RunRequest`, and reports all problems together."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.architecture.attention import AttentionFields
from megatron.config.architecture.encoder import EncoderFields
from megatron.config.architecture.feed_forward import ExpertFields, FeedForwardFields
from megatron.config.architecture.latent_attention import LatentAttentionFields
from megatron.config.architecture.multi_token import MultiTokenFields
from megatron.config.architecture.norms import NormFields
from megatron.config.architecture.positions import LEARNED, PositionFields
from megatron.config.files.deepspeed_file import ParsedDeepSpeedFile, governed_values
from megatron.config.files.flag_files import ParsedFlagFile, preset_path, read_config_file, read_group_files
from megatron.config.flags.command_line import ParsedCommandLine, read_command_line
from megatron.config.flags.fields import Flag, flags_of
from megatron.config.flags.legacy import DEPRECATED, IGNORING, Legacy, legacy_flags
from megatron.config.flags.program import NO_PROGRAM, Program
from megatron.config.flags.section import (
    ConfigSection,
    bound_problems,
    build_unchecked,
    missing_problems,
    relevant_problems,
)
from megatron.config.flags.shorthands import expand_shorthands, shorthand_flags
from megatron.config.flags.status_table import IGNORED, REFUSED
from megatron.config.rules.checking import request_problems, sentences
from megatron.config.rules.rule import Phase
from megatron.config.run_config import RunRequest, sections_of
from megatron.config.run_sections import DEFAULT, FILE, GIVEN, PRESET, ReadFlags
from megatron.config.sections.data import NULL_TOKENIZER
from megatron.config.sections.model import ModelRequest
from megatron.errors import ConfigError

# Help groups of the architecture in order; a group has the flags of its class that no earlier class has.
_PARTS: tuple[tuple[str, type], ...] = (
    ("model: latent attention", LatentAttentionFields),
    ("model: attention", AttentionFields),
    ("model: feed-forward", FeedForwardFields),
    ("model: experts", ExpertFields),
    ("model: positions", PositionFields),
    ("model: norms", NormFields),
    ("model: encoders", EncoderFields),
    ("model: multi-token prediction", MultiTokenFields),
    ("model: output layer, initialization and multipliers", ModelRequest),
)
_SIZE = "model: size"
_SIZES = frozenset(
    {
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "ffn_hidden_size",
        "kv_channels",
        "max_position_embeddings",
        "vocab_size",
    }
)
_TITLES: Mapping[str, str] = types.MappingProxyType(
    {
        "precision": "precision and loss scaling",
        "recompute": "activation checkpointing",
        "documents": "document boundaries",
        "loss": "training loss",
        "masking": "masked language modelling",
        "finetuning": "fine-tuning on examples",
        "distillation": "distillation from a teacher",
        "random": "randomness",
        "kernels": "kernels and compilation",
        "parallel": "parallelism",
        "optim": "optimizer, schedule and batch sizes",
        "data": "data and tokenizer",
        "files": "files of flags",
        "loading": "loading checkpoints",
        "saving": "saving checkpoints",
        "evaluation": "evaluation and text samples",
        "stopping": "exit conditions",
        "safety": "fault tolerance: hangs, bad steps and restarts",
        "report": "logging, run folder, TensorBoard and Weights & Biases",
        "watching": "progress bar, utilization and profiles",
        "planning": "plans and dry runs",
    }
)
_DESCRIPTION = "Pretrains a GPT language model with tensor, pipeline and data parallelism."


_SECTIONS = (*sections_of(RunRequest),)  # a file may group flags by section
# Values of a preset that --epochs replaces.
_LENGTHS = frozenset({"optim.train_iters", "optim.lr_warmup_iters", "optim.lr_decay_iters"})
# Mutually exclusive fields: setting one removes a program's default for the others.
_ALTERNATIVES = (
    frozenset({"optim.train_iters", "optim.train_samples", "optim.train_tokens", "finetuning.epochs"}),
    frozenset({"precision.fp16", "precision.bf16"}),
    frozenset(
        {
            "optim.lr_warmup_fraction",
            "optim.lr_warmup_iters",
            "optim.lr_warmup_samples",
            "optim.lr_warmup_tokens",
        }
    ),
    frozenset({"data.data_path", "data.train_data_path", "data.train_weighted_split_paths"}),
)


@dataclass(frozen=True)
class RequestDraft:
    """The result of parsed flags and files, valid or not.

    Attributes:
        run: the sections; with problems, values may be missing, invalid or contradictory.
        problems: one sentence each.
        wrong: names of fields without a usable value: missing, unreadable, or out of bounds.
    """

    run: ReadFlags
    problems: tuple[str, ...]
    wrong: frozenset[str]

    @property
    def sections(self) -> dict[str, ConfigSection]:
        return {name: getattr(self.run, name) for name in sections_of(RunRequest)}

    def unchecked(self) -> RunRequest:
        """The request without checks; only fields that are not in `wrong` may be used."""
        request = object.__new__(RunRequest)
        for name, value in self._fields().items():
            object.__setattr__(request, name, value)
        return request

    def request(self) -> RunRequest:
        """The checked request.

        Raises:
            ConfigError: with all problems at once.
        """
        if self.problems:
            raise ConfigError(self.problems)
        return RunRequest(**self._fields())

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self.run, field.name) for field in dataclasses.fields(RunRequest)}


@functools.cache
def field_flags() -> Mapping[str, Flag]:
    """The flags that set a field, by destination "section.field"."""
    sections = sections_of(RunRequest).items()
    return types.MappingProxyType(
        {f"{section}.{flag.field}": flag for section, cls in sections for flag in flags_of(cls)}
    )


@functools.cache
def known_flags() -> Mapping[str, Flag]:
    """All flags of the trainer by destination: flags of fields, shorthands, and flags without effect."""
    others = {name: entry.flag for table in (shorthand_flags(), legacy_flags()) for name, entry in table.items()}
    return types.MappingProxyType({**field_flags(), **others})


def parse(
    argv: Sequence[str],
    prog: str | None = None,
    program: Program = NO_PROGRAM,
) -> RunRequest:
    """Parses the trainer's command line and its files of flags; see `read_flags`.

    Raises:
        ConfigError: with all problems at once.
    """
    return read_flags(argv, prog, program).request()


def read_flags(
    argv: Sequence[str],
    prog: str | None = None,
    program: Program = NO_PROGRAM,
) -> RequestDraft:
    """Reads the trainer's command line and its files of flags, and collects the problems.

    Uses only the arguments and the files they name: no torch, no environment, no network. Prints the help and exits for
    `--help`.

    Args:
        program: fixed values, defaults and additional names of the calling program.

    Raises:
        ConfigError: a file of flags cannot be read.
    """
    fields, flags, legacy = field_flags(), known_flags(), legacy_flags()
    groups, epilog = help_groups(), _epilog(legacy)
    parsed = read_command_line(
        flags, argv, prog=prog, description=_DESCRIPTION, groups=groups, epilog=epilog, hidden=list(legacy)
    )
    merged = _merge(parsed, flags, fields, program)
    refusals, remarks = _legacy_sentences(fields, legacy, parsed.spellings, merged.values)
    values, group_problems = read_group_files(merged.values)
    values = _with_id_count(_with_yarn(_with_positions(_with_counts(fields, values))))
    run, section_problems, wrong = _build_sections(fields, values, merged, parsed.spellings)
    problems = [*merged.problems, *refusals, *group_problems, *section_problems]
    notices = [*_deprecated_notices(parsed.spellings.values()), *merged.notices]
    if not problems:
        notices += sentences(Phase.NOTICE, run)
    run = dataclasses.replace(run, notices=tuple(notices), ignored=tuple(remarks), program=program)
    return RequestDraft(run, tuple(problems), frozenset(wrong))


@dataclass(frozen=True)
class _Merged:
    """The merged values by destination, and the source of each."""

    values: dict[str, Any]
    provenance: dict[str, str]
    problems: list[str]
    notices: list[str]
    broken: set[str]


def _merge(
    parsed: ParsedCommandLine, flags: Mapping[str, Flag], fields: Mapping[str, Flag], program: Program
) -> _Merged:
    """Merges the sources of flags. In increasing order of precedence:

    1. the field's default;
    2. the program's defaults, unless a source below sets an alternative (`_ALTERNATIVES`);
    3. `--deepspeed_config`, which must not contradict the sources below (exceptions: `governed_values`);
    4. `--model-preset`, without its length of training if --epochs is set;
    5. `--config`;
    6. the command line;
    7. the program's fixed values, which must not be contradicted.

    Shorthands are expanded within their source first.
    """
    file = ParsedFlagFile()
    if "files.config" in parsed.values:
        file = read_config_file(parsed.values["files.config"], flags, _SECTIONS)
    preset = _read_preset({**file.values, **parsed.values}.get("files.model_preset"), flags)
    defaults = _applicable_defaults(program.defaults, {**preset.values, **file.values, **parsed.values})
    (defaults, by_preset, by_file, given), contradictions = expand_shorthands(
        [defaults, preset.values, file.values, parsed.values]
    )
    if "finetuning.epochs" in {**by_file, **given}:
        by_preset = {name: value for name, value in by_preset.items() if name not in _LENGTHS}
    requested, governed = {**by_preset, **by_file, **given}, ParsedDeepSpeedFile()
    if "parallel.deepspeed_config" in requested:
        governed = governed_values(requested["parallel.deepspeed_config"], fields, requested, defaults)
    known, unknown, renamed = program.with_known_names(requested, by_file.keys() - given.keys())
    by_file = {name: value for name, value in by_file.items() if name in known}
    defaults = _applicable_defaults(defaults, {name for name, value in governed.values.items() if value})
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    layers = (DEFAULT, defaults), (FILE, governed.values), (PRESET, by_preset), (FILE, by_file), (GIVEN, given)
    for source, layer in layers:
        taken = {name: value for name, value in layer.items() if name not in governed.overruled}
        values |= taken
        sources |= dict.fromkeys(taken, source)
    problems = [*parsed.problems, *file.problems, *preset.problems, *contradictions, *governed.problems, *unknown]
    for name, fixed in program.fixed.items():
        problems += _fixed_value_problems(fields[name], fixed, values.get(name, fixed))
        values[name], sources[name] = fixed, GIVEN
    provenance = {name: sources.get(name, DEFAULT) for name in fields}
    broken = parsed.broken | file.broken | preset.broken | governed.broken
    return _Merged(values, provenance, problems, [*governed.notices, *renamed], broken)


def _legacy_sentences(
    fields: Mapping[str, Flag], legacy: Mapping[str, Legacy], spellings: Mapping[str, str], values: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Messages about flags without effect: refusals, and remarks on ignored flags."""
    refusals: list[str] = []
    remarks: list[str] = []
    for name, entry in legacy.items():
        sentence = entry.sentence(spellings.get(name, entry.flag.positive_name), values.get(name, False))
        if sentence is not None:
            (refusals if entry.status == REFUSED else remarks).append(sentence)
    return refusals, [*remarks, *_ignored_notices(fields, values)]


def _applicable_defaults(defaults: Mapping[str, Any], values: Collection[str]) -> dict[str, Any]:
    """A program's defaults, except those with an alternative in `values`."""
    replaced = {name for group in _ALTERNATIVES if group.intersection(values) for name in group}
    return {name: value for name, value in defaults.items() if name not in replaced}


def _fixed_value_problems(flag: Flag, fixed: str, requested: Any) -> list[str]:
    if requested == fixed:
        return []
    name = flag.positive_name
    return [
        f"{name} {requested} was requested, but this program requires {name} {fixed}. Use pretrain_gpt.py for others."
    ]


def _build_sections(
    fields: Mapping[str, Flag], values: Mapping[str, Any], merged: _Merged, spellings: Mapping[str, str]
) -> tuple[ReadFlags, list[str], set[str]]:
    """Builds all sections.

    Returns:
        The sections, their problems without those in `merged`, and the fields without a usable value.
    """
    missing = [flag for name, flag in fields.items() if flag.required and name not in values]
    problems = missing_problems(missing, {}, merged.broken)
    sections: dict[str, Any] = {}
    for section, cls in sections_of(RunRequest).items():
        names = (flag.field for flag in flags_of(cls))
        section_values = {name: values[f"{section}.{name}"] for name in names if f"{section}.{name}" in values}
        sections[section] = build_unchecked(cls, section_values)
    run = ReadFlags(**sections, provenance=merged.provenance, values={**merged.values, **values})
    given = {name.partition(".")[2] for name in values}
    refused = merged.broken | {flag.field for flag in missing}
    written = {name.partition(".")[2]: option for name, option in spellings.items() if name in fields}
    section_problems = relevant_problems(list(sections.values()), given, refused, request_problems(run), written)
    outside = {name for section in sections.values() for name, _ in bound_problems(section)}
    return run, problems + section_problems, refused | outside


def _read_preset(name: str | None, flags: Mapping[str, Flag]) -> ParsedFlagFile:
    if name is None:
        return ParsedFlagFile()
    try:
        return read_config_file(str(preset_path(name)), flags, _SECTIONS)
    except ConfigError as failure:  # the sizes that it would have set are not reported as missing
        sizes = {flag.field for flag in flags.values() if flag.required} | {"max_position_embeddings"}
        return ParsedFlagFile(problems=failure.problems, broken=sizes)


def _with_positions(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without a learned position embedding, --max-position-embeddings defaults to the sequence length."""
    name, length = "model.max_position_embeddings", values.get("data.seq_length")
    if values.get("model.position_embedding_type", LEARNED) == LEARNED or name in values or length is None:
        return dict(values)
    return {**values, name: length}


def _with_yarn(values: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE scaling of latent attention defaults to YaRN with an original context of 4096 tokens.

    --kv-channels is removed, as latent attention has its own head sizes.

    Source: NVIDIA Megatron-LM `megatron/core/transformer/transformer_config.py`, `MLATransformerConfig`.
    """
    if values.get("model.multi_latent_attention"):
        values = {name: value for name, value in values.items() if name != "model.kv_channels"}
    scaled = ("model.multi_latent_attention", "model.rope_scaling_factor")
    if not all(values.get(name) for name in scaled) or "model.rope_scaling_type" in values:
        return dict(values)
    return {"model.rope_original_max_positions": 4096, **values, "model.rope_scaling_type": "yarn"}


def _with_id_count(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sets the vocabulary size of NullTokenizer to --vocab-size."""
    size = values.get("model.vocab_size")
    is_null = values.get("data.tokenizer_type") == NULL_TOKENIZER and size is not None
    return {**values, **({"data.tokenizer_name_or_path": str(size)} if is_null else {})}


def _with_counts(fields: Mapping[str, Flag], values: Mapping[str, Any]) -> dict[str, Any]:
    """Moves per-layer values of a flag to the field for them; the flag itself gets the largest."""
    counted = dict(values)
    for name, value in values.items():
        if isinstance(value, tuple) and name in fields and fields[name].facts.by_layer is not None:
            counted[name] = max(value)
            counted[f"{name.partition('.')[0]}.{fields[name].facts.by_layer}"] = value
    return counted


def help_groups() -> list[tuple[str, list[str]]]:
    """The groups of the help as (title, destinations)."""
    fields = field_flags()
    parts = {field: title for title, cls in reversed(_PARTS) for field in (flag.field for flag in flags_of(cls))}
    titles = list(dict.fromkeys([_SIZE, *(title for title, _ in _PARTS)]))
    model = [name for name in fields if name.startswith("model.")]
    title_of = {name: _SIZE if name.partition(".")[2] in _SIZES else parts[name.partition(".")[2]] for name in model}
    groups = [(title, [name for name in model if title_of[name] == title]) for title in titles]
    groups.append(("model: flags that set values of the flags above", list(shorthand_flags())))
    return groups + [
        (title, [name for name in fields if name.startswith(f"{section}.")]) for section, title in _TITLES.items()
    ]


def _ignored_notices(fields: Mapping[str, Flag], values: Mapping[str, Any]) -> Iterator[str]:
    for name, flag in fields.items():
        if flag.facts.ignored and name in values and values[name] != flag.default:
            yield f"{flag.name} {IGNORING}: {flag.facts.ignored}."


def _deprecated_notices(spellings: Any) -> Iterator[str]:
    for option in spellings:
        if option in DEPRECATED:
            yield f"{option} is deprecated: {DEPRECATED[option]}"


def _epilog(legacy: Mapping[str, Legacy]) -> str:
    def names(status: str) -> str:
        return " ".join(sorted(entry.flag.positive_name for entry in legacy.values() if entry.status == status))

    return f"Ignored with a warning: {names(IGNORED)}. Refused, with an alternative: {names(REFUSED)}."
