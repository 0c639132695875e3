"""The adapter to the evaluation harness gives the figures of the harness's `hf` model on the exported checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.errors import ConfigError, DataError
from megatron.inference.loaded_model import LoadedModel, open_checkpoint
from megatron.parallel.mesh import ParallelMesh
from tests.inference.checkpoints import POSITIONS, make_checkpoint
from tests.trident.evaluate.harness.harness_tasks import TASKS, offline, write_tasks
from tools.convert import export_hf
from trident.evaluate.harness import harness_model

lm_eval = pytest.importorskip("lm_eval")


@pytest.fixture(scope="module", autouse=True)
def without_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with offline(tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(checkpoints: Path) -> LoadedModel:
    return open_checkpoint(str(checkpoints), {}, ParallelMesh.single())


@pytest.fixture(scope="module")
def tasks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def evaluate(model: Any, folder: Path) -> dict[str, Any]:
    """Runs the harness on all tasks."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(model=model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
    assert found is not None
    return found


@pytest.mark.slow
def test_figures_equal_those_of_the_hf_model(
    checkpoints: Path, loaded: LoadedModel, tasks_folder: Path, tmp_path: Path
) -> None:
    from lm_eval.models.huggingface import HFLM

    assert export_hf.main(["--load", str(checkpoints), "--output", str(tmp_path / "exported")]) == 0
    theirs = evaluate(HFLM(str(tmp_path / "exported"), device="cpu", dtype="float32", batch_size=1), tasks_folder)
    ours = evaluate(harness_model(loaded, batch_size=1), tasks_folder)
    for task in TASKS:
        figures = {name: value for name, value in ours["results"][task].items() if isinstance(value, float)}
        assert figures and figures == pytest.approx(
            {name: theirs["results"][task][name] for name in figures}, rel=1e-4, abs=1e-6
        )
        for one, other in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            if task == "own_answers":
                assert one["resps"] == other["resps"]
            else:
                assert flattened(one["resps"]) == pytest.approx(flattened(other["resps"]), rel=1e-4)


def flattened(answers: Any) -> list[float]:
    """The numbers and truth values in nested lists; some versions of the harness write them as texts."""
    if isinstance(answers, list | tuple):
        return [number for answer in answers for number in flattened(answer)]
    return [float(answers == "True") if answers in ("True", "False") else float(answers)]


def request(*values: Any) -> Any:
    return SimpleNamespace(args=values)


def test_generation_is_grouped_by_settings_and_answers_keep_their_order(loaded: LoadedModel) -> None:
    model = harness_model(loaded)
    wanted = [("import os", {"max_gen_toks": 3}), ("def main", {"max_new_tokens": 5}), ("x", {"max_gen_toks": 3})]
    found = model.generate_until([request(*one) for one in wanted])
    assert found == [model.generate_until([request(*one)])[0] for one in wanted]
    stop = found[1][2]
    assert model.generate_until([request("def main", {"max_gen_toks": 5, "until": stop})]) == [found[1].split(stop)[0]]
    draws = {"max_gen_toks": 5, "do_sample": True, "temperature": 5.0}
    assert model.generate_until([request("def main", draws)]) != [found[1]]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_gen_toks": POSITIONS}, f"generates up to {POSITIONS} tokens, but the network has {POSITIONS} positions"),
        ({}, "generates up to 256 tokens"),
        ({"num_beams": 4, "max_gen_toks": 2}, "num_beams 4, which is not supported"),
        ({"penalty_alpha": 0.5, "max_gen_toks": 2}, "penalty_alpha, which is not supported"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(loaded: LoadedModel, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        harness_model(loaded).generate_until([request("x", settings)])


def test_a_continuation_must_fit_the_network(loaded: LoadedModel) -> None:
    model = harness_model(loaded)
    ((logprob, is_greedy),) = model.loglikelihood([request("a context " * 60, "x")])
    assert logprob < 0 and not is_greedy
    with pytest.raises(DataError, match=r"the continuation 'xyz.*the 48 positions of the network"):
        model.loglikelihood([request("", "xyz " * 60)])
    with pytest.raises(ConfigError, match="does not support chats"):
        model.apply_chat_template([])


def test_without_the_package_the_way_out_is_shown(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ConfigError, match="pip install lm-eval"):
        harness_model(loaded)
