"""What a program gives the trainer besides a command line: the interface for programs outside this package."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LOG_STYLES = ("megatron", "short")
RUN_FILES = ("megatron",)


@dataclass(frozen=True)
class RunFileNames:
    """Names of the files that describe a start in the run folder, besides config.json.

    Attributes:
        commit: the commit; also the changes since, unless `changes` names a file for them.
        changes: the changes as a patch.
        flags: the flags of the program that started the run; None for no such file.
    """

    commit: str
    changes: str
    flags: str | None = None
    commit_is_alone: bool = False


@dataclass(frozen=True)
class Program:
    """What a program decides, prefers and names; `pretrain_gpt.py` leaves everything to its flags.

    Attributes:
        decided: words that the program itself gives for some destinations ("section.field"); nothing may disagree.
        defaults: values that the program prefers to the trainer's defaults; a preset, a file or a flag wins.
        log_styles: more names that --log-style takes, each with a function that imports the style, a
            `megatron.observe.console.LineStyle`.
        run_files: more names that --run-files takes.
        callbacks: imports the additional callbacks of its runs, each a class like `megatron.train.callback.Callback`.
    """

    fixed: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    log_styles: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    run_files: Mapping[str, RunFileNames] = field(default_factory=dict)
    callbacks: Callable[[], Sequence[type[Any]]] = tuple

    def with_known_names(
        self, values: Mapping[str, Any], from_file: Collection[str]
    ) -> tuple[dict[str, Any], list[str], list[str]]:
        """Checks the values that are names of this program's or of the trainer's.

        The configuration file of another program's run may hold a name of that program: the default takes its place.

        Returns:
            the values, what is wrong with them, and what the user should know.
        """
        checked, problems, notices = dict(values), [], []
        for name, known in (
            ("report.log_style", (*LOG_STYLES, *self.log_styles)),
            ("report.run_files", (*RUN_FILES, *self.run_files)),
        ):
            value, option = values.get(name, known[0]), "--" + name.partition(".")[2].replace("_", "-")
            if value not in known and name in from_file:
                del checked[name]
                used = self.defaults.get(name, known[0])
                notices.append(f"{option} {value} is a name of another program; {option} {used} is used.")
            elif value not in known:
                problems.append(f"{option} {value} is unknown. Use one of: {', '.join(known)}.")
        return checked, problems, notices


NO_PROGRAM = Program()
