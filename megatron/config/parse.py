"""Command line and file -> `RunRequest`: what was asked for; all that is wrong with it is shown at once."""

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

# The parts of the architecture in the order of the help; a class shows the flags that no class before it has.
_PARTS: tuple[tuple[str, type], ...] = (
    ("model: latent attention", LatentAttentionFields),
    ("model: attention", AttentionFields),
    ("model: feed-forward", FeedForwardFields),
    ("model: experts", ExpertFields),
    ("model: positions", PositionFields),
    ("model: norms", NormFields),
    ("model: encoders", EncoderFields),
    ("model: multi-token prediction", MultiTokenFields),
    ("model: output head, initial values and factors", ModelRequest),
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
        "recompute": "activation recomputation",
        "documents": "document boundaries",
        "loss": "training loss",
        "masking": "masked language modelling",
        "finetuning": "fine-tuning on examples",
        "distillation": "distillation from a teacher",
        "random": "randomness",
        "kernels": "fused kernels",
        "parallel": "parallelism",
        "optim": "optimizer, schedule and batch sizes",
        "data": "data and tokenizer",
        "files": "files of flags",
        "loading": "checkpoint to start from",
        "saving": "writing and keeping checkpoints",
        "evaluation": "evaluation and samples of text",
        "stopping": "exits",
        "safety": "hangs, bad steps and restarts",
        "report": "log lines, run folder, TensorBoard and Weights & Biases",
        "watching": "progress bar, utilization and profiles",
        "planning": "plans and dry runs in place of training",
    }
)
_DESCRIPTION = "Pretrains a GPT language model with tensor, pipeline and data parallelism."


