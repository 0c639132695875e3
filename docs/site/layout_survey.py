"""The values of each axis of a layout as flags, and their combinations that the rules of the flags refuse.

A new axis is a new row of `AXES`.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from megatron.config.parse import RequestDraft, read_flags
from megatron.config.program_flags import flags_with_fields
from megatron.config.sections.optimizers import AVERAGING, OPTIMIZERS
from megatron.config.sections.pipelines import DEEPSPEED, ENGINES, OWN, SCHEDULE_CHUNKS
from megatron.errors import ConfigError

# Of each axis the values by name, each with its flags, which overrule those before them. The first value of an axis can
# be combined with every value of the others.
AXES: Mapping[str, Mapping[str, str]] = types.MappingProxyType(
    {
        "pipeline": {
            "no pipeline": "--pipeline-model-parallel-size 1",
            **{
                name if engine == OWN else f"{name}, engine {engine}": (
                    f"--pipeline-model-parallel-size 2 --pipeline-schedule {name} --pipeline-engine {engine}"
                )
                for engine in (OWN, DEEPSPEED)
                for name in SCHEDULE_CHUNKS
                if engine == OWN or ENGINES[engine].runs(name)
            },
        },
        "ZeRO": {f"ZeRO {stage}": f"--zero-stage {stage}" for stage in (1, 0, 2, 3)},
        "tensor parallelism": {
            "tensor 1": "--tensor-model-parallel-size 1",
            "tensor 2": "--tensor-model-parallel-size 2",
            "tensor 2 with sequence parallelism": "--tensor-model-parallel-size 2 --sequence-parallel",
        },
        "sequences": {
            "whole sequences": "--context-parallel-size 1 --ds-sequence-parallel-size 1",
            "a ring of 2": "--context-parallel-size 2 --attention-dropout 0",
            "Ulysses 2": "--ds-sequence-parallel-size 2",
            "a ring of 2 groups of 2": (
                "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 "
                "--attention-dropout 0"
            ),
        },
        "recompute": {
            "nothing recomputed": "--no-checkpoint-activations",
            "attention recomputed": "--recompute-granularity selective",
            "blocks recomputed": "--checkpoint-activations",
        },
        "dtype": {
            "float32": "--no-bf16 --no-fp16",
            "bf16": "--no-fp16 --bf16",
            "fp16": "--no-bf16 --fp16",
            "bf16 with fp8 products": "--no-fp16 --bf16 --fp8-format hybrid",
        },
        "objective": {
            "next tokens": "--objective causal --no-bidirectional",
            "masked tokens": "--objective masked --bidirectional --masked-lm-head",
        },
        "what is learned": {
            "labels alone": "--no-kd --no-mos",
            "a teacher too": "--kd --load-teacher teacher",
        },
        "weights": {"all trained": "", "some frozen": "--freeze embedding.*"},
        "length": {
            "full samples": "--no-curriculum-learning",
            "curriculum": "--curriculum-learning --curriculum-min-length 16 --curriculum-steps 10",
        },
        "experts": {
            "dense": "--num-experts 1",
            "4 experts": "--num-experts 4",
            "4 experts on 2 ranks": "--num-experts 4 --expert-model-parallel-size 2",
            "4 whole experts on 2 ranks": (
                "--num-experts 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
            ),
        },
        "compiled blocks": {"not compiled": "--no-compile", "compiled": "--compile"},
        "optimizer": {
            name: f"--optimizer {name}" + " --lr-decay-style constant" * (name in AVERAGING) for name in OPTIMIZERS
        },
        "optimizer state": {"on the device": "--no-cpu-optimizer", "on the host": "--cpu-optimizer"},
    }
)
_NO_PIPELINE, _STAGES = next(iter(AXES["pipeline"])), "--pipeline-model-parallel-size"
# Flags of a command that concern an axis without setting its value.
_ALSO: Mapping[str, frozenset[str]] = types.MappingProxyType(
    {
        "pipeline": frozenset(
            {
                "parallel.enable_zbh1_pipeline",
                "parallel.virtual_pipeline_model_parallel_size",
                "parallel.num_layers_per_virtual_pipeline_stage",
                "parallel.decoder_first_pipeline_num_layers",
                "parallel.decoder_last_pipeline_num_layers",
                "parallel.account_for_embedding_in_pipeline_split",
                "parallel.account_for_loss_in_pipeline_split",
            }
        ),
        "recompute": frozenset({"recompute.recompute_activations", "recompute.activations_checkpoint_method"}),
    }
)
_LEFT_BY_OTHERS = frozenset({"model.attention_dropout", "optim.lr_decay_style"})  # which some values of an axis set
_AXIS_OF = {value: axis for axis, values in AXES.items() for value in values}


@dataclass(frozen=True)
class RefusedCombination:
    """Values of some axes that cannot be combined, whatever the others are.

    Attributes:
        values: names of `AXES`, as few as possible.
        sentence: what is wrong, and the nearest that works.
    """

    values: tuple[str, ...]
    sentence: str


@dataclass(frozen=True)
class Alternative:
    """A command with another value of one axis.

    Attributes:
        problems: what is wrong with it; nothing if it works.
        is_given: whether the command has this value already.
        dropped: flags of the command that this value takes the place of, without setting them itself.
    """

    axis: str
    value: str
    problems: tuple[str, ...]
    is_given: bool
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayoutSurvey:
    """A command, and what it could be with one change.

    What is wrong with all of them has nothing to do with the layout, such as a missing flag, and is left out.

    Attributes:
        pipeline: the command's pipeline, by name of `AXES` unless its schedule is a file.
        problems: what is wrong with the command as it is.
    """

    pipeline: str
    problems: tuple[str, ...]
    alternatives: tuple[Alternative, ...]


def words_of(values: Sequence[str]) -> list[str]:
    """The flags of some values."""
    return [word for value in values for word in AXES[_AXIS_OF[value]][value].split()]


def problems_of(words: Sequence[str]) -> tuple[str, ...]:
    """The problems of a command line, by its arguments alone."""
    return read_flags(words).problems


def refusals(base: Sequence[str], most: int = 3) -> Iterator[RefusedCombination]:
    """All combinations of values of up to `most` axes that are refused while all others have their first value.

    Args:
        base: a command line without a problem.
    """
    others = {axis: list(values)[1:] for axis, values in AXES.items()}
    refused: list[frozenset[str]] = []
    for count in range(1, most + 1):
        for axes in itertools.combinations(others, count):
            for values in itertools.product(*(others[axis] for axis in axes)):
                if any(known <= set(values) for known in refused):
                    continue
                problems = problems_of([*base, *words_of(values)])
                if problems:
                    refused.append(frozenset(values))
                    yield RefusedCombination(values, " ".join(problems))


def survey(words: Sequence[str]) -> LayoutSurvey:
    """A command with each value of each axis in turn, in place of what it says of this axis.

    Raises:
        ConfigError: a file of flags cannot be read, or a flag is not known.
    """
    flags = flags_with_fields(words)
    given = read_flags(_without(flags, frozenset()))
    if unknown := _others(problems_of(words), {*given.problems}):
        raise ConfigError(unknown)
    stages, pipeline = given.run.parallel.pipeline_model_parallel_size, _pipeline_of(given)
    drafts, dropped = {}, {}
    for axis, values in AXES.items():
        replaced = {field for value in values for _, fields in flags_with_fields(words_of([value])) for field in fields}
        others = _without(flags, replaced.union(_ALSO.get(axis, ())) - _LEFT_BY_OTHERS)
        for value in values:
            size = [_STAGES, str(stages)] if axis == "pipeline" and stages > 1 and value != _NO_PIPELINE else []
            drafts[axis, value] = read_flags([*others, *words_of([value]), *size])
            kept = frozenset[str]().union(*(fields for _, fields in flags_with_fields([*words_of([value]), *size])))
            gone = replaced.union(_ALSO.get(axis, ())) - _LEFT_BY_OTHERS - kept
            dropped[axis, value] = tuple(written[0] for written, fields in flags if fields & gone)
    everywhere = set(given.problems).intersection(*(draft.problems for draft in drafts.values()))
    alternatives = [
        Alternative(
            axis,
            value,
            _others(draft.problems, everywhere),
            value == pipeline if axis == "pipeline" else draft.sections == given.sections,
            dropped[axis, value],
        )
        for (axis, value), draft in drafts.items()
    ]
    return LayoutSurvey(pipeline, _others(given.problems, everywhere), tuple(alternatives))


def _without(flags: Sequence[tuple[list[str], Set[str]]], fields: Set[str]) -> list[str]:
    return [word for written, set_by_it in flags if not fields & set_by_it for word in written]


def _others(problems: Sequence[str], known: Set[str]) -> tuple[str, ...]:
    return tuple(problem for problem in problems if problem not in known)


def _pipeline_of(draft: RequestDraft) -> str:
    """The pipeline of a command, by name of `AXES` unless its schedule is a file."""
    parallel = draft.run.parallel
    if parallel.pipeline_model_parallel_size == 1:
        return _NO_PIPELINE
    name = parallel.schedule_for(draft.run.model.num_layers)
    return name if parallel.pipeline_engine == OWN else f"{name}, engine {parallel.pipeline_engine}"
