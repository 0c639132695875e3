"""The steps of a run as columns: repeated steps, missing values, evaluations, axes."""

from __future__ import annotations

import math

import numpy as np

from tests.trident.dashboard.run_folders import step
from trident.dashboard.records import metric_records
from trident.dashboard.table import MetricsTable


def evaluation(iteration: int, loss: float, group: str = "valid") -> dict[str, object]:
    return {"kind": "evaluation", "iteration": iteration, "consumed_tokens": 9, "group": group, "lm_loss": loss}


def test_steps_that_were_repeated_count_once_and_later_ones_leave() -> None:
    table = MetricsTable()
    table.add([*map(step, range(1, 8)), evaluation(4, 4.0), evaluation(6, 6.0)])
    # Killed after step 7 and resumed from the checkpoint of step 4, in the same part of the file.
    table.add([{"kind": "start", "step": 4}, step(5, lm_loss=50.0), step(6, lm_loss=60.0), evaluation(6, 66.0)])
    assert table.axis("steps").tolist() == [1, 2, 3, 4, 5, 6]
    assert table.column("lm_loss")[4:].tolist() == [50.0, 60.0] and table.repeated_steps == 3
    assert table.axis("hours")[-1] * 3600 == 3.0
    (places, losses) = table.evaluation_curves("lm_loss", "steps")["valid"]
    assert places.tolist() == [4, 6] and losses.tolist() == [4.0, 66.0]
    table.add([step(2), step(3)])
    assert table.axis("steps").tolist() == [1, 2, 3]
    assert "valid" not in table.evaluation_curves("lm_loss", "steps")


def test_a_repeated_step_within_one_part_is_found() -> None:
    table = MetricsTable()
    table.add([step(1), step(2), step(3), step(2, lm_loss=20.0), step(2, lm_loss=21.0), step(3)])
    assert table.axis("steps").tolist() == [1, 2, 3] and table.last("lm_loss") != 21.0
    assert table.column("lm_loss")[1] == 21.0


def test_values_that_are_missing_or_not_finite_keep_their_places() -> None:
    table = MetricsTable()
    table.add([step(1, lm_loss="NaN"), step(2, lm_loss="Infinity"), step(3, lm_loss="surprise"), step(4)])
    losses = table.column("lm_loss")
    assert math.isnan(losses[0]) and losses[1] == math.inf and math.isnan(losses[2]) and math.isfinite(losses[3])
    table.add([{**step(5), "memory_bytes": 8e9}, step(6)])
    assert np.isnan(table.column("memory_bytes")).tolist() == [True] * 4 + [False, True]
    assert table.last("memory_bytes") is None and table.column("nonsense").tolist() == []
    metrics = table.metrics()
    assert {"lm_loss", "memory_bytes", "gradient_norm"} <= set(metrics)
    assert not {"loss_scale", "iteration", "train_iterations", "kind"} & set(metrics)


def test_nested_figures_become_curves_of_their_own() -> None:
    table = MetricsTable()
    source = {"web": {"lm_loss": 3.0, "tokens": 10}}
    table.add([step(1, source_losses=source, routing={"dropped_ratio": 0.25, "loads": [1, 2]}), step(2)])
    assert table.column("lm_loss of web")[0] == 3.0 and table.column("dropped_ratio")[0] == 0.25
    assert "loads" not in table.metrics()
    table.add([step(3, source_losses="abc", routing=[1, 2], new_group={"new": 0.5}, gradient_norms={"head": 1.0})])
    assert table.column("new")[-1] == 0.5 and "head" not in table.metrics()


def test_tasks_and_broken_records() -> None:
    table = MetricsTable()
    task = {"kind": "task", "iteration": 1, "consumed_tokens": 9, "task": "arc", "figures": {"acc": 0.5, "x": None}}
    strange = [
        {"kind": "step"},
        {"kind": "step", "iteration": "7"},
        {"kind": "evaluation"},
        {"kind": "task", "figures": 3},
        {"kind": "task", "iteration": 1, "figures": 3},
        {},
    ]
    table.add(metric_records([step(1), task, *strange]))
    assert table.count == 1 and table.metrics()[-1] == "arc/acc"
    assert table.evaluation_curves("arc/acc", "hours")["arc"][1].tolist() == [0.5]
    assert MetricsTable().axis("tokens").tolist() == [] and MetricsTable().last("lm_loss") is None


def test_many_steps_grow_the_columns() -> None:
    table = MetricsTable()
    for start in range(1, 3000, 700):
        table.add([step(number) for number in range(start, start + 700)])
    assert table.count == 3500 and table.axis("tokens")[-1] == 3500 * 128
    assert np.isfinite(table.column("lm_loss")).all()


def test_texts_lists_and_truth_values_are_never_numbers() -> None:
    table = MetricsTable()
    table.add([step(1, lm_loss="5", gradient_norm=[1], z_loss=True)])
    table.add([step(2, lm_loss=1e308, gradient_norm=[2], z_loss=0.5), step(3, lm_loss="7", gradient_norm=True)])
    losses = table.column("lm_loss")
    assert np.isnan(losses[[0, 2]]).all() and losses[1] == math.inf and table.column("z_loss")[1] == 0.5
    assert table.column("gradient_norm").size == 0


def test_the_number_of_curves_is_limited() -> None:
    table = MetricsTable()
    table.add([step(1, **{f"metric {number}": 1.0 for number in range(5000)}), step(2)])
    table.add([{"kind": "task", "iteration": 2, "figures": {f"figure {number}": 1.0 for number in range(5000)}}])
    assert len(table.metrics()) == 4000 and table.count == 2
