"""Paired comparisons: tests against exact values, intervals that cover, and results that do not belong together."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest, norm

from megatron.errors import ConfigError, DataError
from tools.runs import compare_evaluations
from trident.evaluate.results import FORMAT, FORMAT_VERSION
from trident.evaluate.significance import (
    Resampling,
    bootstrap_interval,
    compare_results,
    comparison_lines,
    holm,
    mcnemar,
    sign_test,
)

FEW = Resampling(draws=2000)


def results_of(*items: dict[str, Any], name: str = "questions") -> dict[str, Any]:
    """A file of results with one task."""
    numbered = [{"item": f"some/folder/file.jsonl:{number}", **item} for number, item in enumerate(items, start=1)]
    tree = {"format": FORMAT, "format_version": FORMAT_VERSION, "checkpoint": {"path": "checkpoints/a"}}
    return {**tree, "tasks": [{"name": "failed", "failure": "no file"}, {"name": name, "per_item": numbered}]}


def accuracies(*hits: float) -> dict[str, Any]:
    return results_of(*({"acc": hit, "predicted": "x"} for hit in hits))


@pytest.mark.parametrize(("one", "other"), [(0, 0), (1, 0), (3, 12), (12, 3), (7, 7), (40, 61)])
def test_mcnemar_is_the_exact_binomial_test(one: int, other: int) -> None:
    exact = binomtest(one, one + other).pvalue if one + other else 1.0
    assert mcnemar(one, other) == pytest.approx(exact)


def test_all_signs_of_few_items_are_as_good_as_random_ones() -> None:
    differences = np.array([0.3, -0.1, 0.4, 0.2, 0.5, 0.1, -0.2, 0.3])
    signs = np.array(list(itertools.product((1, -1), repeat=8)))
    exact = np.mean(np.abs(signs @ differences) >= abs(differences.sum()) - 1e-9)
    assert sign_test(differences, Resampling(draws=20_000)) == pytest.approx(exact, abs=0.01)
    assert sign_test(np.zeros(5), FEW) == 1.0


def test_the_interval_is_that_of_the_normal_distribution_for_many_items() -> None:
    differences = np.random.default_rng(1).normal(0.2, 1.0, 800)
    low, high = bootstrap_interval(differences, np.ones(800), Resampling(draws=4000, confidence=0.9))
    error = differences.std(ddof=1) / math.sqrt(800) * norm.ppf(0.95)
    assert (low, high) == pytest.approx((differences.mean() - error, differences.mean() + error), abs=0.008)


def test_false_findings_are_as_rare_as_the_level() -> None:
    generator = np.random.default_rng(5)
    found = [sign_test(generator.normal(0, 1, 30), Resampling(draws=400, seed=seed)) for seed in range(400)]
    assert 0.02 < np.mean([value <= 0.05 for value in found]) < 0.09


def test_holm_corrects_for_the_number_of_metrics() -> None:
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_accuracies_are_compared_by_the_items_only_one_answered() -> None:
    (found,) = compare_results(accuracies(*[1, 0] * 10), accuracies(*[1, 1] * 8, *[0, 0] * 2), FEW)
    assert (found.first, found.second, found.items, found.test) == (0.5, 0.8, 20, "McNemar")
    assert (found.only_first, found.only_second) == (2, 8)
    assert found.p_value == pytest.approx(binomtest(2, 10).pvalue) == found.adjusted_p_value
    assert found.low < 0.3 < found.high and found.verdict(0.05) == "no difference shown"
    assert found.verdict(0.2) == "B is better"


def test_losses_are_weighted_by_tokens_and_lower_is_better() -> None:
    items = [(10 + number, 5 + number % 3) for number in range(30)]
    first = results_of(*({"nats": nats, "tokens": tokens} for nats, tokens in items))
    second = results_of(*({"nats": nats - 1.0, "tokens": tokens} for nats, tokens in items))
    (found,) = compare_results(first, second, FEW)
    tokens = sum(count for _, count in items)
    assert found.metric == "loss" and found.test == "signs"
    assert found.difference == pytest.approx(-30 / tokens)
    assert found.low < found.difference < found.high < 0
    assert found.p_value == pytest.approx(1 / 2001) and (found.only_first, found.only_second) == (0, 30)
    assert found.verdict(0.05) == "B is better"
    assert compare_results(second, first, FEW)[0].verdict(0.05) == "A is better"


def test_the_same_seed_gives_the_same_comparison() -> None:
    pair = [
        results_of(*({"logprob": float(value)} for value in np.random.default_rng(seed).normal(size=40)))
        for seed in (1, 2)
    ]
    assert compare_results(*pair, FEW) == compare_results(*pair, FEW)
    assert compare_results(*pair, FEW) != compare_results(*pair, Resampling(draws=2000, seed=2))


def test_a_checkpoint_does_not_differ_from_itself() -> None:
    (found,) = compare_results(accuracies(1, 0, 1), accuracies(1, 0, 1), FEW)
    assert (found.difference, found.p_value, found.low, found.high) == (0, 1.0, 0, 0)
    assert found.verdict(0.05) == "no difference shown"


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (accuracies(1, 0), "questions has 3 items in one result and 2 in the other"),
        (results_of({"acc": 1}, name="others"), "no task in common .*questions and others"),
        (results_of({"acc": 1, "item": "b:1"}, {"acc": 1}, {"acc": 1}), "the item 'file.jsonl:1'"),
        (results_of({"acc": "nan"}, {"acc": 1}, {"acc": 1}), "has 'nan' as acc, which is not a finite number"),
    ],
)
def test_results_that_do_not_belong_together_are_refused(second: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        compare_results(accuracies(1, 0, 1), second, FEW)


def test_losses_of_different_tokenizers_are_refused() -> None:
    first, second = (results_of({"nats": 1.0, "tokens": tokens}) for tokens in (5, 6))
    with pytest.raises(DataError, match="different numbers of tokens"):
        compare_results(first, second, FEW)


def test_the_tool_shows_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, tree in (("a", accuracies(*[1, 0] * 10)), ("b", accuracies(*[1, 1] * 10))):
        (tmp_path / name).write_text(json.dumps(tree))
    output = tmp_path / "comparison.json"
    words = [str(tmp_path / "a"), str(tmp_path / "b"), "--resamples", "500", "--output", str(output)]
    assert compare_evaluations.main(words) == 0
    shown = capsys.readouterr().out
    assert "A: checkpoints/a" in shown and "+0.5000" in shown and "0/10 of 20" in shown and "B is better" in shown
    (found,) = json.loads(output.read_text())["differences"]
    assert found["p_value"] == pytest.approx(2 / 1024) and found["only_second"] == 10


def test_two_results_are_needed() -> None:
    with pytest.raises(ConfigError, match="--results expects two files, got 1"):
        compare_evaluations.main(["a.json"])


def test_names_from_a_file_cannot_steer_the_terminal() -> None:
    hostile = accuracies(1)
    hostile["tasks"][1]["name"] = "a\x1b[2Jb"
    assert "\x1b" not in "".join(comparison_lines(compare_results(hostile, hostile, FEW), FEW))
