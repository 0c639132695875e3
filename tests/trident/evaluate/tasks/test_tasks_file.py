"""Reading tasks files, and the errors of invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config.flags.fields import flags_of
from megatron.errors import ConfigError
from trident.evaluate.tasks.exact_match import ExactMatch
from trident.evaluate.tasks.perplexity import Perplexity
from trident.evaluate.tasks.tasks_file import KINDS, read_tasks, task_from


def test_a_file_of_tasks(tmp_path: Path) -> None:
    path = tmp_path / "tasks.yaml"
    path.write_text(
        "- {task: perplexity, data: a.txt, stride: 32, detokenizer: wikitext}\n"
        '- {task: exact_match, name: sums, data: b.jsonl, stop: ["\\n", "."], train: null}\n'
    )
    text, sums = read_tasks(path)
    assert text == Perplexity(data="a.txt", stride=32, detokenizer="wikitext", folder=tmp_path)
    assert sums == ExactMatch(name="sums", data="b.jsonl", stop=("\n", "."), folder=tmp_path)
    assert text.title == "perplexity:a" and sums.title == "sums"


def test_json_and_a_list_under_tasks(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    path.write_text('{"tasks": [{"task": "lambada", "data": "a.jsonl", "strict": false}]}')
    (task,) = read_tasks(path)
    assert KINDS["lambada"](data="a.jsonl", strict=False, folder=tmp_path) == task


def test_all_problems_of_a_file_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "tasks.yaml"
    path.write_text(
        "- {task: lambda, data: a}\n"
        "- {task: lambada, data: a, strickt: true}\n"
        "- {task: lambada, strict: 3}\n"
        "- {task: perplexity, data: a, stride: 0, detokenizer: none}\n"
        "- {task: perplexity}\n"
        "- 5\n"
    )
    with pytest.raises(ConfigError) as failure:
        read_tasks(path)
    problems = failure.value.problems
    assert len(problems) == 6
    assert "task 1: `task` 'lambda' is unknown. Use one of: perplexity, lambada, cloze" in problems[0]
    assert "task 2 (lambada): unknown key 'strickt'. Did you mean \"strict\"?" in problems[1]
    assert "Its keys: name, data, train, key, strict." in problems[1]
    assert 'task 3 (lambada): "strict" must be true or false, not 3' in problems[2]
    assert "task 4 (perplexity): --stride 0 is out of range. It must be at least 1" in problems[3]
    assert "task 5 (perplexity): --data is required" in problems[4]
    assert "task 6 must be a mapping of keys to values, not 5" in problems[5]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "must hold a list of tasks"),
        ("task: lambada\ndata: a", "must hold a list of tasks"),
        ("- {task: lambada, data: x/a}\n- {task: lambada, data: y/a}", '2 tasks are called "lambada:a". Give each a'),
        ("- {task: [], data: a}", r"`task` \[\] is unknown"),
        ("- {data: a}", "`task` None is unknown"),
        ("- {task: lambada, data: ''}\n- {task: lambada, data: [}", "is not YAML"),
        ("- {task: cloze, data: a}\n" * 1001, "holds 1001 tasks; the limit is 1000"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "tasks.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=says):
        read_tasks(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the tasks file .*nowhere.yaml cannot be read: No such file"):
        read_tasks(tmp_path / "nowhere.yaml")


def test_a_text_that_nothing_can_encode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'here: "a\\ud800" contains the unpaired surrogate U\+D800'):
        task_from({"task": "multiple_choice", "data": "a", "separator": "a\ud800"}, Path(), "here")


def test_rules_between_keys_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"here \(multiple_choice\): --few-shot 2 requires --examples"):
        task_from({"task": "multiple_choice", "data": "a", "few_shot": 2}, Path(), "here")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_the_keys_of_its_class(kind: str) -> None:
    assert {"name", "data", "train"} <= set([flag.field for flag in flags_of(KINDS[kind])])
    assert KINDS[kind].kind == kind
