"""Parsing of command lines into dataclass fields; the only file that uses argparse.

Boolean flags accept a value (`--eval-only false`). All problems of a command line are collected, not only the first.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import math
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config.flags.fields import Flag, flags_of
from megatron.config.flags.paths import path_problems
from megatron.config.flags.section import Instance, build_unchecked, missing_problems, relevant_problems
from megatron.errors import ConfigError
from megatron.secret_text import guarded, masked

_TRUE_WORDS = frozenset({"true", "yes", "on"})
_FALSE_WORDS = frozenset({"false", "no", "off"})
_LONGEST_SHOWN = 200
_TOOL_FLAGS = "flags"
_LARGEST_NUMBER = 2**63 - 1
_LARGEST_FLOAT32 = 3.4028234663852886e38  # torch refuses to multiply a float32 tensor by more
_NEGATIVE_NUMBER = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?(,-?\d+)*$")


@dataclass
class ParsedCommandLine:
    """The values on a command line, before rules between them are checked."""

    values: dict[str, Any]  # destination -> value
    problems: list[str]
    broken: set[str]  # flags whose values could not be read
    spellings: dict[str, str]  # destination -> the option string on the command line
    occurrences: list[tuple[str, str, list[str]]] = field(default_factory=list)  # (destination, option, arguments)


def read_command_line(
    flags: Mapping[str, Flag],
    argv: Sequence[str],
    *,
    prog: str | None,
    description: str,
    groups: Sequence[tuple[str, Sequence[str]]],
    epilog: str = "",
    hidden: Sequence[str] = (),
) -> ParsedCommandLine:
    """Parses `argv` against a set of flags; prints the help and exits for `--help`.

    Args:
        flags: destination -> flag; a destination is any unique string.
        argv: the arguments after the program's name.
        prog: the program's name; None for the process's.
        description: description of the program, for the help.
        groups: (title, destinations) in the order of the help.
        epilog: printed after the flags.
        hidden: destinations that are accepted but not shown in the help.
    """
    parser, known = _build_parser(flags, argv, prog, description, [*groups, (argparse.SUPPRESS, hidden)], epilog)
    namespace = argparse.Namespace(occurrences=[])
    _, extra = parser.parse_known_args(list(argv), namespace)
    parsed = ParsedCommandLine({}, _unknown_problems(extra, known), set(), {}, namespace.occurrences)
    for destination, (option, arguments) in _by_flag(flags, parsed).items():
        flag = flags[destination]
        parsed.spellings[destination] = option
        try:
            parsed.values[destination] = value = parse_value(flag, option, arguments)
            check_paths(flag, option, value)
        except ConfigError as failure:
            parsed.problems.extend(failure.problems)
            parsed.broken.add(flag.field)
            parsed.values.pop(destination, None)
    return parsed


def _by_flag(flags: Mapping[str, Flag], parsed: ParsedCommandLine) -> dict[str, tuple[str, list[str]]]:
    """The option and the arguments of each flag.

    The last value of a repeated flag counts and lists of strings are concatenated, but lists whose positions have a
    meaning must not be repeated.
    """
    by_flag: dict[str, tuple[str, list[str]]] = {}
    for destination, option, arguments in parsed.occurrences:
        flag, (_, before) = flags[destination], by_flag.get(destination, ("", arguments))
        is_list = flag.is_tuple and flag.count is None
        if destination in by_flag and is_list and flag.element is str and not flag.facts.once:
            arguments = [*before, *arguments]
        elif before != arguments and (
            is_list or flag.facts.once or (flag.facts.by_layer and len(before + arguments) > 2)
        ):
            values = ", then ".join(masked(" ".join(each)) or "nothing" for each in (before, arguments))
            all_values = ", with all values" if is_list else ""
            parsed.problems.append(f"{option} is given twice: {values}. Give it once{all_values}.")
        by_flag[destination] = option, arguments
    return by_flag


def parse_flags(
    cls: type[Instance],
    argv: Sequence[str],
    prog: str | None = None,
    description: str = "",
    *,
    positional: str | None = None,
) -> Instance:
    """Parses the command line of a tool into an instance of `cls`, a dataclass of `flag()` fields.

    Args:
        positional: the flag that receives arguments before the first flag, such as `--load`.

    Raises:
        ConfigError: with all problems of the command line at once.
    """
    if positional is not None and argv and not argv[0].startswith("-"):
        argv = [positional, *argv]
    flags = {flag.field: flag for flag in flags_of(cls)}
    groups = areas_of(cls)
    parsed = read_command_line(flags, argv, prog=prog, description=description, groups=groups)
    problems = [*parsed.problems, *missing_problems(flags.values(), parsed.values, parsed.broken)]
    missing = {flag.field for flag in flags.values() if flag.required and flag.field not in parsed.values}
    instance = build_unchecked(cls, parsed.values)
    problems.extend(relevant_problems([instance], parsed.values, parsed.broken | missing))
    if problems:
        raise ConfigError(problems)
    return instance


def areas_of(cls: type) -> list[tuple[str, list[str]]]:
    """The flags of a tool in groups for its help: its own, then each base class's with a title."""
    area_of = dict.fromkeys((flag.field for flag in flags_of(cls)), _TOOL_FLAGS)
    for base in reversed(cls.__mro__[1:]):
        title = vars(base).get("help_title")
        if title:
            area_of.update(
                dict.fromkeys((flag.field for flag in flags_of(base) if area_of[flag.field] == _TOOL_FLAGS), title)
            )
    titles = dict.fromkeys([_TOOL_FLAGS, *area_of.values()])
    return [(title, [name for name, area in area_of.items() if area == title]) for title in titles]