_SECTIONS = (*sections_of(RunRequest),)  # under which a file may have its flags
# What --epochs replaces of a preset.
_LENGTHS = frozenset({"optim.train_iters", "optim.lr_warmup_iters", "optim.lr_decay_iters"})
# Fields of which one is set: a program's default gives way to any of the others.
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
    """What flags and files say, whether or not a run can be made of it.

    Attributes:
        run: the sections; where there are problems, values may be missing, wrong or contradictory.
        problems: everything that is wrong, one sentence each.
        wrong: names of fields without a value that can be used: missing, unreadable, or out of bounds.
    """

    run: ReadFlags
    problems: tuple[str, ...]
    wrong: frozenset[str]

    @property
    def sections(self) -> dict[str, ConfigSection]:
        return {name: getattr(self.run, name) for name in sections_of(RunRequest)}

    def unchecked(self) -> RunRequest:
        """What was read in the form of a request, of which only fields that are not `wrong` may be used."""
        request = object.__new__(RunRequest)
        for name, value in self._fields().items():
            object.__setattr__(request, name, value)
        return request

    def request(self) -> RunRequest:
        """The request that was read.

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
    """Every flag that sets a field, by its destination "section.field"."""
    sections = sections_of(RunRequest).items()
    return types.MappingProxyType(
        {f"{section}.{flag.field}": flag for section, cls in sections for flag in flags_of(cls)}
    )


@functools.cache
def known_flags() -> Mapping[str, Flag]:
    """Every flag of the trainer by its destination: those that set a field, shorthands, and those without effect."""
    others = {name: entry.flag for table in (shorthand_flags(), legacy_flags()) for name, entry in table.items()}
    return types.MappingProxyType({**field_flags(), **others})


def parse(
    argv: Sequence[str],
    prog: str | None = None,
    program: Program = NO_PROGRAM,
) -> RunRequest:
    """Reads the trainer's command line, and the file of `--config` if one is given; see `read_flags`.

    Raises:
        ConfigError: with all problems at once.
    """
    return read_flags(argv, prog, program).request()


def read_flags(
    argv: Sequence[str],
    prog: str | None = None,
    program: Program = NO_PROGRAM,
) -> RequestDraft:
    """Reads the trainer's command line, and the file of `--config` if one is given, and lists what is wrong with it.

    Looks at nothing but the words and the files they name: no torch, no environment, no network. Prints the help and
    exits for `--help`.

    Args:
        program: what the program decides, prefers and names.

    Raises:
        ConfigError: a file of flags cannot be read.
    """
    own, flags, legacy = field_flags(), known_flags(), legacy_flags()
    groups, epilog = help_groups(), _epilog(legacy)
    reading = read_command_line(
        flags, argv, prog=prog, description=_DESCRIPTION, groups=groups, epilog=epilog, hidden=list(legacy)
    )
    merged = _merge(reading, flags, own, program)
    refusals, remarks = _legacy_sentences(own, legacy, reading.spellings, merged.values)
    values, group_problems = read_group_files(merged.values)
    values = _with_id_count(_with_stretch(_with_positions(_with_counts(own, values))))
    run, section_problems, wrong = _build_sections(own, values, merged, reading.spellings)
    problems = [*merged.problems, *refusals, *group_problems, *section_problems]
    notices = [*_deprecated_notices(reading.spellings.values()), *merged.notices]
    if not problems:
        notices += sentences(Phase.NOTICE, run)
    run = dataclasses.replace(run, notices=tuple(notices), ignored=tuple(remarks), program=program)
    return RequestDraft(run, tuple(problems), frozenset(wrong))


@dataclass(frozen=True)
class _Merged:
    """The value of each field that anything sets, by destination, and which source it comes from."""

    values: dict[str, Any]
    provenance: dict[str, str]
    problems: list[str]
    notices: list[str]
    broken: set[str]


def _merge(reading: ParsedCommandLine, flags: Mapping[str, Flag], own: Mapping[str, Flag], program: Program) -> _Merged:
    """Decides which source sets a field. The order of precedence, from the weakest source to the strongest:

    1. the field's default;
    2. the program's defaults, except those to which one of the sources below sets an alternative (`_ALTERNATIVES`);
    3. `--deepspeed_config`, which may not contradict the sources below (the exceptions are in `governed_values`);
    4. `--model-preset`, without its length of training if --epochs is given;
    5. `--config`;
    6. the command line;
    7. the program's decisions, which nothing may contradict.

    Shorthands are expanded within their source first.
    """
    file = ParsedFlagFile()
    if "files.config" in reading.values:
        file = read_config_file(reading.values["files.config"], flags, _SECTIONS)
    preset = _read_preset({**file.values, **reading.values}.get("files.model_preset"), flags)
    preferred = _preferred(program.defaults, {**preset.values, **file.values, **reading.values})
    (preferred, by_preset, by_file, given), contradictions = expand_shorthands(
        [preferred, preset.values, file.values, reading.values]
    )
    if "finetuning.epochs" in {**by_file, **given}:
        by_preset = {name: value for name, value in by_preset.items() if name not in _LENGTHS}
    asked, governed = {**by_preset, **by_file, **given}, ParsedDeepSpeedFile()
    if "parallel.deepspeed_config" in asked:
        governed = governed_values(asked["parallel.deepspeed_config"], own, asked, preferred)
    known, unknown, renamed = program.with_known_names(asked, by_file.keys() - given.keys())
    by_file = {name: value for name, value in by_file.items() if name in known}
    preferred = _preferred(preferred, {name for name, value in governed.values.items() if value})
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    layers = (DEFAULT, preferred), (FILE, governed.values), (PRESET, by_preset), (FILE, by_file), (GIVEN, given)
    for source, layer in layers:
        taken = {name: value for name, value in layer.items() if name not in governed.overruled}
        values |= taken
        sources |= dict.fromkeys(taken, source)
    problems = [*reading.problems, *file.problems, *preset.problems, *contradictions, *governed.problems, *unknown]
    for name, word in program.fixed.items():
        problems += _disagreement(own[name], word, values.get(name, word))
        values[name], sources[name] = word, GIVEN
    provenance = {name: sources.get(name, DEFAULT) for name in own}
    broken = reading.broken | file.broken | preset.broken | governed.broken
    return _Merged(values, provenance, problems, [*governed.notices, *renamed], broken)


def _legacy_sentences(
    own: Mapping[str, Flag], legacy: Mapping[str, Legacy], spellings: Mapping[str, str], values: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """What there is to say of flags that have no effect: refusals, and remarks on ignored flags."""
    refusals: list[str] = []
    remarks: list[str] = []
    for name, entry in legacy.items():
        sentence = entry.sentence(spellings.get(name, entry.flag.positive_name), values.get(name, False))
        if sentence is not None:
            (refusals if entry.status == REFUSED else remarks).append(sentence)
    return refusals, [*remarks, *_ignored_notices(own, values)]


def _preferred(defaults: Mapping[str, Any], values: Collection[str]) -> dict[str, Any]:
    """A program's defaults, without the ones that an alternative to them replaces."""
    replaced = {name for group in _ALTERNATIVES if group.intersection(values) for name in group}
    return {name: value for name, value in defaults.items() if name not in replaced}


def _disagreement(flag: Flag, decided: str, asked: Any) -> list[str]:
    """What is wrong if a flag or a file asks for something else than the program is for."""
    if asked == decided:
        return []
    name = flag.positive_name
    return [
        f"{name} {asked} was requested, but this program is for {name} {decided}. Drop {name}, or use pretrain_gpt.py, "
        f"which takes any."
    ]


