"""What evens out the load of experts is the same in every layout: biases, losses of any scope, groups, capacity."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megatron.checkpoint import load, save
from megatron.engine.engine import Engine
from megatron.engine.state import owned_pieces, pieces_to_load, refresh_weights
from megatron.model.blocks.router import BALANCE_LOSS, PASSES, dropped_tokens, expert_tokens
from megatron.model.interface.step_state import states_of
from megatron.parallel.joining import open_mesh
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.campaign_cases import mark_campaign
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe

pytestmark = pytest.mark.slow
RECIPE = dataclasses.replace(Recipe(), num_layers=2, steps=4, learning_rate=2.0e-3, micro_batch_size=2)
EXPERTS, SAVED_AFTER = 4, 2
COMMON = f"--num-experts {EXPERTS} --moe-router-topk 2 --moe-ffn-hidden-size 12 "
BIAS = "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.02 "
GLOBAL = "--moe-aux-loss-scope global --moe-aux-loss-coeff 0.5 --moe-z-loss-coeff 0.1 "
FORMS = {
    "bias": BIAS + "--moe-router-score-function sigmoid --moe-router-num-groups 2 --moe-router-group-topk 1 "
    "--moe-aux-loss-scope sample",
    "global": GLOBAL,
    "sample": "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.5",
    "capacity": "--moe-expert-capacity-factor 0.8 --moe-min-capacity 0 --moe-aux-loss-coeff 0.5",
    "everything": BIAS + GLOBAL + "--moe-expert-capacity-factor 1.0 --moe-token-drop-policy position",
}
# (tp, pp, dp), ZeRO stage, further flags
LAYOUTS = {
    "dp2": ((1, 1, 2), 1, ""),
    "dp2-zero3": ((1, 1, 2), 3, ""),
    "tp2": ((2, 1, 1), 0, "--checkpoint-activations"),
    "tp2-sp": ((2, 1, 1), 1, "--sequence-parallel"),
    "pp2": ((1, 2, 1), 1, ""),
    "cp2": ((1, 1, 2), 2, "--context-parallel-size 2"),
}
FEW = [("everything", "dp2-zero3"), ("everything", "tp2"), ("bias", "pp2"), ("capacity", "cp2"), ("global", "dp2")]
ALL = [*FEW, *(case for case in itertools.product(FORMS, LAYOUTS) if case not in FEW)]


class Course(NamedTuple):
    """What a run leaves: loss, norm and statistics of each step, and the state by name."""

    curve: list[dict[str, list[float]]]
    states: dict[str, torch.Tensor]


def train(engine: Engine, recipe: Recipe, config: object, first: int, last: int) -> Course:
    curve = []
    for step in range(first, last):
        result = engine.train_batch(local_batches(recipe, config, engine.mesh, step, uneven=True), recipe.learning_rate)  # type: ignore[arg-type]
        curve.append({"loss": [result.loss], "norm": [result.gradient_norm], **result.sums})
    return Course(curve, {state.global_name: state.clone() for state in states_of(engine.stack)})  # type: ignore[attr-defined]


def train_cases(rank: int, cases: list[tuple[str, str, int]], folder: str) -> dict[tuple[str, str, int], Course]:
    """One course for each form, layout and micro-batch size; the first leaves a checkpoint on its way."""
    courses = {}
    for case in cases:
        form, name, micro_batch = case
        layout, stage, extra = LAYOUTS.get(name, ((1, 1, 1), 1, ""))
        recipe = dataclasses.replace(RECIPE, micro_batch_size=micro_batch)
        config = layout_config(recipe, layout, stage, [*COMMON.split(), *FORMS[form].split(), *extra.split()])
        engine = build_engine(config, open_mesh(config.parallel))
        course = train(engine, recipe, config, 0, SAVED_AFTER)
        if folder and case == cases[0]:
            save(Path(folder), SAVED_AFTER, owned_pieces(engine), {"updates": engine.update_count}, engine.mesh)
        rest = train(engine, recipe, config, SAVED_AFTER, RECIPE.steps)
        courses[case] = Course(course.curve + rest.curve, rest.states)
    return courses


def continue_in(rank: int, form: str, name: str, folder: str) -> Course:
    layout, stage, extra = LAYOUTS[name]
    config = layout_config(RECIPE, layout, stage, [*COMMON.split(), *FORMS[form].split(), *extra.split()])
    engine = build_engine(config, open_mesh(config.parallel))
    record = load(Path(folder) / f"iter_{SAVED_AFTER:07d}", pieces_to_load(engine), engine.mesh)
    refresh_weights(engine, record["updates"])
    return train(engine, RECIPE, config, SAVED_AFTER, RECIPE.steps)


def check(course: Course, expected: Course, steps: slice = slice(None)) -> None:
    curve = expected.curve[steps]
    assert len(course.curve) == len(curve)
    for found, known in zip(course.curve, curve, strict=True):
        for name, values in known.items():
            if "tokens" in name:
                assert found[name] == values, name
            elif name in ("loss", "norm"):
                assert found[name] == pytest.approx(values, rel=1.0e-5), name
            else:
                mean = [value / known[PASSES][0] for value in values]
                assert [value / found[PASSES][0] for value in found[name]] == pytest.approx(mean, rel=1.0e-5), name
    for name, state in course.states.items():
        torch.testing.assert_close(state, expected.states[name], rtol=1.0e-6, atol=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("balancing")


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[tuple[str, int], Course]:
    """The courses of one process, by form and micro-batch size; the first has left a checkpoint."""
    sizes = [("everything", 2), *((form, 2) for form in FORMS if form != "everything")]
    sizes += [(form, size) for form in ("global", "bias", "sample") for size in (1, 4)]
    cases = [(form, "one", size) for form, size in sizes]
    found = run_ranks(train_cases, 1, cases, str(folder / "plain"))[0]
    return {(form, size): course for (form, _, size), course in found.items()}


def test_every_form_is_at_work(plain: dict[tuple[str, int], Course]) -> None:
    choices = 2 * RECIPE.global_batch_size * RECIPE.sequence_length
    for course in plain.values():
        assert all(sum(step[expert_tokens(1)]) == choices for step in course.curve)
        assert course.curve[-1]["loss"] != course.curve[0]["loss"]
    steps = plain["bias", 2].curve
    expected = torch.zeros(EXPERTS)
    for step in steps:
        counts = torch.tensor(step[expert_tokens(0)])
        expected += 0.02 * (counts.mean() - counts).sign()
    torch.testing.assert_close(plain["bias", 2].states["decoder.layers.0.mlp.router.expert_bias"], expected)
    last = torch.tensor(plain["global", 2].curve[-1][expert_tokens(1)])
    shares = plain["global", 2].states["decoder.layers.1.mlp.router.expert_shares"]
    torch.testing.assert_close(shares, last / last.sum())
    assert plain["global", 2].curve[0][BALANCE_LOSS][0] == pytest.approx(plain["global", 2].curve[0][PASSES][0])
    assert plain["sample", 2].curve[0][BALANCE_LOSS][0] > 1.001 * plain["sample", 2].curve[0][PASSES][0]
    assert all(sum(step[dropped_tokens(0)]) > 0 for step in plain["capacity", 2].curve)


@pytest.mark.parametrize("form", ["global", "bias", "sample"])
def test_losses_do_not_depend_on_the_micro_batch_size(form: str, plain: dict[tuple[str, int], Course]) -> None:
    for size in (1, 4):
        check(plain[form, size], plain[form, 2])


def test_a_loss_within_micro_batches_does(plain: dict[tuple[str, int], Course]) -> None:
    forms = [("capacity", "one", size) for size in (1, 4)]
    found = run_ranks(train_cases, 1, forms, "")[0]
    small, large = (found[case].curve[0] for case in forms)
    assert small["norm"] != pytest.approx(large["norm"], rel=1.0e-3)


@pytest.mark.full
@pytest.mark.parametrize("cases", mark_campaign([FEW, ALL], [FEW]), ids=["few", "all"])
def test_every_layout_trains_like_one_process(
    cases: list[tuple[str, str]], plain: dict[tuple[str, int], Course], tmp_path: Path
) -> None:
    for courses in run_ranks(train_cases, 2, [(form, name, 2) for form, name in cases], str(tmp_path)):
        for (form, name, _), course in courses.items():
            try:
                check(course, plain[form, 2])
            except AssertionError as failure:
                raise AssertionError(f"{form} in {name}") from failure
    form, _ = cases[0]
    for course in run_ranks(continue_in, 2, form, "pp2", str(tmp_path)):
        check(course, plain[form, 2], slice(SAVED_AFTER, None))


def test_training_continues_in_another_layout(plain: dict[tuple[str, int], Course], folder: Path) -> None:
    for course in run_ranks(continue_in, 2, "everything", "tp2", str(folder / "plain")):
        check(course, plain["everything", 2], slice(SAVED_AFTER, None))