def parse_value(flag: Flag, option: str, arguments: Sequence[str]) -> Any:
    """Converts the arguments of an option.

    Raises:
        ConfigError: too few or too many arguments, or an argument of the wrong type.
    """
    if flag.element is bool and not flag.is_tuple:
        turns_on = flag.spellings.get(option, True)
        if not arguments:
            return turns_on
        return _single_value(flag, option, arguments) is turns_on
    if not flag.is_tuple:
        return _single_value(flag, option, arguments)
    if flag.count is not None and len(arguments) != flag.count:
        raise ConfigError(
            f"{option} expects {flag.count} values, got {len(arguments)} ({' '.join(arguments) or 'none'})."
        )
    if flag.facts.nargs == "+" and not arguments:
        raise ConfigError(f"{option} expects at least one value. Give one, or drop the flag.")
    return tuple(_convert(flag, option, argument) for argument in arguments)


def value_from_file(flag: Flag, value: Any) -> Any:
    """Converts an entry of a configuration file.

    Raises:
        ConfigError: the entry is not of the flag's type; the message starts with "must be".
    """
    if flag.is_tuple:
        items = value if isinstance(value, list) else [value]
        if flag.count is not None and len(items) != flag.count:
            raise ConfigError(f"must be a list of {flag.count} values, got {len(items)}")
        return tuple(_from_file(flag, item) for item in items)
    return _from_file(flag, value)


def check_paths(flag: Flag, option: str, value: Any) -> None:
    """Checks that existing paths are suitable for the flag.

    Args:
        option: the flag as written, or the entry of a file, for the message.

    Raises:
        ConfigError: one of them is a pipe, a device, a dangling link or the like.
    """
    if flag.facts.path is None:
        return
    paths = value if flag.is_tuple else (value,)
    if problems := [text for path in paths for text in path_problems(option, flag.facts.path, path)]:
        raise ConfigError(problems)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known spelling closest to `name`; None if none is close."""
    close = difflib.get_close_matches(name.replace("_", "-"), list(known), n=1, cutoff=0.7)
    return close[0] if close else None


def _single_value(flag: Flag, option: str, arguments: Sequence[str]) -> Any:
    if flag.facts.by_layer is not None and len(arguments) > 1:
        return tuple(_convert(flag, option, argument) for argument in arguments)
    if len(arguments) != 1:
        given = f"{len(arguments)} ({' '.join(arguments)})" if arguments else "none"
        remedy = f" {flag.facts.remedy}" if flag.facts.remedy else ""
        raise ConfigError(f"{option} expects one value, got {given}.{remedy}")
    return _convert(flag, option, arguments[0])


def _convert(flag: Flag, option: str, argument: str) -> Any:
    if flag.element is bool:
        if argument.lower() in _TRUE_WORDS | _FALSE_WORDS:
            return argument.lower() in _TRUE_WORDS
        if flag.facts.numeric and argument in ("0", "1"):
            return argument == "1"
        raise ConfigError(f'{option} expects no value, true or false, got "{argument}".')
    if flag.element is str:
        if not argument and flag.default != "":
            raise ConfigError(f"{option} expects a string, got an empty one. Is a variable in the script unset?")
        return flag.facts.synonyms.get(argument, argument)
    try:
        value = flag.element(argument)
    except ValueError:
        value = math.nan
    is_too_large = isinstance(value, int) and abs(value) > _LARGEST_NUMBER
    if is_too_large or not math.isfinite(value):
        kind = "an integer" if flag.element is int else "a number"
        most = f" of at most {_LARGEST_NUMBER}" if is_too_large else ""
        shown = argument if len(argument) <= _LONGEST_SHOWN else f"{argument[:_LONGEST_SHOWN]}..."
        raise ConfigError(f'{option} expects {kind}{most}, got "{shown}".')
    if abs(value) > _largest(flag):
        raise ConfigError(f"{option} {argument} is out of range. Its magnitude must be at most {_largest(flag)}.")
    return value


def _largest(flag: Flag) -> float:
    return _LARGEST_FLOAT32 if flag.element is float else _LARGEST_NUMBER


def _from_file(flag: Flag, value: Any) -> Any:
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    if flag.element is float and isinstance(value, str):  # YAML 1.1 reads 1e-4 as a string
        with contextlib.suppress(ValueError):
            value = float(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf
    if is_number and isinstance(value, int) and abs(value) > _LARGEST_NUMBER:
        raise ConfigError(f"must be a number of at most {_LARGEST_NUMBER}, not one of {value.bit_length()} bits")
    if flag.element is float and is_number and abs(value) <= _LARGEST_FLOAT32:
        return float(value)
    if flag.element is float and is_number:
        raise ConfigError(f"must be a number of at most {_LARGEST_FLOAT32} in magnitude, not {shown_value(value)}")
    if flag.element is int and is_number and value == int(value) and abs(value) <= _LARGEST_NUMBER:
        return int(value)
    if flag.element is str and isinstance(value, str):
        return guarded(flag.facts.synonyms.get(value, value))
    if flag.element is bool and isinstance(value, bool):
        return value
    raise ConfigError(f"must be {names[flag.element]}, not {shown_value(value)}")


def shown_value(value: Any) -> str:
    """The value of a file entry for a message: one line, without secrets."""
    text = masked(repr(value))
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError."""

    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(f"{masked(message)}.")