def _build_sections(
    own: Mapping[str, Flag], values: Mapping[str, Any], merged: _Merged, spellings: Mapping[str, str]
) -> tuple[ReadFlags, list[str], set[str]]:
    """Builds every section, and lists what is wrong with them except for values that are refused already, and the
    fields that have no usable value.
    """
    missing = [flag for name, flag in own.items() if flag.required and name not in values]
    problems = missing_problems(missing, {}, merged.broken)
    sections: dict[str, Any] = {}
    for section, cls in sections_of(RunRequest).items():
        names = (flag.field for flag in flags_of(cls))
        fields = {name: values[f"{section}.{name}"] for name in names if f"{section}.{name}" in values}
        sections[section] = build_unchecked(cls, fields)
    run = ReadFlags(**sections, provenance=merged.provenance, values={**merged.values, **values})
    given = {name.partition(".")[2] for name in values}
    refused = merged.broken | {flag.field for flag in missing}
    written = {name.partition(".")[2]: option for name, option in spellings.items() if name in own}
    section_problems = relevant_problems(list(sections.values()), given, refused, request_problems(run), written)
    outside = {name for section in sections.values() for name, _ in bound_problems(section)}
    return run, problems + section_problems, refused | outside


def _read_preset(name: str | None, flags: Mapping[str, Flag]) -> ParsedFlagFile:
    if name is None:
        return ParsedFlagFile()
    try:
        return read_config_file(str(preset_path(name)), flags, _SECTIONS)
    except ConfigError as failure:  # the sizes that it would have set are not asked for
        sizes = {flag.field for flag in flags.values() if flag.required} | {"max_position_embeddings"}
        return ParsedFlagFile(problems=failure.problems, broken=sizes)


def _with_positions(values: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the sequence length the context of a network whose positions have no rows of their own."""
    place, length = "model.max_position_embeddings", values.get("data.seq_length")
    if values.get("model.position_embedding_type", LEARNED) == LEARNED or place in values or length is None:
        return dict(values)
    return {**values, place: length}


def _with_stretch(values: Mapping[str, Any]) -> dict[str, Any]:
    """A stretch of latent attention's context is YaRN's unless --rope-scaling-type or --rope-type says otherwise, and
    starts from 4096 tokens; the width of its heads is not --kv-channels.

    Source: NVIDIA Megatron-LM `megatron/core/transformer/transformer_config.py`, `MLATransformerConfig`.
    """
    if values.get("model.multi_latent_attention"):
        values = {name: value for name, value in values.items() if name != "model.kv_channels"}
    stretch = ("model.multi_latent_attention", "model.rope_scaling_factor")
    if not all(values.get(name) for name in stretch) or "model.rope_scaling_type" in values:
        return dict(values)
    return {"model.rope_original_max_positions": 4096, **values, "model.rope_scaling_type": "yarn"}


def _with_id_count(values: Mapping[str, Any]) -> dict[str, Any]:
    """Gives NullTokenizer as many ids as the network's vocabulary."""
    size = values.get("model.vocab_size")
    is_null = values.get("data.tokenizer_type") == NULL_TOKENIZER and size is not None
    return {**values, **({"data.tokenizer_name_or_path": str(size)} if is_null else {})}


def _with_counts(own: Mapping[str, Flag], values: Mapping[str, Any]) -> dict[str, Any]:
    """Moves several values of a flag that takes one for each layer to the field for them; the flag's own is the
    largest.
    """
    counted = dict(values)
    for name, value in values.items():
        if isinstance(value, tuple) and name in own and own[name].facts.by_layer is not None:
            counted[name] = max(value)
            counted[f"{name.partition('.')[0]}.{own[name].facts.by_layer}"] = value
    return counted


def help_groups() -> list[tuple[str, list[str]]]:
    """(title, destinations) of the help; the architecture is shown by part of the network."""
    own = field_flags()
    parts = {field: title for title, cls in reversed(_PARTS) for field in (flag.field for flag in flags_of(cls))}
    titles = list(dict.fromkeys([_SIZE, *(title for title, _ in _PARTS)]))
    model = [name for name in own if name.startswith("model.")]
    title_of = {name: _SIZE if name.partition(".")[2] in _SIZES else parts[name.partition(".")[2]] for name in model}
    groups = [(title, [name for name in model if title_of[name] == title]) for title in titles]
    groups.append(("model: flags that set values of the flags above", list(shorthand_flags())))
    return groups + [
        (title, [name for name in own if name.startswith(f"{section}.")]) for section, title in _TITLES.items()
    ]


def _ignored_notices(own: Mapping[str, Flag], values: Mapping[str, Any]) -> Iterator[str]:
    for name, flag in own.items():
        if flag.facts.ignored and name in values and values[name] != flag.default:
            yield f"{flag.name} {IGNORING}: {flag.facts.ignored}."


def _deprecated_notices(spellings: Any) -> Iterator[str]:
    for option in spellings:
        if option in DEPRECATED:
            yield f"{option} is deprecated: {DEPRECATED[option]}"


def _epilog(legacy: Mapping[str, Legacy]) -> str:
    def names(status: str) -> str:
        return " ".join(sorted(entry.flag.positive_name for entry in legacy.values() if entry.status == status))

    return (
        f"Accepted with a warning and ignored: {names(IGNORED)}. Refused, with what to use instead: {names(REFUSED)}."
    )
