"""The interface for programs that call the trainer: defaults, fixed values, log styles and callbacks."""

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
        commit: file with the commit, followed by the changes unless `commit_is_alone`.
        changes: file with uncommitted changes as a patch.
        flags: file with the flags of the program that started the run; None for no such file.
    """

    commit: str
    changes: str
    flags: str | None = None
    commit_is_alone: bool = False


@dataclass(frozen=True)
class Program:
    """Settings of a program; `pretrain_gpt.py` has none.

    Attributes:
        fixed: values by destination ("section.field") that flags and files must not contradict.
        defaults: values that replace the trainer's defaults; presets, files and flags override them.
        log_styles: additional values of --log-style, each with a function that imports the style, a
            `megatron.observe.console.LineStyle`.
        run_files: additional values of --run-files.
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
        """Checks --log-style and --run-files.

        A configuration file of another program's run may contain a name of that program: the default replaces it.

        Returns:
            The values, problems, and notices for the user.
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
                notices.append(f"{option} {value} belongs to another program; {option} {used} is used.")
            elif value not in known:
                problems.append(f"{option} {value} is unknown. Use one of: {', '.join(known)}.")
        return checked, problems, notices


NO_PROGRAM = Program()