class _Collect(argparse.Action):
    """Records an option and its arguments, which are converted later so that all problems are found."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.occurrences.append((self.dest, option_string, [guarded(argument) for argument in values]))


class _Help(argparse.Action):
    """Prints the help, or the groups and flags that its arguments match, and exits."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if values:
            _keep_named(parser, values)
        parser.print_help()
        parser.exit()


def _keep_named(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Hides flags if neither their name nor their group's title matches.

    Raises:
        ConfigError: nothing matches.
    """
    patterns = [re.sub(r"[_ ]", "-", argument.lower().lstrip("-")) for argument in arguments]
    is_empty, titles = True, []
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        titles += [group.title or ""] if shown else []
        if any(pattern in (group.title or "").lower().replace(" ", "-") for pattern in patterns):
            is_empty &= not shown
            continue
        for action in shown:
            if any(pattern in name for pattern in patterns for name in action.option_strings):
                is_empty = False
            else:
                action.help = argparse.SUPPRESS
    if is_empty:
        raise ConfigError(f"--help {' '.join(arguments)} matches no flag and no group. Groups: {'; '.join(titles)}.")
    parser.description = parser.epilog = None


class _HelpFormatter(argparse.HelpFormatter):
    """Shows the main name and the type of each flag."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=48, width=140)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, _Help):
            return f"{', '.join(action.option_strings)} [WORD ...]"
        return f"{action.option_strings[0]} {action.metavar}".rstrip()

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Keeps the line breaks of multi-line descriptions."""
        if "\n" not in text.strip():
            return super()._fill_text(text, width, indent)
        return "\n".join((indent + line).rstrip() for line in text.strip().splitlines())

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        return f"usage: {self._prog} [flags]\n\n"


def _build_parser(
    flags: Mapping[str, Flag],
    argv: Sequence[str],
    prog: str | None,
    description: str,
    groups: Sequence[tuple[str, Sequence[str]]],
    epilog: str,
) -> tuple[_Parser, list[str]]:
    """Builds the parser for a command line, and lists the spellings of all flags."""
    parser = _Parser(
        prog=prog,
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        add_help=False,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument(
        *("-h", "--help"),
        action=_Help,
        nargs="*",
        help="show this help, or only the groups and flags whose names contain a WORD",
    )
    parser._negative_number_matcher = _NEGATIVE_NUMBER  # argparse's default takes -1e-3 for a flag
    known = ["--help"]
    # argparse is slow to build: it gets only the flags on the command line, or all of them for the help.
    given = {argument.partition("=")[0] for argument in argv}
    shows_help = any(argument.startswith(("-h", "--help")) for argument in given)
    for title, destinations in groups:
        group = parser.add_argument_group(title)
        for destination in destinations:
            flag = flags[destination]
            spellings = [flag.name, *(text for text in flag.spellings if text != flag.name)]
            known.extend(spellings)
            if not shows_help and given.isdisjoint(spellings):
                continue
            group.add_argument(
                *spellings,
                dest=destination,
                action=_Collect,
                nargs="*",
                default=argparse.SUPPRESS,
                metavar="" if flag.element is bool and not flag.is_tuple else flag.type_name,
                help=argparse.SUPPRESS if title == argparse.SUPPRESS else _help_text(flag),
            )
    return parser, known


def _help_text(flag: Flag) -> str:
    default = "required" if flag.required else f"default: {flag.shown_default}"
    choices = f" {{{', '.join(str(choice) for choice in flag.facts.choices)}}}" if flag.facts.choices else ""
    turns_off = flag.default is True and flag.element is bool
    also = [text for text in flag.facts.spelled if text != flag.name and flag.spellings[text] is not turns_off]
    spelled = f"; also {', '.join(also)}" if also else ""
    ignored = " [ignored]" if flag.facts.ignored else ""
    help = f"turns off: {flag.facts.help}" if turns_off else flag.facts.help
    return f"{help}{choices} ({default}{spelled}){ignored}".replace("%", "%%")


def _unknown_problems(extra: Sequence[str], known: Sequence[str]) -> list[str]:
    """Sentences about arguments that argparse could not assign: unknown flags, and values without a flag."""
    problems: list[str] = []
    after_unknown = False
    for argument in extra:
        if argument.startswith("-"):
            name = masked(argument.split("=", 1)[0])
            guess = meant_flag(name, known) or nearest(name, known)
            hint = f"Did you mean {guess}?" if guess else "See --help for all flags."
            problems.append(f"unknown flag {name}. {hint}")
            after_unknown = True
        elif not after_unknown:
            problems.append(f'unexpected argument "{masked(argument)}". Values must follow their flag.')
    return problems


# Names in nanoGPT, the Hugging Face Trainer, litgpt, torchtitan and common usage, by the equivalent flag.
_NAMES: Mapping[str, str] = types.MappingProxyType(
    {
        "--compile": "torch-compile",
        "--lr": "learning-rate max-lr peak-lr",
        "--train-iters": "max-steps max-iters num-steps num-iterations num-train-steps iterations iters steps",
        "--epochs": "num-train-epochs max-epochs num-epochs n-epochs",
        "--num-layers": "n-layer n-layers layers num-hidden-layers depth",
        "--num-attention-heads": "n-head n-heads num-heads heads",
        "--hidden-size": "n-embd d-model dim embedding-dim embed-dim width",
        "--ffn-hidden-size": "intermediate-size ff-dim d-ff",
        "--seq-length": "block-size context-length context-size max-length max-seq-length max-seq-len seq-len",
        "--micro-batch-size": "per-device-train-batch-size device-batch-size",
        "--global-batch-size": "total-batch-size gradient-accumulation-steps accumulate-grad-batches grad-accum",
        "--hidden-dropout": "dropout",
        "--lr-warmup-iters": "warmup-steps warmup-iters num-warmup-steps lr-warmup-steps",
        "--lr-warmup-fraction": "warmup-ratio warmup-fraction",
        "--lr-decay-style": "lr-scheduler lr-scheduler-type scheduler",
        "--clip-grad": "grad-clip max-grad-norm gradient-clipping gradient-clip-val",
        "--save": "output-dir out-dir save-dir checkpoint-dir",
        "--load": "resume resume-from resume-from-checkpoint init-from",
        "--save-interval": "save-steps save-every checkpoint-every",
        "--eval-interval": "eval-steps eval-every",
        "--log-interval": "logging-steps log-every log-freq",
        "--data-path": "dataset dataset-name dataset-path data data-dir train-file train-data",
        "--tokenizer-name-or-path": "tokenizer tokenizer-path tokenizer-name",
        "--tensor-model-parallel-size": "tp tp-size tensor-parallel tensor-parallel-size tensor-parallel-degree",
        "--pipeline-model-parallel-size": "pp pp-size pipeline-parallel pipeline-parallel-size",
        "--bf16": "precision dtype mixed-precision torch-dtype",
        "--checkpoint-activations": "gradient-checkpointing activation-checkpointing",
        "--wandb-project": "wandb report-to",
    }
)


def meant_flag(name: str, known: Collection[str]) -> str | None:
    """The known flag that other projects call `name`; None if there is none."""
    plain = name.lstrip("-").replace("_", "-")
    return next((flag for flag, names in _NAMES.items() if flag in known and plain in names.split()), None)
