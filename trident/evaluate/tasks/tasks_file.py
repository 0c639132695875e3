"""Tasks files: lists of mappings in YAML or JSON. `task` is the kind; the other keys are the fields of its class."""

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
    """Reads the tasks of a file, in their order; the tasks' data is read when they run.

    Args:
        path: a JSON file if it ends in .json, otherwise YAML.

    Raises:
        ConfigError: the file cannot be read, or has an invalid task; all problems at once.
    """
    name = f"the tasks file {path}"
    tree = read_json(str(path), name) if str(path).endswith(".json") else read_yaml(str(path), name)
    if isinstance(tree, Mapping) and set(tree) == {"tasks"}:
        tree = tree["tasks"]
    if not isinstance(tree, list) or not tree:
        raise ConfigError(f"{name} must hold a list of tasks, each with its kind under `task`.")
    if len(tree) > MOST_TASKS:
        raise ConfigError(f"{name} holds {len(tree)} tasks; the limit is {MOST_TASKS}.")
    tasks: list[Task] = []
    problems: list[str] = []
    for number, description in enumerate(tree, start=1):
        try:
            tasks.append(task_from(description, Path(path).parent, f"{name}: task {number}"))
        except ConfigError as failure:
            problems += failure.problems
    titles = [task.title for task in tasks]
    problems += [
        f'{name}: {titles.count(title)} tasks are called "{title}". Give each a unique `name`.'
        for title in sorted({title for title in titles if titles.count(title) > 1})
    ]
    if problems:
        raise ConfigError(problems)
    return tasks


def task_from(description: Any, folder: Path, source: str) -> Task:
    """Builds a task from its keys and values.

    Args:
        folder: the folder that paths are relative to.
        source: name of the description, for messages.

    Raises:
        ConfigError: an unknown kind or key, or an invalid value.
    """
    if not isinstance(description, Mapping):
        raise ConfigError(f"{source} must be a mapping of keys to values, not {shown_value(description)}.")
    check_values(description, source)
    kind = description.get("task")
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ConfigError(f"{source}: `task` {shown_value(kind)} is unknown. Use one of: {', '.join(KINDS)}.")
    values, problems = _values(cls, description, source)
    if not problems:
        problems = missing_problems(flags_of(cls), values, set())
        unchecked = build_unchecked(cls, {**dict.fromkeys(_required(cls), ""), **values, "folder": folder})
        problems += relevant_problems([unchecked], values, set())
        problems = [f"{source} ({kind}): {problem}" for problem in problems]
    if problems:
        raise ConfigError(problems)
    return cls(**values, folder=folder)


def _values(cls: type[AnyTask], description: Mapping[Any, Any], source: str) -> tuple[dict[str, Any], list[str]]:
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
                f"{source} ({cls.kind}): unknown key {shown_value(key)}.{hint} Its keys: {', '.join(flags)}."
            )
            continue
        try:
            values[key] = value_from_file(flags[key], value)
        except ConfigError as failure:
            problems.append(f'{source} ({cls.kind}): "{key}" {failure}.')
    return values, problems


def _required(cls: type[DescribedTask]) -> list[str]:
    return [one.field for one in flags_of(cls) if one.required]
