"""`read_tasks`: the tasks of a file, each described by the keys of its kind.

The file is a list of mappings, in YAML or JSON. `task` says the kind; the other keys are the fields of its class.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config.flags.command_line import nearest, shown_value, value_from_file
from megatron.config.flags.fields import flags_of
from megatron.config.flags.section import build_unchecked, missing_problems, relevant_problems
from megatron.errors import ConfigError
from megatron.files.settings import check_values, read_json, read_yaml
from trident.evaluate.tasks.cloze import Cloze
from trident.evaluate.tasks.exact_match import ExactMatch
from trident.evaluate.tasks.lambada import Lambada
from trident.evaluate.tasks.multiple_choice import MultipleChoice
from trident.evaluate.tasks.perplexity import Perplexity
from trident.evaluate.tasks.task import DescribedTask, Task

AnyTask = Perplexity | Lambada | Cloze | MultipleChoice | ExactMatch
KINDS: Mapping[str, type[AnyTask]] = {
    kind.kind: kind for kind in (Perplexity, Lambada, Cloze, MultipleChoice, ExactMatch)
}
MOST_TASKS = 1000


def read_tasks(path: str | Path) -> list[Task]:
    """The tasks of a file, in their order; their own files are read when they run.

    Args:
        path: JSON if it ends in .json, otherwise YAML.

    Raises:
        ConfigError: the file cannot be read, or describes something that is not a task; all problems at once.
    """
    name = f"the tasks file {path}"
    tree = read_json(str(path), name) if str(path).endswith(".json") else read_yaml(str(path), name)
    if isinstance(tree, Mapping) and set(tree) == {"tasks"}:
        tree = tree["tasks"]
    if not isinstance(tree, list) or not tree:
        raise ConfigError(f"{name} must hold a list of tasks, each with its kind under `task`.")
    if len(tree) > MOST_TASKS:
        raise ConfigError(f"{name} holds {len(tree)} tasks; there may be {MOST_TASKS}.")
    tasks: list[Task] = []
    problems: list[str] = []
    for number, description in enumerate(tree, start=1):
        try:
            tasks.append(task_from(description, Path(path).parent, f"{name}: task {number}"))
        except ConfigError as failure:
            problems += failure.problems
    titles = [task.title for task in tasks]
    problems += [
        f'{name}: {titles.count(title)} tasks are called "{title}". Give each a `name` of its own.'
        for title in sorted({title for title in titles if titles.count(title) > 1})
    ]
    if problems:
        raise ConfigError(problems)
    return tasks


def task_from(description: Any, folder: Path, place: str) -> Task:
    """A task from the keys that describe it.

    Args:
        folder: that its paths are relative to.
        place: of the description, for messages.

    Raises:
        ConfigError: the kind is unknown, a key is not one of its keys, or a value cannot be used.
    """
    if not isinstance(description, Mapping):
        raise ConfigError(f"{place} must be a mapping of keys to values, not {shown_value(description)}.")
    check_values(description, place)
    kind = description.get("task")
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ConfigError(f"{place}: `task` {shown_value(kind)} is unknown. Use one of: {', '.join(KINDS)}.")
    values, problems = _values(cls, description, place)
    if not problems:
        problems = missing_problems(flags_of(cls), values, set())
        unchecked = build_unchecked(cls, {**dict.fromkeys(_required(cls), ""), **values, "folder": folder})
        problems += relevant_problems([unchecked], values, set())
        problems = [f"{place} ({kind}): {problem}" for problem in problems]
    if problems:
        raise ConfigError(problems)
    return cls(**values, folder=folder)


def _values(cls: type[AnyTask], description: Mapping[Any, Any], place: str) -> tuple[dict[str, Any], list[str]]:
    flags = {one.field: one for one in flags_of(cls)}
    values: dict[str, Any] = {}
    problems = []
    for key, value in description.items():
        if key == "task" or value is None:
            continue
        if key not in flags:
            guess = nearest(str(key)[:80], list(flags))
            hint = f' Did you mean "{guess}"?' if guess else ""
            problems.append(
                f"{place} ({cls.kind}): the key {shown_value(key)} is not one of its keys.{hint} They are: "
                f"{', '.join(flags)}."
            )
            continue
        try:
            values[key] = value_from_file(flags[key], value)
        except ConfigError as failure:
            problems.append(f'{place} ({cls.kind}): "{key}" {failure}.')
    return values, problems


def _required(cls: type[DescribedTask]) -> list[str]:
    return [one.field for one in flags_of(cls) if one.required]
